"""The output of `quire plan auto`: the frontier, the chosen settings, why others lost, and a configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli import shared
from quire.config import ServeConfig, SloConfig, describe, format_bytes
from quire.placement.divisions import not_served
from quire.placement.rejected import Reason
from quire.planning.points import PlanResult, SettingsPoint, Tried, named
from quire.workload.slo import finite

if TYPE_CHECKING:
    from quire.planning.auto import Planner
    from quire.planning.curves import Loss

REASONS = 5
"""Maximum number of printed reasons for settings that were not tried; JSON has all of them."""


def show(planner: Planner, found: PlanResult) -> None:
    """Prints a plan."""
    goal = planner.goal
    if told := not_served(*found.chosen.point.settings.division):
        print(f"{told}; the file leaves it out")
    print(
        f"\nfrontier within {format_bytes(goal.memory)}: no settings serve more, lose less quality and need less memory"
        f" at once. The quality budget is {goal.quality:.2%}"
    )
    rows = {each.point.key: each for each in (*found.frontier, found.chosen)}
    if found.baseline is not None:
        rows.setdefault(found.baseline.point.key, found.baseline)
    shared.print_table(
        ("", "settings", "requests/s", "", "attained", "quality lost", "", "memory", "", "cached tokens", "steps"),
        [_row(planner, found, each) for each in rows.values()],
        left=("settings", "steps", ""),
    )
    chosen = found.chosen
    print(f"\nchosen: {chosen.point.name(planner.space)}")
    print(f"  {_goodput(planner, chosen)}")
    print(f"  quality lost: {_loss(chosen.point.loss)}, at most {chosen.point.loss.most:.2%}: {chosen.point.loss.how}")
    print(f"  memory: {_memory(planner, chosen.point)}")
    print(f"  seconds of steps: {chosen.point.speed[0]}, {chosen.point.speed[1]}")
    print("\nsettings that differ from the chosen ones in one thing")
    near = found.neighbours(planner.space)
    rows_of_near = sorted((named(planner.space, settings, share), reason) for settings, share, reason in near)
    shared.print_table(("settings", "why not"), rows_of_near, left=("why not",))
    counts = Counter(each.why for each in found.rejected)
    others = ", ".join(f"{count:,} {why}" for why, count in counts.items())
    print(f"\n{len(found.finalists):,} finalists; other settings: {others or 'none'}")
    lacking = Counter(each.reason for each in found.rejected if each.why in (Reason.UNFIT, Reason.UNKNOWN))
    for reason, count in lacking.most_common(REASONS):
        print(f"  {count:,}: {reason}")
    for warning in found.warnings:
        print(f"note: {warning}")


def _row(planner: Planner, found: PlanResult, each: Tried) -> tuple[str, ...]:
    point, loss = each.point, each.point.loss
    mark = "chosen" if each is found.chosen else "default" if each is found.baseline else ""
    error = "" if not loss.value_error else f" +- {loss.value_error:.2%}"
    return (
        mark, point.name(planner.space), f"{each.rate:.3g}", goodput_origin(each), f"{each.goodput.attainment:.1%}",
        f"{loss.value:.2%}{error}", loss.origin.value, format_bytes(point.room.total), "modelled",
        f"{point.room.tokens:,}", f"{point.speed[0]}",
    )  # fmt: skip


def goodput_origin(each: Tried) -> str:
    """The origin of a goodput: fitted requests, through steps that are fitted or modelled."""
    return each.point.speed[0].value


def _goodput(planner: Planner, each: Tried) -> str:
    told = each.goodput
    return (
        f"goodput ({goodput_origin(each)}): {each.rate:.4g} requests/s per {planner.unit}; {told.attainment:.1%} of"
        f"{' fresh' if told.confirmed else ''} requests meet both targets, wanted are {told.target:.1%};"
        f" {each.requests} requests a simulation"
    )


def _loss(loss: Loss) -> str:
    error = "" if not loss.value_error else f" +- {loss.value_error:.2%}"
    return f"{loss.value:.2%}{error} ({loss.origin})"


def _memory(planner: Planner, point: SettingsPoint) -> str:
    return f"{format_bytes(point.room.total)} per {planner.unit} (modelled): {planner.memory_text(point)}"


def configuration(planner: Planner, found: PlanResult, file: Path, given: Mapping[str, str], serve: ServeConfig) -> str:
    """A file for `quire serve --config`: every setting of engine, cluster and targets, with predictions as comments.

    given  origins of the settings that the plan was given, by key
    """
    chosen, goal = found.chosen, planner.goal
    point = chosen.point
    planned = {**point.settings.options, "cache.memory": None}
    origins = {key: "planned" if key in planned and origin == "default" else origin for key, origin in given.items()}
    told = not_served(*point.settings.division)
    lines = [
        *([f"{told}; this file leaves it out.", ""] if told else []),
        f"quire serve {planner.name} --config {file}",
        "",
        f"Made by quire plan auto for {goal.load.workload.name} within {format_bytes(goal.memory)} and a quality budget"
        f" of {goal.quality:.2%}: {point.name(planner.space)}.",
        f"Predicted: {_goodput(planner, chosen)}.",
        f"Quality lost: {_loss(point.loss)}, {point.loss.how}.",
        f"Memory: {_memory(planner, point)}.",
        f"Seconds of steps: {point.speed[0]}, {point.speed[1]}.",
    ]
    head = "".join(f"# {line}".rstrip() + "\n" for line in _wrapped(lines))
    ttft, tpot = finite(goal.slo.ttft), finite(goal.slo.tpot)
    slo = SloConfig(ttft=ttft, tpot=tpot, attainment=goal.slo.attainment)
    groups = (
        point.settings.engine(planner.config).with_options({"cache.memory": point.room.cache}),
        serve,
        planner.cluster_of(point.settings),
        slo,
    )
    origins |= dict.fromkeys(slo.to_options(), "planned for")
    return head + "\n" + "\n".join(describe(group, origins) for group in groups)


def _wrapped(lines: Iterable[str]) -> list[str]:
    import textwrap

    return [part for line in lines for part in (textwrap.wrap(line, 116) or [""])]


def facts(planner: Planner, found: PlanResult) -> dict[str, Any]:
    """All results, for JSON."""
    goal, chosen = planner.goal, found.chosen
    return {
        "workload": goal.load.facts(),
        "memory": goal.memory,
        "quality": goal.quality,
        "slo": goal.slo.facts(),
        "chosen": _facts_of(planner, chosen),
        "default": None if found.baseline is None else _facts_of(planner, found.baseline),
        "frontier": [_facts_of(planner, each) for each in found.frontier],
        "finalists": [_facts_of(planner, each) for each in found.finalists],
        "neighbours": [
            {"settings": named(planner.space, settings, share), "reason": reason}
            for settings, share, reason in found.neighbours(planner.space)
        ],
        "left": [
            {"settings": named(planner.space, *each.option), "why": each.why, "reason": each.reason}
            for each in found.rejected
        ],
        "warnings": [*filter(None, [not_served(*chosen.point.settings.division)]), *found.warnings],
    }


def _facts_of(planner: Planner, each: Tried) -> dict[str, Any]:
    point, loss, told = each.point, each.point.loss, each.goodput
    return {
        "settings": point.name(planner.space),
        "options": {**point.settings.options, "cache.memory": point.room.cache},
        "goodput": {
            "rate": each.rate, "attainment": told.attainment, "confirmed": told.confirmed, "verdict": told.verdict,
            "requests": each.requests, "origin": goodput_origin(each),
        },
        "loss": {
            "value": loss.value, "error": loss.value_error, "most": finite(loss.most),
            "origin": loss.origin, "how": loss.how,
        },
        "memory": {
            "total": point.room.total, "cache": point.room.cache, "tokens": point.room.tokens, "origin": "modelled",
        },
        "steps": {"origin": point.speed[0], "how": point.speed[1]},
    }  # fmt: skip
