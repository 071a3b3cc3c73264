"""`quire plan placement`: the instances that serve most of a load per GPU or machine, found by simulation."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.arguments import Arguments
from quire.cli import shared, simulation_common
from quire.config import EngineConfig, add_flags
from quire.errors import ConfigError
from quire.options import format_number

if TYPE_CHECKING:
    from quire.placement.cluster_file import ClusterSpec
    from quire.placement.placement_file import Instances, Placement
    from quire.planning.option_trials import ModelOnCluster
    from quire.planning.placements import PlacementResult
    from quire.simulation.load import Load
    from quire.workload.slo import Slo

ALGORITHMS = ("apart", "pairs", "mixed")
"""The names in `quire.planning.placement.ALGORITHMS`, which takes a second to import."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of this action."""
    group = parser.add_argument_group("plan")
    text = "TOML file with the machines: sections [nodes] and [network]"
    group.add_file("--cluster.file", text=text, dest="cluster_file")
    simulation_common.add_search_arguments(group, 120.0)
    text = "requests/s to serve, with the instances that serve most per machine (default: as many as all can serve)"
    group.add_argument("--rate", type=simulation_common.positive, metavar="X", help=text)
    text = "requests of a simulation, up to 20 times as many where targets are long against them"
    group.add_count("--requests", text=text, default=300)
    text = "latency model or profile of instances on cores, or ROLE=FILE for a role; one for each number of threads"
    group.add_argument("--latency", action="append", default=[], metavar="FILE", help=text)
    text = "prompts and decoding on different instances, in pairs within machines, or mixed (default: auto)"
    group.add_argument("--algorithm", choices=(*ALGORITHMS, "auto"), default="auto", help=text)
    group.add_switch("--ablation", text="search with all algorithms, and show them beside each other")
    add_flags(parser, ("tiers", "slo"))


def run(args: argparse.Namespace) -> int:
    """Plans, and writes the placement."""
    slo = _checked(args)
    from quire.placement.cluster_file import read_cluster
    from quire.planning.placements import PlacementGoal, best_of, completed, search_placements
    from quire.simulation.load import Load
    from quire.simulation.pool import pool_of
    from quire.version import __version__

    cluster = read_cluster(args.cluster_file)
    load = Load.read(args.trace, args.requests, fitted=True)
    model = model_of(args, cluster, load)
    load, doubts = load.within(model.context)
    goal = PlacementGoal(load, slo, args.rate, args.algorithm, args.ablation, args.plan_seconds, args.seed)
    with pool_of(args.processes) as pool:
        found = search_placements(model, goal, pool, shared.progress)
    made = {"name": args.cluster_file.stem, "command": shlex.join(["quire", *args.words]), "version": __version__}
    placement = completed(best_of(found, goal), model, goal, load.facts(), made, doubts)
    if args.output is not None:
        placement.write(args.output)
    if args.json:
        print(placement.to_json(), end="")
        return 0
    if placement.unserved:
        print(placement.unserved)
    simulation_common.print_load(load)
    if len(found) > 1:
        _print_algorithms(found, slo)
    _print(placement, model, slo, args.output)
    return 0


def _checked(args: argparse.Namespace) -> Slo:
    """The latency targets. Raises ConfigError for arguments that are missing or invalid."""
    if args.cluster_file is None:
        raise ConfigError("quire plan placement needs --cluster.file FILE with the machines")
    if args.trace is None:
        raise ConfigError("quire plan placement needs --trace FILE with the requests")
    simulation_common.check_seed(args.seed)
    slo = simulation_common.slo_of(args)
    simulation_common.check_targets(slo, "quire plan placement")
    if args.output is not None:
        shared.check_writable(args.output)
    return slo


def model_of(args: argparse.Namespace, cluster: ClusterSpec, load: Load) -> ModelOnCluster:
    """The model on the machines. Raises ConfigError."""
    config = EngineConfig.from_flags(args)
    longest = int((load.workload.prompt_tokens + load.workload.columns.num_out).max())
    if not cluster.has_gpus:
        from quire.measure.latency_bench import LatencyFiles
        from quire.planning.option_trials import OnCores
        from quire.simulation.setup import LocalModel

        return OnCores(LocalModel(args.model, LatencyFiles(args.latency, args.model).of), config, cluster, longest)
    from quire.placement.placement_file import Gpus
    from quire.planning.option_trials import OnGpus
    from quire.simulation.hardware import Target
    from quire.timing.devices import DEVICES

    if args.latency:
        raise ConfigError("--latency is for instances on cores; those on GPUs are modelled from data sheets")
    gpus = Gpus.of(cluster)
    if gpus is None:
        raise ConfigError(f"nodes.device is missing in {args.cluster_file}; the GPUs are {', '.join(DEVICES)}")
    return OnGpus(Target.on(gpus, args.model), config, cluster, longest)


def _print_algorithms(found: Sequence[PlacementResult], slo: Slo) -> None:
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


def _print(placement: Placement, model: ModelOnCluster, slo: Slo, output: Path | None) -> None:
    said, origin = placement.predicted, model.origin.value
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
        if warning != placement.unserved:  # which is the first line
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
        how = "quire simulate MODEL --hardware NAME" if model.cluster.has_gpus else "quire serve MODEL"
        ray = "" if model.cluster.has_gpus or model.cluster.nodes.count == 1 else " --cluster.address HOST:PORT"
        where = ", on a Ray cluster of these machines" if ray else ""
        print(f"written to {output}, for {how} --cluster.placement {output}{ray}{where}")
