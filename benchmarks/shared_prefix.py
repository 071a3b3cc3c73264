"""Requests with a common prefix: Quire with and without sharing, and peers with their prefix caches.

    scripts/peers.sh                                # installs the peers below .peers/
    python benchmarks/shared_prefix.py              # every engine, every cell, five rounds: about 20 minutes
    python benchmarks/shared_prefix.py --engines quire,quire-unshared --cells apart-1,apart-32
    python benchmarks/shared_prefix.py --markdown --json results.jsonl
    python benchmarks/shared_prefix.py --engines quire --before HEAD~1:0.97

Model, weights, threads and turns are those of `peers.py`. Every engine has its prefix cache on; Quire also runs without
it for comparison (`cache.share` false).

Cells
    shared-B    B requests at once with a common prefix of 1,024 tokens and 64 own tokens, 64 out. The prefix is new in
                every turn, so the time includes computing it once, or more often in an engine that starts all requests
                before it looks for shared prefixes
    apart-B     B requests of 128 tokens with nothing in common, 128 out: the cost of sharing when there is nothing to
                share. Only for Quire; `peers.py` has the peers' numbers

Figures
    total       seconds from all prompts to all answers
    prompts     seconds of the same for one token, with another new prefix: at batch 1 the time to first token
    decode      tokens/s: B * (out - 1) / (total - prompts)
    hit         milliseconds to the single token of another request with the same prefix, sent after the batch
    found       prompt tokens that the batch finds in the cache, and that the request after it finds, if the engine
                reports them. At most 1,024 for each request but the first, and 1,024

The lines below each table are Quire's advantage over the best peer, and over Quire without sharing: medians of the
ratios within a round.

llama.cpp takes part twice: its server with its prompt cache, and its decoding loop alone (see `run_llamacpp.py`). The
loop is an upper bound for everything built on it, and is compared like an engine.

With --before, earlier commits of Quire take turns too; the last table is as in `peers.py`. The exit status is 1 if an
engine was left out, or if a cell is slower than it may be.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import contest
from common import append_record, format_rate, format_table, median
from contest import LLAMACPP, OPENVINO, QUIRE, VLLM, Contest, Engine, Figures, Results
from turns import Worker


@dataclass(frozen=True)
class Cell:
    """One shape of work: `common` and `own` tokens in, `output` out."""

    name: str
    batch: int
    common: int
    own: int
    output: int


CELLS = [Cell(f"shared-{batch}", batch, 1024, 64, 64) for batch in (1, 4, 16, 32)]
CELLS += [Cell(f"apart-{batch}", batch, 0, 128, 128) for batch in (1, 32)]

UNSHARED = dataclasses.replace(QUIRE, name="quire-unshared", title="Quire, not sharing", options=("cache.share=false",))
ENGINES = [
    dataclasses.replace(QUIRE, options=("cache.share=true",)),
    UNSHARED,
    VLLM,
    OPENVINO,
    dataclasses.replace(
        LLAMACPP, name="llamacpp-server", title="llama-server", runner="run_llamacpp_server.py", restarts=False
    ),
    dataclasses.replace(LLAMACPP, title="llama.cpp, loop alone"),
]

# For each figure its title, its format, and whether less is better.
TABLES = {
    "total": ("total, s", lambda value: f"{value:.2f}", True),
    "decode": ("decode, tokens/s", format_rate, False),
    "prompts": ("prompts, s", lambda value: f"{value:.3f}", True),
    "hit": ("hit, ms", lambda value: f"{1e3 * value:.1f}", True),
}


def ask(worker: Worker, cell: Cell, output: int, seed: int, common_seed: int, batch: int) -> Figures:
    """One call in the cell's shape. Returns `seconds`, `first_seconds` and `cached_tokens`; NaN for missing ones."""
    shape = {"batch": batch, "prompt": cell.common + cell.own, "common": cell.common, "output": output}
    answer = worker.ask(op="run", **shape, seed=seed, common_seed=common_seed)
    return {key: math.nan if value is None else value for key, value in answer.items()}


