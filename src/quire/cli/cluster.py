"""Show the instances of a running server's cluster, drain or restart them, or change their roles and numbers.

quire cluster status                    lists instances: what they can do and have to do, and the times of requests
quire cluster drain INSTANCE            lets an instance finish its requests and starts another one in its place;
                                        with --remove none
quire cluster restart                   does that with one instance after the other
quire cluster role INSTANCE ROLE        changes what an instance does: prefill, decode or mixed
quire cluster place FILE                switches to the instances of a file of `quire plan placement`; with --pause also
                                        if there is no room for a new one beside any that serves: requests then wait

No request fails by any of these. INSTANCE is a place, such as prefill-0. The command ends when all of it is done. If it
is interrupted, the server goes on. See docs/guide/machines.md.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import format_bytes
from quire.errors import ConfigError
from quire.options import format_number

CHOICES = ("status", "drain", "restart", "role", "place")
PATHS = {"place": "placement"}
"""Ends of paths that differ from the action's name."""
COLUMNS = (
    "instance", "role", "health", "pid", "L_m", "batch", "running", "waiting", "held", "cache free", "of", "attempts",
)  # fmt: skip

PATIENCE_SECONDS = 4 * 3600.0
"""Timeout of a drain, restart or switch, during which long answers finish."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    parser.add_argument("action", choices=CHOICES, metavar="|".join(CHOICES), help="what to do")
    text = "with drain and role: the instance's place; with place: a file of quire plan placement"
    parser.add_argument("instance", nargs="?", metavar="INSTANCE|FILE", help=text)
    parser.add_argument("role", nargs="?", metavar="ROLE", help="with role: prefill, decode or mixed")
    text = f"of the server (default: {shared.DEFAULT_URL})"
    parser.add_argument("--url", default=shared.DEFAULT_URL, metavar="URL", help=text)
    parser.add_switch("--remove", text="with drain: no other instance takes its place")
    parser.add_switch("--pause", text="with place: requests may wait while no instance serves")
    shared.add_api_key_file(parser)
    parser.add_switch("--json", text="print the server's answer, the state of all instances")


def run(args: argparse.Namespace) -> int:
    """Runs the action."""
    body = _body(args)
    from quire.cli import remote

    path = "/v1/cluster" if body is None else f"/v1/cluster/{PATHS.get(args.action, args.action)}"
    if args.pause:
        path += "?pause=true"
    seconds = remote.TIMEOUT_SECONDS if args.action in ("status", "role") else PATIENCE_SECONDS
    key = remote.read_key(args.api_key_file)
    found = remote.call_server(args.url, path, key, "--url", "instances", body, seconds)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    with remote.known_format():
        if args.action == "status":
            print_status(found)
        else:
            print(_done(args, found))
    return 0


def _body(args: argparse.Namespace) -> dict[str, Any] | None:
    """The body to post; None for a GET. Raises ConfigError for arguments that do not go together."""
    action, words = args.action, [each for each in (args.instance, args.role) if each is not None]
    needed = {"drain": "one INSTANCE", "role": "an INSTANCE and a ROLE", "place": "one FILE"}.get(action, "no INSTANCE")
    if len(words) != {"drain": 1, "role": 2, "place": 1}.get(action, 0):
        raise ConfigError(f"quire cluster {action} takes {needed}, but got {' '.join(words) or 'none'}")
    for name, of in (("remove", "drain"), ("pause", "place")):
        if getattr(args, name) and action != of:
            raise ConfigError(f"--{name} is for quire cluster {of}")
    match action:
        case "place":
            return _placement(Path(args.instance))
        case "drain":
            return {"instance": args.instance, "restart": not args.remove}
        case "role":
            return {"instance": args.instance, "role": args.role}
    return {} if action == "restart" else None


def _placement(file: Path) -> dict[str, Any]:
    """The content of a placement's file, with the file's name if the placement has none."""
    from quire.placement.placement_file import read_placement

    found: dict[str, Any] = json.loads(read_placement(file).to_json())
    return found | {"made": {"name": file.name, **found["made"]}}


def _done(args: argparse.Namespace, found: dict[str, Any]) -> str:
    names = {each["place"]: each["name"] for each in found["instances"]}
    match args.action:
        case "drain" if args.remove:
            return f"{args.instance} has ended"
        case "drain":
            return f"{args.instance} is {names[args.instance]} now"
        case "role":
            return f"the role of {args.instance} is {args.role}"
        case "place":
            places = ", ".join(f"{each['place']} ({each['role']})" for each in found["instances"])
            return f"the cluster has the placement of {args.instance}: {places}"
    return f"restarted: {', '.join(filter(None, names.values()))}"


def print_status(found: dict[str, Any]) -> None:
    """Prints instances, placement, times of stages, and counters, as GET /v1/cluster returned them. Raises KeyError,
    TypeError, ValueError or AttributeError if the answer has another form.
    """
    shared.print_table(COLUMNS, [_row(each) for each in found["instances"]], left=("role", "health"))
    if lines := _placed(found):
        print("\n" + "\n".join(lines))
    stages = {name: seconds for name, seconds in found["stages"].items() if seconds}
    if stages:
        shares = list(next(iter(stages.values())))
        print()
        rows = [(name, *(_seconds(seconds[share]) for share in shares)) for name, seconds in stages.items()]
        shared.print_table(("stage", *shares), rows)
    if found["counts"]:
        print("\n" + ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in found["counts"].items()))


def _placed(found: dict[str, Any]) -> list[str]:
    """Lines about the placement of the instances, about a switch that runs or has failed, and about replanning. An
    older server sends none of them.
    """
    lines, placed, switch, plan = [], found.get("placement"), found.get("switch"), found.get("replanning")
    if placed is not None:
        lines.append(
            f"placement {placed['name']}: {placed['rate']:.4g} requests/s predicted on {placed['cost']:.4g}"
            f" {placed['unit']}{'s' * (placed['cost'] != 1)}, {placed['attainment']:.1%} within the latency targets"
        )
    if switch is not None and switch["error"]:
        lines.append(switch["error"])
    elif switch is not None:
        lines.append(
            f"a switch to {switch['to']} is under way: {switch['done']} of {switch['actions']} actions are done"
            f"{', now: ' * bool(switch['now'])}{switch['now']}"
        )
    if plan is not None:
        changed = f": {plan['reason']}" if plan["reason"] else ""
        counts = ", ".join(f"{name} {plan[name]:,}" for name in ("searches", "switches", "failed"))
        lines.append(f"replanning {plan['phase']}{changed} ({counts})")
    return lines


def _row(instance: dict[str, Any]) -> tuple[str, ...]:
    load = instance["load"] or {}

    def number(value: int | None) -> str:
        return "-" if value is None else f"{value:,}"

    def size(value: int | None) -> str:
        return "-" if value is None else format_bytes(value)

    return (
        instance["place"],
        instance["role"],
        instance["health"],
        "-" if instance["pid"] is None else str(instance["pid"]),
        number(instance["saturating_rows"]),
        number(instance["batch"]),
        number(load.get("running")),
        number(load.get("waiting")),
        number(load.get("held")),
        size(load.get("free_bytes")),
        size(load.get("total_bytes")),
        number(instance["attempts"]),
    )


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def ready_line(instance: dict[str, Any]) -> str:
    """One line about an instance that is ready, from the cluster's own state."""
    return (
        f"{instance['place']}: {instance['role']}, L_m {instance['prompt_rows']:,} rows at"
        f" {format_number(1e3 * instance['seconds_per_row'])} ms each, decodes up to {instance['batch']:,} at"
        f" {format_number(1e3 * instance['seconds_per_step'])} ms a step, {_cores(instance['cores'])},"
        f" cache of {format_bytes(instance['cache_bytes'])}"
    )


def _cores(cores: list[int]) -> str:
    """Numbers of cores as text; consecutive ones as a range."""
    if not cores:
        return "all cores"
    runs = [[core for _, core in run] for _, run in groupby(enumerate(sorted(cores)), lambda each: each[1] - each[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"core {text}" if len(cores) == 1 else f"cores {text}"
