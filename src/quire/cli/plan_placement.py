"""`quire plan placement`: the instances that serve most of a load per GPU or machine, found by simulation."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared, simulation_common
from quire.config import ENGINE_SECTIONS, EngineConfig, add_flags, flags_of, options_from
from quire.errors import ConfigError, QuireError
from quire.options import format_number

if TYPE_CHECKING:
    from quire.planning.candidates import Option
    from quire.planning.cluster_file import ClusterSpec
    from quire.planning.placement import Search
    from quire.planning.placement_file import Instances, Placement
    from quire.planning.slo import Slo
    from quire.simulation.load import Load, Workers
    from quire.simulation.outcome import Outcome
    from quire.simulation.queue_check import QueueCheck
    from quire.simulation.search import Joint, Maker, Planner

ALGORITHMS = ("apart", "pairs", "mixed")
DEFAULTS: dict[str, Any] = {
    "cluster_file": None,
    "trace": None,
    "rate": None,
    "requests": 300,
    "seed": 0,
    "latency": [],
    "plan_seconds": 120.0,
    "algorithm": "auto",
    "ablation": False,
    "processes": 1,
}
FLAGS = {"cluster_file": "--cluster.file", "plan_seconds": "--plan.seconds"}
"""Flags whose spelling differs from their argument's name."""

JOINT_SEEDS = 2
"""Number of simulations of a whole placement."""

NEAR = 0.01
"""Share of requests by which a placement may miss the target and still reach it: the noise of simulations."""


ACCEPTED_SHARE = 0.02
"""Largest difference in attainment between drawn and recorded requests that is not reported."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of this action."""
    group = parser.add_argument_group("plan")
    text = "TOML file with the machines: sections [nodes] and [network]"
    group.add_file("--cluster.file", text=text, dest="cluster_file")
    simulation_common.add_search_arguments(group, DEFAULTS["plan_seconds"])
    text = "requests/s to serve, with the instances that serve most per machine (default: as many as all can serve)"
    group.add_argument("--rate", type=simulation_common.positive, metavar="X", help=text)
    text = "requests of a simulation, up to 20 times as many where targets are long against them"
    group.add_count("--requests", text=text, default=DEFAULTS["requests"])
    text = "latency model of instances on cores, or ROLE=FILE for a role; one for each number of threads"
    group.add_argument("--latency", action="append", default=[], metavar="FILE", help=text)
    text = "prompts and decoding on different instances, in pairs within machines, or mixed (default: auto)"
    group.add_argument("--algorithm", choices=(*ALGORITHMS, "auto"), default=DEFAULTS["algorithm"], help=text)
    group.add_switch("--ablation", text="search with all algorithms, and show them beside each other")
    add_flags(parser, ("tiers", "slo"))


@dataclass(frozen=True)
class PlacementResult:
    """The result of an algorithm.

    attainment  attainment in the simulation of the whole placement at its predicted rate
    cached      share of the prompts' tokens that were cached there
    replayed    attainment of recorded requests, with their gaps scaled to that rate, and of as many drawn ones; None:
                the recorded requests cannot be compared
    searched    seconds of the search
    at_wanted   attainment at the wanted rate, if the target is missed at the predicted rate; None otherwise
    check       check of an instance for prompts; None: there is no such instance
    error       why there is no placement; empty if there is one
    """

    algorithm: str
    placement: Placement | None = None
    attainment: float = 0.0
    cached: float = 0.0
    replayed: tuple[float, float] | None = None
    searched: float = 0.0
    at_wanted: float | None = None
    check: QueueCheck | None = None
    error: str = ""


def run(args: argparse.Namespace) -> int:
    """Plans, and writes the placement."""
    slo = _checked(args)
    from quire.planning.cluster_file import read_cluster

    cluster = read_cluster(args.cluster_file)
    load = simulation_common.load_of(args.trace, args.requests, fitted=True)
    maker = maker_of(args, cluster, load)
    with simulation_common.workers_of(args.processes) as workers:
        found = _search(args, maker, load, slo, workers)
    best = _best(found, slo, args)
    assert best.placement is not None
    placement = _finished(args, best, maker, load, slo)
    if args.output is not None:
        placement.write(args.output)
    if args.json:
        print(placement.to_json(), end="")
        return 0
    simulation_common.print_load(load)
    if len(found) > 1:
        _print_algorithms(found, slo)
    _print(placement, maker, slo, args.output)
    return 0