def measure(worker: Worker, cell: Cell, seed: int) -> Figures:
    """All figures of a cell. decode is NaN if the machine is too busy."""
    whole = ask(worker, cell, cell.output, seed, seed, cell.batch)
    figures = {"total": whole["seconds"], "found": whole["cached_tokens"], "hit": math.nan, "hit_found": math.nan}
    if cell.common:
        # One call is too short to be timed.
        hits = [ask(worker, cell, 1, seed + repeat, seed, 1) for repeat in (1, 2, 3)]
        figures["hit"] = median(hit["seconds"] for hit in hits)
        figures["hit_found"] = hits[0]["cached_tokens"]
    prompts = whole["first_seconds"]
    if math.isnan(prompts):
        prompts = ask(worker, cell, 1, seed + 4, seed + 4, cell.batch)["seconds"]
    decoding = figures["total"] - prompts
    rate = cell.batch * (cell.output - 1) / decoding if decoding > 0 else math.nan
    return {**figures, "prompts": prompts, "decode": rate}


def joins(engine: Engine, cell: Cell) -> bool:
    """Whether an engine takes part in a cell."""
    return cell.common > 0 or not engine.is_peer


def report(run: Contest, results: Results) -> str:
    """All tables, as text or Markdown."""

    def samples(name: str, cell: Cell, figure: str) -> list[float]:
        return results.get((name, cell.name), {}).get(figure, [])

    shares = {QUIRE.name, UNSHARED.name} <= run.workers.keys()
    against = {"Quire to the best peer": run.rivals(), "sharing to not sharing": [UNSHARED.name] if shares else []}
    tables = []
    for figure, (title, form, less_is_better) in TABLES.items():
        cells = [cell for cell in run.given.cells if cell.common or figure != "hit"]
        rows = [
            [run.engines[name].title, *(show(median(samples(name, cell, figure)), form) for cell in cells)]
            for name in run.workers
        ]
        for words, others in against.items():
            ratios = [
                contest.times_the_best(
                    samples("quire", cell, figure), [samples(name, cell, figure) for name in others], less_is_better
                )
                for cell in cells
            ]
            if others:
                rows.append([words, *(show(ratio, "{:.2f}x".format) for ratio in ratios)])
        tables.append(format_table([title, *(cell.name for cell in cells)], rows, run.given.markdown))
    cells = [cell for cell in run.given.cells if cell.common]
    rows = [["at most", *(f"{(cell.batch - 1) * cell.common} + {cell.common}" for cell in cells)]]
    for name in run.workers:
        found = [[median(samples(name, cell, figure)) for figure in ("found", "hit_found")] for cell in cells]
        shown = [[show(value, "{:.0f}".format) for value in both] for both in found]
        rows.append([run.engines[name].title, *(" + ".join(both) for both in shown)])
    tables.append(format_table(["found, tokens", *(cell.name for cell in cells)], rows, run.given.markdown))
    return "\n\n".join([*tables, run.conditions(results, "total")])


def show(value: float, form: Callable[[float], str]) -> str:
    """A number in the table; a dash when nothing was measured."""
    return "-" if math.isnan(value) else form(value)


def record(run: Contest, results: Results) -> None:
    """Appends one JSON line per engine and cell: the medians, and all samples under `rounds`."""
    for (name, cell), samples in results.items():
        medians = {figure: median(values) for figure, values in samples.items()}
        about = {"benchmark": "shared_prefix", **run.about(name), "cell": cell}
        append_record(run.given.json, {**about, **medians, "rounds": samples})


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    contest.add_arguments(parser, ENGINES, CELLS)
    return contest.parse(parser, ENGINES, CELLS)


def main() -> int:
    """Runs everything, prints the tables."""
    given = arguments()
    ours = ENGINES[0]
    with contest.added_before(given, ours), Contest(given, measure, joins) as run:
        run.start(lambda worker, cell: ask(worker, cell, 8, given.seed - 1, given.seed - 1, cell.batch))
        results = run.rounds(lambda figures: f"{figures['total']:6.2f} s {format_rate(figures['decode']):>6} tok/s")
        complete = len(run.workers) == len(given.engines)
        print(report(run, results))
        holds = contest.compare(run, results, ours, {figure: less for figure, (_, _, less) in TABLES.items()})
        if given.json:
            record(run, results)
    return 0 if complete and holds else 1


if __name__ == "__main__":
    sys.exit(main())
