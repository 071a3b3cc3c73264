"""Engines that take turns on one machine: starting, timing and comparing them.

The workload comes from a script: its cells, the measurement of a cell, and the warm-up of an engine.

Each engine is one process. It is started once, warmed up in every cell, and stopped (SIGSTOP) while it is not its turn:
some engines keep threads spinning after a call, which would slow down the next one. A round measures every cell on
every engine; the order of engines rotates by one from round to round. Each turn also records the number of cores that
other processes kept busy. A turn in which this exceeds --quiet is repeated, at most --retries times. Numbers from a
busy machine mean little: with two busy threads, one competitor can cost a factor of ten.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from common import ROOT, commit, format_table, hardware, hardware_line, median, spread
from turns import Meter, Worker, WorkerError

HERE = Path(__file__).resolve().parent / "peers"

# The first start of vLLM compiles for about two minutes.
START_SECONDS = 900
CACHE_GIB = 1
# Engines that agree differ only where two tokens are almost equally likely in bf16, and not before this many tokens.
MIN_SAME_TOKENS = 8


class Cell(Protocol):
    """One shape of work."""

    @property
    def name(self) -> str:
        """Its name on the command line and in records."""
        ...


@dataclass(frozen=True)
class Engine:
    """How to start one engine. `python`, `model` and `programs` are paths below the folder of the peers.

    restarts  every run is a fresh process
    options   settings of Quire, as its flags
    tree      checkout with Quire's sources; None is this one
    """

    name: str
    title: str
    runner: str
    python: str | None = None
    model: str = ""
    programs: str | None = None
    native: bool = False
    restarts: bool = False
    options: tuple[str, ...] = ()
    tree: Path | None = None

    @property
    def is_peer(self) -> bool:
        """Whether this is not Quire."""
        return family(self.name) != "quire"

    @property
    def counts(self) -> bool:
        """Whether Quire is compared with it: both have the same weights."""
        return self.is_peer and not self.native


QUIRE = Engine("quire", "Quire", "run_quire.py")
VLLM = Engine("vllm", "vLLM", "run_vllm.py", "vllm/bin/python", "models/float32")
OPENVINO = Engine("openvino", "OpenVINO GenAI", "run_openvino.py", "openvino/bin/python", "models/openvino")
LLAMACPP = Engine("llamacpp", "llama.cpp", "run_llamacpp.py", None, "models/bf16.gguf", "llamacpp/bin", restarts=True)

Figures = dict[str, float]
"""The measurements of one turn, by name; NaN if there is nothing to measure."""

Samples = dict[str, list[float]]
"""The figures of all rounds."""

Results = dict[tuple[str, str], Samples]
"""By engine and cell name. The samples always include `other_cores`."""

OTHER_CORES = "other_cores"


class Contest:
    """The engines of one run; `workers` are those that still take part. All end with the context.

    given    the result of `parse`
    measure  (engine's worker, cell, seed) -> figures; seeds within ten of each other belong to one turn
    joins    whether an engine takes part in a cell
    """

    def __init__(
        self,
        given: argparse.Namespace,
        measure: Callable[[Worker, Any, int], Figures],
        joins: Callable[[Engine, Any], bool] = lambda engine, cell: True,
    ) -> None:
        self.given, self.measure, self.joins = given, measure, joins
        self.engines = {engine.name: engine for engine in given.engines}
        self.workers: dict[str, Worker] = {}

    def __enter__(self) -> Self:
        # Without this, paused engines would outlive the script.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers.values():
            worker.close()

    def start(self, warm: Callable[[Worker, Any], object]) -> None:
        """Starts every engine and warms it up with all its cells. An engine that fails or computes other tokens is left
        out. Ends the script if none remains.
        """
        answers: dict[str, list[int]] = {}
        for engine in self.engines.values():
            say(f"{engine.title}: starting")
            try:
                worker = self.workers[engine.name] = start(engine, self.given)
                worker.resume()
                answers[engine.name] = worker.ask(op="check")["tokens"]
                for cell in self.given.cells:
                    if self.joins(engine, cell):
                        warm(worker, cell)
                worker.pause()
            except WorkerError as error:
                self._leave_out(engine.name, error)
                continue
            ready = worker.ready
            say(f"{engine.title} {ready['version']}: warmed up; started in {ready['start_seconds']:.1f} s")
        for name in [name for name in self.workers if not self.engines[name].native]:
            others = [answers[other] for other in self.workers if family(other) != family(name)]
            if others and (same := max(same_tokens(answers[name], other) for other in others)) < MIN_SAME_TOKENS:
                self._leave_out(name, WorkerError(f"{name}: no other engine agrees with more than {same} tokens"))
        if not self.workers:
            sys.exit("no engine could be started")

    def rounds(self, describe: Callable[[Figures], str]) -> Results:
        """Runs all rounds. An engine that fails is left out with all its results.

        describe  one turn's figures in a few words, for the progress line
        """
        results: Results = {}
        turns = [(number, cell) for number in range(self.given.rounds) for cell in self.given.cells]
        for turn, (number, cell) in enumerate(turns):
            names = [name for name in self.workers if self.joins(self.engines[name], cell)]
            first = number % max(1, len(names))
            for name in names[first:] + names[:first]:
                try:
                    # The same seed gives every engine the same token ids; 1000 leaves room for repeats.
                    figures = self._take_turn(self.workers[name], cell, self.given.seed + 1000 * turn)
                except WorkerError as error:
                    self._leave_out(name, error)
                    continue
                samples = results.setdefault((name, cell.name), {})
                for key, value in figures.items():
                    samples.setdefault(key, []).append(value)
                progress = f"round {number + 1}/{self.given.rounds}  {cell.name:12}  {name:15} {describe(figures)}"
                say(f"{progress}  others {figures[OTHER_CORES]:.2f}")
        return {key: samples for key, samples in results.items() if key[0] in self.workers}

    def conditions(self, results: Results, spread_of: str) -> str:
        """The machine, its foreign load, and the engines' versions and settings.

        spread_of  the figure whose variation between rounds is reported
        """
        given = self.given
        others = [cores for samples in results.values() for cores in samples[OTHER_CORES]]
        noisy = sum(cores > given.quiet for cores in others) > len(others) // 4
        moved = median(spread(samples[spread_of]) for samples in results.values())
        notes = []
        for name, ready in ((name, worker.ready) for name, worker in self.workers.items()):
            engine = self.engines[name]
            started = "every run" if engine.restarts else f"{ready['start_seconds']:.1f} s"
            notes.append([engine.title, ready["version"], started, ready["settings"]])
        return (
            f"{hardware_line(hardware())}; {given.threads} threads; commit {commit()}; {time.strftime('%Y-%m-%d')}; "
            f"rounds: {given.rounds}, medians shown.\nOther processes kept {median(others):.2f} cores busy (at worst "
            f"{max(others, default=0.0):.2f}); between rounds a cell moved by {moved:.0%} of its median."
            + ("\nTHE MACHINE WAS NOT QUIET: these numbers are not for publication." if noisy else "")
            + "\n\n"
            + format_table(["engine", "version", "started in", "settings"], notes, given.markdown)
        )

    def about(self, name: str) -> dict[str, Any]:
        """The fields of a record about an engine and the run."""
        settings = {"threads": self.given.threads, "cache_gib": CACHE_GIB, "seed": self.given.seed}
        return {"engine": name, **self.workers[name].ready, **settings}

    def rivals(self) -> list[str]:
        """The engines that Quire is compared with; none if it does not take part itself."""
        return [name for name in self.workers if self.engines[name].counts] if QUIRE.name in self.workers else []

    def _take_turn(self, worker: Worker, cell: Cell, seed: int) -> Figures:
        """Measures one cell on one engine. If the turn is repeated, the quietest one counts."""
        attempts: list[Figures] = []
        worker.resume()
        while len(attempts) <= self.given.retries and not (
            attempts and min(attempt[OTHER_CORES] for attempt in attempts) <= self.given.quiet
        ):
            # Untimed: wakes threads and refills the processor's caches.
            worker.ask(op="run", batch=1, prompt=32, output=4, seed=seed)
            meter = Meter(worker)
            figures = self.measure(worker, cell, seed + 1)
            attempts.append({**figures, OTHER_CORES: meter.other_cores()})
            seed += 10
        worker.pause()
        return min(attempts, key=lambda attempt: attempt[OTHER_CORES])

    def _leave_out(self, name: str, error: WorkerError) -> None:
        """Reports an engine's failure and continues without it."""
        say(f"LEFT OUT  {error}")
        if name in self.workers:
            self.workers.pop(name).close()


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
    command += [word for option in engine.options for word in ("--option", option)]
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "" if engine.is_peer else str((engine.tree or ROOT) / "src")}
    return Worker(engine.name, command, environment, given.logs / f"{engine.name}.log", START_SECONDS)