def _checked(args: argparse.Namespace) -> Slo:
    """The latency targets. Raises ConfigError for arguments that are missing or invalid."""
    for name, what in (("cluster_file", "the machines"), ("trace", "the requests")):
        if getattr(args, name) is None:
            raise ConfigError(f"quire plan placement needs {FLAGS.get(name, '--' + name)} FILE with {what}")
    simulation_common.check_seed(args.seed)
    slo = simulation_common.slo_of(args)
    simulation_common.check_targets(slo, "quire plan placement")
    if args.output is not None:
        shared.check_writable(args.output)
    return slo


def maker_of(args: argparse.Namespace, cluster: ClusterSpec, load: Load) -> Maker:
    """The maker of instances on the machines. Raises ConfigError."""
    config = EngineConfig.from_flags(args)
    lengths = load.workload.prompt_tokens + load.workload.columns.num_out
    if not cluster.has_gpus:
        from quire.evaluation.latency_bench import LatencyFiles
        from quire.simulation.search import OnCores
        from quire.simulation.setup import LocalModel

        files = LatencyFiles(args.latency, args.model)
        model = LocalModel(args.model, config, files.of)
        return OnCores(model, cluster, min(int(lengths.max()), model.sizes.max_context))
    from quire.planning.devices import DEVICES
    from quire.planning.placement_file import Gpus
    from quire.simulation.hardware import Target
    from quire.simulation.search import OnGpus

    if args.latency:
        raise ConfigError("--latency is for instances on cores; those on GPUs are modelled from data sheets")
    gpus = Gpus.of(cluster)
    if gpus is None:
        raise ConfigError(f"nodes.device is missing in {args.cluster_file}; the GPUs are {', '.join(DEVICES)}")
    target = Target.on(gpus, args.model, config)
    context = target.config.model.max_context or target.shape.max_context
    return OnGpus(target, cluster, min(int(lengths.max()), context))


def _search(
    args: argparse.Namespace, maker: Maker, load: Load, slo: Slo, workers: Workers | None
) -> list[PlacementResult]:
    """The result of each requested algorithm."""
    from quire.planning.placement import Budget, Rough, Search
    from quire.simulation.search import Planner

    planner = Planner(maker, load, slo, args.seed, workers)
    chosen = [args.algorithm]
    if args.algorithm == "auto":
        chosen = ["apart" if maker.cluster.is_fast else "pairs", "mixed"]
    chosen = list(ALGORITHMS) if args.ablation else chosen
    _check_known(planner)
    found, left = list[PlacementResult](), args.plan_seconds
    for index, algorithm in enumerate(chosen):
        with shared.progress(f"options ({algorithm})") as progress:
            search = Search(
                maker.cluster,
                maker.needs,
                planner.goodput_of,
                args.rate,
                planner.bound_of,
                planner.serves,
                Rough(planner.rough_goodput_of, planner.serves_roughly, partial(_tell, progress, 0)),
                maker.why_unknown,
                Budget(max(0.0, left) / (len(chosen) - index), time.monotonic),
                partial(_tell, progress, 1),
                maker.options_of,
            )
            found.append(_place(args, algorithm, search, planner, workers))
        left -= found[-1].searched
    return found


def _tell(progress: Callable[[int, int], None], times: int, done: int, total: int, option: Option) -> None:
    """Counts an option twice: when it is tried roughly, and when it is done."""
    progress(times * total + done, 2 * total)


def _check_known(planner: Planner) -> None:
    """Raises ConfigError if no instance has known latencies."""
    from quire.planning.candidates import Role, candidates

    maker = planner.maker
    reasons = [
        maker.why_unknown(each)
        for role in Role
        for each in candidates(maker.cluster, maker.needs.num_layers, role)
        if maker.needs.lack(each, maker.cluster) is None
    ]
    if reasons and all(reasons):
        raise ConfigError(reasons[0])


