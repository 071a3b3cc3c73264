"""Simulate a server under load, before it runs.

quire simulate MODEL --trace requests.jsonl --latency model.json --cluster.prefill 1 --cluster.decode 1 --rates 1,2,3
quire simulate MODEL --trace requests.jsonl --slo.ttft 0.4 --slo.tpot 0.1 --goodput
quire simulate opt-66b --hardware a100-80g --parallel.tp 4 --trace requests.csv --slo.ttft 2.5 --slo.tpot 0.15 --goodput

The engine's own scheduler, cache and router decide, and a latency model says how long steps take. --latency is a file
of quire bench latency or of quire plan hardware, or ROLE=FILE for instances of one role; without it a kept model of
this machine is used.
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
from pathlib import Path
from typing import TYPE_CHECKING

from quire.arguments import Arguments
from quire.cli import shared, simulation_common
from quire.config import ENGINE_SECTIONS, ClusterConfig, EngineConfig, add_flags
from quire.errors import ConfigError
from quire.options import parse_bytes

if TYPE_CHECKING:
    from quire.placement.placement_file import Placement
    from quire.planning.goodput import Goodput
    from quire.planning.scenario import Scenario
    from quire.simulation.setup import Setup

REQUESTS = 500

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
    text = "latency model or profile for all instances, or ROLE=FILE for a role; may be repeated"
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


def run(args: argparse.Namespace) -> int:
    """Simulates, and prints the results."""
    if args.plot is not None:
        shared.check_plot(args.plot)
    scenario = _scenario(args)
    from quire.simulation.pool import pool_of

    warnings = scenario.warnings()
    if not args.json:
        simulation_common.print_load(scenario.load)
        simulation_common.print_setup(scenario.setup)
        for warning in warnings:
            print(warning)
    found = None
    rates = [args.rate] if args.rate else args.rates or ([] if args.goodput else [None])
    with pool_of(args.processes) as pool:
        with shared.progress("requests") as progress:
            outcomes = scenario.outcomes(rates, args.seed, pool, progress)
        if args.goodput:
            with shared.progress("simulations") as progress:
                found, rate, outcome = scenario.goodput(args.seed, pool, progress)
            outcomes.setdefault(rate, outcome)
    outcomes = dict(sorted(outcomes.items()))
    if args.plot is not None:
        from quire.planning.simulation_plot import save_simulation

        title = f"{args.model}, {scenario.load.workload.name}, {scenario.origin} latencies"
        save_simulation(args.plot, outcomes, scenario.slo, title, found)
    results = [each.facts(rate, scenario.slo, scenario.origin) for rate, each in outcomes.items()]
    if args.json:
        facts = {"model": args.model, **scenario.facts(), "seed": args.seed, "rates": results, "warnings": warnings}
        facts |= {} if found is None else {"goodput": scenario.goodput_facts(found)}
        print(json.dumps(facts, indent=2, allow_nan=False))
        return 0
    simulation_common.print_results(results, scenario.origin)
    if found is not None:
        _print_goodput(found, scenario)
    return 0


def _scenario(args: argparse.Namespace) -> Scenario:
    """The scenario of the command line. Raises ConfigError."""
    from quire.planning.scenario import Scenario
    from quire.simulation.load import Load

    slo = simulation_common.slo_of(args)
    if args.goodput:
        simulation_common.check_targets(slo, "--goodput")
    simulation_common.check_seed(args.seed)
    settings = ClusterConfig.from_flags(args)
    placement = None
    if settings.placement_file is not None:
        from quire.placement.placement_file import read_placement

        placement = read_placement(settings.placement_file)
    load = Load.read(args.trace, args.requests, fitted=args.fit or args.goodput)
    if args.hardware is not None:
        setup, num_gpus = _on_hardware(args, settings, placement)
        return Scenario(setup, load, slo, num_gpus, "GPU")
    cores = len(os.sched_getaffinity(0)) if placement is None and settings.address is None else None
    machines = 1.0 if placement is None or placement.gpus is not None else placement.predicted.cost
    return Scenario(_here(args, settings, placement), load, slo, machines, "machine", cores)


def _here(args: argparse.Namespace, settings: ClusterConfig, placement: Placement | None) -> Setup:
    """Instances with measured latencies."""
    for flag, value in (("--parallel.tp", args.tp), ("--parallel.pp", args.pp), ("--network", args.network)):
        if value is not None:
            raise ConfigError(f"{flag} is for GPUs that are not here: name them with --hardware")
    from quire.measure.latency_bench import LatencyFiles
    from quire.simulation.setup import LocalModel
    from quire.timing.analytic import MODELS

    if args.model.lower() in MODELS and not Path(args.model).exists():
        raise ConfigError(f"{args.model} is a model in numbers, without weights; name GPUs for it with --hardware")
    files = LatencyFiles(args.latency, args.model)
    model = LocalModel(args.model, files.of)
    return model.setup(model.candidate(EngineConfig.from_flags(args), settings, placement))


def _on_hardware(args: argparse.Namespace, settings: ClusterConfig, placement: Placement | None) -> tuple[Setup, int]:
    """Instances with modelled latencies, and the number of their GPUs."""
    from quire.simulation.candidate import Candidate, InstanceGroup
    from quire.simulation.hardware import Target
    from quire.timing.devices import device_named

    if args.latency:
        raise ConfigError("--latency is measured and --hardware is modelled; give one of them")
    config, device = EngineConfig.from_flags(args), device_named(args.hardware)
    target, between = Target(args.model, device), None if args.network is None else parse_bytes(args.network)
    if placement is None:
        candidate = target.candidate(config, settings, args.tp or 1, args.pp or 1, between)
        return target.setup(candidate), candidate.num_gpus
    if args.tp or args.pp:
        raise ConfigError("the placement says how instances are divided; leave --parallel.tp and --parallel.pp out")
    if placement.gpus is not None and placement.gpus.device.lower() == device.name:
        target = Target.on(placement.gpus, args.model)
    groups = tuple(
        InstanceGroup(each.role, config.with_options(each.options), each.count, each.tp, each.pp)
        for each in placement.instances
    )
    candidate = Candidate(groups, settings, between=between, in_pairs=placement.in_pairs)
    return target.setup(candidate), candidate.num_gpus


def _print_goodput(found: Goodput, scenario: Scenario) -> None:
    print(
        f"\ngoodput, from {scenario.origin} latencies and fitted requests: {found.rate:.4g} requests/s,"
        f" {found.rate / scenario.units:.4g} per {scenario.unit}; {found.attainment:.1%} of fresh requests meet both"
        f" targets, wanted are {found.target:.1%}"
    )
    for doubt in found.doubts:
        print(f"  {doubt}")
    if found.verdict.value == "unbounded":
        print("  no server keeps up with a higher rate; with more --requests the queue that grows at this one shows")
