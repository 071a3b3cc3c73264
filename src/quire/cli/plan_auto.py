"""`quire plan auto`: the settings that serve most requests within a memory, for the quality that may be lost."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared, simulation_common
from quire.config import (
    ClusterConfig,
    EngineConfig,
    PlanConfig,
    ServeConfig,
    add_flags,
    format_bytes,
    options_from,
    sources,
)
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.planning.auto import Planner, Tools
    from quire.simulation.load import Load
    from quire.workload.slo import Slo

OF_OFFLOAD = ("plan.gpu", "plan.cpu", "plan.disk")
"""Settings that only `quire plan offload` has."""

DECIDED = {
    "cache.memory": "plan.memory says how much there is for everything",
    "cluster.placement": "it decides the instances, too; quire plan placement plans them for given settings",
    "offload.mode": "its weights are in memory; quire plan offload plans for less memory than they need",
    "cache.sparse_values": "it is not among what is searched",
}
"""Settings that a plan refuses, each with the reason."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of this action."""
    group = parser.add_argument_group("plan")
    simulation_common.add_search_arguments(group, 300.0)
    group.add_file("--text", text="text to measure quality with; without it only curves of earlier plans are used")
    group.add_count("--context", text="tokens of a window of the text (default: 1024)")
    group.add_count("--windows", text="windows of the text at most (default: 12)")
    group.add_argument("--hardware", metavar="NAME", help="plan for these GPUs, which need not be here: t4, h100, ...")
    shared.add_plot(group, "goodput over quality")
    add_flags(parser, ("tiers", "plan", "slo"), left_out=OF_OFFLOAD)


def run(args: argparse.Namespace) -> int:
    """Plans, prints the result, and writes the configuration."""
    planner = planner_of(args)
    from quire.cli import plan_auto_report as shown

    if not args.json:
        simulation_common.print_load(planner.goal.load)
    found = planner.run()
    if args.plot is not None:
        from quire.planning.auto_plot import save_frontier

        title = f"{args.model}, {planner.goal.load.workload.name}, {format_bytes(planner.goal.memory)}"
        save_frontier(args.plot, found, planner.space, planner.goal.quality, title, planner.unit)
    if args.output is not None:
        with shared.writing(args.output):
            origins = sources(options_from(args), args.config) | sources({}, args.config, ("serve", "cluster"))
            text = shown.configuration(planner, found, args.output, origins, ServeConfig.from_options({}, args.config))
            args.output.write_text(text, encoding="utf-8")
    if args.json:
        print(json.dumps(shown.facts(planner, found), indent=2, allow_nan=False))
    else:
        shown.show(planner, found)
        if args.output is not None:
            print(f"\nquire serve {args.model} --config {args.output}")
    return 0


def planner_of(args: argparse.Namespace) -> Planner:
    """The inputs of a plan, checked. Raises ConfigError."""
    if args.trace is None:
        raise ConfigError("quire plan auto needs --trace FILE: the requests to plan for")
    slo = simulation_common.slo_of(args)
    simulation_common.check_targets(slo, "quire plan auto")
    simulation_common.check_seed(args.seed)
    plan = PlanConfig.from_flags(args)
    options = options_from(args)
    config, cluster = EngineConfig.from_options(options, args.config), ClusterConfig.from_options({}, args.config)
    given = given_of(options, args.config, config, cluster)
    for key, reason in DECIDED.items():
        if key in given:
            raise ConfigError(f"{key} is {given[key]!r}, and quire plan auto does not take it: {reason}")
    if args.plot is not None:
        shared.check_plot(args.plot)
    if args.output is not None:
        shared.check_writable(args.output)
    from quire.planning.auto import Goal, Tools
    from quire.planning.auto_local import LocalPlanner, free_bytes, machine_of
    from quire.planning.halving import RUNGS
    from quire.planning.quality import WINDOWS, Text
    from quire.planning.space import Space
    from quire.simulation.load import Load
    from quire.timing.kept_latencies import kept_folder

    text = None if args.text is None else Text.read(args.text)
    load = Load.read(args.trace, RUNGS[-1].requests, fitted=True)
    tools = Tools(kept_folder(), text, args.context, args.windows or WINDOWS, args.processes, progress=_teller())
    common = load, slo
    if args.hardware is not None:
        return _on_hardware(args, config, cluster, given, common, tools, plan)
    memory = free_bytes(config) if plan.memory is None else plan.memory
    goal = Goal(*common, memory, plan.quality, args.plan_seconds, args.seed)
    return LocalPlanner(args.model, config, cluster, Space.of(machine_of(args.model, config, given)), goal, tools)


def _on_hardware(
    args: argparse.Namespace, config: EngineConfig, cluster: ClusterConfig, given: dict[str, Any],
    common: tuple[Load, Slo], tools: Tools, plan: PlanConfig,
) -> Planner:  # fmt: skip
    from quire.planning.auto import Goal
    from quire.planning.auto_hardware import HardwarePlanner, machine_of
    from quire.planning.quality import Quality
    from quire.planning.space import Space
    from quire.timing.analytic import MODELS
    from quire.timing.devices import device_named

    if plan.memory is not None:
        raise ConfigError("--plan.memory is for this machine; a GPU of --hardware has the memory of its data sheet")
    if given.get("tiers.disk") is not None:
        raise ConfigError("--tiers.disk is for this machine; the disks of --hardware are not known")
    device = device_named(args.hardware)
    space = Space.of(machine_of(given))
    has_files = args.model.lower() not in MODELS and not args.model.endswith(".json")
    quality = None
    if has_files:
        quality = Quality(args.model, config, space, tools.text, context=tools.context, num_windows=tools.num_windows)
    elif tools.text is not None:
        raise ConfigError(f"{args.model} has no weights to measure quality with; leave --text out")
    goal = Goal(*common, int(device.memory), plan.quality, args.plan_seconds, args.seed)
    return HardwarePlanner(args.model, config, cluster, space, goal, tools, device, quality)


def given_of(
    options: dict[str, Any], file: Path | None, config: EngineConfig, cluster: ClusterConfig
) -> dict[str, Any]:
    """The settings given by flags or the file, by key."""
    values = {**config.to_options(), **cluster.to_options()}
    origins = sources(options, file) | sources({}, file, ("cluster",))
    return {key: values[key] for key, origin in origins.items() if origin != "default"}


def _teller() -> Callable[[str, int, int], None]:
    """A function that reports progress on stderr: one line for each task, and then one every PLAIN_SECONDS."""
    import time

    before, last = "", 0.0

    def told(what: str, done: int, total: int) -> None:
        nonlocal before, last
        now = time.monotonic()
        if what != before or now - last >= shared.PLAIN_SECONDS:
            before, last = what, now
            print(f"quire: {what}, {done}/{total} done", file=sys.stderr, flush=True)

    return told
