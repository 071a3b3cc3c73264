"""Quality and bytes of quantized key-value caches: Quire's codecs and those of other engines.

    make peers                                       # or scripts/peers.sh: installs the peers below .peers/
    python benchmarks/kv_quality.py --data DIR       # DIR has wiki.test.raw; 8 windows of it
    python benchmarks/kv_quality.py --data DIR --engines openvino,llamacpp --caches u4,q4_0 --windows 148
    python benchmarks/kv_quality.py --data DIR --engines quire --earlier FILE    # a --json FILE of the others: hours
    python benchmarks/kv_quality.py --data DIR --plot FILE.png                   # needs matplotlib

SmolLM2-135M-Instruct reads WikiText-2's test text in windows of 2,048 tokens that do not overlap. Quire's tokenizer
cuts the text, and every engine gets the same token ids. Every token of a window but the first is scored. The other
engines read slices of 64 tokens, Quire's chunk, because the loss of a cache affects only tokens of later calls.

The quality of a cache is its perplexity divided by that of the same engine's 16-bit cache, so that other differences
between engines cancel. The ratio's standard error over windows follows it. Bytes are those of the engine's own tensors
or pool for a full window, including scales, zero points and exact tokens, divided by the window's tokens.

The runners in kv_quality/ describe how each engine handles a slice. In short: transformers, KIVI and Quire read a
slice's own tokens exact, llama.cpp and OpenVINO as stored. KIVI is a simulation of the paper's scheme with packed
tensors, not its authors' code.

The exit status is 1 if some cache is no larger than one of Quire's and no worse, 2 if nothing was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import ROOT, append_record, commit, format_table, hardware, hardware_line
from contest import say
from turns import Worker, WorkerError

HERE = Path(__file__).resolve().parent
BENCHMARK = "kv_quality"
CONTEXT = 2048
CHUNK = 64
START_SECONDS = 300
CACHE_SECONDS = 4 * 3600
BEATEN = "BEATEN by"
LEAST_LOSS = 0.05
"""Smallest loss in the plot, in percent, because a logarithm needs one. Only 8-bit caches lose less."""


@dataclass(frozen=True)
class Peer:
    """How to start one engine's runner. `python`, `model`, `programs` and `packages` are paths below --peers.

    python    interpreter of its environment; None: the one that runs this script
    packages  a folder of further packages
    """

    title: str
    runner: str
    python: str | None
    model: str
    programs: str | None = None
    packages: str | None = None


PEERS = {
    "transformers": Peer(
        "transformers", "run_transformers.py", "transformers/bin/python", "models/float32", packages="quantizers"
    ),
    "kivi": Peer("KIVI (simulated)", "run_kivi.py", "transformers/bin/python", "models/float32"),
    "llamacpp": Peer("llama.cpp", "run_llamacpp.py", None, "models/bf16.gguf", programs="llamacpp/bin"),
    "openvino": Peer("OpenVINO", "run_openvino.py", "openvino/bin/python", "models/openvino"),
}
QUIRE, DENSE = "quire", "dense"
CODECS = {DENSE: 16, "nuq4": 4, "g4": 4, "nuq3": 3, "nuq2": 2}
TITLES = {QUIRE: "Quire"} | {name: peer.title for name, peer in PEERS.items()}


@dataclass(frozen=True)
class Row:
    """One cache of one engine.

    bits         bits of a code; if keys and values differ, the smaller number
    baseline     perplexity with the engine's 16-bit cache
    perplexity   perplexity with this cache
    ratio_error  standard error of their ratio over windows; None for a single window and for the 16-bit cache itself
    surprise     sum of -ln p of each window; empty if the engine does not report it
    """

    engine: str
    version: str
    cache: str
    bits: int
    bytes_per_token: float
    baseline: float
    perplexity: float
    ratio_error: float | None
    surprise: Sequence[float] = ()

    @property
    def ratio(self) -> float:
        """Perplexity relative to the 16-bit cache; 1 is equal."""
        return self.perplexity / self.baseline

    def beats(self, other: Row) -> bool:
        """Whether this cache is no larger than another and no worse."""
        return self.bytes_per_token <= other.bytes_per_token and self.ratio <= other.ratio


def cut_windows(text: Path, model: str, number: int) -> list[list[int]]:
    """Token ids of the text's first windows."""
    from quire.models.resolve import resolve_model
    from quire.models.tokenizer import load_tokenizer

    token_ids = load_tokenizer(resolve_model(model)).encode(text.read_text(encoding="utf-8"))
    starts = range(0, len(token_ids) - CONTEXT + 1, CONTEXT)
    return [token_ids[start : start + CONTEXT] for start in starts[:number]]


