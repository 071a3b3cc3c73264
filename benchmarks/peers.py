"""Quire and its peers on the same machine, in the same run, in turns.

    make peers                                      # or scripts/peers.sh: installs the peers below .peers/
    python benchmarks/peers.py                      # every engine, every cell, five rounds
    python benchmarks/peers.py --engines quire,openvino,vllm --cells decode-8 --rounds 9
    python benchmarks/peers.py --markdown --json results.jsonl

All engines compute SmolLM2-135M-Instruct with bf16 weights (dequantized from the same 4-bit file) and a 16-bit cache
on the same number of threads, greedily, to the full length. Prompts are random token ids, new in every repeat and the
same for every engine that takes ids; tokens come back as ids, so no engine spends time on text.

Cells
    prefill-N   prompt tokens/s of one request of N tokens with one token out: N / seconds
    decode-B    tokens/s of B requests of 128 tokens in, 128 out: B * 127 / (seconds - seconds of the same for 1 token)
    request-B   the plain throughput of those same requests: B * 128 / seconds

Decode speed is a difference of two whole requests because that needs nothing from an engine but its ordinary call and
favours no schedule: with first-token timestamps, an engine that decodes early requests while it still prefills late
ones could not be compared with one that prefills all of them first. The request for one token uses other prompts of
the same shape, so that a prefix cache cannot shorten either. llama.cpp's program does run all prompts first, for the
whole batch, and times that phase itself: there the difference is taken within one run.

Each engine is one process, started and warmed up once in every shape, and stopped (SIGSTOP) while it is not its turn:
some keep threads spinning after a call, which would slow down whoever is next. In a round every cell is measured on
every engine, the order of engines moving on by one from round to round; medians over the rounds are shown, and ratios
are medians of the ratios within a round. Beside its time each turn records how many cores other processes kept busy
meanwhile; a turn during which that exceeds --quiet is repeated, at most --retries times. Numbers taken on a busy
machine are worth little: two busy threads and one competitor can cost a factor of ten.

The exit status is 1 when fewer than three peers could be measured.
"""

import argparse
import math
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, append_record, commit, format_rate, format_table, hardware, hardware_line, median, spread
from turns import Meter, Worker, WorkerError

HERE = Path(__file__).resolve().parent / "peers"

# The first start of vLLM compiles for about two minutes.
START_SECONDS = 900
CACHE_GIB = 1
MIN_PEERS = 3
# Engines in agreement differ only where two tokens are almost equally likely in bf16: later than this.
MIN_SAME_TOKENS = 8


@dataclass(frozen=True)
class Cell:
    """One shape of work. `output` of 1 makes it a prefill cell."""

    name: str
    batch: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Engine:
    """How to start one engine. `python`, `model` and `programs` are paths below the folder of the peers."""

    name: str
    title: str
    runner: str
    python: str | None = None
    model: str = ""
    programs: str | None = None
    native: bool = False

    @property
    def is_peer(self) -> bool:
        """Whether this is somebody else's engine."""
        return not self.name.startswith("quire")

    @property
    def counts(self) -> bool:
        """Whether Quire with the same weights is compared with it."""
        return self.is_peer and not self.native


# Untimed, before every turn.
WAKE = Cell("wake", 1, 32, 4)
CELLS = [
    Cell("prefill-512", 1, 512, 1),
    Cell("prefill-1536", 1, 1536, 1),
    Cell("decode-1", 1, 128, 128),
    Cell("decode-8", 8, 128, 128),
    Cell("decode-32", 32, 128, 128),
]
# Fewer weight bytes pay where weights are read for one token alone.
NATIVE_CELLS = {"decode-1"}

