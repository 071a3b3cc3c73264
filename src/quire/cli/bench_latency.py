"""`quire bench latency`: seconds of an engine's steps by their contents, and a latency model fitted to them."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import plan_hardware, shared
from quire.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from quire.measure.latency_bench import FittedSteps
    from quire.timing.latency import LatencyModel
    from quire.timing.latency_fit import Record

POINTS = ("prompt", "prefix", "decode")
"""The kinds of `quire.measure.latency_points`, which takes a second to import."""

SECONDS = 120.0
"""Time to measure steps for, by default."""

LARGE = 0.15
"""A model is called poor if a tenth of its steps has a larger relative error."""


def add_arguments(parser: Arguments) -> None:
    """Adds the flags of this benchmark."""
    group = parser.add_argument_group("benchmark")
    group.add_file("--output", text="write the latency model as JSON")
    shared.add_plot(group, "measured over predicted seconds")
    text = f"time to measure for (default: {SECONDS:g})"
    group.add_argument("--seconds", type=float, metavar="X", help=text)
    text = "steps to measure: prompts, prompts behind cached tokens, decoding batches that prompts join (default: all)"
    group.add_argument("--points", nargs="+", choices=POINTS, help=text)
    text = "logs of a server's steps (runtime.step_log), to be fitted in place of measuring"
    group.add_file("--steps", text=text, nargs="+")
    text = "measure what offloading needs instead: disk, copies, a layer's parts; --output writes a profile"
    group.add_switch("--tiers", text=text)
    plan_hardware.add_arguments(parser)


def check(args: argparse.Namespace) -> dict[str, str]:
    """Raises ConfigError for invalid arguments. Returns the origins of the settings that it sets."""
    if args.tiers:
        if given := [name for name in ("plot", "seconds", "points", "steps") if getattr(args, name) is not None]:
            raise ConfigError(
                f"--{given[0]} is no setting of --tiers, which measures the machine, not an engine's steps"
            )
        return plan_hardware.check(args, "quire bench latency --tiers")
    for name in ("folder", "rounds"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is a setting of --tiers")
    for name in ("seconds", "points"):
        if args.steps and getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for measuring, and --steps measures nothing")
    args.seconds = SECONDS if args.seconds is None else args.seconds
    args.points = args.points or list(POINTS)
    if not 0 < args.seconds < math.inf:
        raise ConfigError(f"--seconds is {args.seconds:g}; it must be above 0, and finite")
    if args.output is not None:
        shared.check_writable(args.output)
    if args.plot is not None:
        shared.check_plot(args.plot)
    return {}


def run(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Prints the steps by kind, and the model. Returns a row per kind, or with --tiers the profile as one."""
    if args.tiers:
        from quire.offload.planning.profile import profile_text

        profile = plan_hardware.measured(args)
        plan_hardware.print_profile(profile)
        return [json.loads(profile_text(profile))]
    from quire.measure.latency_bench import fit_engine, fit_logs

    if args.steps:
        return _report(args, fit_logs(args.model, args.steps), console)
    with shared.measured_model(args, console) as llm:
        with shared.progress("seconds") as progress:
            found = fit_engine(llm, args.model, args.seconds, args.points, progress)
        return [row | shared.model_facts(llm) for row in _report(args, found, console)]


def _report(args: argparse.Namespace, found: FittedSteps, console: Console) -> list[dict[str, Any]]:
    """Prints, draws, writes and keeps a model. Returns a row per kind of steps."""
    rows = found.rows()
    _print(found.model, rows, console)
    if (measured := found.measured) is not None:
        console.print(
            f"{len(measured.visits)} of {len(measured.points)} points in {measured.num_visits} visits; other programs"
            f" were busy in {measured.num_disturbed} of them"
        )
        if len(measured.visits) < len(measured.points):
            console.print("the largest points are missing, and the model does not cover them: raise --seconds")
    if args.output is not None:
        found.model.write(args.output)
    if args.plot is not None:
        draw(args.plot, found.model, found.records)
    if args.points == list(POINTS) and (reason := found.keep()):
        console.print(reason)
    return rows


def _print(model: LatencyModel, rows: list[dict[str, Any]], console: Console) -> None:
    from quire.timing.latency import QUANTILES
    from quire.timing.latency_fit import describe

    shared.print_table(
        ("steps", "number", "median ms", *(f"{100 * share:.0f} %" for share in QUANTILES.values()), "sum"),
        [
            (
                row["kind"],
                f"{row['steps']:,}",
                f"{1e3 * row['median_seconds']:.2f}",
                *(f"{row[name]:.3f}" for name in QUANTILES),
                f"{row['total']:.3f}",
            )
            for row in rows
        ],
    )
    outliers = model.counts["outliers"]
    num_steps = sum(row["steps"] for row in rows)
    console.print(
        f"measured / predicted seconds: quantiles, and the sum of all measured over all predicted; {num_steps:,} steps,"
        f" without {outliers:,} ({outliers / num_steps:.1%}) that took much longer than their like"
    )
    console.print("")
    shared.print_table(
        ("seconds (fitted)", "ours", "DistServe, Appendix A"), describe(model), left=("ours", "DistServe, Appendix A")
    )
    for name, link in model.links.items():
        console.print(f"{name} (measured): {link.bytes_per_second / 1e6:,.0f} MB/s after {1e3 * link.latency:.0f} ms")
    for row in rows:
        if row["within"] > LARGE:
            console.print(
                f"poor fit: a tenth of the {row['kind']} steps is off by more than {row['within']:.0%}; measure longer,"
                " or while nothing else runs"
            )


def draw(file: Path, model: LatencyModel, records: Sequence[Record]) -> None:
    """Draws measured over predicted seconds, and their ratio over the rows of a step."""
    from quire.evaluation.plot import drawing, finish
    from quire.timing.latency import KINDS

    about = [str(model.about[name]) for name in ("model", "processor") if name in model.about]
    with drawing(file, 9.6, 4.0, ", ".join(about)) as figure:
        seconds, ratios = figure.subplots(1, 2)
        for kind in KINDS:
            of_kind = [(work, taken, model.seconds(work)) for work, taken in records if work.kind == kind]
            if of_kind:
                style = {"marker": ".", "linestyle": "", "markersize": 3, "alpha": 0.5, "label": kind}
                seconds.plot([said for _, _, said in of_kind], [taken for _, taken, _ in of_kind], **style)
                ratios.plot(
                    [work.rows for work, _, _ in of_kind], [taken / said for _, taken, said in of_kind], **style
                )
        ends = [op(model.seconds(work) for work, _ in records) for op in (min, max)]
        seconds.plot(ends, ends, color="black", linewidth=0.8)
        ratios.axhline(1, color="black", linewidth=0.8)
        finish(seconds, "predicted seconds of a step", "measured seconds", xscale="log", yscale="log")
        finish(ratios, "rows of a step", "measured / predicted", xscale="log", yscale="log")