def start(name: str, windows: Path, given: argparse.Namespace) -> Worker:
    """Starts a peer's runner. Raises WorkerError."""
    peer = PEERS[name]
    python = given.peers / peer.python if peer.python else Path(sys.executable)
    further = {key: given.peers / place for key in ("programs", "packages") if (place := getattr(peer, key))}
    for path in [python, given.peers / peer.model, *further.values()]:
        if not path.exists():
            raise WorkerError(f"{name}: {path} is missing; run scripts/peers.sh")
    command = [python, HERE / "kv_quality" / peer.runner, "--model", given.peers / peer.model]
    command += ["--windows", windows, "--threads", given.threads]
    command += ["--programs", further["programs"]] if peer.programs else []
    # The code that ends a runner with this script is shared with the other benchmarks of peers.
    packages = [HERE / "peers", *([further["packages"]] if peer.packages else [])]
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(map(str, packages))}
    environment["OMP_NUM_THREADS"] = str(given.threads)
    worker = Worker(name, command, environment, given.logs / f"kv-{name}.log", START_SECONDS)
    worker.resume()
    return worker


def measure_peer(name: str, windows: Path, given: argparse.Namespace) -> Iterator[Row]:
    """Measures one engine's 16-bit cache and its requested caches. One that fails is reported and left out."""
    worker = start(name, windows, given)
    try:
        bits = worker.ready["caches"]
        exact, *others = bits
        scored = CONTEXT - 1
        base: list[float] = []
        for cache in [exact, *(other for other in others if not given.caches or other in given.caches)]:
            try:
                found = worker.ask(CACHE_SECONDS, cache=cache)
            except WorkerError as error:
                say(f"LEFT OUT  {cache}: {error}")
                if cache == exact:
                    return
                continue
            losses = [total / scored for total in found["surprise"]]
            base = base or losses
            perplexity, baseline = (math.exp(statistics.fmean(each)) for each in (losses, base))
            # Both read the same tokens, so the noise is in the difference within each window.
            spread = standard_error([loss - unquantized for loss, unquantized in zip(losses, base, strict=True)])
            ratio_error = None if spread is None or cache == exact else perplexity / baseline * spread
            size = found["bytes_per_token"]
            say(f"{name:13} {cache:24} {size:7.0f} B  {perplexity / baseline:.4f}  in {found['seconds']:.0f} s")
            version, losses = worker.ready["version"], found["surprise"]
            yield Row(name, version, cache, bits[cache], size, baseline, perplexity, ratio_error, losses)
    finally:
        worker.close()