def family(name: str) -> str:
    """The engine that variants have in common. Agreement within a family proves nothing."""
    return name.partition("-")[0]


def same_tokens(tokens: list[int], other: list[int]) -> int:
    """The number of equal leading tokens."""
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(tokens), len(other)))


def times_the_best(ours: Sequence[float], rivals: Iterable[Sequence[float]], less_is_better: bool = False) -> float:
    """Quire's advantage over the rival with the best median: the median of the ratios within each round; NaN without a
    rival.

    ours, rivals  one number per round; more is better unless `less_is_better`
    """
    known = [samples for samples in rivals if not math.isnan(median(samples))]
    if not known:
        return math.nan
    best = (min if less_is_better else max)(known, key=median)
    pairs = zip(ours, best, strict=True)
    return median(theirs / mine if less_is_better else mine / theirs for mine, theirs in pairs)


def bootstrap(ratios: Sequence[float], resamples: int = 10_000) -> tuple[float, float]:
    """The 95 % interval of the median of `ratios`, one per round: 2.5 % and 97.5 % quantiles over random resamples.

    The same ratios give the same interval. NaN without a ratio.
    """
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    if not known:
        return math.nan, math.nan
    draw = random.Random(0)
    medians = sorted(median(draw.choices(known, k=len(known))) for _ in range(resamples))
    return medians[resamples * 25 // 1000], medians[resamples * 975 // 1000 - 1]


@contextlib.contextmanager
def checkouts(revisions: Sequence[str]) -> Iterator[dict[str, Path]]:
    """A folder with the sources of each revision of this repository, which exists during the context."""
    with tempfile.TemporaryDirectory() as name:
        folders = {}
        for number, revision in enumerate(revisions):
            folder = folders[revision] = Path(name) / str(number)
            folder.mkdir()
            archive = subprocess.run(
                ["git", "-C", ROOT, "archive", revision, "src"], check=True, stdout=subprocess.PIPE
            ).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield folders


@dataclass(frozen=True)
class Before:
    """An earlier commit, and the ratio to it that every cell must reach."""

    revision: str
    least: float

    @classmethod
    def parse(cls, text: str) -> Before:
        """From "REVISION" or "REVISION:LEAST"."""
        revision, _, least = text.partition(":")
        return cls(revision, float(least or 1))

    def name(self, engine: Engine) -> str:
        """The name of an engine at this commit."""
        return f"{engine.name}-{self.revision}"


@contextlib.contextmanager
def added_before(given: argparse.Namespace, engine: Engine) -> Iterator[None]:
    """Adds an engine at the commits of --before, whose sources exist during the context."""
    with checkouts([earlier.revision for earlier in given.before]) as trees:
        given.engines += [
            dataclasses.replace(
                engine,
                name=earlier.name(engine),
                title=f"{engine.title} at {earlier.revision}",
                tree=trees[earlier.revision],
            )
            for earlier in given.before
        ]
        yield


def compare(run: Contest, results: Results, engine: Engine, figures: Mapping[str, bool]) -> bool:
    """Prints how each cell compares with the commits of --before. Returns whether no cell is slower.

    figures  names of the figures, and whether less is better
    """
    rows, holds = [], True
    given = run.given
    for earlier, cell, (figure, less_is_better) in itertools.product(given.before, given.cells, figures.items()):
        ours, theirs = (
            results.get((name, cell.name), {}).get(figure, []) for name in (engine.name, earlier.name(engine))
        )
        if less_is_better:
            ours, theirs = theirs, ours
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=False) if not math.isnan(mine / other)]
        if not ratios:
            continue
        low, high = bootstrap(ratios)
        reaches = high >= earlier.least
        holds &= reaches
        row = [earlier.revision, cell.name, figure, f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}"]
        rows.append([*row, f"{earlier.least:.2f}", "yes" if reaches else "NO"])
    if rows:
        headings = ["commit", "cell", "figure", "ratio", "95 % interval", "least", "reached"]
        print(f"\n{format_table(headings, rows, run.given.markdown)}")
    return holds


