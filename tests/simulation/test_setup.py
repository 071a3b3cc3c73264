"""The setup of a simulation: what instances share, and what their options count for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from quire.config import ClusterConfig, EngineConfig
from quire.placement.placement_file import Instances, Placement, Predicted
from quire.simulation.cluster import SimulatedCluster
from quire.simulation.events import Events
from quire.simulation.setup import LINKS, Bandwidths, Setup, tiers_of, ways_of
from quire.timing.latency import LatencyModel, Link
from tests.cli.test_simulate import folder as folder
from tests.cli.test_simulate import four_cores as four_cores
from tests.cli.test_simulate import local as local


@pytest.mark.usefixtures("four_cores")
def test_instances_share_cores_and_memory_as_a_server_s(local: Callable[..., Setup]) -> None:
    automatic = {"cache.memory": "auto"}
    alone = local(**automatic).replicas[0].config
    apart = local(ClusterConfig(prefill=1, decode=2), **automatic).replicas
    assert alone.runtime.threads == 4
    threads = [each.config.runtime.threads for each in apart for _ in range(each.count)]
    assert sorted(map(int, threads)) == [1, 1, 2]
    memories = {each.config.cache.memory for each in apart}
    assert all(int(memory) < int(alone.cache.memory) for memory in memories)


@pytest.mark.usefixtures("four_cores")
def test_a_placement_s_options_count_for_their_role(local: Callable[..., Setup]) -> None:
    instances = (
        Instances("prefill", 1, options={"runtime.threads": 3, "scheduler.token_budget": 256}),
        Instances("decode", 1, options={"runtime.threads": 1}),
    )
    setup = local(ClusterConfig(), Placement(instances, Predicted(1.0, 1.0, "machine", 1.0, 0.9)))
    found = {each.role: each.config for each in setup.replicas}
    assert (found["prefill"].runtime.threads, found["decode"].runtime.threads) == (3, 1)
    assert (found["prefill"].scheduler.token_budget, found["decode"].scheduler.token_budget) == (256, 128)
    assert [*setup.places] == ["prefill-0", "decode-0"]


def test_a_router_has_the_settings_of_its_cluster(local: Callable[..., Setup]) -> None:
    for options, fetches in (
        ({}, True),
        ({"retain.budget": 0.5, "retain.profile_rows": 16}, False),
        ({"cache.share": False}, False),
    ):
        front = local(ClusterConfig(mixed=2, tries=1, timeout=7.0, routing="queue"), **options).front_of(Events())
        assert isinstance(front, SimulatedCluster)
        router = front.router
        assert (router._tries, router._timeout, router._routing) == (1, 7.0, "queue")
        assert router._fetches is fetches, "instances with retention drop rows that others would fetch"


def test_ways_are_measured_where_a_latency_model_has_them() -> None:
    links = {"disk": Link(0.002, 1e8), "shm": Link(0.001, 5e8)}
    model = LatencyModel({}, {"base": 0.01}, (1,), {}, {}, links)
    ways = ways_of([model, dataclasses.replace(model, links={"disk": Link(0.003, 2e8)})])
    assert (ways.disk, ways.bulk, ways.measured) == (Link(0.002, 1e8), Link(0.001, 5e8), {"disk", "shm"})
    assert (ways.pinned, ways_of([], "tcp").bulk) == (LINKS["pinned"], LINKS["tcp"])
    assert ways_of([model], between=10**8).bulk == Link(0.001, 1e8)
    assert ways_of([model], between=10**9).bulk == Link(0.001, 5e8), "the network is no faster than the transport"


def test_tiers_forget_what_was_not_used_for_a_lifetime() -> None:
    config = EngineConfig.from_options({"tiers.memory": "64MiB", "tiers.disk": "folder:64MiB", "cache.lifetime": 30.0})
    assert [(each.name, each.lifetime) for each in tiers_of(config, Bandwidths())] == [("memory", 30.0), ("disk", 30.0)]


def test_an_instance_measures_how_many_rows_saturate_it(local: Callable[..., Setup]) -> None:
    """A step takes 10 ms for up to 128 rows, and 0.1 ms for each further one."""
    flat = LatencyModel({}, {"base": 0.01, "rows_from_128": 1e-4}, (128,), {}, {})
    plan = local(**{"scheduler.token_budget": 512}).replicas[0].plan
    found = dataclasses.replace(plan, latency=flat).capacity
    assert (found.prompt_rows, found.seconds_per_row) == (128, pytest.approx(0.01 / 128))
