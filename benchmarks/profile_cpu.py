"""The cost of profiling a prompt on a CPU: prefill with and without profile, and one `recovered` of its last rows.

    python benchmarks/profile_cpu.py [--codecs dense,nuq3] [--context 2048] [--slice 1024] [--last-rows 128,256]
                                     [--rounds 5] [--threads 2] [--json FILE] [--markdown]

SmolLM2 in bfloat16, with one copy of its weights. The whole model without its head computes the same tokens in slices:
without a profile; with the profile for a threshold, which has column sums of all rows and keeps the last rows; and with
the profile for a budget, which has only the peaks of the last rows and needs no recovery. The sides take turns, after
one turn each to warm up. Ratios are medians over the rounds, each within one round. If a codec needs a calibration and
there is none, it is made first.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, arguments, commit, format_table, hardware, hardware_line, median

from quire.attention.cpu import CpuAttention
from quire.attention.rows import Profiled, RowSlice
from quire.attention.spec import AttentionSpec
from quire.cache.arena import Arena
from quire.cache.codecs.sums import SumsCodec
from quire.cache.ledger import PAGE_TOKENS, PageLedger
from quire.cache.table import ChunkTable
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.measure.engines import load_engines
from quire.models.plan import Model

MODEL = "smollm2"
VOCABULARY = 49_000
LOCAL_SHARE = 0.3


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--codecs", default="dense,nuq3", help="codecs of sealed chunks")
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--slice", type=int, default=1024, help="rows of a slice")
    parser.add_argument("--last-rows", default="128,256", help="rows kept at the prompt's end")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    given = parser.parse_args()
    kept = [int(count) for count in given.last_rows.split(",")]
    options = {"runtime.threads": given.threads, "cache.share": False}
    engines, _ = load_engines(MODEL, EngineConfig.from_options(options), given.context, given.codecs.split(","))
    rows = []
    for codec, engine in engines.items():
        prompt = Prompt(engine, given.context, given.slice)
        plain: list[float] = []
        ways = [(name, count) for name in ("threshold", "budget") for count in kept]
        profiled: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
        recovery: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
        for number in range(given.rounds + 1):
            seconds, _ = prompt.run(None)
            if number:
                plain.append(seconds)
            for name, count in ways:
                seconds, asked = prompt.run(count, peaks=name == "budget")
                if number:
                    profiled[name, count].append(seconds)
                    recovery[name, count].append(asked)
        for way in ways:
            ratio = median(a / b for a, b in zip(profiled[way], plain, strict=True))
            times = median(plain), median(profiled[way]), median(recovery[way])
            rows.append([codec, *way, *(f"{1e3 * each:.1f}" for each in times), f"{ratio:.3f}"])
            if given.json:
                record = {"codec": codec, "context": given.context, "slice": given.slice, "way": way[0], "rows": way[1]}
                found = {"plain": plain, "profiled": profiled[way], "recovery": recovery[way]}
                append_record(given.json, {"benchmark": "profile_cpu", **record, "seconds": found})
    head = ["codec", "for a", "last rows", "prefill, ms", "profiled, ms", "one recovery, ms", "profiled to prefill"]
    print(format_table(head, rows, given.markdown))
    print(f"\n{hardware_line(hardware())}; {given.threads} threads; commit {commit()}; {time.strftime('%Y-%m-%d')}")


class Prompt:
    """One prompt with its own cache, which every run overwrites."""

    def __init__(self, engine: Engine, context: int, rows: int) -> None:
        self.model: Model = engine.runner.model
        assert isinstance(engine.runner.attention, CpuAttention)
        self.spec = with_sums(engine.runner.attention.spec, context)
        self.attention = CpuAttention(self.spec)
        table = self.spec.table
        assert context % PAGE_TOKENS == rows % PAGE_TOKENS == 0, "whole chunks"
        count = context // PAGE_TOKENS
        self.chunks = table.take(count, table.sealed_codec, sidecar=True)
        assert table.sums is not None
        self.sums = table.take(count, table.sums)
        self.tokens = torch.randint(VOCABULARY, (context,), generator=torch.Generator().manual_seed(0))
        self.starts = range(0, context, rows)
        self.rows = rows

    def run(self, last_rows: int | None, *, peaks: bool = False) -> tuple[float, float]:
        """Seconds of the prefill, profiled unless last_rows is None; and of one `recovered`, 0 with `peaks` or None."""
        spec, table = self.spec, self.spec.table
        shape = spec.num_layers, spec.layers[0].num_kv_heads
        assert table.sums is not None
        table.store_sums(self.sums, np.zeros((*shape, len(self.sums) * PAGE_TOKENS), np.float32))
        began = time.perf_counter()
        for start in self.starts:
            end = min(start + self.rows, len(self.tokens))
            profiled = None
            is_last = end == len(self.tokens)
            if last_rows is not None and peaks:
                profiled = Profiled(self.sums, peaks=last_rows) if is_last else None
            elif last_rows is not None:
                profiled = Profiled(self.sums, last_rows if is_last else 0)
            plan = self.attention.plan([RowSlice(start, end - start, self.chunks, profiled=profiled)])
            self.model.hidden(self.tokens[start:end], torch.arange(start, end), plan)
        seconds = time.perf_counter() - began
        if last_rows is None or peaks:
            return seconds, 0.0
        attention = table.load_sums(self.sums).sum(-1)
        assert np.abs(attention - len(self.tokens)).max() < 0.01 * len(self.tokens), "rows that do not add up to one"
        kept = np.random.default_rng(0).integers(0, 2**64, (*shape, len(self.chunks)), np.uint64)
        local = np.full(shape, int(LOCAL_SHARE * len(self.tokens)), np.int64)
        began = time.perf_counter()
        plan.recovered(0, kept, local)
        return seconds, time.perf_counter() - began


def with_sums(spec: AttentionSpec, tokens: int) -> AttentionSpec:
    """The same spec with its own cache and column sums."""
    table = spec.table
    sealed = (table.sealed_codec,) if table.encodes else ()
    pages = spec.num_layers * spec.layers[0].num_kv_heads * (tokens // PAGE_TOKENS + 8)
    ledger = PageLedger(2 * pages * (table.open_codec.page_bytes + SumsCodec.page_bytes))
    arena = Arena(ledger.num_bytes)
    heads = spec.num_layers, spec.layers[0].num_kv_heads
    own = ChunkTable(ledger, *heads, table.open_codec, *sealed, sinks=table.sinks, sums=SumsCodec(), arena=arena)
    return dataclasses.replace(spec, table=own)


if __name__ == "__main__":
    main()
