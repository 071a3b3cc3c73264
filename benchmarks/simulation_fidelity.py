"""How well the simulator predicts a server: the same requests at the same moments, served and simulated.

    python benchmarks/simulation_fidelity.py --data DIR --out fidelity.jsonl              # serves for hours
    python benchmarks/simulation_fidelity.py --data DIR --report fidelity.jsonl           # compares, in minutes

DIR has traces/. Sides: `mixed` is one process with a dense cache, `apart` a prefill and a decode instance with nuq3 and
retention, `offloaded` is `mixed` with the policy of --policy, whose seconds are those of --machine, a profile that
`quire plan hardware` made with the options of `COMMON`, and nothing is fitted to its steps. A repeat of a side answers,
at each rate, requests of each trace that fit --longest tokens, for --seconds, with the trace's own order and gaps
scaled to the rate; and between these loads a profile of synthetic requests, whose steps the server logs
(runtime.step_log). No step of a trace is used for fitting.

The report fits a latency model to the steps of the profiles alone, takes the seconds between client and engine from a
few lonely requests of the profiles, simulates every load, and prints attainment, mean TTFT and mean TPOT beside the
measured ones; the rate at which attainment falls to 90 %, measured and predicted; and the repeats that were dropped
because other programs took more than --quiet of a core. A repeat is a server of its own, and loads of a repeat are
simulated with its own profile; --pooled takes the profiles of all repeats together.

The exit status is 1 if a mark is missed. These are, for each side and trace: at least four rates; attainment that
differs by at most 5 points at each of them; and rates at the target that differ by at most 7 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import format_table, hardware, hardware_line
from load import LoadRequest, Send, completions, replay
from servers import Server, quire_server
from tiers import Mark, marks_table

from quire.cache.costs import LATENCY
from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.engine.capacity import MeasuredCapacity
from quire.engine.step_log import Logged, read_steps
from quire.load import find_calibration
from quire.measure.latency_bench import LatencyFiles
from quire.models.fingerprint import fingerprint
from quire.models.resolve import resolve_model
from quire.models.weights import open_model
from quire.simulation.cluster import Alone, Front, Place, SimulatedCluster
from quire.simulation.engine import Plan, make_engine
from quire.simulation.events import Events
from quire.simulation.outcome import Outcome
from quire.simulation.simulate import simulate
from quire.timing.latency import Link, StepTime
from quire.timing.latency_fit import fit
from quire.workload.slo import Slo
from quire.workload.traces import read_workload, tokens
from quire.workload.workload import Arrival, Workload

VOCABULARY = range(1000, 20000)
TRACES = {"conv": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
COMMON = {"cache.memory": "768MiB", "scheduler.max_running": "48", "model.weights": "dequantized"}
SIDES: dict[str, dict[str, str]] = {
    "mixed": {},
    "apart": {"cache.codec": "nuq3", "retain.budget": "0.5", "cluster.prefill": "1", "cluster.decode": "1"},
    "offloaded": {},
}
HOP = 0.0005
LONELY = 4
"""Requests of a part of a profile that are alone, from which the seconds between client and engine follow."""

PARTS = 3
"""Parts of a profile: one before each third of the loads."""


def profile(seed: str, seconds: float, rate: float, longest: int) -> list[LoadRequest]:
    """Lonely requests, then Poisson arrivals at rates from a third of `rate` up. Half of them have short answers to
    prompts of all lengths, the others long answers to shorter prompts, so that many sequences decode at once.
    """
    rng, at, found = random.Random(seed), 0.0, list[LoadRequest]()

    def add(num_in: float, num_out: float) -> None:
        found.append(LoadRequest(at, [rng.choice(VOCABULARY) for _ in range(int(num_in))], max(1, int(num_out))))

    def drawn(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    for number in range(LONELY):
        add(48 + 60 * number, 12)
        at += 1.6
    begun = at
    while at < begun + seconds:
        at += rng.expovariate(rate * (0.35 + 1.1 * (at - begun) / seconds))
        if rng.random() < 0.5:
            num_in = drawn(8, longest * 0.8)
            add(num_in, drawn(4, min(200, longest - num_in)))
        else:
            add(drawn(16, longest * 0.4), rng.uniform(60, min(250, longest * 0.6)))
    return found


def load_of(data: Path, trace: str, rate: float, repeat: int, longest: int, seconds: float) -> Workload:
    """Requests of a trace that fit, at a rate, from another place of the trace in each repeat."""
    whole = read_workload(data / "traces" / TRACES[trace])
    fits = [each for each in whole.arrivals if each.num_in + each.num_out <= longest]
    count = max(8, round(rate * seconds))
    part = fits[repeat * count : (repeat + 1) * count]
    moved = [Arrival(each.at - part[0].at, each.prompt, each.num_out) for each in part]
    return Workload(trace, moved).at_rate(rate)


def kept_load(data: Path, record: dict[str, Any]) -> Workload:
    """The load of a record."""
    return load_of(data, *(record[key] for key in ("trace", "rate", "repeat", "longest", "seconds")))


def prompts_of(load: Workload, rate: float, repeat: int) -> list[list[int]]:
    """Token ids of a load. Those of other loads, of which a server may have the cache, are different."""
    return tokens(load, VOCABULARY, zlib.crc32(f"{load.name} {rate} {repeat}".encode()))


def options_of(side: str, args: argparse.Namespace) -> dict[str, str]:
    """Settings of a side's engines, and of its cluster."""
    return {**COMMON, **SIDES[side], **({"offload.mode": str(args.policy)} if side == "offloaded" else {})}