def add_arguments(parser: argparse.ArgumentParser, engines: Sequence[Engine], cells: Sequence[Any]) -> None:
    """The arguments of every contest."""
    names, shapes = (", ".join(each.name for each in group) for group in (engines, cells))
    parser.add_argument("--engines", help=f"comma-separated, of {names} (default: all but those with 4-bit weights)")
    parser.add_argument("--cells", help=f"comma-separated, of {shapes} (default: all)")
    parser.add_argument(
        "--before",
        type=lambda text: [Before.parse(each) for each in text.split(",")],
        default=[],
        help="commits of Quire to compare with, with the least ratio: REV:0.97,REV:1.0",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2", help="the model that Quire loads")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="folder of scripts/peers.sh")
    parser.add_argument("--logs", type=Path, help="folder for the engines' output (default: PEERS/logs)")
    parser.add_argument("--quiet", type=float, default=0.1, help="cores others may use before a turn is repeated")
    parser.add_argument("--retries", type=int, default=2, help="most repetitions of a disturbed turn")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9), help="of all token ids")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per engine and cell")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")


def parse(parser: argparse.ArgumentParser, engines: Sequence[Engine], cells: Sequence[Any]) -> argparse.Namespace:
    """Parses the command line. `engines` and `cells` become lists of the given objects, in the given order. If the
    script has a flag --native, this adds the engines with 4-bit weights.
    """
    given = parser.parse_args()
    given.logs = given.logs or given.peers / "logs"
    usual = [engine.name for engine in engines if not engine.native]
    wanted = given.engines.split(",") if given.engines else usual
    wanted += [engine.name for engine in engines if engine.native and getattr(given, "native", False)]
    shapes = given.cells.split(",") if given.cells else [cell.name for cell in cells]
    for names, known in ((wanted, engines), (shapes, cells)):
        for name in names:
            if name not in (titles := [each.name for each in known]):
                parser.error(f"{name!r} is none of {', '.join(titles)}")
    given.engines = [engine for engine in engines if engine.name in wanted]
    given.cells = [cell for cell in cells if cell.name in shapes]
    return given


def say(text: str) -> None:
    """Prints progress to standard error. Standard output has only the table."""
    print(text, file=sys.stderr, flush=True)
