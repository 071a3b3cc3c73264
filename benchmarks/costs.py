"""Whether the engine knows what fetching and computing cost: predicted seconds beside measured ones.

    python benchmarks/costs.py                              # prompts of 128 to 4,096 tokens: a minute
    python benchmarks/costs.py --model other.gguf --longest 1024
    python benchmarks/costs.py --quick

The engine compares the two for every prompt that a disk has (docs/guide/restart.md). Here each prompt of random tokens
is computed, evicted, and fetched, in an order that the seed decides. Before each the engine's own fit, as far as it has
learned from the prompts before, says how long it will take; then it is measured in the same way as the fit measures.
The first round only teaches. A request is fetched whatever the fit says.

The marks: the order of the predicted seconds is that of the measured ones (Spearman's rank correlation at least 0.9),
and half of the predictions are wrong by at most 25 %. The exit status is 1 if a mark is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import append_record, format_table
from tiers import (
    Mark,
    OtherLoad,
    arena_need,
    conditions,
    disk_options,
    engine_options,
    exit_status,
    fresh_folder,
    marks_table,
    parse_tier,
    random_prompts,
    tier_arguments,
    token_ids,
)

from quire.cache.costs import Costs
from quire.engine.params import SamplingParams
from quire.llm import LLM

FETCH, PREFILL = "fetch", "prefill"
LENGTHS = 6
"""Different lengths of prompts."""
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


class Watched(Costs):
    """Costs that keep what they predicted beside what was measured. seen: pairs by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[tuple[float, float]]] = {FETCH: [], PREFILL: []}

    def note_fetch(self, num_bytes: int, seconds: float) -> None:
        """See Costs."""
        self._compare(FETCH, self.fetch(num_bytes), seconds)
        super().note_fetch(num_bytes, seconds)

    def note_prefill(self, num_tokens: int, tokens_and_positions: float, seconds: float) -> None:
        """See Costs."""
        start = tokens_and_positions / num_tokens - num_tokens / 2
        self._compare(PREFILL, self.prefill(int(start), num_tokens), seconds)
        super().note_prefill(num_tokens, tokens_and_positions, seconds)

    def _compare(self, kind: str, predicted: float | None, measured: float) -> None:
        if predicted is not None:
            self.seen[kind].append((predicted, measured))


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """The rank correlation of predicted and measured seconds."""
    one, other = (np.argsort(np.argsort(values)) for values in zip(*pairs, strict=True))
    return float(np.corrcoef(one, other)[0, 1])


def errors(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Of each prediction, relative to what was measured."""
    return [abs(predicted / measured - 1) for predicted, measured in pairs]


def measure(given: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Pairs of predicted and measured seconds, of all rounds but the first."""
    ids, rng = token_ids(given.model), random.Random(given.seed)
    lengths = [given.longest >> shift for shift in range(LENGTHS)]
    options = engine_options(given, cache_codec=given.codec)
    need = arena_need(given.model, options, 2 * given.longest // 64 + 2, 2, 2).num_bytes
    stored = need * (given.rounds + 1)
    with fresh_folder(given.folder, stored) as folder:
        options |= disk_options(folder, stored, given.bandwidth) | {"cache.memory": need}
        with LLM(given.model, options) as llm:
            manager = llm.engine.scheduler.manager
            costs = Watched()
            costs.speed = manager.fetching.costs.speed
            manager.fetching.costs = costs
            manager.fetching._pays = lambda *decision: True  # type: ignore[method-assign]
            for number in range(given.rounds + 1):
                for length in rng.sample(lengths, len(lengths)):
                    (prompt,) = random_prompts(ids, 1, length, (given.seed, number, length))
                    ask(llm, prompt, is_stored=False)
                    manager.eviction.evict(sys.maxsize)
                    if not llm.flush(120):
                        sys.exit("the disk did not take a prompt within 120 s")
                    ask(llm, prompt, is_stored=True)
                    manager.eviction.evict(sys.maxsize)
                if number == 0:
                    costs.seen = {FETCH: [], PREFILL: []}
    return costs.seen


def ask(llm: LLM, prompt: list[int], *, is_stored: bool) -> None:
    """Asks for one token, of a prompt that the disk has or has not."""
    (output,) = llm.generate({"prompt_token_ids": prompt}, PARAMS)
    if bool(output.cached_by_tier.get("disk")) != is_stored:
        sys.exit(f"of a prompt of {len(prompt)} tokens came from elsewhere: {output.cached_by_tier}")


def marks_of(seen: dict[str, list[tuple[float, float]]]) -> list[Mark]:
    """The claims."""
    return [
        mark
        for kind, pairs in seen.items()
        for mark in (
            Mark(f"{kind}: Spearman's correlation of predicted and measured", [spearman(pairs)], 0.9),
            Mark(f"{kind}: error of a prediction", errors(pairs), 0.25, True),
        )
    ]


def report(given: argparse.Namespace, seen: dict[str, list[tuple[float, float]]], load: OtherLoad) -> str:
    """All tables."""
    rows = [
        [kind, f"{predicted * 1e3:.1f}", f"{measured * 1e3:.1f}", f"{predicted / measured:.2f}"]
        for kind, pairs in seen.items()
        for predicted, measured in sorted(pairs, key=lambda pair: pair[1])
    ]
    table = format_table(["kind", "predicted, ms", "measured, ms", "ratio"], rows, given.markdown)
    return f"{table}\n\n{marks_table(marks_of(seen), given.markdown)}\n\n{conditions(given, load)}"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = tier_arguments(__doc__, rounds=3)
    parser.add_argument("--codec", default="dense", help="of sealed chunks (default: dense)")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest prompt; each next has half")
    parser.add_argument("--bandwidth", help="tiers.disk_bandwidth (default: not throttled)")
    given = parse_tier(parser, words)
    if given.longest >> (LENGTHS - 1) <= 64:
        parser.error(f"--longest: a prompt of {given.longest >> (LENGTHS - 1)} tokens has no whole chunk to fetch")
    return given


def main() -> int:
    """Measures and prints."""
    given, load = arguments(), OtherLoad()
    seen = measure(given)
    print(report(given, seen, load))
    if given.json:
        about = {"benchmark": "costs", "model": Path(given.model).name, "codec": given.codec, "longest": given.longest}
        append_record(given.json, {**about, "pairs": seen})
    return exit_status(given, marks_of(seen))


if __name__ == "__main__":
    sys.exit(main())
