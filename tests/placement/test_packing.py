"""Replicas in machines."""

from __future__ import annotations

import pytest

from quire.placement.divisions import Division, Role
from quire.placement.packing import mix, replicas, room_beside
from tests.planning.test_placement import gpus, room


@pytest.mark.parametrize(
    ("rate", "goodput", "wanted"), [(12, 5, 3), (10, 10, 1), (10.001, 10, 2), (0.1, 5, 1), (3 * 0.1, 0.1, 3)]
)
def test_replicas_are_whole_and_enough(rate: float, goodput: float, wanted: int) -> None:
    assert replicas(rate, goodput) == wanted


@pytest.mark.parametrize(
    ("slots", "rates", "mixed"),
    [
        (6, (5.6, 10.0), (20.0, 4, 2)),
        (5, (5.6, 10.0), (pytest.approx(16.8), 3, 2)),
        (4, (5.0, 10.0), (10.0, 2, 1)),
        (2, (5.6, 10.0), (5.6, 1, 1)),
        (1, (5.6, 10.0), (0.0, 0, 0)),
    ],
)
def test_no_instance_of_a_mix_is_idle(slots: int, rates: tuple[float, float], mixed: tuple[float, int, int]) -> None:
    prefill, decode = Division(Role.PREFILL), Division(Role.DECODE)
    assert mix(gpus(1, slots), prefill, rates[0], decode, rates[1]) == mixed


@pytest.mark.parametrize(
    ("nodes", "slots", "first", "second"), [(2, 6, 4, 3), (3, 4, 3, 1), (2, 5, 2, 3), (1, 8, 3, 2)]
)
def test_the_room_for_two_sizes_of_stages_is_exact(nodes: int, slots: int, first: int, second: int) -> None:
    found = room_beside(nodes, slots, first, second)
    for count in range(nodes * (slots // first) + 2):
        exact = [
            others for others in range(nodes * slots + 1)
            if room([slots] * nodes, sorted([first] * count + [second] * others, reverse=True))
        ]  # fmt: skip
        assert (count < len(found)) == bool(exact) and (not exact or found[count] == max(exact))
