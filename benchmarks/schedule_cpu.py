"""Requests a second that the control plane can schedule: the real scheduler, manager and prefix tree, without bytes.

    python benchmarks/schedule_cpu.py [--running 32,128,256] [--cached 0] [--rounds 5] [--json FILE]

Prompts of 1,024 tokens, half of them in eight groups that share 512; 64 to 192 generated tokens; 32 layers of 8 kv
heads of 128 in 16 bits. Every step is taken, sampled tokens differ from sequence to sequence. The arena holds twice
what runs, or what runs and the chunks cached before, so that finished requests are cached and evicted. Seconds are the
processor's, of this process.
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, arguments, format_table, median

from quire.cache.codecs.dense import DenseCodec
from quire.cache.counts import ChunkCounts
from quire.cache.ledger import PAGE_TOKENS, PageCounts
from quire.cache.manager import CacheManager
from quire.cache.tree import PrefixTree
from quire.engine.params import SamplingParams
from quire.engine.request import Request, Sequence
from quire.engine.scheduler import Scheduler

LAYERS, HEADS, DIM = 32, 8, 128
PROMPT, SHARED, GROUPS = 1024, 512, 8
OUTPUT = (64, 192)
VOCABULARY = 50_000
BUDGET = 2048
"""Rows of a step beside those that decode."""


@dataclass
class Load:
    """Requests one after the other, the same whatever the batch.

    output  of how many tokens answers are at least and at most
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
            request = Request(str(number), None, prompt, SamplingParams(max_tokens=length), 0.0)
            request.sequences.append(Sequence(request, 0, list(prompt), length))
            found.append(request)
        return found


def scheduler_of(running: int, cached: int) -> Scheduler:
    """One whose arena holds so many running requests, and as many chunks or more beside them."""
    codec = DenseCodec(DIM, torch.bfloat16)
    chunks = running * (-(-(PROMPT + OUTPUT[1]) // PAGE_TOKENS) + 1)
    chunks += max(cached, chunks)
    ledger = PageCounts(chunks * LAYERS * HEADS * codec.page_bytes)
    table = ChunkCounts(ledger, LAYERS, HEADS, codec)
    return Scheduler(CacheManager(table, PrefixTree((LAYERS, HEADS))), BUDGET + running, running, 1 << 30)


def run(scheduler: Scheduler, requests: list[Request]) -> tuple[float, str]:
    """Seconds of the processor, and a digest of all slices."""
    outputs = {
        request.sequences[0]: iter([(number * 7919 + place * 104_729) % VOCABULARY for place in range(OUTPUT[1])])
        for number, request in enumerate(requests)
    }
    for request in requests:
        scheduler.add(request.sequences)
    digest = hashlib.blake2b()
    gc.collect()
    begun = time.process_time()
    while (batch := scheduler.next_batch()) is not None:
        tokens = [next(outputs[piece.sequence]) for piece in batch.slices if piece.samples]
        scheduler.commit(batch, tokens)
    seconds = time.process_time() - begun
    for request in requests:
        digest.update(repr(request.sequences[0].token_ids).encode())
    return seconds, digest.hexdigest()[:12]


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--running", default="32,128,256", help="sequences in the batch, with commas between")
    parser.add_argument("--cached", type=int, default=0, help="chunks of other prompts that are cached before")
    args = parser.parse_args()
    table = []
    for running in map(int, args.running.split(",")):
        found = []
        for number in range(args.rounds + 1):
            scheduler = scheduler_of(running, args.cached)
            # Half of them add half a prompt.
            before = args.cached * PAGE_TOKENS // (PROMPT - SHARED // 2)
            run(scheduler, Load(before, seed=1, output=(1, 1)).requests())
            assert scheduler.manager.tree is not None and scheduler.manager.tree.num_chunks >= 0.9 * args.cached
            count = max(256, 4 * running)
            seconds, _ = run(scheduler, Load(count).requests())
            scheduler.check()
            if number:
                found.append(count / seconds)
        table.append([running, f"{median(found):.0f}", scheduler.counters.steps, scheduler.manager.tree.num_evicted])
        if args.json:
            append_record(args.json, {"benchmark": "schedule_cpu", "running": running, "requests_per_second": found})
    print(format_table(["running", "requests/s", "steps", "chunks evicted"], table))


if __name__ == "__main__":
    main()
