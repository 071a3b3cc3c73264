"""Quire and its peers on the same machine, in the same run, in turns.

    make peers                                      # or scripts/peers.sh: installs the peers below .peers/
    python benchmarks/peers.py                      # every engine, every cell, five rounds
    python benchmarks/peers.py --engines quire,openvino,vllm --cells decode-8 --rounds 9
    python benchmarks/peers.py --markdown --json results.jsonl
    python benchmarks/peers.py --engines quire --before HEAD~1:1.0,0fe7588:0.97 --rounds 9

All engines run SmolLM2-135M-Instruct with bf16 weights (dequantized from the same 4-bit file) and a 16-bit cache on the
same number of threads, greedily, to the full length. Prompts are random token ids, new in every repeat and the same for
every engine that takes ids. Tokens come back as ids, so no engine spends time on text.

Cells
    prefill-N   prompt tokens/s of one request of N tokens with one token out: N / seconds
    decode-B    tokens/s of B requests of 128 tokens in, 128 out: B * 127 / (seconds - seconds of the same for 1 token)
    request-B   throughput of the same requests: B * 128 / seconds

Decode speed is the difference of two whole requests. This needs only an engine's ordinary call and favours no schedule:
with first-token timestamps, an engine that decodes early requests while it prefills late ones could not be compared
with one that prefills all of them first. The request for one token uses other prompts of the same shape, so that a
prefix cache cannot shorten either. llama.cpp's program runs all prompts of a batch first and times that phase itself;
there the difference is taken within one run.

Engines take turns as in contest.py. The table shows medians over the rounds; ratios are medians of the ratios within a
round.

With --before, earlier commits of Quire take turns too. Each line of the second table is a cell: the median of the
ratios to that commit, and their bootstrap interval. "No cell slower" holds if every interval reaches the least ratio,
which follows the commit after a colon and is 1 by default.

The exit status is 1 if a cell is slower than that, or if peers are requested and fewer than three are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from dataclasses import dataclass

import contest
from common import append_record, format_rate, format_table, median
from contest import LLAMACPP, OPENVINO, QUIRE, VLLM, Contest, Engine, Figures, Results, say
from turns import Worker

MIN_PEERS = 3


@dataclass(frozen=True)
class Cell:
    """One shape of work. With an `output` of 1 it is a prefill cell."""

    name: str
    batch: int
    prompt: int
    output: int


CELLS = [
    Cell("prefill-512", 1, 512, 1),
    Cell("prefill-1536", 1, 1536, 1),
    Cell("decode-1", 1, 128, 128),
    Cell("decode-8", 8, 128, 128),
    Cell("decode-32", 32, 128, 128),
]

ENGINES = [
    QUIRE,
    VLLM,
    OPENVINO,
    LLAMACPP,
    Engine("transformers", "transformers", "run_transformers.py", "transformers/bin/python", "models/float32"),
    dataclasses.replace(QUIRE, name="quire-native", title="Quire, 4-bit weights", native=True),
    dataclasses.replace(
        LLAMACPP, name="llamacpp-native", title="llama.cpp, Q4_1", model="models/q4_1.gguf", native=True
    ),
]


def call(worker: Worker, cell: Cell, output: int, seed: int) -> dict[str, float | None]:
    """One call in the cell's shape with `output` new tokens per request. Returns its `seconds` and `first_seconds`."""
    return worker.ask(op="run", batch=cell.batch, prompt=cell.prompt, output=output, seed=seed)


def measure(worker: Worker, cell: Cell, seed: int) -> Figures:
    """The cell's rate and its whole-request rate, in tokens per second; NaN if there is none.

    The decode rate is NaN if the request for one token took longer than the whole one, because the machine is too busy.
    """
    if cell.output == 1:
        # One call is too short to be timed.
        seconds = median(call(worker, cell, 1, seed + repeat)["seconds"] for repeat in range(3))
        return {"rates": cell.batch * cell.prompt / seconds, "request_rates": math.nan}
    whole = call(worker, cell, cell.output, seed)
    first = whole["first_seconds"] or call(worker, cell, 1, seed + 1)["seconds"]
    decoding = whole["seconds"] - first
    rate = cell.batch * (cell.output - 1) / decoding if decoding > 0 else math.nan
    return {"rates": rate, "request_rates": cell.batch * cell.output / whole["seconds"]}


def report(run: Contest, results: Results) -> str:
    """All tables, as text or Markdown."""
    cells = run.given.cells
    # Heading, cell, and name of the samples.
    columns = [(cell.name, cell.name, "rates") for cell in cells]
    columns += [
        (cell.name.replace("decode", "request"), cell.name, "request_rates") for cell in cells if cell.output > 1
    ]

    def samples(name: str, column: tuple[str, str, str]) -> list[float]:
        return results.get((name, column[1]), {}).get(column[2], [])

    rows = []
    for name in run.workers:
        rates = [format_rate(median(samples(name, column))) for column in columns]
        rows.append([run.engines[name].title, *rates])
    if rivals := run.rivals():
        ratios = [
            contest.times_the_best(samples("quire", column), [samples(name, column) for name in rivals])
            for column in columns
        ]
        rows.append([f"Quire / best of {len(rivals)} peers", *(f"{ratio:.2f}" for ratio in ratios)])
    table = format_table(["tokens/s", *(heading for heading, _, _ in columns)], rows, run.given.markdown)
    return f"{table}\n\n{run.conditions(results, 'rates')}"


def record(run: Contest, results: Results) -> None:
    """Appends one JSON line per engine and cell."""
    for (name, cell), samples in results.items():
        about = {"benchmark": "peers", **run.about(name), "cell": cell, "tokens_per_second": median(samples["rates"])}
        append_record(run.given.json, {**about, **samples})


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Quire and its peers, interleaved on one machine.")
    contest.add_arguments(parser, ENGINES, CELLS)
    parser.add_argument("--native", action="store_true", help="add the engines that keep weights in 4 bits")
    return contest.parse(parser, ENGINES, CELLS)


def main() -> int:
    """Runs everything, prints the tables."""
    given = arguments()
    wants_peers = any(engine.is_peer for engine in given.engines)
    with contest.added_before(given, QUIRE), Contest(given, measure) as run:
        run.start(lambda worker, cell: call(worker, cell, min(cell.output, 8), given.seed - 1))
        results = run.rounds(lambda figures: f"{format_rate(figures['rates']):>6} tok/s")
        print(report(run, results))
        holds = contest.compare(run, results, QUIRE, {"rates": False})
        if given.json:
            record(run, results)
        measured = sum(run.engines[name].counts for name in run.workers)
    if wants_peers and measured < MIN_PEERS:
        say(f"{measured} peers were measured; a table with fewer than {MIN_PEERS} does not count")
        return 1
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
