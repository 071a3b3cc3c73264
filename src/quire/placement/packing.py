"""How many instances machines have room for. A stage takes slots of one machine.

Stages of an instance may be on several machines even if one had room for all of them: what is left of machines is used.
Latencies of such an instance are those of one machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import numpy as np
from numpy.typing import NDArray

from quire.placement.cluster_file import ClusterSpec
from quire.placement.divisions import Division, Option

ROUNDING = 1e-9
"""Relative difference of rates that rounding may make."""


@cache
def room_beside(num_nodes: int, slots: int, first: int, second: int) -> NDArray[np.int64]:
    """How many stages of `second` slots machines have room for, beside stages of `first` slots.

    returns  [n + 1]: at index i beside i stages of `first` slots, of which n fit at most; it does not increase
    """
    # Beside a stages of the first size one machine has room for within[a] of the second.
    within = (slots - first * np.arange(slots // first + 1)) // second
    found = np.zeros(1, np.int64)
    for _ in range(num_nodes):
        more = np.full(len(found) + len(within) - 1, -1, np.int64)
        for count, others in enumerate(within):
            part = more[count : count + len(found)]
            np.maximum(part, found + others, out=part)
        found = more
    found.flags.writeable = False
    return found


def most(cluster: ClusterSpec, option: Option) -> int:
    """The largest number of equal instances or pairs that the cluster has room for."""
    return cluster.nodes.count * (cluster.slots // option.stage_slots) // option.pp


def fit(cluster: ClusterSpec, counts: Mapping[Option, int]) -> bool:
    """Whether the cluster has room for some instances or pairs, of at most two kinds."""
    stages = [(option.stage_slots, option.pp * count) for option, count in counts.items()]
    (first, num_first), (second, num_second) = (*stages, (1, 0))[:2]
    room = room_beside(cluster.nodes.count, cluster.slots, first, second)
    return num_first < len(room) and num_second <= int(room[num_first])


def replicas(rate: float, goodput: float) -> int:
    """Instances of a goodput that are needed for a rate."""
    return max(1, math.ceil(rate / goodput * (1 - ROUNDING)))


def mix(
    cluster: ClusterSpec, first: Division, first_rate: float, second: Division, second_rate: float
) -> tuple[float, int, int]:
    """The highest rate min(n * first_rate, m * second_rate) of n and m instances that the cluster has room for.

    returns  the rate and the smallest n and m that reach it; zeros if there is no room for one of each
    """
    room = room_beside(cluster.nodes.count, cluster.slots, first.stage_slots, second.stage_slots)
    counts = np.arange(1, (len(room) - 1) // first.pp + 1)
    rates = np.minimum(counts * first_rate, room[counts * first.pp] // second.pp * second_rate)
    best = float(rates.max(initial=0.0))
    return (best, replicas(best, first_rate), replicas(best, second_rate)) if best else (0.0, 0, 0)
