"""A simulated cluster, and one simulated engine alone: both answer requests at the times that latency models say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

from quire.cluster.bodies import InstanceLoad, SequenceJob
from quire.cluster.members import Health, Member
from quire.cluster.messages import ROUTER, Token
from quire.cluster.router import TICK_SECONDS, RoutedRequest, Router
from quire.engine.capacity import MeasuredCapacity
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.engine.request import Request, SequenceState
from quire.errors import QueueFullError, QuireError, RequestError
from quire.simulation.arrivals import ChunkArrivals
from quire.simulation.engine import EngineLoop, EngineOf, StoresOf, no_stores, with_stores
from quire.simulation.events import Events, StepClock
from quire.simulation.instance import SimulatedInstance, SimulatedNetwork
from quire.simulation.outcome import Used
from quire.timing.latency import Link


@dataclass
class Answered:
    """What came of one request. Times in seconds; inf until they are known.

    admitted  when an instance began with its prompt
    taken     when the instance that decodes had its cache; the time of the first token if there is only one
    """

    arrived: float
    num_in: int
    num_out: int
    token_ids: list[int] = field(default_factory=list)
    admitted: float = math.nan
    first: float = math.inf
    taken: float = math.nan
    last: float = math.inf
    cached: dict[str, int] = field(default_factory=dict)
    error: str = ""


Ended = Callable[[Answered], None]


class Front(Protocol):
    """Takes requests."""

    def begin(self, prompt: list[int], num_out: int, ended: Ended) -> Answered:
        """A request arrives now. ended: is called after its last token, or when it has failed."""
        ...

    def used(self) -> tuple[Used, ...]:
        """What the instances have done so far."""
        ...


class Alone:
    """One engine in the server's process.

    overhead  seconds between a client and the engine, for a request and for a token
    """

    def __init__(
        self, events: Events, engine_of: EngineOf, stores_of: StoresOf = no_stores, *, overhead: float = 0.0
    ) -> None:
        self._events, self._overhead = events, overhead
        arrivals, clock = ChunkArrivals(events), StepClock(events)
        self.engine = with_stores(engine_of, clock, arrivals, stores_of(events, arrivals))
        self.loop = EngineLoop(events, self.engine, clock, self._has_stepped)
        self._asked: dict[str, tuple[Answered, Ended]] = {}
        self._waiting: dict[str, Request] = {}
        self._num_asked = 0

    def begin(self, prompt: list[int], num_out: int, ended: Ended) -> Answered:
        """See Front."""
        self._num_asked += 1
        name = f"request-{self._num_asked}"
        answered = Answered(self._events.now, len(prompt), num_out)
        self._asked[name] = answered, ended
        self._events.after(self._overhead, lambda: self.loop.submit(partial(self._add, name, prompt, num_out)))
        return answered

    def _add(self, name: str, prompt: list[int], num_out: int) -> None:
        try:
            check_length(len(prompt), num_out, self.engine.max_context)
            self._waiting[name] = self.engine.add(name, prompt, params_of(num_out))
        except QuireError as error:
            answered, ended = self._asked.pop(name)
            answered.error = str(error)
            ended(answered)

    def _has_stepped(self, outputs: list[RequestOutput]) -> None:
        begun = self.engine.scheduler.manager.tree.now
        for name, request in [*self._waiting.items()]:
            if request.sequences[0].state is not SequenceState.WAITING:
                self._asked[name][0].admitted = begun
                del self._waiting[name]
        if outputs:
            self._events.after(self._overhead, partial(self._tell, outputs))

    def _tell(self, outputs: list[RequestOutput]) -> None:
        now = self._events.now
        for output in outputs:
            answered, ended = self._asked[output.request_id]
            answered.token_ids += output.outputs[0].token_ids
            if answered.first == math.inf:
                answered.first = answered.taken = now
                answered.cached = output.cached_by_tier
            if output.finished:
                answered.last = now
                del self._asked[output.request_id]
                ended(answered)

    def used(self) -> tuple[Used, ...]:
        """See Front."""
        return (_used("engine", "mixed", self.loop),)


@dataclass(frozen=True)
class Place:
    """An instance to simulate.

    capacity   what it measures when it starts
    stores_of  see SimulatedInstance
    """

    name: str
    role: str
    engine_of: EngineOf
    capacity: MeasuredCapacity
    stores_of: StoresOf = no_stores


class SimulatedCluster:
    """The real router over simulated instances.

    hop, bulk                 see Network
    routing, shares, fetches  see Router
    timeout, tries            see Router
    max_queue                 most requests without a first token; further ones fail
    overhead                  seconds between a client and the router, for a request and for a token
    """

    instance: ClassVar[type[SimulatedInstance]] = SimulatedInstance

    def __init__(
        self,
        events: Events,
        places: Sequence[Place],
        *,
        hop: float,
        bulk: Link,
        routing: str = "expected",
        shares: bool = True,
        fetches: bool = True,
        overhead: float = 0.0,
        timeout: float = 60.0,
        tries: int = 4,
        max_queue: int = 1 << 30,
    ) -> None:
        self._events, self._overhead, self._max_queue = events, overhead, max_queue
        self.network = SimulatedNetwork(events, hop, bulk)
        self.network.hearers[ROUTER] = self
        self.router = Router(
            lambda to, message: self.network.send(ROUTER, to, message), timeout=timeout, tries=tries, routing=routing,
            shares=shares, fetches=fetches,
            clock=lambda: events.now, soon=lambda call: events.after(0.0, call),
        )  # fmt: skip
        self.instances: list[SimulatedInstance] = []
        for place in places:
            instance = self.instance(
                self.network, place.name, place.role, place.engine_of, place.capacity, stores_of=place.stores_of,
                timeout=timeout,
            )  # fmt: skip
            self.instances.append(instance)
            self.router.members[place.name] = Member(
                place.name, place.name, place.role, Health.SERVING, instance.ready, seen=0.0
            )
        self._num_asked = 0
        events.after(TICK_SECONDS, self._tick)

    def receive(self, sender: str, message: Any, extents: object) -> None:
        """See Hearer."""
        if isinstance(message, InstanceLoad):
            self.router.handle_load(message)
        else:
            self.router.handle(message)

    def begin(self, prompt: list[int], num_out: int, ended: Ended) -> Answered:
        """See Front."""
        self._num_asked += 1
        answered = Answered(self._events.now, len(prompt), num_out)
        job = SequenceJob(f"request-{self._num_asked}", prompt, asdict(params_of(num_out)), {}, self._num_asked)
        self._events.after(self._overhead, partial(self._route, job, answered, ended))
        return answered

    def _route(self, job: SequenceJob, answered: Answered, ended: Ended) -> None:
        try:
            check_length(len(job.prompt_ids), answered.num_out, min(each.engine.max_context for each in self.instances))
            if self.router.num_waiting >= self._max_queue:
                raise QueueFullError("the queue is full")
        except QuireError as error:
            answered.error = str(error)
            ended(answered)
            return
        requests: list[RoutedRequest] = []

        def tell(item: Token | Exception | None) -> None:
            self._events.after(self._overhead, partial(self._tell, requests, answered, ended, item))

        requests.append(self.router.begin(job, tell))

    def _tell(
        self, requests: list[RoutedRequest], answered: Answered, ended: Ended, item: Token | Exception | None
    ) -> None:
        (request,) = requests
        if isinstance(item, Exception):
            answered.error = str(item)
            ended(answered)
        elif item is None:
            answered.last = self._events.now
            answered.admitted, first = request.admitted, request.first
            answered.taken = max(answered.first, request.handed_over or first or answered.first)
            ended(answered)
        else:
            answered.token_ids += item.output.token_ids
            if answered.first == math.inf:
                answered.first = self._events.now
                answered.cached = {} if item.first is None else item.first.cached_by_tier

    def _tick(self) -> None:
        for member in self.router.members.values():
            member.seen = self._events.now
        self.router.tick()
        self._events.after(TICK_SECONDS, self._tick)

    def used(self) -> tuple[Used, ...]:
        """See Front."""
        return tuple(_used(each.name, each.role, each.loop) for each in self.instances)


def check_length(num_in: int, num_out: int, most: int) -> None:
    """Raises RequestError, as a server does, for a prompt and an answer with more than `most` tokens together."""
    if num_in + num_out > most:
        raise RequestError(f"{num_in} tokens and {num_out} of the answer do not fit into the context of {most}")


def params_of(num_out: int) -> SamplingParams:
    """Of a request whose length is known."""
    return SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True, detokenize=False)


def _used(name: str, role: str, loop: EngineLoop) -> Used:
    return Used(name, role, loop.busy, loop.num_steps, loop.num_out, loop.engine.stats())