def _place(
    args: argparse.Namespace, algorithm: str, search: Search, planner: Planner, workers: Workers | None
) -> PlacementResult:
    """The result of one algorithm, simulated as a whole with fresh seeds."""
    from quire.planning import placement
    from quire.simulation.load import run_many
    from quire.simulation.search import CONFIRMATIONS, SEEDS

    places: dict[str, Callable[[Search], Placement]] = {
        "apart": placement.place_apart,
        "pairs": placement.place_pairs,
        "mixed": placement.place_mixed,
    }
    begun = time.monotonic()
    try:
        found = planner.warned(places[algorithm](search))
    except placement.PlacementError as error:
        return PlacementResult(algorithm, error=str(error), searched=time.monotonic() - begun)
    searched, fresh = time.monotonic() - begun, args.seed + SEEDS + CONFIRMATIONS
    if not found.predicted.fits:
        said, nodes = found.predicted, search.cluster.nodes
        reason = (
            f"{args.rate:.4g} requests/s need {said.cost:.4g} {said.unit}s, for which the cluster's {nodes.count} x"
            f" {search.cluster.slots} {'GPUs' if search.cluster.has_gpus else 'cores'} have no room: one {said.unit}"
            f" serves {said.rate_per_unit:.4g}/s; plan without --rate for as much as they can serve"
        )
        return PlacementResult(algorithm, error=reason, searched=searched)

    def outcomes(runs: list[Joint]) -> list[Outcome]:
        with shared.progress(f"requests ({algorithm}, the placement as a whole)") as progress:
            return run_many(runs, progress=progress) if workers is None else workers.run(runs, progress)

    def joint(rate: float) -> list[Joint]:
        return [planner.joint(found, rate, fresh + index) for index in range(JOINT_SEEDS)]

    rate = found.predicted.rate
    results = outcomes([*joint(rate), *planner.replayed(found, rate, fresh)])
    shares = [each.attainment(planner.slo) for each in results]
    share, compared = fmean(shares[:JOINT_SEEDS]), shares[JOINT_SEEDS:]
    cached = fmean(each.cached for each in results[:JOINT_SEEDS])
    misses = share < planner.slo.attainment and args.rate is not None
    check = planner.queue_check(found, fresh)
    at_wanted = fmean(each.attainment(planner.slo) for each in outcomes(joint(args.rate))) if misses else None
    replayed = (compared[0], compared[1]) if compared else None
    return PlacementResult(algorithm, found, share, cached, replayed, searched, at_wanted, check)


def _best(found: list[PlacementResult], slo: Slo, args: argparse.Namespace) -> PlacementResult:
    """The best result that reaches the target: the fewest units for the wanted rate, or the highest rate.

    Raises QuireError if there is no placement.
    """
    placed = [each for each in found if each.placement is not None and args.algorithm in (each.algorithm, "auto")]
    if not placed:
        raise QuireError(next(each.error for each in found if args.algorithm in (each.algorithm, "auto")))

    def worth(each: PlacementResult) -> tuple[bool, float, float]:
        assert each.placement is not None
        said = each.placement.predicted
        share = each.attainment if each.at_wanted is None else each.at_wanted
        cost = -said.cost if args.rate is not None else 0.0
        return share >= slo.attainment - NEAR, cost, said.rate

    return max(placed, key=worth)


def _finished(args: argparse.Namespace, best: PlacementResult, maker: Maker, load: Load, slo: Slo) -> Placement:
    """The placement, completed with its workload and the record of its planning."""
    from quire.planning.placement_file import Gpus, Hosts
    from quire.simulation.search import CONFIRMATIONS, SEEDS
    from quire.version import __version__

    assert best.placement is not None
    warnings = list(best.placement.warnings)
    share, rate = best.attainment, best.placement.predicted.rate
    if best.at_wanted is not None:
        share, rate = best.at_wanted, args.rate
    if share < slo.attainment - NEAR:
        warnings.append(
            f"simulated as a whole, {share:.1%} of the requests meet both targets at {rate:.4g} requests/s, and"
            f" {slo.attainment:.1%} are wanted; plan for a higher rate than is needed"
        )
    if best.replayed is not None and abs(best.replayed[0] - best.replayed[1]) > ACCEPTED_SHARE:
        replayed, drawn = best.replayed
        warnings.append(
            f"of the requests of the trace itself, replayed at {best.placement.predicted.rate:.4g} requests/s,"
            f" {replayed:.1%} meet both targets, and {drawn:.1%} of as many that were drawn like them: the fitted"
            " arrivals are not like the trace's"
        )
    seeds = {"first": args.seed, "search": SEEDS, "confirm": CONFIRMATIONS, "joint": JOINT_SEEDS}
    made = {
        **best.placement.made,
        "name": args.cluster_file.stem,
        "command": command_of(args),
        "version": __version__,
        "seeds": seeds,
        "origin": maker.origin.value,
        **({} if best.replayed is None else {"attainment_of_trace": best.replayed[0]}),
        **({} if best.check is None else {"queue_check": checked(best.check)}),
        **({} if best.at_wanted is None else {"wanted_rate": args.rate, "attainment_at_wanted_rate": best.at_wanted}),
    }
    targets = {"ttft": slo.ttft, "tpot": slo.tpot, "attainment": slo.attainment}
    return dataclasses.replace(
        best.placement,
        predicted=dataclasses.replace(best.placement.predicted, attainment=best.attainment),
        warnings=tuple(warnings),
        workload={
            **simulation_common.facts_of(load),
            "cached": best.cached,
            **({} if args.rate is None else {"rate": args.rate}),
        },
        slo={name: value for name, value in targets.items() if math.isfinite(value)},
        made=made,
        gpus=Gpus.of(maker.cluster),
        hosts=Hosts.of(maker.cluster),
    )


