"""When things happen in a simulation: events, caches on their way, and what instances measure first."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.cluster.bodies import PullExtents
from quire.cluster.messages import Attempt
from quire.cluster.outgoing_pages import OutgoingPages
from quire.simulation.arrivals import ChunkArrivals, LateReads, SimulatedDisk
from quire.simulation.cluster import Place, SimulatedCluster
from quire.simulation.engine import Plan, make_engine, with_stores
from quire.simulation.events import Events, StepClock
from quire.simulation.instance import SimulatedInstance, SimulatedNetwork
from quire.simulation.outcome import Outcome
from quire.simulation.simulate import simulate
from quire.timing.latency import LatencyModel, Link
from quire.workload.traces import tokens
from quire.workload.workload import Arrival, Span, Workload
from tests.simulation.test_bulk import LATENCY, plan_of

STEP = 0.01
HOP = 0.0005
ATTEMPT = Attempt(1, 0)


def plan() -> Plan:
    """Every step takes as long."""
    return dataclasses.replace(plan_of(200), latency=LatencyModel({}, {"base": STEP}, (1,), {}, {}))


# Events.


def test_calls_run_by_time_and_those_of_one_time_in_their_order() -> None:
    events, found = Events(), list[tuple[float, str]]()

    def note(name: str) -> None:
        found.append((events.now, name))

    events.at(2.0, partial(note, "c"))
    events.at(1.0, lambda: (note("a"), events.at(0.5, partial(note, "late")), events.after(1.0, partial(note, "d"))))
    events.at(1.0, partial(note, "b"))
    events.run(lambda: False)
    assert found == [(1.0, "a"), (1.0, "b"), (1.0, "late"), (2.0, "c"), (2.0, "d")]


def test_events_end_when_they_are_over() -> None:
    events, found = Events(), list[float]()
    for time in (1.0, 2.0, 3.0):
        events.at(time, lambda: found.append(events.now))
    events.run(lambda: len(found) == 2)
    assert found == [1.0, 2.0] and events.now == 2.0
    events.run(lambda: False)
    assert found == [1.0, 2.0, 3.0]


def test_an_engine_s_clock_is_ahead_while_it_computes() -> None:
    events = Events()
    clock, found = StepClock(events), list[float]()
    events.at(1.0, lambda: (clock.spend(0.5), clock.spend(0.25)))
    for time in (1.5, 1.75, 2.0):
        events.at(time, lambda: found.append(clock()))
    events.run(lambda: False)
    assert found == [1.75, 1.75, 2.0]
    clock.spend(1.0)
    clock.restart()
    assert clock() == 2.0


# Caches on their way.


def test_layers_of_reads_arrive_evenly_and_one_run_after_the_other() -> None:
    events, found = Events(), list[tuple[float, str, int]]()
    reads = LateReads(Link(0.5, 100.0), events, ChunkArrivals(events))
    transfer: Any = SimpleNamespace(ready=np.zeros(4, np.int32))
    for name, size in (("a", 200), ("b", 400)):
        reads.bring(transfer, size, lambda layer, name=name: found.append((events.now, name, layer)))  # type: ignore[misc]
    events.run(lambda: False)
    times = {"a": [1.0, 1.5, 2.0, 2.5], "b": [3.5, 4.5, 5.5, 6.5]}
    assert found == [(time, name, layer) for name in times for layer, time in enumerate(times[name])]


class Receiver(SimulatedInstance):
    """Notes when caches come."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def expect(self, number: int, begun: float, seconds: float, outgoing_pages: OutgoingPages) -> None:
        self.found.append((begun, begun + seconds))

    def receive(self, sender: str, message: Any, extents: Any) -> None:
        pass


@pytest.mark.parametrize(("pairs", "times"), [
    ([("a", "x"), ("a", "x")], [(0.5, 2.5), (2.5, 4.5)]),
    ([("a", "x"), ("a", "y")], [(0.5, 2.5), (2.5, 4.5)]),
    ([("a", "x"), ("b", "x")], [(0.5, 2.5), (2.5, 4.5)]),
    ([("a", "x"), ("b", "y")], [(0.5, 2.5), (0.5, 2.5)]),
    ([("a", "x"), ("b", "x"), ("b", "y")], [(0.5, 2.5), (2.5, 4.5), (4.5, 6.5)]),
])  # fmt: skip
def test_an_instance_sends_and_receives_one_cache_at_a_time(
    pairs: list[tuple[str, str]], times: list[tuple[float, float]]
) -> None:
    events = Events()
    network = SimulatedNetwork(events, HOP, Link(0.5, 100.0), {name: Receiver() for name in "xy"})
    for number, (sender, to) in enumerate(pairs):
        outgoing_pages: Any = SimpleNamespace(page_bytes=[120, 80], done=lambda: None)
        network.carry(sender, to, PullExtents(ATTEMPT, number), outgoing_pages)
    found = [time for name in "xy" for time in network.hearers[name].found]  # type: ignore[attr-defined]
    assert sorted(found) == sorted(times)


