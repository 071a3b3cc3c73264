"""Simulate a server under load, before it runs.

quire simulate MODEL --trace requests.jsonl --latency model.json --cluster.prefill 1 --cluster.decode 1 --rates 1,2,3
quire simulate MODEL --trace requests.jsonl --slo.ttft 0.4 --slo.tpot 0.1 --goodput
quire simulate opt-66b --hardware a100-80g --parallel.tp 4 --trace requests.csv --slo.ttft 2.5 --slo.tpot 0.15 --goodput

The engine's own scheduler, cache and router decide, and a latency model says how long steps take. --latency is a file
of quire bench latency, or ROLE=FILE for instances of one role; without it a kept model of this machine is used.
--hardware names GPUs that need not be here: their latencies follow from data sheets, and MODEL may also be a name such
as opt-66b or a config.json without weights. A placement for such GPUs brings their memory and network. Settings of the
engine and of the cluster are those of quire serve.

--trace is an Azure trace (CSV), a Mooncake trace (JSON lines) or a workload of Quire's own. Its first requests are
replayed, at its own rate or with its gaps scaled to --rate. --fit draws the requests from distributions that are fitted
to all of it.

Attainment is the share of requests that meet both latency targets. --goodput searches the highest rate at which it
reaches --slo.attainment, with requests that are drawn as with --fit, and confirms it with fresh ones. Every number says
where it comes from: measured, fitted (to measured steps or requests), or modelled (by a formula or a default).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared, simulation_common
from quire.config import ENGINE_SECTIONS, ClusterConfig, EngineConfig, add_flags
from quire.errors import ConfigError
from quire.options import parse_bytes

if TYPE_CHECKING:
    from quire.planning.goodput import Goodput
    from quire.planning.placement_file import Placement
    from quire.planning.slo import Slo
    from quire.simulation.load import Load, Workers
    from quire.simulation.outcome import Outcome
    from quire.simulation.setup import Setup

REQUESTS = 500

USUAL_RUNS = 20
"""Approximate number of simulations of a search for the goodput."""

SECTIONS = (*ENGINE_SECTIONS, "cluster", "slo")


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    text = "folder, .gguf file, hub id or smollm2; with --hardware also a name or config.json"
    parser.add_argument("model", metavar="MODEL", help=text)
    shared.add_config(parser)
    load = parser.add_argument_group("requests")
    load.add_file("--trace", text="requests; see above", required=True)
    load.add_count("--requests", text="number of requests of each simulation", default=REQUESTS)
    rates = load.add_mutually_exclusive_group()
    rates.add_argument("--rate", type=simulation_common.positive, metavar="X", help="requests/s (default: the trace's)")
    rates.add_argument(
        "--rates", type=simulation_common.positives, metavar="X,...", help="several rates, one after the other"
    )
    load.add_switch("--fit", text="draw requests from distributions fitted to the trace")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests that are drawn (default: 0)")
    times = parser.add_argument_group("latencies")
    text = "latency model for all instances, or ROLE=FILE for a role; may be repeated"
    times.add_argument("--latency", action="append", default=[], metavar="FILE", help=text)
    times.add_argument("--hardware", metavar="NAME", help="GPUs of the instances: t4, a100-80g, h100, ...")
    text = "GPUs that share each layer of an instance, with --hardware (default: 1)"
    times.add_count("--parallel.tp", text=text, dest="tp")
    text = "stages that share the layers of an instance, with --hardware (default: 1)"
    times.add_count("--parallel.pp", text=text, dest="pp")
    text = "bytes per second between instances, with --hardware (default: the device's links)"
    times.add_argument("--network", metavar="SIZE", help=text)
    results = parser.add_argument_group("results")
    results.add_switch("--goodput", text="search the highest rate at which enough requests meet both targets")
    results.add_count("--processes", text="simulations at once", default=1)
    shared.add_plot(results, "times and attainment")
    results.add_switch("--json", text="print JSON")
    add_flags(parser, SECTIONS)


@dataclass(frozen=True)
class SimulationScenario:
    """A simulation's instances, requests and targets.

    units  number of GPUs or machines
    cores  cores that all instances share; None: unknown, or no cores
    """

    setup: Setup
    load: Load
    slo: Slo
    units: float
    unit: str
    cores: int | None = None

    @property
    def origin(self) -> str:
        """The origin of its latencies."""
        return simulation_common.origins_of([each.plan.latency for each in self.setup.replicas])

    def goodput_facts(self, found: Goodput) -> dict[str, Any]:
        """All numbers of a goodput, for JSON."""
        return {
            "rate": found.rate,
            "rate_per_unit": found.rate / self.units,
            "unit": self.unit,
            "attainment": found.attainment,
            "verdict": found.verdict.value,
            "confirmed": found.confirmed,
            "target": found.target,
            "points": [list(point) for point in found.points],
            "doubts": list(found.doubts),
            "origin": self.origin,
        }

    def facts(self) -> dict[str, Any]:
        """The facts of the scenario, for JSON."""
        return {
            "workload": simulation_common.facts_of(self.load),
            "slo": simulation_common.slo_facts(self.slo),
            "instances": [
                {
                    "role": each.role,
                    "count": each.count,
                    "each": each.unit,
                    "cache_tokens": each.plan.sizes.tokens,
                    "prompt_rows": each.capacity.prompt_rows,
                    "batch": each.capacity.batch,
                    "latency": each.plan.latency.origin.value,
                }
                for each in self.setup.replicas
            ],
        }


def run(args: argparse.Namespace) -> int:
    """Simulates, and prints the results."""
    if args.plot is not None:
        shared.check_plot(args.plot)
    scenario = _scenario(args)
    warnings = list(_warnings(scenario))
    if not args.json:
        simulation_common.print_load(scenario.load)
        simulation_common.print_setup(scenario.setup)
        for warning in warnings:
            print(warning)
    found = None
    with simulation_common.workers_of(args.processes) as workers:
        outcomes = _simulate(args, scenario, workers)
        if args.goodput:
            found, outcome = _goodput(args.seed, scenario, workers)
            outcomes.setdefault(found.rate or min(point.rate for point in found.points), outcome)
    outcomes = dict(sorted(outcomes.items()))
    if args.plot is not None:
        from quire.evaluation.simulation_plot import save_simulation

        title = f"{args.model}, {scenario.load.workload.name}, {scenario.origin} latencies"
        save_simulation(args.plot, outcomes, scenario.slo, title, found)
    results = [
        simulation_common.result_of(rate, each, scenario.slo, scenario.origin) for rate, each in outcomes.items()
    ]
    if args.json:
        facts = {"model": args.model, **scenario.facts(), "seed": args.seed, "rates": results, "warnings": warnings}
        facts |= {} if found is None else {"goodput": scenario.goodput_facts(found)}
        print(json.dumps(facts, indent=2, allow_nan=False))
        return 0
    simulation_common.print_results(results, scenario.origin)
    if found is not None:
        _print_goodput(found, scenario)
    return 0


def _scenario(args: argparse.Namespace) -> SimulationScenario:
    """The scenario of the command line. Raises ConfigError."""
    slo = simulation_common.slo_of(args)
    if args.goodput:
        simulation_common.check_targets(slo, "--goodput")
    simulation_common.check_seed(args.seed)
    settings = ClusterConfig.from_flags(args)
    placement = None
    if settings.placement_file is not None:
        from quire.planning.placement_file import read_placement

        placement = read_placement(settings.placement_file)
    load = simulation_common.load_of(args.trace, args.requests, fitted=args.fit or args.goodput)
    if args.hardware is not None:
        setup, num_gpus = _on_hardware(args, settings, placement)
        return SimulationScenario(setup, load, slo, num_gpus, "GPU")
    cores = len(os.sched_getaffinity(0)) if placement is None and settings.address is None else None
    machines = 1.0 if placement is None or placement.gpus is not None else placement.predicted.cost
    return SimulationScenario(_here(args, settings, placement), load, slo, machines, "machine", cores)


def _here(args: argparse.Namespace, settings: ClusterConfig, placement: Placement | None) -> Setup:
    """Instances with measured latencies."""
    for flag, value in (("--parallel.tp", args.tp), ("--parallel.pp", args.pp), ("--network", args.network)):
        if value is not None:
            raise ConfigError(f"{flag} is for GPUs that are not here: name them with --hardware")
    from quire.evaluation.latency_bench import LatencyFiles
    from quire.planning.analytic import MODELS
    from quire.simulation.setup import LocalModel

    if args.model.lower() in MODELS and not Path(args.model).exists():
        raise ConfigError(f"{args.model} is a model in numbers, without weights; name GPUs for it with --hardware")
    files = LatencyFiles(args.latency, args.model)
    return LocalModel(args.model, EngineConfig.from_flags(args), files.of).setup(settings, placement)


def _on_hardware(args: argparse.Namespace, settings: ClusterConfig, placement: Placement | None) -> tuple[Setup, int]:
    """Instances with modelled latencies, and the number of their GPUs."""
    from quire.planning.devices import device_named
    from quire.planning.latency import Link
    from quire.simulation.hardware import Division, Target
    from quire.simulation.setup import HOP_SECONDS, ROLES

    if args.latency:
        raise ConfigError("--latency is measured and --hardware is modelled; give one of them")
    config, tp, pp = EngineConfig.from_flags(args), args.tp or 1, args.pp or 1
    device = device_named(args.hardware)
    target = Target(args.model, device, config)
    if placement is not None and placement.gpus is not None and placement.gpus.device.lower() == device.name:
        target = Target.on(placement.gpus, args.model, config)
    if placement is not None:
        if args.tp or args.pp:
            raise ConfigError("the placement says how instances are divided; leave --parallel.tp and --parallel.pp out")
        divisions = [
            Division(each.role, config.with_options(each.options), each.count, each.tp, each.pp)
            for each in placement.instances
        ]
    else:
        counts = {role: getattr(settings, role) for role in ROLES}
        divisions = [Division(role, config, count, tp, pp) for role, count in counts.items() if count]
    is_alone = not divisions
    divisions = divisions or [Division("mixed", config, 1, tp, pp)]
    bulk = None if args.network is None else Link(HOP_SECONDS, float(parse_bytes(args.network)))
    in_pairs = settings.placement == "pairs" if placement is None else placement.in_pairs
    setup = target.setup(divisions, settings, bulk, alone=is_alone, in_pairs=in_pairs)
    return setup, sum(each.count * each.tp * each.pp for each in divisions)


def _simulate(args: argparse.Namespace, scenario: SimulationScenario, workers: Workers | None) -> dict[float, Outcome]:
    """The outcomes by rate."""
    from quire.simulation.load import Run, run_many

    rates: list[float | None] = [args.rate] if args.rate else list(args.rates or ([] if args.goodput else [None]))
    rates = list(dict.fromkeys(rates))
    runs = [Run(scenario.setup, scenario.load, rate, args.seed) for rate in rates]
    with shared.progress("requests") as progress:
        found = run_many(runs, progress=progress) if workers is None else workers.run(runs, progress)
    own = scenario.load.workload.rate
    return {own if rate is None else rate: each for rate, each in zip(rates, found, strict=True)}


def _goodput(seed: int, scenario: SimulationScenario, workers: Workers | None) -> tuple[Goodput, Outcome]:
    """The goodput, and the outcome at this rate, or at the lowest tried rate if there is no goodput."""
    from quire.simulation.load import Attains, Run, ceiling_of, find_goodput
    from quire.simulation.search import Joint

    done = 0
    with shared.progress("simulations") as progress:

        def on_run(rate: float, seed: int, outcome: Outcome) -> None:
            nonlocal done
            done += 1
            progress(done, max(done, USUAL_RUNS))

        attains = Attains(
            lambda rate, seed: Joint(scenario.setup, scenario.load, rate, seed),
            scenario.slo,
            workers=workers,
            on_run=on_run,
        )
        found = find_goodput(attains, ceiling_of(scenario.setup, scenario.load.workload), seed)
    rate = found.rate or min(point.rate for point in found.points)
    return found, Run(scenario.setup, scenario.load, rate, seed + 1).outcome()


def _warnings(scenario: SimulationScenario) -> Iterator[str]:
    """Doubts that neither latencies nor engines report themselves."""
    workload, setup = scenario.load.workload, scenario.setup
    count = int((workload.prompt_tokens + workload.columns.num_out > setup.max_context).sum())
    if count:
        yield f"{count:,} requests of the trace do not fit into the context of {setup.max_context:,} tokens"
    threads = sum(each.count * (each.config.runtime.threads or 0) for each in setup.replicas)
    if scenario.cores is not None and threads > scenario.cores:
        yield (
            f"{threads} threads would share the {scenario.cores} cores of this machine; the latencies are those of"
            " threads with cores of their own"
        )
    if scenario.load.fitted is not None and not scenario.load.fitted.accepted:
        yield "requests that are drawn are not like those of the trace; results with them may differ from it"


def _print_goodput(found: Goodput, scenario: SimulationScenario) -> None:
    print(
        f"\ngoodput, from {scenario.origin} latencies and fitted requests: {found.rate:.4g} requests/s,"
        f" {found.rate / scenario.units:.4g} per {scenario.unit}; {found.attainment:.1%} of fresh requests meet both"
        f" targets, wanted are {found.target:.1%}"
    )
    for doubt in found.doubts:
        print(f"  {doubt}")
    if found.verdict.value == "unbounded":
        print("  no server keeps up with a higher rate; with more --requests the queue that grows at this one shows")