def checked(check: QueueCheck) -> dict[str, float | None]:
    """The mean seconds to the first token, computed in three ways; null: infinite."""
    return {name: value if math.isfinite(value) else None for name, value in dataclasses.asdict(check).items()}


def command_of(args: argparse.Namespace) -> str:
    """The command line that repeats this plan."""
    words = ["quire", "plan", "placement", args.model]
    for name, usual in DEFAULTS.items():
        value, flag = getattr(args, name), FLAGS.get(name, f"--{name.replace('_', '-')}")
        if value is True:
            words.append(flag)
        elif value != usual:
            for each in value if isinstance(value, list) else [value]:
                words += [flag, str(each)]
    if args.config is not None:
        words += ["--config", str(args.config)]
    return shlex.join(words + flags_of(options_from(args, (*ENGINE_SECTIONS, "slo"))))


def _print_algorithms(found: list[PlacementResult], slo: Slo) -> None:
    rows = []
    for each in found:
        if each.placement is None:
            rows.append((each.algorithm, each.error, "", "", "", ""))
            continue
        said = each.placement.predicted
        instances = ", ".join(_described(one) for one in each.placement.instances)
        wanted = "" if each.at_wanted is None else f", at the wanted rate {each.at_wanted:.1%}"
        rows.append(
            (
                each.algorithm, instances, f"{said.cost:.4g}", f"{said.rate:.4g}", f"{said.rate_per_unit:.4g}",
                f"{each.attainment:.1%}{wanted}",
            )
        )  # fmt: skip
    unit = next((f"{each.placement.predicted.unit}s" for each in found if each.placement is not None), "units")
    shared.print_table(
        ("algorithm", "instances", unit, "requests/s", "per unit", "attained"),
        rows,
        left=("instances",),
    )
    print(
        f"attained: share of requests that meet both targets in a simulation of the whole; {slo.attainment:.1%} wanted"
    )


def _described(each: Instances) -> str:
    division = f"tp {each.tp} pp {each.pp}"
    if "runtime.threads" in each.options:
        division = f"{each.options['runtime.threads']} cores"
    return f"{each.count} x {each.role} ({division})"


def _print(placement: Placement, maker: Maker, slo: Slo, output: Path | None) -> None:
    said, origin = placement.predicted, maker.origin.value
    rows = [
        (f"{each.count} x {each.role}", f"{each.tp}", f"{each.pp}", json.dumps(each.options))
        for each in placement.instances
    ]
    print(f"\nplacement ({placement.made['algorithm']}, {origin} latencies)")
    shared.print_table(("instances", "tp", "pp", "options"), rows, left=("options",))
    print(
        f"predicted ({origin}): {said.rate:.4g} requests/s on {said.cost:.4g} {said.unit}s, {said.rate_per_unit:.4g}"
        f" per {said.unit}; simulated as a whole {said.attainment:.1%} of the requests meet both targets, wanted are"
        f" {slo.attainment:.1%}"
    )
    if "wanted_rate" in placement.made:
        share = placement.made["attainment_at_wanted_rate"]
        print(f"at the wanted {placement.made['wanted_rate']:.4g} requests/s {share:.1%} do")
    if "queue_check" in placement.made:
        rate, *means = placement.made["queue_check"].values()
        simulated_mean, one_by_one, closed = (
            "infinite" if each is None else f"{format_number(each)} s" for each in means
        )
        print(
            f"check: an instance for prompts at {rate:.3g} requests/s has a mean TTFT of {simulated_mean} simulated,"
            f" {one_by_one} if it computed one prompt after the other, {closed} in closed form (M/G/1)"
        )
    for warning in placement.warnings:
        print(f"  {warning}")
    if placement.rejected:
        print(f"\nrejected, {origin} rates")
        shared.print_table(
            ("option", f"per {said.unit}", "why", "reason"),
            [
                (
                    str(each.option), "" if each.rate_per_unit is None else f"{each.rate_per_unit:.4g}", each.why.value,
                    each.reason,
                )
                for each in placement.rejected
            ],
            left=("why", "reason"),
        )  # fmt: skip
    if output is not None:
        how = "quire simulate MODEL --hardware NAME" if maker.cluster.has_gpus else "quire serve MODEL"
        ray = "" if maker.cluster.has_gpus or maker.cluster.nodes.count == 1 else " --cluster.address HOST:PORT"
        where = ", on a Ray cluster of these machines" if ray else ""
        print(f"written to {output}, for {how} --cluster.placement {output}{ray}{where}")
