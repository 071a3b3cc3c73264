"""Where Ray puts instances: its test cluster of several nodes in one machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from quire.errors import ConfigError

from ..effort import full_only
from ..ray_cluster import (
    LONG,
    MARK,
    PARAMS,
    PROMPTS,
    SMALL,
    TOKEN,
    command_of,
    ended,
    environment,
    instance,
    on_ray,
    parent_of,
    places,
    serves_anew,
    shared_memory,
    short_folder,
    tokens,
    until,
)

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -c constraints.txt 'ray[default]'"
    ),
]
whole = full_only("it starts Ray")


WATCHFUL = {
    "RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3", "RAY_health_check_initial_delay_ms": "500",
}  # fmt: skip
"""Ray finds a dead node in two seconds, not in twenty."""


class Nodes:
    """Ray's test cluster: a head without cores, one node in zone a, and two in zone b, with two cores each."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "temp_dir": str(folder)},
        )
        self.zones: dict[str, str] = {}
        self.nodes: dict[str, Any] = {}
        for zone in "abb":
            node = self.cluster.add_node(num_cpus=2, labels={"zone": zone})
            self.zones[node.node_id], self.nodes[node.node_id] = zone, node
        self.address: str = self.cluster.address


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    mark = f"{MARK}-{os.getpid()}"
    folder = short_folder()
    memory, on_terminate = shared_memory(), signal.getsignal(signal.SIGTERM)
    with environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, **SMALL}):
        # It would tell the whole machine that this is the cluster to use.
        with environment({MARK: mark, **WATCHFUL}), mock.patch("ray._private.utils.write_ray_address"):
            started = Nodes(Path(folder.name))
        try:
            yield started
        finally:
            started.cluster.shutdown()
            signal.signal(signal.SIGTERM, on_terminate)  # Ray has set its own
            ended(mark)
            folder.cleanup()
            assert shared_memory() <= memory


@whole
def test_pairs_share_a_node(nodes: Nodes) -> None:
    found = places(nodes.address, 3, 3, placement="pairs", cores=1)
    for index in range(3):
        assert found[f"prefill-{index}"] == found[f"decode-{index}"]
    assert len(set(found.values())) == 3


@whole
def test_pairs_that_fit_on_no_node_are_refused_in_time(nodes: Nodes) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="no room for prefill-0 and decode-0 after 1 s, on one node: each needs 2"):
        places(nodes.address, 1, 1, placement="pairs", cores=2, place_seconds=1)
    assert time.monotonic() - begun < 10


@whole
def test_instances_without_pairs_may_be_apart(nodes: Nodes) -> None:
    found = places(nodes.address, 1, 1, placement="pack", cores=2)
    assert found["prefill-0"] != found["decode-0"], "both do not fit on a node"


@whole
def test_packed_instances_share_a_node_and_spread_ones_do_not(nodes: Nodes) -> None:
    assert len(set(places(nodes.address, 1, 1, placement="pack", cores=1).values())) == 1
    assert len(set(places(nodes.address, 1, 2, placement="spread", cores=1).values())) == 3


@whole
def test_labels_choose_nodes(nodes: Nodes) -> None:
    found = places(nodes.address, 1, 2, cores=1, prefill_labels="zone=a", decode_labels="zone=b")
    assert {place: nodes.zones[node] for place, node in found.items()} == {
        "prefill-0": "a", "decode-0": "b", "decode-1": "b"
    }  # fmt: skip


@whole
def test_labels_that_no_node_has_are_refused_in_time(nodes: Nodes) -> None:
    with pytest.raises(ConfigError, match="decode needs nodes with zone=c.*2 cores.*zone=a"):
        places(nodes.address, 1, 1, cores=1, decode_labels="zone=c", place_seconds=1)


@whole
def test_all_cores_are_given_out(nodes: Nodes) -> None:
    assert len(set(places(nodes.address, 1, 2).values())) == 3, "three nodes with two cores each"
    assert len(set(places(nodes.address, 3, 3).values())) == 3, "one core for each"


@whole
def test_more_instances_than_cores_are_refused_in_time(nodes: Nodes) -> None:
    with pytest.raises(ConfigError, match="no room for prefill-0 and .* Add nodes"):
        places(nodes.address, 4, 3, place_seconds=1)


@whole
def test_a_killed_node_is_replaced_by_another_one_and_streams_go_on(
    nodes: Nodes, model: Path, expected: dict[str, list[list[int]]]
) -> None:
    labels = {"prefill_labels": "zone=a", "decode_labels": "zone=b"}
    with on_ray(nodes.address, model, prefill=1, decode=1, cores=2, **labels) as cluster:
        ray_side: Any = cluster.processes
        before = instance(cluster, "decode-0")
        lost = ray_side.node(before["name"])
        assert nodes.zones[lost] == "b" and nodes.zones[ray_side.node(instance(cluster, "prefill-0")["name"])] == "a"

        async def lose_node() -> list[int]:
            found: list[int] = []
            async for delta in cluster.cluster.generate(PROMPTS[1], LONG):
                found += delta.outputs[0].token_ids
                if len(found) == 20:
                    os.kill(parent_of(before["pid"]), signal.SIGKILL)
            return found

        assert [cluster.call(lose_node())] == expected["long"]
        until(lambda: serves_anew(cluster, "decode-0", before), "another node has it", 60)
        moved = ray_side.node(instance(cluster, "decode-0")["name"])
        assert moved != lost and nodes.zones[moved] == "b"
        until(lambda: not command_of(before["pid"]), "the actor of the lost node has ended")
        assert [tokens(each) for each in cluster.generate(PROMPTS, PARAMS)] == expected["prompts"]
