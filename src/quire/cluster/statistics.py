"""Counters of several engines, as if they were one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.cluster.members import Member
from quire.cluster.prefixes import group_by_machine, machine_total
from quire.cluster.router import COUNTERS
from quire.engine.cached_prefixes import DISK

_NOTHING: dict[str, Any] = {
    **dict.fromkeys(COUNTERS, 0),
    "cache": dict.fromkeys(
        (f"bytes_{name}" for name in ("total", "used", "cached", "free", "peak", "pinned", "saved", "evicted")), 0
    )
    | {"bytes_retention_freed": 0},
}
"""The counters of no instance."""


def sum_counters(members: Iterable[Member], past: Mapping[str, int]) -> dict[str, Any]:
    """The counters of all instances together. Instances on one machine have one disk.

    past  counters of instances that are gone
    """
    found = [(each.machine, each.stats) for each in members if each.stats is not None]
    total = _added([_NOTHING, dict(past), *(stats for _, stats in found)])
    disks = [(machine, stats["tiers"][DISK]) for machine, stats in found if DISK in stats.get("tiers", {})]
    for name in ("bytes", "cap_bytes", "chunks") if disks else ():
        of_each = group_by_machine((machine, disk[name]) for machine, disk in disks)
        total["tiers"][DISK][name] = sum(machine_total(DISK, sizes) for sizes in of_each)
    costs = [stats["costs"] for _, stats in found if "costs" in stats]
    if costs:  # sizes and speeds, which are not summed
        total["costs"] = {key: max((each[key] for each in costs), key=lambda cost: cost or 0) for key in costs[0]}
    return total


def _added(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum of counters, group by group."""
    total: dict[str, Any] = {}
    for each in found:
        for key, value in each.items():
            if isinstance(value, dict):
                total[key] = _added([total.get(key, {}), value])
            elif isinstance(value, int | float) and not isinstance(value, bool):
                total[key] = (total.get(key) or 0) + value
            else:
                total[key] = value if total.get(key) is None else total[key]
    return total
