"""Packed weights: one GGUF file in Quire packed, in Quire dequantized to 16 bits, and in llama.cpp, in turns.

    scripts/peers.sh --only llamacpp                 # installs llama.cpp below .peers/
    python benchmarks/packed.py --model FILE.gguf    # nine rounds of every cell
    python benchmarks/packed.py --model FILE.gguf --cells decode-1 --level v3

Cells are those of peers.py; engines take turns as in contest.py. For each cell, the second table has the median ratio,
within a round, of packed weights to llama.cpp and to 16 bits. Then follow the bytes of the file that a step at batch 1
reads, compared with the time that two threads need to read as many bytes in this run; and the peak memory of the
process, compared with file and cache.

--level restricts the instructions of Quire and torch. llama.cpp uses those of the machine that built it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import threading
import time
from pathlib import Path

import contest
import numpy as np
from common import append_record, format_rate, format_table, median
from contest import CACHE_GIB, LLAMACPP, QUIRE, Contest, Results
from peers import CELLS, call, measure

SHAPES = [cell for cell in CELLS if cell.name != "prefill-1536"]

PACKED = dataclasses.replace(
    QUIRE, name="quire-native", title="Quire, packed", native=True, options=("model.weights=native",)
)
PLAIN = dataclasses.replace(
    QUIRE, name="quire-dequantized", title="Quire, 16 bits", native=True, options=("model.weights=dequantized",)
)
PEER = dataclasses.replace(LLAMACPP, name="llamacpp-native", title="llama.cpp", native=True)
ENGINES = [PACKED, PLAIN, PEER]


def reading_speed(threads: int, rounds: int = 5) -> float:
    """Best rate at which threads read memory, in bytes per second: sums of 256 MiB each."""
    parts = [np.ones(1 << 25, np.int64) for _ in range(threads)]

    def once() -> float:
        began = time.perf_counter()
        readers = [threading.Thread(target=part.sum) for part in parts]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return time.perf_counter() - began

    once()
    return sum(part.nbytes for part in parts) / min(once() for _ in range(rounds))


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def report(run: Contest, results: Results, speed: float) -> str:
    """The tables as text or Markdown."""
    cells, given = run.given.cells, run.given

    def samples(name: str, cell: str) -> list[float]:
        return results.get((name, cell), {}).get("rates", [])

    rows = [
        [run.engines[name].title, *(format_rate(median(samples(name, cell.name))) for cell in cells)]
        for name in run.workers
    ]
    if PACKED.name in run.workers:
        for other in (PEER, PLAIN):
            if other.name in run.workers:
                pairs = [
                    zip(samples(PACKED.name, cell.name), samples(other.name, cell.name), strict=True) for cell in cells
                ]
                ratios = [[mine / theirs for mine, theirs in pair] for pair in pairs]
                rows.append([f"packed / {other.title}", *(f"{median(ratio):.2f}" for ratio in ratios)])
    text = format_table(["tokens/s", *(cell.name for cell in cells)], rows, given.markdown)
    size = given.model.stat().st_size
    text += f"\n\n{given.model.name}: {size / 1e6:.0f} MB; {given.threads} threads read {speed / 1e9:.1f} GB/s"
    if (rates := samples(PACKED.name, "decode-1")) and PACKED.name in run.workers:
        step, reading = 1 / median(rates), size / speed
        text += f"; a step at batch 1 takes {step * 1e3:.1f} ms, {step / reading:.2f} times what reading the file takes"
    for name in (PACKED.name, PLAIN.name):
        if name in run.workers:
            peak = peak_bytes(run.workers[name].process.pid)
            beyond = (peak - size - CACHE_GIB * 2**30) / 1e6
            text += f"\n{run.engines[name].title}: at most {peak / 1e6:.0f} MB resident, {beyond:+.0f} MB beside file"
            text += f" and a cache of {CACHE_GIB} GiB"
    return f"{text}\n\n{run.conditions(results, 'rates')}"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Packed weights beside 16 bits and llama.cpp.")
    contest.add_arguments(parser, ENGINES, SHAPES)
    parser.add_argument("--level", help="instruction level of Quire and torch, as runtime.cpu_level")
    parser.set_defaults(rounds=9, native=True)
    given = contest.parse(parser, ENGINES, SHAPES)
    given.model = Path(given.model).resolve()
    if not given.model.is_file():
        parser.error(f"--model: {given.model} is no file")
    return given


def main() -> None:
    """Runs everything, prints the tables."""
    given = arguments()
    options: tuple[str, ...] = ()
    if given.level:
        options = (f"runtime.cpu_level={given.level}",)
        if given.level in ("v2", "v3"):
            os.environ.update(ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2")
    given.engines = [
        dataclasses.replace(engine, model=str(given.model))
        if engine.is_peer
        else dataclasses.replace(engine, options=(*engine.options, *options))
        for engine in given.engines
    ]
    speed = reading_speed(given.threads)
    with Contest(given, measure) as run:
        run.start(lambda worker, cell: call(worker, cell, min(cell.output, 8), given.seed - 1))
        results = run.rounds(lambda figures: f"{format_rate(figures['rates']):>6} tok/s")
        print(report(run, results, max(speed, reading_speed(given.threads))))
        if given.json:
            for (name, cell), samples in results.items():
                about = {"benchmark": "packed", "model": given.model.name, **run.about(name), "cell": cell}
                append_record(given.json, {**about, "tokens_per_second": median(samples["rates"]), **samples})


if __name__ == "__main__":
    sys.exit(main())
