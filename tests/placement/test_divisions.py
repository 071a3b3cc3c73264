"""Candidates of a placement: their stages, their number, and the memory that they need."""

from __future__ import annotations

import dataclasses

import pytest

from quire.placement.divisions import Division, Needs, Pair, Role, degrees, divisions, pairs
from tests.planning.test_placement import GB, GIB, cpus, gpus


def test_a_stage_s_gpus_share_a_machine_and_stages_are_as_many_as_layers_and_machines_allow() -> None:
    assert degrees(gpus(1, 8)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert degrees(cpus(1, 8)) == [1, 2, 4, 8] and degrees(cpus(1, 6)) == [1, 2, 3, 4, 6]
    found = divisions(gpus(2, 4), 5, Role.PREFILL)
    most = {tp: max(each.pp for each in found if each.tp == tp) for tp in (1, 2, 3, 4)}
    assert most == {1: 5, 2: 4, 3: 2, 4: 2} and len(found) == len(set(found)) == 13
    # Two stages of 4 GPUs in machines of 6: one in each.
    assert max(each.pp for each in divisions(gpus(2, 6), 99, Role.PREFILL) if each.tp == 4) == 2


def test_the_number_of_candidates_grows_with_machines_and_their_gpus_as_in_the_paper() -> None:
    nodes, each = 4, 8
    for role in Role:
        assert 2 * len(divisions(gpus(nodes, each), 96, role)) <= nodes * each**2
    assert len(pairs(gpus(nodes, each, fast=False), 96)) <= nodes * each**2


def test_segments_of_a_pair_have_equal_stages_and_share_a_machine() -> None:
    found = pairs(gpus(3, 4), 5)
    assert all(each.prefill.pp == each.decode.pp and each.prefill.tp + each.decode.tp <= 4 for each in found)
    shapes = {(each.prefill.tp, each.decode.tp, each.pp) for each in found}
    # Two stages of 1 + 1 GPUs fit into a machine of 4, one of up to 2 + 2 or 1 + 3.
    assert shapes == {
        (first, second, pp)
        for first, second, most in [(1, 1, 5), (1, 2, 3), (2, 1, 3), (2, 2, 3), (1, 3, 3), (3, 1, 3)]
        for pp in range(1, most + 1)
    }
    with pytest.raises(AssertionError, match="different layers"):
        Pair(Division(Role.PREFILL, 1, 2), Division(Role.DECODE, 1, 1))


def test_an_instance_needs_room_for_its_weights_and_the_longest_request() -> None:
    """OPT-66B in 16 bits, 2048 tokens: 132 GB and 4.5 GiB on GPUs of 80 GB."""
    needs = Needs(num_layers=64, weight_bytes=132 * GB, request_bytes=4.5 * GIB)
    cluster = gpus(1, 8)
    fitting = {(each.tp, each.pp) for each in divisions(cluster, 64, Role.DECODE) if not needs.lack(each, cluster)}
    assert (1, 1) not in fitting and {(2, 1), (1, 2)} < fitting
    assert needs.lack(Division(Role.DECODE), cluster) == (
        "127.4GiB are needed (122.9GiB of weights, 4.5GiB for the longest request), and a GPU has 74.51GiB"
    )
    # 66 GB and 4.83 GB / 2 of 68.4159 GB: the memory must be more than what is needed.
    needed = 66 * GB + 2.25 * GIB
    assert needs.lack(Division(Role.DECODE, 2), gpus(1, 8, int(needed)))
    assert not needs.lack(Division(Role.DECODE, 2), gpus(1, 8, int(needed) + 1))
    more = dataclasses.replace(needs, fixed_bytes=0.5 * GIB)
    assert "512MiB beside them" in str(more.lack(Division(Role.DECODE, 2), gpus(1, 8, int(needed) + 1)))


def test_the_largest_stage_decides_and_few_cache_heads_are_copied() -> None:
    needs = Needs(num_layers=4, weight_bytes=40.0, request_bytes=80.0, num_heads=8, num_kv_heads=2)
    uneven = Division(Role.MIXED, 1, 3)  # stages of 2, 1 and 1 layers
    assert needs.lack(uneven, gpus(1, 4, 60)) and not needs.lack(uneven, gpus(1, 4, 61))
    copied = Division(Role.MIXED, 4)  # 10 of weights, and half of the cache
    assert needs.lack(copied, gpus(1, 4, 50)) and not needs.lack(copied, gpus(1, 4, 51))
    assert needs.lack(Division(Role.MIXED, 3), gpus(1, 6)) == "8 heads cannot be divided among 3 GPUs"
    pair = Pair(Division(Role.PREFILL, 4), Division(Role.DECODE, 3))
    assert needs.lack(pair, gpus(1, 8)) and not needs.divides(pair)