ENGINES = [
    Engine("quire", "Quire", "run_quire.py"),
    Engine("vllm", "vLLM", "run_vllm.py", "vllm/bin/python", "models/float32"),
    Engine("openvino", "OpenVINO GenAI", "run_openvino.py", "openvino/bin/python", "models/openvino"),
    Engine("llamacpp", "llama.cpp", "run_llamacpp.py", None, "models/bf16.gguf", "llamacpp/bin"),
    Engine("transformers", "transformers", "run_transformers.py", "transformers/bin/python", "models/float32"),
    Engine("quire-native", "Quire, 4-bit weights", "run_quire.py", native=True),
    Engine("llamacpp-native", "llama.cpp, Q4_1", "run_llamacpp.py", None, "models/q4_1.gguf", "llamacpp/bin", True),
]
BY_NAME = {engine.name: engine for engine in ENGINES}


@dataclass
class Result:
    """The samples of one engine in one cell, one per round."""

    rates: list[float] = field(default_factory=list)
    request_rates: list[float] = field(default_factory=list)
    other_cores: list[float] = field(default_factory=list)


Results = dict[tuple[str, str], Result]
"""By engine and cell name."""


def start(engine: Engine, given: argparse.Namespace) -> Worker:
    """Start one engine. Raises WorkerError."""
    python = given.peers / engine.python if engine.python else Path(sys.executable)
    model = given.peers / engine.model if engine.is_peer else given.model
    programs = ["--programs", given.peers / engine.programs] if engine.programs else []
    for path in [python, *([model] if engine.is_peer else []), *programs[1:]]:
        if not path.exists():
            raise WorkerError(f"{engine.name}: {path} is missing; run scripts/peers.sh")
    command = [python, HERE / engine.runner, "--model", model, "--threads", given.threads, "--cache-gib", CACHE_GIB]
    command += [*programs, *(["--native"] if engine.native else [])]
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "" if engine.is_peer else str(ROOT / "src")}
    return Worker(engine.name, command, environment, given.logs / f"{engine.name}.log", START_SECONDS)


def call(worker: Worker, cell: Cell, output: int, seed: int) -> dict[str, Any]:
    """One call in the cell's shape with `output` new tokens per request: its `seconds` and `first_seconds`."""
    return worker.ask(op="run", batch=cell.batch, prompt=cell.prompt, output=output, seed=seed)


def measure(worker: Worker, cell: Cell, seed: int) -> tuple[float, float]:
    """The cell's rate and its whole-request rate, both in tokens a second; NaN where there is none.

    A decode rate is NaN when the request for one token took longer than the whole one, on a machine too busy to tell.
    """
    if cell.output == 1:
        # Too short to be timed once.
        seconds = median(call(worker, cell, 1, seed + repeat)["seconds"] for repeat in range(3))
        return cell.batch * cell.prompt / seconds, math.nan
    whole = call(worker, cell, cell.output, seed)
    first = whole["first_seconds"] or call(worker, cell, 1, seed + 1)["seconds"]
    decoding = whole["seconds"] - first
    rate = cell.batch * (cell.output - 1) / decoding if decoding > 0 else math.nan
    return rate, cell.batch * cell.output / whole["seconds"]


def take_turn(worker: Worker, cell: Cell, seed: int, given: argparse.Namespace, result: Result) -> None:
    """Measure one cell on one engine and add it to `result`; of repeated turns the quietest counts."""
    attempts: list[tuple[float, float, float]] = []
    worker.resume()
    while len(attempts) <= given.retries and not (attempts and min(attempts)[0] <= given.quiet):
        # Untimed: wakes threads and refills the processor's caches.
        call(worker, WAKE, WAKE.output, seed)
        meter = Meter(worker)
        rates = measure(worker, cell, seed + 1)
        attempts.append((meter.other_cores(), *rates))
        seed += 10
    worker.pause()
    other_cores, rate, request_rate = min(attempts)
    result.other_cores.append(other_cores)
    result.rates.append(rate)
    result.request_rates.append(request_rate)


