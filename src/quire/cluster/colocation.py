"""Which instances share a machine, and which resources each one needs. Pure: `ray_processes` finds the machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.options import format_count

STRATEGIES = {"pack": "PACK", "spread": "SPREAD", "pairs": "STRICT_PACK"}
"""Ray's names of the values of `cluster.placement`."""


@dataclass(frozen=True)
class InstanceResources:
    """The resources that each instance needs on a node.

    memory  bytes of the weights and of a cache of fixed size; 0 if the cache takes a share of the node's memory
    labels  labels that a node must have, by role
    """

    cores: int
    gpus: int
    memory: int
    labels: Mapping[str, Mapping[str, str]]

    def bundle(self) -> dict[str, float]:
        """The same resources as a bundle of Ray."""
        wanted = {"CPU": self.cores, "GPU": self.gpus, "memory": self.memory}
        return {name: float(amount) for name, amount in wanted.items() if amount}

    def described(self, roles: Sequence[str]) -> str:
        """The resources that instances with these roles need, for an error message."""
        parts = [format_count(self.cores, "core"), *([format_count(self.gpus, "GPU")] if self.gpus else [])]
        if self.memory:
            parts.append(f"{self.memory / 2**30:.2f} GiB of memory")
        needs = f"{'each ' if len(roles) > 1 else ''}needs {', '.join(parts)}"
        for role in dict.fromkeys(roles):
            if labels := self.labels.get(role):
                needs += f"; {role} needs nodes with {','.join(f'{key}={value}' for key, value in labels.items())}"
        return needs


def colocated_groups(roles: Mapping[str, str], placement: str) -> list[list[str]]:
    """The places that share a machine: all of them, or with `pairs` those that must share a node.

    A pair has one instance that computes prompts and one that decodes. Surplus instances of one role are distributed
    over the pairs. A mixed instance forms a group alone.

    Source: DistServe, arXiv 2401.09670, Algorithm 2, which keeps both phases of a pipeline stage on one node where the
    network between nodes is slow. Ours differs: an instance has one stage.
    """
    if placement != "pairs":
        return [list(roles)]
    of = {role: [place for place, each in roles.items() if each == role] for role in ("prefill", "decode", "mixed")}
    count = min(len(of["prefill"]), len(of["decode"]))
    if not count:  # only mixed instances do one of the two
        return [[place] for place in roles]
    groups: list[list[str]] = [[] for _ in range(count)]
    for role in ("prefill", "decode"):
        for index, place in enumerate(of[role]):
            groups[index % count].append(place)
    return groups + [[place] for place in of["mixed"]]


def most_cores(sizes: Sequence[int], cpus: Sequence[int]) -> int:
    """Maximum number of cores that every instance can have; 1 if there are fewer cores than instances.

    sizes  number of instances in each group that must share a node
    cpus   cores of each node
    """
    for cores in range(max(cpus, default=1), 1, -1):
        room = [count // cores for count in cpus]
        for size in sorted(sizes, reverse=True):
            emptiest = room.index(max(room))
            room[emptiest] -= size
        if min(room) >= 0:
            return cores
    return 1
