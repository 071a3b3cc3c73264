"""A simulated instance of a cluster: the real agent and attempts around a simulated engine, on connections that take
time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from quire.cluster.agent import Agent
from quire.cluster.attempt_states import deadlines_within
from quire.cluster.bodies import InstanceReady, PullExtents
from quire.cluster.engine_attempts import EngineAttempts, Notice
from quire.cluster.outgoing_pages import OutgoingPages
from quire.cluster.peer_store import PeerStore, Pull
from quire.engine.capacity import MeasuredCapacity
from quire.engine.outputs import RequestOutput
from quire.simulation.arrivals import ChunkArrivals
from quire.simulation.engine import EngineLoop, EngineOf, StoresOf, no_stores, with_stores
from quire.simulation.events import Events, StepClock
from quire.stores.signer import SECRET_BYTES, ExtentSigner
from quire.timing.latency import Link

SEAL = ExtentSigner(bytes(SECRET_BYTES))

PART_SECONDS = 1.0
"""Bytes of a layer that takes longer count in parts of about this time: receivers ask again if nothing comes."""


class Hearer(Protocol):
    """Whoever gets messages."""

    def receive(self, sender: str, message: Any, extents: Iterator[memoryview]) -> None:
        """A message has come."""
        ...


@dataclass(eq=False)
class SimulatedNetwork:
    """Messages between processes, and caches that travel. An instance sends one cache at a time, and receives one.

    Caches travel in the order in which they are sent: one that waits for its receiver holds up those after it. What
    instances of one machine share beyond that, and messages behind a cache, are left out.

    hop    seconds of a message
    bulk   how fast caches leave an instance, and how fast they come to one
    """

    events: Events
    hop: float
    bulk: Link
    hearers: dict[str, Hearer] = field(default_factory=dict)
    _sends_until: dict[str, float] = field(default_factory=dict)
    _receives_until: dict[str, float] = field(default_factory=dict)

    def send(self, sender: str, to: str, message: Any) -> None:
        """Sends a message."""
        self.events.after(self.hop, partial(self._deliver, sender, to, message))

    def carry(self, sender: str, to: str, message: PullExtents, outgoing_pages: OutgoingPages) -> None:
        """Sends pages, layer by layer, and then the message that they have come."""
        receiver, sizes = self.hearers[to], outgoing_pages.page_bytes
        assert isinstance(receiver, SimulatedInstance), "pages go to instances"
        free_at = max(self._sends_until.get(sender, 0.0), self._receives_until.get(to, 0.0))
        begun = max(self.events.now + self.bulk.latency, free_at)
        seconds = sum(sizes) / self.bulk.bytes_per_second
        self._sends_until[sender] = self._receives_until[to] = end = begun + seconds
        receiver.expect(message.pull, begun, seconds, outgoing_pages)
        self.events.at(end, outgoing_pages.done)
        self.events.at(end, partial(self._deliver, sender, to, message))

    def _deliver(self, sender: str, to: str, message: Any) -> None:
        self.hearers[to].receive(sender, message, iter(()))


class Parted(PeerStore):
    """A peer store whose extents were noted by layer, or in smaller parts, before the message about them comes."""

    def __init__(self, signer: ExtentSigner) -> None:
        super().__init__(signer)
        self._ahead: Counter[int] = Counter()  # by pull: bytes that were noted before their layer

    def arrive(self, number: int, extents: Iterator[memoryview]) -> bool:
        """They were whole."""
        return True

    def note_part(self, number: int, num_bytes: int) -> None:
        """Bytes of the next layer of a pull have come."""
        if (pull := self.find_pull(number)) is not None:
            super()._note_extent(pull, num_bytes)
            self._ahead[number] += num_bytes

    def _note_extent(self, pull: Pull, num_bytes: int) -> None:
        super()._note_extent(pull, num_bytes - self._ahead.pop(pull.number, 0))


class _Links:
    """What an agent asks of its connections."""

    def __init__(self, network: SimulatedNetwork, name: str) -> None:
        self._network, self._name = network, name

    def send(self, to: str, message: Any, bulk: OutgoingPages | None = None) -> bool:
        if bulk is None:
            self._network.send(self._name, to, message)
        else:
            self._network.carry(self._name, to, message, bulk)
        return True

    def learn(self, name: str, address: str) -> None:
        """Does nothing: all instances are connected."""

    def forget(self, name: str) -> None:
        """Does nothing: all instances are connected."""


class SimulatedInstance:
    """An engine, its attempts and an agent.

    stores_of  makes its stores beside those of all instances
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        name: str,
        role: str,
        engine_of: EngineOf,
        capacity: MeasuredCapacity,
        *,
        stores_of: StoresOf = no_stores,
        timeout: float = 60.0,
    ) -> None:
        self.name, self.role = name, role
        self._events = events = network.events
        self.arrivals = ChunkArrivals(events)
        self.peer_store = Parted(SEAL)
        clock = StepClock(events)
        stores = [*stores_of(events, self.arrivals), self.peer_store]
        self.engine = engine = with_stores(engine_of, clock, self.arrivals, stores)
        if role == "prefill":
            engine.scheduler.policy.prompt_rows = capacity.prompt_rows
        self.loop = EngineLoop(events, engine, clock, self._has_stepped)
        self._agent = Agent(
            name, _Links(network, name), self.peer_store, self.loop.submit,  # type: ignore[arg-type]
            deadlines_within(timeout), clock=lambda: events.now,
        )  # fmt: skip
        self._engine_attempts = EngineAttempts(engine, self.peer_store, SEAL, self._notice, self.loop.submit)
        self.ready = InstanceReady(
            name, "", capacity.prompt_rows, capacity.batch, engine.limits,
            capacity.seconds_per_row, capacity.seconds_per_step,
            cache_bytes=engine.scheduler.manager.stats()["bytes_total"], namespace=engine.namespace,
        )  # fmt: skip
        self._timer = math.inf
        network.hearers[name] = self
        self._agent.begin(self._engine_attempts)
        self._plan()

    def receive(self, sender: str, message: Any, extents: Iterator[memoryview]) -> None:
        """See Hearer."""
        self._agent.receive(sender, message, extents)
        self._turn()

    def expect(self, number: int, begun: float, seconds: float, outgoing_pages: OutgoingPages) -> None:
        """The pages of a pull are on their way, for some seconds."""
        pull = self.peer_store.find_pull(number)
        if pull is not None:
            count = len(pull.transfer.ready)
            times = [begun + seconds * (layer + 1) / count for layer in range(count)]
            self.arrivals.bring(pull.transfer, times, self.unload(pull, outgoing_pages))
            parts = math.ceil(seconds / count / PART_SECONDS)
            note = partial(self.peer_store.note_part, number, sum(outgoing_pages.page_bytes) // count // max(1, parts))
            for part in range(parts * count):
                if part % parts:
                    self._events.at(begun + seconds * part / parts / count, note)

    def unload(self, pull: Pull, outgoing_pages: OutgoingPages) -> Callable[[int], None]:
        """What happens when a layer arrives."""
        of_layer = [size // len(pull.transfer.ready) for size in outgoing_pages.page_bytes]
        return lambda layer: self.peer_store.note_layer(pull, layer, of_layer)

    def _has_stepped(self, outputs: list[RequestOutput]) -> None:
        self._engine_attempts.has_stepped(outputs)

    def _notice(self, notices: list[Notice]) -> None:
        self._agent.notice(notices)
        self._turn()

    def _turn(self) -> None:
        self._agent.turn(0.0)
        self._plan()

    def _plan(self) -> None:
        if (due := self._agent.timers.next) < self._timer:
            self._timer = due
            self._events.at(due, partial(self._tick, due))

    def _tick(self, planned: float) -> None:
        if planned == self._timer:
            self._timer = math.inf
            self._turn()