def start_all(workers: dict[str, Worker], given: argparse.Namespace) -> None:
    """Start and warm up every engine into `workers`; one that fails or computes something else is left out."""
    answers: dict[str, list[int]] = {}
    for engine in given.engines:
        say(f"{engine.title}: starting")
        try:
            worker = workers[engine.name] = start(engine, given)
            worker.resume()
            answers[engine.name] = worker.ask(op="check")["tokens"]
            for cell in cells_of(engine, given.cells):
                call(worker, cell, min(cell.output, 8), given.seed - 1)
            worker.pause()
        except WorkerError as error:
            leave_out(workers, engine.name, error)
            continue
        say(f"{engine.title} {worker.ready['version']}: warmed up; started in {worker.ready['start_seconds']:.1f} s")
    for name in [name for name in workers if not BY_NAME[name].native]:
        others = [answers[other] for other in workers if other != name]
        if others and (same := max(same_tokens(answers[name], other) for other in others)) < MIN_SAME_TOKENS:
            leave_out(workers, name, WorkerError(f"{name}: no other engine agrees with more than {same} of its tokens"))


def leave_out(workers: dict[str, Worker], name: str, error: WorkerError) -> None:
    """Report an engine's failure and go on without it."""
    say(f"LEFT OUT  {error}")
    if name in workers:
        workers.pop(name).close()


def same_tokens(tokens: list[int], other: list[int]) -> int:
    """How many leading tokens are equal."""
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(tokens), len(other)))


def cells_of(engine: Engine, cells: list[Cell]) -> list[Cell]:
    """The cells an engine takes part in."""
    return [cell for cell in cells if not engine.native or cell.name in NATIVE_CELLS]


def run_rounds(workers: dict[str, Worker], given: argparse.Namespace) -> Results:
    """All rounds. An engine that fails leaves `workers`."""
    results: Results = {}
    turns = [(number, cell) for number in range(given.rounds) for cell in given.cells]
    for turn, (number, cell) in enumerate(turns):
        names = [engine.name for engine in given.engines if engine.name in workers]
        names = [name for name in names if cell in cells_of(BY_NAME[name], given.cells)]
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            result = results.setdefault((name, cell.name), Result())
            try:
                # The same seed, thus the same token ids, for every engine; 1000 leaves room for repeats.
                take_turn(workers[name], cell, given.seed + 1000 * turn, given, result)
            except WorkerError as error:
                leave_out(workers, name, error)
                continue
            rate, others = format_rate(result.rates[-1]), result.other_cores[-1]
            say(f"round {number + 1}/{given.rounds}  {cell.name:12}  {name:15} {rate:>6} tok/s  others {others:.2f}")
    return {key: result for key, result in results.items() if key[0] in workers}


def report(workers: dict[str, Worker], results: Results, given: argparse.Namespace) -> str:
    """Everything that was found, as text or Markdown."""
    # A heading, the cell, and which of its samples.
    columns = [(cell.name, cell.name, "rates") for cell in given.cells]
    columns += [
        (cell.name.replace("decode", "request"), cell.name, "request_rates") for cell in given.cells if cell.output > 1
    ]

    def samples(name: str, column: tuple[str, str, str]) -> list[float]:
        found: list[float] = getattr(results.get((name, column[1]), Result()), column[2])
        return found

    rows = []
    for name in workers:
        rates = [format_rate(median(samples(name, column))) for column in columns]
        rows.append([BY_NAME[name].title, *rates])
    rivals = [name for name in workers if BY_NAME[name].counts]
    if "quire" in workers and rivals:
        ratios = []
        for column in columns:
            best = max((samples(name, column) for name in rivals), key=median)
            pairs = zip(samples("quire", column), best, strict=True)
            ratios.append(median(ours / theirs for ours, theirs in pairs))
        rows.append([f"Quire / best of {len(rivals)} peers", *(f"{ratio:.2f}" for ratio in ratios)])
    notes = []
    for name, ready in ((name, worker.ready) for name, worker in workers.items()):
        started = "every run" if BY_NAME[name].programs else f"{ready['start_seconds']:.1f} s"
        notes.append([BY_NAME[name].title, ready["version"], started, ready["settings"]])
    others = [cores for result in results.values() for cores in result.other_cores]
    noisy = sum(cores > given.quiet for cores in others) > len(others) // 4
    moved = median(spread(result.rates) for result in results.values())
    paragraphs = [
        format_table(["tokens/s", *(heading for heading, _, _ in columns)], rows, given.markdown),
        f"{hardware_line(hardware())}; {given.threads} threads; commit {commit()}; {time.strftime('%Y-%m-%d')}; "
        f"rounds: {given.rounds}, medians shown.\nOther processes kept {median(others):.2f} cores busy (at worst "
        f"{max(others, default=0.0):.2f}); between rounds a cell moved by {moved:.0%} of its median."
        + ("\nTHE MACHINE WAS NOT QUIET: these numbers are not for publication." if noisy else ""),
        format_table(["engine", "version", "started in", "settings"], notes, given.markdown),
    ]
    return "\n\n".join(paragraphs)