def measure_quire(text: Path, given: argparse.Namespace) -> Iterator[Row]:
    """Quire's codecs, measured by its own command on the same windows of the same text."""
    command = [sys.executable, "-m", "quire", "eval", "ppl", given.model, "--text", text, "--context", CONTEXT]
    command += ["--windows", given.windows, "--codecs", ",".join([DENSE, *given.codecs]), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": str(given.threads)}
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise WorkerError(f"quire: `{' '.join(map(str, command[1:]))}` ended with {done.returncode}")
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        raise WorkerError("quire: it printed no result")
    baseline = math.exp(found[0]["nll"])
    elements = elements_per_token(given.peers)

    def chunk_bytes(result: dict[str, Any]) -> float:
        return float(result["bits_per_element"]) * elements * CHUNK / 8

    for result in found:
        perplexity = math.exp(result["nll"])
        ratio_error = None if result is found[0] else result["ratio_error"]
        # The last token of a window is scored but not stored. If it were stored, the open chunk would be encoded too.
        stored = result["bytes_per_token"] * (CONTEXT - 1) - chunk_bytes(found[0]) + chunk_bytes(result)
        codec, size = result["codec"], stored / CONTEXT
        yield Row(QUIRE, commit(), codec, CODECS[codec], size, baseline, perplexity, ratio_error)


def earlier(file: Path, given: argparse.Namespace) -> list[Row]:
    """The records of an earlier run, over the same number of windows, for engines that are not measured now; the latest
    record of each cache.
    """
    records = [json.loads(line) for line in file.read_text().splitlines()]
    fields = [field.name for field in dataclasses.fields(Row)]
    found = {
        (record["engine"], record["cache"]): Row(**{name: record[name] for name in fields})
        for record in records
        if record["benchmark"] == BENCHMARK
        and record["engine"] not in (QUIRE, *given.engines)
        and len(record["surprise"]) == given.windows
    }
    return list(found.values())


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def elements_per_token(peers: Path) -> int:
    """Key and value numbers of one token, over all layers."""
    shape = json.loads((peers / "models/float32/config.json").read_text())
    size = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return 2 * int(shape["num_hidden_layers"] * shape["num_key_value_heads"] * size)


def report(rows: Sequence[Row], given: argparse.Namespace) -> str:
    """The table and the conditions."""
    elements = elements_per_token(given.peers)
    head = ["engine", "cache", "B/token", "bits/element", "16-bit ppl", "ppl", "ratio", "+-"]
    lines = [
        [
            TITLES[row.engine],
            row.cache,
            f"{row.bytes_per_token:.0f}",
            f"{8 * row.bytes_per_token / elements:.2f}",
            f"{row.baseline:.3f}",
            f"{row.perplexity:.3f}",
            f"{row.ratio:.4f}",
            "-" if row.ratio_error is None else f"{row.ratio_error:.4f}",
        ]
        for row in rows
    ]
    versions = ", ".join(
        f"{TITLES[name]} {version}" for name, version in {row.engine: row.version for row in rows}.items()
    )
    return (
        f"{format_table(head, lines, given.markdown)}\n\n"
        f"{given.windows} windows of {CONTEXT} tokens; {hardware_line(hardware())}; commit {commit()}; "
        f"{time.strftime('%Y-%m-%d')}.\n{versions}."
    )


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Compares each of Quire's codecs with the caches of equal code width, and lists all caches that beat it."""
    lines = []
    for ours in (row for row in rows if row.engine == QUIRE and row.cache != DENSE):
        others = [row for row in rows if row.engine != QUIRE]
        groups: dict[str, list[Row]] = {}
        for other in (other for other in others if other.bits == ours.bits):
            quality = "better" if ours.ratio < other.ratio else "no better"
            size = "no larger" if ours.bytes_per_token <= other.bytes_per_token else "larger"
            groups.setdefault(f"{quality} and {size} than", []).append(other)
        groups[BEATEN] = [other for other in others if other.beats(ours)]
        lines += [f"Quire {ours.cache}: {words} {names(group)}" for words, group in groups.items() if group]
    return lines


def names(rows: Sequence[Row]) -> str:
    """Engines and caches, separated by semicolons."""
    return "; ".join(f"{TITLES[row.engine]} {row.cache}" for row in rows)


def plot(rows: Sequence[Row], file: Path) -> None:
    """Plots the loss of caches over their bytes, both axes logarithmic, one colour per engine, without 16-bit caches.

    A cache with less than LEAST_LOSS is drawn there.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for engine, title in TITLES.items():
        found = [row for row in rows if row.engine == engine and row.bits < 16]
        if not found:
            continue
        found.sort(key=lambda row: row.bytes_per_token)
        sizes = [row.bytes_per_token for row in found]
        losses = [max(100 * (row.ratio - 1), LEAST_LOSS) for row in found]
        errors = [min(100 * (row.ratio_error or 0.0), 0.9 * loss) for row, loss in zip(found, losses, strict=True)]
        ours = engine == QUIRE
        size = 9 if ours else 6
        (points, *_) = axes.errorbar(
            sizes, losses, yerr=errors, fmt="o", markersize=size, elinewidth=1, zorder=2 + ours, label=title
        )
        for row, at in zip(found, zip(sizes, losses, strict=True), strict=True):
            axes.annotate(
                row.cache,
                at,
                xytext=(-6, -6) if ours else (4, 5),
                textcoords="offset points",
                rotation=0 if ours else 35,  # slanted names overlap least
                rotation_mode="anchor",
                horizontalalignment="right" if ours else "left",
                verticalalignment="top" if ours else "bottom",
                fontsize=11 if ours else 7,
                fontweight="bold" if ours else "normal",
                color=points.get_color(),
            )
    ticks = [*range(3000, 9000, 1000), *range(10000, 17000, 2000)]
    axes.set(xscale="log", yscale="log", xlim=(3000, 16000), ylim=(LEAST_LOSS / 2, 5000))
    axes.set_xticks(ticks, [f"{size:,}" for size in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.set_xlabel("bytes resident per token of a full window")
    axes.set_ylabel("perplexity above that of the engine's own 16-bit cache")
    axes.set_title(f"SmolLM2-135M-Instruct, WikiText-2 test, windows of {CONTEXT:,} tokens")
    axes.grid(alpha=0.3)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everyone = [QUIRE, *PEERS]
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder that has wiki.test.raw")
    parser.add_argument("--engines", default=",".join(everyone), help="comma-separated (default: %(default)s)")
    parser.add_argument(
        "--caches", help="comma-separated caches of the peers, besides their 16-bit ones (default: all)"
    )
    parser.add_argument("--codecs", default="nuq4,nuq3,nuq2", help="Quire's, besides dense (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=8, help="windows, of the text's 148 (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute (default: %(default)s)")
    parser.add_argument("--model", default="smollm2", help="the model of Quire; its tokenizer cuts the text")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="folder of scripts/peers.sh")
    parser.add_argument("--logs", type=Path, help="folder for the engines' output (default: PEERS/logs)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per cache")
    parser.add_argument("--earlier", type=Path, metavar="FILE", help="a --json file with engines not measured now")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw quality against bytes: PNG, SVG or PDF")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    given = parser.parse_args()
    given.engines, given.codecs = given.engines.split(","), given.codecs.split(",")
    given.caches = given.caches and given.caches.split(",")
    given.logs = given.logs or given.peers / "logs"
    for wanted, known in ((given.engines, everyone), (given.codecs, CODECS)):
        if unknown := set(wanted) - set(known):
            parser.error(f"{', '.join(unknown)}: none of {', '.join(known)}")
    return given


def main() -> int:
    """Measures everything, prints the table."""
    given = arguments()
    text = given.data / "wiki.test.raw"
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        windows = cut_windows(text, given.model, given.windows)
        given.windows = len(windows)
        file = Path(folder) / "windows.json"
        file.write_text(json.dumps(windows))
        for name in given.engines:
            try:
                found = measure_quire(text, given) if name == QUIRE else measure_peer(name, file, given)
                for row in found:
                    rows.append(row)
                    if given.json:
                        about = {"benchmark": BENCHMARK, "context": CONTEXT, "ratio": row.ratio}
                        append_record(given.json, {**about, **asdict(row)})
            except WorkerError as error:
                say(f"LEFT OUT  {error}")
    rows += earlier(given.earlier, given) if given.earlier else []
    rows.sort(key=lambda row: list(TITLES).index(row.engine))
    if not rows:
        return 2
    print(report(rows, given))
    if given.plot:
        plot(rows, given.plot)
    lines = verdicts(rows)
    print("\n".join(lines))
    return int(any(BEATEN in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