def handed_over(
    bulk: Link, requests: list[tuple[float, int, int]], num_decode: int = 1
) -> tuple[Outcome, SimulatedCluster]:
    """Requests by time, tokens of the prompt and of the answer, in a cluster whose instances have one role each."""
    load = Workload("x", [Arrival(at, (Span(n, size),), num_out) for n, (at, size, num_out) in enumerate(requests)])
    made, clusters = plan(), list[SimulatedCluster]()
    roles = ["prefill", *["decode"] * num_decode]
    places = [Place(f"{role}-{n}", role, partial(make_engine, made), made.capacity) for n, role in enumerate(roles)]

    def front(events: Events) -> SimulatedCluster:
        clusters.append(SimulatedCluster(events, places, hop=HOP, bulk=bulk))
        return clusters[0]

    return simulate(load, tokens(load, range(200), 0), front), clusters[0]


@pytest.mark.parametrize(("length", "num_chunks", "num_out"), [(128, 2, 5), (100, 2, 3), (64, 1, 2)])
def test_a_hand_over_delays_the_second_token(length: int, num_chunks: int, num_out: int) -> None:
    """A message each way between the instances, all pages, and a step for each further token."""
    found, _ = handed_over(Link(0.002, 1e6), [(0.0, length, num_out)])
    transfer = 2 * HOP + 0.002 + num_chunks * 64 * plan().sizes.bytes_per_token / 1e6
    assert found.ttft[0] == pytest.approx(2 * HOP + STEP)
    assert found.last[0] - found.first[0] == pytest.approx(transfer + (num_out - 1) * STEP)
    assert found.tpot[0] == pytest.approx(transfer / (num_out - 1) + STEP)


def test_caches_of_one_source_share_its_link() -> None:
    """Two prompts of one step, for two receivers: the second cache comes after the first."""
    found, _ = handed_over(Link(0.002, 1e5), [(0.0, 64, 2), (0.0, 64, 2)], num_decode=2)
    seconds = 64 * plan().sizes.bytes_per_token / 1e5
    first, second = sorted((found.last - found.first).tolist())
    assert second - first == pytest.approx(seconds - 0.002, abs=0.003)


def test_a_layer_that_takes_long_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of 8 s each, longer than receivers wait for a sign of life."""
    num_bytes = 2 * 64 * plan().sizes.bytes_per_token
    sent, carry = list[str](), SimulatedNetwork.carry

    def noted(network: SimulatedNetwork, sender: str, to: str, message: Any, outgoing_pages: OutgoingPages) -> None:
        sent.append(to)
        carry(network, sender, to, message, outgoing_pages)

    monkeypatch.setattr(SimulatedNetwork, "carry", noted)
    found, cluster = handed_over(Link(0.002, num_bytes / 16), [(0.0, 128, 3)])
    counts = cluster.instances[1].engine.stats()["tiers"]["neighbour"]
    assert sent == ["decode-1"]
    assert (counts["num_pulls"], counts["bytes_read"], counts["num_failed"]) == (1, num_bytes, 0)
    assert found.last[0] - found.first[0] == pytest.approx(16 + 0.002 + 2 * HOP + 2 * STEP)


# What an engine measures first.


def test_an_engine_with_stores_knows_what_prompts_cost() -> None:
    made = plan_of(200)
    events = Events()
    arrivals, clock = ChunkArrivals(events), StepClock(events)
    disk = SimulatedDisk("disk", 1 << 20, Link(0.001, 1e6), events, arrivals)
    engine = with_stores(partial(make_engine, made), clock, arrivals, [disk])
    costs = engine.scheduler.manager.fetching.costs
    seconds = LATENCY.coefficients["base"] + LATENCY.coefficients["rows_from_1"] * 128
    assert costs.prefill(0, 128) == pytest.approx(seconds, rel=0.3) and costs.speed == 1e6
    assert clock() == 0.0 and engine.stats()["steps"] == 0 and not engine.has_work