def record(workers: dict[str, Worker], results: Results, given: argparse.Namespace) -> None:
    """Append one JSON line per engine and cell."""
    for (name, cell), result in results.items():
        about = {"benchmark": "peers", "engine": name, **workers[name].ready, "cell": cell}
        settings = {"threads": given.threads, "cache_gib": CACHE_GIB, "seed": given.seed}
        append_record(given.json, {**about, **settings, "tokens_per_second": median(result.rates), **asdict(result)})


def say(text: str) -> None:
    """Progress goes to standard error: standard output carries the table alone."""
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Quire and its peers, interleaved on one machine.")
    names = [engine.name for engine in ENGINES]
    parser.add_argument("--engines", help=f"comma-separated, of {', '.join(names)} (default: all but the 4-bit ones)")
    parser.add_argument("--cells", help=f"comma-separated, of {', '.join(cell.name for cell in CELLS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--native", action="store_true", help="add the engines that keep weights in 4 bits")
    parser.add_argument("--model", default="smollm2", help="what Quire loads")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where scripts/peers.sh installed them")
    parser.add_argument("--logs", type=Path, help="folder for what the engines print (default: PEERS/logs)")
    parser.add_argument("--quiet", type=float, default=0.1, help="cores others may use before a turn is repeated")
    parser.add_argument("--retries", type=int, default=2, help="how often a disturbed turn is repeated")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9), help="of all token ids")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per engine and cell")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    given = parser.parse_args()
    given.logs = given.logs or given.peers / "logs"
    wanted = given.engines.split(",") if given.engines else [engine.name for engine in ENGINES if not engine.native]
    wanted += [engine.name for engine in ENGINES if given.native and engine.native and engine.name not in wanted]
    shapes = given.cells.split(",") if given.cells else [cell.name for cell in CELLS]
    for name, known in [*((w, names) for w in wanted), *((s, [cell.name for cell in CELLS]) for s in shapes)]:
        if name not in known:
            parser.error(f"{name!r} is none of {', '.join(known)}")
    given.engines = [engine for engine in ENGINES if engine.name in wanted]
    given.cells = [cell for cell in CELLS if cell.name in shapes]
    return given


def main() -> int:
    """Run everything, print the tables."""
    given = arguments()
    # Paused engines would outlive this script if it simply ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    workers: dict[str, Worker] = {}
    try:
        start_all(workers, given)
        if not workers:
            say("no engine could be started")
            return 1
        results = run_rounds(workers, given)
        print(report(workers, results, given))
        if given.json:
            record(workers, results, given)
        measured = sum(BY_NAME[name].counts for name in workers)
    finally:
        for worker in workers.values():
            worker.close()
    if measured < MIN_PEERS:
        say(f"{measured} peers were measured; a table with fewer than {MIN_PEERS} does not count")
    return 0 if measured >= MIN_PEERS else 1


if __name__ == "__main__":
    sys.exit(main())
