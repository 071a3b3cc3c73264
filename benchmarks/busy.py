"""Decoding while another program occupies one core, compared with decoding on a quiet machine.

    python benchmarks/busy.py                        # five rounds, batch 1 and 8
    python benchmarks/busy.py --model FILE.gguf --cells decode-8 --engines quire-native,llamacpp-native

The other program is an endless loop, bound to the last core that this script may use. It runs during the second half of
every turn. Cells are those of peers.py; engines take turns as in contest.py. `busy / quiet` is the median of the ratios
within a turn.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import contest
from common import append_record, format_rate, format_table, median
from contest import Contest, Figures, Results
from packed import PACKED, PEER, PLAIN
from peers import CELLS, Cell, call, measure
from turns import Worker

SHAPES = [cell for cell in CELLS if cell.name.startswith("decode")]

ENGINES = [PACKED, PLAIN, PEER]


@contextlib.contextmanager
def held_core() -> Iterator[int]:
    """Keeps the last usable core busy with another process. Yields the core's number."""
    core = max(os.sched_getaffinity(0))
    program = f"import os\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        time.sleep(0.1)
        try:
            yield core
        finally:
            other.kill()


def both(worker: Worker, cell: Cell, seed: int) -> Figures:
    """The cell's rate on a quiet machine, and with one core held."""
    quiet = measure(worker, cell, seed)["rates"]
    with held_core():
        # Warm-up, as on the quiet machine: the request that runs when the core is taken does not count.
        call(worker, cell, 16, seed + 4)
        busy = measure(worker, cell, seed + 2)["rates"]
    return {"rates": quiet, "busy": busy}


def report(run: Contest, results: Results) -> str:
    """The table as text or Markdown."""
    rows = []
    for cell in run.given.cells:
        for name in run.workers:
            samples = results.get((name, cell.name), {})
            quiet, busy = samples.get("rates", []), samples.get("busy", [])
            ratio = median(held / free for held, free in zip(busy, quiet, strict=True))
            title = run.engines[name].title
            rows.append([cell.name, title, format_rate(median(quiet)), format_rate(median(busy)), f"{ratio:.2f}"])
    core = max(os.sched_getaffinity(0))
    heading = ["cell", "engine", "quiet tok/s", "one core held", "busy / quiet"]
    text = format_table(heading, rows, run.given.markdown)
    text += f"\n\nCore {core} of {os.cpu_count()} was held by an endless loop."
    return f"{text}\n\n{run.conditions(results, 'rates')}"


def main() -> None:
    """Runs everything, prints the table."""
    parser = argparse.ArgumentParser(description="Decoding with one core taken by another program.")
    contest.add_arguments(parser, ENGINES, SHAPES)
    # Most of the foreign load is the program that this script starts.
    parser.set_defaults(cells="decode-1,decode-8", engines=PACKED.name, quiet=float(os.cpu_count() or 1))
    given = contest.parse(parser, ENGINES, SHAPES)
    if Path(given.model).is_file():
        given.engines = [
            dataclasses.replace(engine, model=str(Path(given.model).resolve())) if engine.is_peer else engine
            for engine in given.engines
        ]
    with Contest(given, both) as run:
        run.start(lambda worker, cell: call(worker, cell, min(cell.output, 8), given.seed - 1))
        results = run.rounds(lambda found: f"{format_rate(found['rates'])} tok/s, held {format_rate(found['busy'])}")
        print(report(run, results))
        if given.json:
            for (name, cell), samples in results.items():
                append_record(given.json, {"benchmark": "busy", **run.about(name), "cell": cell, **samples})


if __name__ == "__main__":
    sys.exit(main())
