"""Which instances share a machine, and what each needs there."""

from __future__ import annotations

import pytest

from quire.cluster.colocation import InstanceResources, colocated_groups, most_cores


def roles(prefill: int, decode: int, mixed: int = 0) -> dict[str, str]:
    counts = {"prefill": prefill, "decode": decode, "mixed": mixed}
    return {f"{role}-{index}": role for role, count in counts.items() for index in range(count)}


def test_a_pair_computes_prompts_and_decodes() -> None:
    assert colocated_groups(roles(2, 2), "pairs") == [["prefill-0", "decode-0"], ["prefill-1", "decode-1"]]


def test_the_rest_of_a_role_is_dealt_out_to_the_pairs() -> None:
    assert colocated_groups(roles(3, 2, 1), "pairs") == [
        ["prefill-0", "prefill-2", "decode-0"],
        ["prefill-1", "decode-1"],
        ["mixed-0"],
    ]
    assert colocated_groups(roles(0, 1, 1), "pairs") == [["decode-0"], ["mixed-0"]]


def test_without_pairs_all_are_placed_together() -> None:
    for placement in ("pack", "spread"):
        assert colocated_groups(roles(1, 2), placement) == [["prefill-0", "decode-0", "decode-1"]]


@pytest.mark.parametrize(
    ("sizes", "cpus", "cores"),
    [
        ([1, 1], [4], 2),
        ([1, 1, 1], [8, 8], 4),
        ([2, 2], [8, 8], 4),
        ([2], [3, 3], 1),
        ([1], [16, 64], 64),
        ([1, 1, 1], [2], 1),
        ([1], [], 1),
        ([3, 1], [6, 0, 4], 2),
    ],
)
def test_every_instance_gets_as_many_cores_as_all_can_have(sizes: list[int], cpus: list[int], cores: int) -> None:
    assert most_cores(sizes, cpus) == cores


def test_a_bundle_has_only_what_is_needed() -> None:
    assert InstanceResources(2, 0, 0, {}).bundle() == {"CPU": 2.0}
    assert InstanceResources(2, 1, 512, {}).bundle() == {"CPU": 2.0, "GPU": 1.0, "memory": 512.0}


def test_an_error_says_what_instances_need() -> None:
    needs = InstanceResources(1, 2, 3 << 30, {"decode": {"zone": "b"}})
    assert needs.described(["prefill", "decode"]) == (
        "each needs 1 core, 2 GPUs, 3.00 GiB of memory; decode needs nodes with zone=b"
    )