@contextmanager
def serving(side: str, args: argparse.Namespace, folder: Path) -> Iterator[tuple[Server, Send]]:
    """A server of a side, which logs its steps."""
    words = [word for key, value in options_of(side, args).items() for word in (f"--{key}", value)]
    log = folder / "steps.log"
    with quire_server(folder / f"{side}.log", args.model, *words, "--runtime.step_log", log) as server:
        yield server, completions(server.url, args.model)


def busy_seconds() -> float:
    """Processor seconds of all programs since the start of the machine."""
    fields = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(fields[:3] + fields[5:8]) / 100


def own_seconds(pids: list[int]) -> float:
    """Processor seconds of this process and of the server's."""
    total = time.process_time()
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / 100
    return total


def family(pid: int) -> list[int]:
    """A process and its children, and theirs."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def serve(args: argparse.Namespace) -> None:
    """Measures all sides and appends what came of every load."""
    for repeat in range(args.first, args.first + args.repeats):
        for side in args.sides:
            with tempfile.TemporaryDirectory() as name, serving(side, args, Path(name)) as (server, send):
                asyncio.run(replay([LoadRequest(0.3 * n, [700 + n] * 200, 6) for n in range(4)], send))
                points = [(trace, rate) for trace in args.traces for rate in args.rates[trace]]
                random.Random(repeat).shuffle(points)
                measuring = Measuring(args, side, repeat, Path(name), server, send)
                for part in range(PARTS):
                    measuring.profile(part)
                    for trace, rate in points[part::PARTS]:
                        measuring.load(trace, rate)


@dataclass
class Measuring:
    """One repeat of a side."""

    args: argparse.Namespace
    side: str
    repeat: int
    folder: Path
    server: Server
    send: Send

    def profile(self, part: int) -> None:
        """Answers a part of the profile. Keeps its steps, and what the instances had measured."""
        args, state = self.args, None
        with self._keeping_steps("steps"):
            sent = profile(f"{self.repeat} {part}", args.profile / PARTS, args.busy, args.longest)
            lonely = asyncio.run(replay(sent, self.send))[:LONELY]
        if self.side == "apart":
            with urllib.request.urlopen(f"{self.server.url}/v1/cluster") as page:
                state = json.load(page)["instances"]
        requests = [[len(each.request.prompt), each.request.num_out, each.ttft, each.tpot] for each in lonely]
        self._keep("lonely", cluster=state, requests=requests)

    def load(self, trace: str, rate: float) -> None:
        """Answers a load, and keeps its times and its steps."""
        args = self.args
        load = load_of(args.data, trace, rate, self.repeat, args.longest, args.seconds)
        pairs = zip(load.arrivals, prompts_of(load, rate, self.repeat), strict=True)
        requests = [LoadRequest(each.at, prompt, each.num_out) for each, prompt in pairs]
        pids = family(self.server.process.pid)
        busy, own, begun = busy_seconds(), own_seconds(pids), time.monotonic()
        with self._keeping_steps("loaded"):
            answers = asyncio.run(replay(requests, self.send))
        seconds = time.monotonic() - begun
        others = (busy_seconds() - busy - own_seconds(pids) + own) / seconds
        ok = [each for each in answers if not each.error]
        self._keep(
            "load", trace=trace, rate=rate, longest=args.longest, seconds=args.seconds, others=others,
            ttft=[each.ttft for each in answers], tpot=[each.tpot for each in answers],
            errors=[each.error for each in answers if each.error],
        )  # fmt: skip
        print(
            f"{self.side} {trace} {rate:g}/s repeat {self.repeat}: {len(answers)} requests, TTFT"
            f" {statistics.mean(each.ttft for each in ok):.3f} s, TPOT"
            f" {1e3 * statistics.mean(each.tpot for each in ok):.1f} ms, others {others:.2f}",
            file=sys.stderr,
            flush=True,
        )

    @contextmanager
    def _keeping_steps(self, kind: str) -> Iterator[None]:
        """Keeps the steps that the server logs meanwhile."""
        before = {file.name: len(file.read_bytes().splitlines()) for file in self.folder.glob("steps*.log")}
        yield
        for file in sorted(self.folder.glob("steps*.log")):
            lines = file.read_text().splitlines()
            self._keep(kind, log=file.name, head=lines[0], lines=lines[max(1, before.get(file.name, 1)) :])

    def _keep(self, kind: str, **what: Any) -> None:
        """Appends a record."""
        with self.args.out.open("a") as file:
            file.write(json.dumps({"kind": kind, "side": self.side, "repeat": self.repeat, **what}) + "\n")


def steps_of(records: list[dict[str, Any]]) -> Logged:
    """The steps of some records of one role."""
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / f"{number}.log" for number in range(len(records))]
        for file, each in zip(files, records, strict=True):
            file.write_text("\n".join((each["head"], *each["lines"])) + "\n")
        return read_steps(files)


class Simulated:
    """One side as the simulator sees it, from its profiles."""

    def __init__(self, side: str, records: list[dict[str, Any]], args: argparse.Namespace, repeats: list[int]) -> None:
        self.side, model = side, args.model
        options = {key: value for key, value in options_of(side, args).items() if not key.startswith("cluster")}
        own = [each for each in records if each["side"] == side and each["repeat"] in repeats]
        path = resolve_model(model)
        given = EngineConfig.from_options({**options, "runtime.threads": 1 if side == "apart" else 2})
        self.models: dict[str, StepTime] = {}
        self.fits: dict[str, str] = {}  # how well the profile's steps are known, in words
        self.loaded: dict[str, tuple[float, float]] = {}  # seconds of the loads' steps, measured and fitted
        speeds: list[float] = []
        for role in ("prefill", "decode") if side == "apart" else ("mixed",):
            of_role = [each for each in own if side != "apart" or f".{role}-" in each.get("log", "")]
            logged = steps_of([each for each in of_role if each["kind"] == "steps"])
            found: StepTime
            if side == "offloaded":
                found = LatencyFiles([str(args.machine)], model).of(role, given, fingerprint(path))
                ratios = [seconds / found.seconds(work) for work, seconds in logged.records]
                low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
                total = sum(seconds for _, seconds in logged.records)
                said = sum(found.seconds(work) for work, _ in logged.records)
                num_covered = sum(found.covers(work) for work, _ in logged.records)
                self.fits[role] = (
                    f"{len(ratios)} steps, {num_covered} covered, measured / profiled {low:.3f} {middle:.3f}"
                    f" {high:.3f}, sum {total / said:.3f}"
                )
            else:
                found = fitted = fit(logged.records, {"model": model})
                self.fits[role] = (
                    f"{fitted.counts['steps']} steps, measured / fitted {fitted.residuals['p10']:.3f}"
                    f" {fitted.residuals['p50']:.3f} {fitted.residuals['p90']:.3f},"
                    f" sum {fitted.residuals['total']:.3f}"
                )
            self.models[role] = found
            speeds += logged.speeds
            if loaded := [each for each in of_role if each["kind"] == "loaded"]:
                steps = steps_of(loaded).records
                self.loaded[role] = sum(seconds for _, seconds in steps), sum(found.seconds(work) for work, _ in steps)
        self.bulk = Link(LATENCY, statistics.median(speeds)) if speeds else Link(LATENCY, 0.5e9)
        calibration = find_calibration(path, given)
        with open_model(path) as checkpoint:
            config, sizes = resolve(given, checkpoint.shape, checkpoint, calibration)
            shape = checkpoint.shape
        self.plans = {role: Plan(shape, config, sizes, found, calibration) for role, found in self.models.items()}
        lonely = [each for each in own if each["kind"] == "lonely"]
        self.capacities = {}
        for each in lonely[-1]["cluster"] or ():
            self.capacities[each["role"]] = MeasuredCapacity(
                each["saturating_rows"], each["batch"], each["seconds_per_row"], each["seconds_per_step"]
            )
        self.overhead = 0.0
        gaps = []
        for each in lonely:
            load = Workload(
                "lonely", [Arrival(2.0 * n, ((n, row[0]),), row[1]) for n, row in enumerate(each["requests"])]
            )  # type: ignore[arg-type]
            found = self.run(load, [[5 + number] * row[0] for number, row in enumerate(each["requests"])])
            gaps += [row[2] - said for row, said in zip(each["requests"], found.ttft.tolist(), strict=True)]
        self.overhead = max(0.0, statistics.median(gaps)) / 2

    def front(self, events: Events) -> Front:
        """What takes the requests."""
        if self.side != "apart":
            return Alone(events, partial(make_engine, self.plans["mixed"]), overhead=self.overhead)
        places = [
            Place(f"{role}-0", role, partial(make_engine, plan), self.capacities[role])
            for role, plan in self.plans.items()
        ]
        return SimulatedCluster(events, places, hop=HOP, bulk=self.bulk, fetches=False, overhead=self.overhead)

    def run(self, load: Workload, prompts: list[list[int]]) -> Outcome:
        """Simulates a load."""
        return simulate(load, prompts, self.front)


def knee(rates: list[float], shares: list[float], target: float) -> float | None:
    """The rate at which attainment falls to the target: between two rates on a straight line. None: at no rate."""
    for (low, above), (high, below) in zip(
        zip(rates, shares, strict=True), zip(rates[1:], shares[1:], strict=False), strict=False
    ):
        if above >= target > below:
            return low + (high - low) * (above - target) / (above - below)
    return None


def marks_of(name: str, rates: list[float], measured: list[float], predicted: list[float], target: float) -> list[Mark]:
    """What is wanted of the predictions for a trace on a side.

    measured, predicted  attainment at each rate
    target               attainment at which two rates are compared, if either falls to it
    """
    points = [round(100 * abs(one - other), 9) for one, other in zip(measured, predicted, strict=True)]
    left, right = knee(rates, measured, target), knee(rates, predicted, target)
    error = math.nan if left is right else math.inf
    if left is not None and right is not None:
        error = abs(right / left - 1)
    return [
        Mark(f"{name}: rates that are compared", [len(rates)], 4),
        Mark(f"{name}: largest difference in attainment, in points", [max(points, default=math.nan)], 5, at_most=True),
        Mark(f"{name}: error of the rate at {target:.0%}", [error], 0.07, at_most=True),
    ]


def report(args: argparse.Namespace) -> list[Mark]:
    """Compares, and returns what is wanted of each side and trace."""
    records = [json.loads(line) for line in args.report.read_text().splitlines()]
    print(hardware_line(hardware()))
    slo, marks = Slo(args.ttft, args.tpot), list[Mark]()
    for side in dict.fromkeys(each["side"] for each in records):
        loads = [each for each in records if each["kind"] == "load" and each["side"] == side]
        kept = [each for each in loads if each["others"] <= args.quiet]
        repeats = sorted({each["repeat"] for each in loads})
        groups = [repeats] if args.pooled else [[each] for each in repeats]
        of: dict[int, Simulated] = {}
        for group in groups:
            simulated = Simulated(side, records, args, group)
            of |= dict.fromkeys(group, simulated)
            name = f"{side}, repeat {', '.join(map(str, group))}"
            for role, how in simulated.fits.items():
                print(f"{name}, {role}: {how}")
                if role in simulated.loaded:
                    real, said = simulated.loaded[role]
                    print(f"{name}, {role}: the steps of the loads took {real:.0f} s, and {said:.0f} s as predicted")
            print(f"{name}: {1e3 * simulated.overhead:.1f} ms each way")
        print(f"{side}: {len(loads) - len(kept)} of {len(loads)} loads dropped")
        for trace in dict.fromkeys(each["trace"] for each in loads):
            rows, measured, predicted = [], [], []
            rates = sorted({each["rate"] for each in kept if each["trace"] == trace})
            for rate in rates:
                at_rate = [each for each in kept if (each["trace"], each["rate"]) == (trace, rate)]
                real, said = [], []
                for each in at_rate:
                    load = kept_load(args.data, each)
                    outcome = of[each["repeat"]].run(load, prompts_of(load, rate, each["repeat"]))
                    ttft, tpot = np.array(each["ttft"]), np.array(each["tpot"])
                    real.append((float(((ttft <= slo.ttft) & (tpot <= slo.tpot)).mean()), ttft.mean(), tpot.mean()))
                    said.append((outcome.attainment(slo), outcome.ttft.mean(), outcome.tpot.mean()))
                (a, f, p), (b, g, q) = (np.mean(each, 0) for each in (real, said))
                spread = max(each[0] for each in real) - min(each[0] for each in real)
                measured.append(a)
                predicted.append(b)
                rows.append([
                    f"{rate:g}", len(real), f"{100 * a:.1f}", f"{100 * b:.1f}", f"{100 * spread:.1f}", f"{f:.3f}",
                    f"{g:.3f}", f"{100 * (g / f - 1):+.1f}", f"{1e3 * p:.1f}", f"{1e3 * q:.1f}",
                    f"{100 * (q / p - 1):+.1f}",
                ])  # fmt: skip
            print(f"\n{side}, {trace}; SLO {args.ttft:g} s, {args.tpot:g} s")
            print(format_table(
                [
                    "rate", "repeats", "met %", "said %", "spread", "TTFT s", "said", "error %", "TPOT ms", "said",
                    "error %",
                ],
                rows,
            ))  # fmt: skip
            left, right = knee(rates, measured, slo.attainment), knee(rates, predicted, slo.attainment)
            shown = ["not within these rates" if each is None else f"{each:.3f}" for each in (left, right)]
            error = "" if left is None or right is None else f" ({right / left - 1:+.1%})"
            print(f"rate at {slo.attainment:.0%}: measured {shown[0]}, predicted {shown[1]}{error}")
            marks += marks_of(f"{side}, {trace}", rates, measured, predicted, slo.attainment)
    print(f"\n{marks_table(marks)}")
    return marks


def main() -> int:
    """Runs what the command line asks for. 1 if a report misses a mark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="serve, and append what comes of it")
    parser.add_argument("--report", type=Path, metavar="FILE", help="compare what --out has written")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sides", default="mixed,apart", help=f"of {', '.join(SIDES)} (default: mixed,apart)")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="of the side offloaded")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="profile for the side offloaded")
    parser.add_argument("--traces", default="conv,code")
    parser.add_argument(
        "--rates", default="0.3,0.45,0.6,0.7,0.8,0.95;0.1,0.15,0.2,0.25,0.3,0.4",
        help="requests/s, of each trace; ';' alone: the profile only",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=90.0, help="of each load (default: 90)")
    parser.add_argument("--profile", type=float, default=120.0, help="seconds of a profile (default: 120)")
    parser.add_argument("--busy", type=float, default=1.5, help="requests/s of a profile, about (default: 1.5)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="number of the first repeat, to go on with a file")
    parser.add_argument("--longest", type=int, default=768, help="tokens of a request (default: 768)")
    parser.add_argument("--pooled", action="store_true", help="fit to the profiles of all repeats together")
    parser.add_argument("--ttft", type=float, default=2.0)
    parser.add_argument("--tpot", type=float, default=0.1)
    parser.add_argument("--quiet", type=float, default=0.1, help="cores that other programs may take (default: 0.1)")
    args = parser.parse_args()
    args.sides, args.traces = args.sides.split(","), args.traces.split(",")
    sides = set(args.sides) if args.out is not None else set()
    if args.report is not None and args.report.exists():
        sides |= {json.loads(line)["side"] for line in args.report.read_text().splitlines()}
    if "offloaded" in sides and None in (args.policy, args.machine):
        parser.error("the side offloaded needs --policy and --machine")
    if args.out is not None:
        of_traces = [[float(each) for each in rates.split(",") if each] for rates in args.rates.split(";")]
        if len(of_traces) != len(args.traces):
            parser.error(f"--rates are of {len(of_traces)} traces, and --traces are {len(args.traces)}")
        args.rates = dict(zip(args.traces, of_traces, strict=True))
        serve(args)
    if args.report is not None:
        return int(any(mark.reached is False for mark in report(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
