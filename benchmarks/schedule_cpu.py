"""Requests per second that the control plane can schedule: the real scheduler, manager and prefix tree, without bytes.

    python benchmarks/schedule_cpu.py [--running 32,128,256] [--cached 0] [--codec g4] [--rounds 5]

Prompts have 1,024 tokens; half of the requests are in eight groups that share 512 tokens. 64 to 192 tokens are
generated. One request in 16 pins its prompt for ten seconds; a step counts as 20 ms. The model has 32 layers of 8 kv
heads of 128 numbers. Open chunks have 16 bits, sealed ones the 4 bits of the codec; with `--codec dense` 16, too.

`taken`: every step is made as data and committed, as for a runner. `skipped`: the scheduler advances by itself and
skips steps in which nothing happens. Tokens differ between sequences. Both modes make the same decisions at the same
steps, which is checked. The arena holds twice the running sequences, or these and the chunks of --cached, so that
finished requests are cached and evicted. Seconds are processor time of this process.
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, arguments, format_table, median

from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.group import GroupCodec
from quire.cache.counts import ChunkCounts
from quire.cache.ledger import PAGE_TOKENS, PageCounts
from quire.cache.manager import CacheManager
from quire.cache.tree import PrefixTree
from quire.engine.calendar import placeholder_tokens
from quire.engine.fast_forward import FastForward
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.request import NO_HINTS, Request, Sequence
from quire.engine.scheduler import Scheduler
from quire.engine.step import Result

LAYERS, HEADS, DIM = 32, 8, 128
PROMPT, SHARED, GROUPS = 1024, 512, 8
OUTPUT = (64, 192)
VOCABULARY = 50_000
PINNED, STEP_SECONDS = CacheHints(cache_pin=10.0), 0.02
SEALED = {"dense": [], "g4": [GroupCodec(DIM)]}
BUDGET = 2048
"""Rows of a step besides those that decode."""


@dataclass
class Load:
    """A sequence of requests that does not depend on the batch.

    output  least and most tokens of an answer
    """

    count: int
    seed: int = 0
    output: tuple[int, int] = OUTPUT

    def requests(self) -> list[Request]:
        """All of them, with their tokens."""
        rng = random.Random(self.seed)
        shared = [[rng.randrange(VOCABULARY) for _ in range(SHARED)] for _ in range(GROUPS)]
        found = []
        for number in range(self.count):
            prompt = list(shared[number // 2 % GROUPS]) if number % 2 else []
            prompt += [rng.randrange(VOCABULARY) for _ in range(PROMPT - len(prompt))]
            length = rng.randint(*self.output)
            hints = PINNED if number % 16 == 0 else NO_HINTS
            request = Request(str(number), None, prompt, SamplingParams(max_tokens=length), 0.0, hints)
            request.sequences.append(Sequence(request, 0, list(prompt), length))
            found.append(request)
        return found


def scheduler_of(running: int, cached: int, codec: str) -> Scheduler:
    """A scheduler whose arena holds `running` requests and at least as many chunks again, or `cached` chunks."""
    opened, sealed = DenseCodec(DIM, torch.bfloat16), SEALED[codec]
    chunks = running * (-(-(PROMPT + OUTPUT[1]) // PAGE_TOKENS) + 1)
    chunks += max(cached, chunks)
    num_bytes = LAYERS * HEADS * (chunks * [opened, *sealed][-1].page_bytes + 2 * running * opened.page_bytes)
    table = ChunkCounts(PageCounts(num_bytes), LAYERS, HEADS, opened, *sealed)
    manager = CacheManager(table, PrefixTree((LAYERS, HEADS)))
    return Scheduler(manager, BUDGET + running, running, 1 << 30)


def take(scheduler: Scheduler) -> None:
    """Makes and commits every step."""
    while (step := scheduler.next_step()) is not None:
        tokens = [
            token_id
            for index, piece in enumerate(step.slices)
            if piece.samples
            for token_id in placeholder_tokens(scheduler.sequence_of(index), piece.start + piece.num_rows, 1)
        ]
        scheduler.commit(step, Result(tokens))
        scheduler.manager.tick(scheduler.counters.steps * STEP_SECONDS)


def skip(scheduler: Scheduler) -> None:
    """Lets the scheduler advance by itself."""
    forward = FastForward(scheduler)
    while forward.advance(1 << 30):
        scheduler.manager.tick(scheduler.counters.steps * STEP_SECONDS)


MODES = {"taken": take, "skipped": skip}


def run(scheduler: Scheduler, requests: list[Request], mode: str) -> float:
    """Seconds of processor time."""
    for request in requests:
        scheduler.add(request.sequences)
    gc.collect()
    gc.freeze()  # as the server does, so that the collector passes over what was there before
    begun = time.process_time()
    MODES[mode](scheduler)
    seconds = time.process_time() - begun
    gc.unfreeze()
    return seconds


def decisions(running: int, mode: str, codec: str) -> str:
    """A digest of admissions and ends with their steps, of evictions, and of all tokens."""
    scheduler, digest = scheduler_of(running, 0, codec), hashlib.blake2b(digest_size=6)
    manager, tree = scheduler.manager, scheduler.manager.tree
    assert tree is not None
    admit, release, evict = manager.admit, manager.release, tree.evict

    def note(*what: object) -> None:
        digest.update(repr((scheduler.counters.steps, *what)).encode())

    def admitted(holder: Any) -> Any:
        found = admit(holder)
        if found:
            note("admitted", holder.sequence_id, holder.path.num_tokens)
        return found

    def released(holder: Any) -> None:
        note("ended", holder.sequence_id, holder.token_ids)
        release(holder)

    def evicted(count: int) -> Any:
        note("evicted", count)
        return evict(count)

    manager.admit, manager.release, tree.evict = admitted, released, evicted  # type: ignore[method-assign]
    run(scheduler, Load(2 * running).requests(), mode)
    note(scheduler.counters, manager.stats())
    return digest.hexdigest()


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--running", default="32,128,256", help="sequences in the batch, comma-separated")
    parser.add_argument("--cached", type=int, default=0, help="chunks of other prompts, cached before")
    parser.add_argument("--codec", choices=SEALED, default="g4", help="of sealed chunks")
    args = parser.parse_args()
    table = []
    for running in map(int, args.running.split(",")):
        if len({decisions(running, mode, args.codec) for mode in MODES}) != 1:
            raise SystemExit(f"{running} running: steps that are skipped decide otherwise than steps that are taken")
        found: dict[str, list[float]] = {mode: [] for mode in MODES}
        for number in range(args.rounds + 1):
            for mode, rates in found.items():
                scheduler = scheduler_of(running, args.cached, args.codec)
                # Half of the requests add half a prompt.
                before = args.cached * PAGE_TOKENS // (PROMPT - SHARED // 2)
                run(scheduler, Load(before, seed=1, output=(1, 1)).requests(), "skipped")
                assert scheduler.manager.tree is not None and scheduler.manager.tree.num_chunks >= 0.9 * args.cached
                count = max(256, 4 * running)
                seconds = run(scheduler, Load(count).requests(), mode)
                scheduler.check()
                if number:
                    rates.append(count / seconds)
        rates_of = {mode: f"{median(rates):.0f}" for mode, rates in found.items()}
        table.append([running, *rates_of.values(), scheduler.counters.steps, scheduler.manager.tree.num_evicted])
        if args.json:
            append_record(args.json, {"benchmark": "schedule_cpu", "running": running, "requests_per_second": found})
    print(format_table(["running", "taken/s", "skipped/s", "steps", "chunks evicted"], table))


if __name__ == "__main__":
    main()
