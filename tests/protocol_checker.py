"""Model checker for the protocol of a hand-over: every order of events of a small system, with the real code.

    python -m tests.protocol_checker --requests 2 --crashes 1 --losses 1 --repeats 1

The system has a router, two instances of which one computes prompts and one decodes, some requests with answers of a
few tokens, and messages under way. Messages of a request between two processes arrive in order, as on a connection; all
others in any order. The numbers above say how many messages are lost, how many arrive twice, and how often an instance
fails and comes back with nothing. A deadline ends when nothing else can happen to its request, and `early` times before
that.

No state may answer a position twice or out of order, answer after the end, decode from half a cache, or fail while
there are tries. From every state there is a path on which all requests end; then nobody holds anything. No path has a
cycle.

Requests share room and crashes, and nothing else: every message belongs to one attempt. The checker works in two steps.
The first step visits all states of one request. Other requests may take the room or leave it at any moment. Each state
gets a kind. States of one kind can do the same things, and these lead to the same kinds again. For example, a state
whose last messages can only be dropped has the kind of the state without them. The second step visits all combinations
of kinds that several requests reach together, with shared room and shared crashes. (Kinds are the classes of a
branching bisimulation: van Glabbeek and Weijland, J. ACM 43(3), 1996. To replace each part of a system by such classes
is called compositional minimization.)

The first step follows some orders of events that no number of requests reaches, so it may report a violation that never
happens. It misses none.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from quire.cluster import protocol
from quire.cluster.messages import (
    CLIENT,
    ROUTER,
    Abort,
    Admitted,
    Attempt,
    Begin,
    CachePart,
    Cancel,
    Compute,
    Expired,
    Failed,
    InstanceDown,
    ManifestRequest,
    PartsRequest,
    Receive,
    Token,
    TokenSampled,
)
from quire.cluster.protocol import ReceiverPhase, RequestPhase, SourcePhase
from tests.protocol_table import NO_TEXT

SOURCE, RECEIVER, NOBODY = "p", "d", "nobody"
PAIRS = (
    (ROUTER, SOURCE), (ROUTER, RECEIVER), (SOURCE, ROUTER), (RECEIVER, ROUTER), (SOURCE, RECEIVER), (RECEIVER, SOURCE),
    (NOBODY, ROUTER),
)  # fmt: skip
NUMBER = {pair: number for number, pair in enumerate(PAIRS)}

GOES_ON, GOES_WRONG, STUCK = "goes on", "goes wrong", "stuck"
SOURCE_ROOM, RECEIVER_ROOM = "room of p", "room of d"


class Violation(Exception):
    """A forbidden state was reached. The message has the events that lead to it."""


class Envelope(NamedTuple):
    """A message under way. is_true: whether its sender has what it says."""

    to: str
    sender: str
    message: Any
    is_true: bool = True


class Budget(NamedTuple):
    """What may still go wrong."""

    crashes: int
    losses: int
    repeats: int
    early: int
    aborts: int


NOTHING_GOES_WRONG = Budget(0, 0, 0, 0, 0)


def divided(budget: Budget, requests: int) -> list[tuple[Budget, ...]]:
    """All divisions of a budget among requests. Every crash happens to all of them."""
    ways = [
        [counts for counts in itertools.product(range(total + 1), repeat=requests) if sum(counts) == total]
        for total in budget[1:]
    ]
    return [
        tuple(Budget(budget.crashes, *counts) for counts in zip(*way, strict=True)) for way in itertools.product(*ways)
    ]


class SystemState(NamedTuple):
    """A request, and all that is under way for it. The states of its parts are indices into `ModelChecker.items`, so
    that a state of the system is small and compares fast.

    route       the router's state
    client      tokens that the client has, and whether the answer has ended
    sources     of attempts at the source, rising
    receivers   of attempts at the receiver, rising
    envelopes     by pair of processes, in the order of arrival
    arrived     (attempt, part) that a receiver truly has
    budget      what may still go wrong
    went_wrong  whether something has
    has         parts that the receiver has before
    """

    route: int
    client: tuple[int, bool]
    sources: tuple[int, ...]
    receivers: tuple[int, ...]
    envelopes: tuple[tuple[int, ...], ...]
    arrived: frozenset[Any]
    budget: Budget
    went_wrong: bool
    has: frozenset[int]

    def spend(self, name: str) -> SystemState:
        """With one thing less that may go wrong."""
        budget = self.budget._replace(**{name: getattr(self.budget, name) - 1})
        return self._replace(budget=budget, went_wrong=True)


class Event(NamedTuple):
    """kind: deliver, lose, repeat, begin, source, receiver, expire, crash or abort.

    label  what it means to the other requests: GOES_ON and GOES_WRONG, nothing; SOURCE_ROOM and RECEIVER_ROOM, it needs
           room; STUCK, it happens only when no request can go on. All other labels are crashes, which happen to all
           requests at once
    """

    kind: str
    what: Any = None
    more: Any = None
    label: str = GOES_ON


class Observation(NamedTuple):
    """What other requests, and the checks of all of them, see of a state.

    source_room    attempts that have memory of the source
    receiver_room  attempts that have memory of the receiver
    end            phase of the route and number of tokens, if nobody holds anything any more
    has_failed     whether the request has
    went_wrong     whether anything has gone wrong
    """

    source_room: int
    receiver_room: int
    end: tuple[str, int] | None
    has_failed: bool
    went_wrong: bool


class EquivalenceClass(NamedTuple):
    """States of one request that no check can distinguish. steps: labels, and the kinds that follow."""

    observation: Observation
    steps: frozenset[tuple[str, int]]


class ModelChecker:
    """All states that are reachable from the first ones.

    code    the protocol, or a changed one
    room    attempts that each instance has memory for
    parts   of every cache
    has     parts that the receiver has of every second request
    alone   whether later attempts have no source: their receiver computes the prompt
    most    number of states after which it gives up
    merges  whether equivalent states are visited once
    """

    def __init__(
        self,
        *,
        requests: int = 1,
        tokens: int = 2,
        tries: int = 2,
        budget: Budget = NOTHING_GOES_WRONG,
        room: int = 1,
        parts: int = 1,
        has: int = 0,
        alone: bool = False,
        most: int = 2_000_000,
        code: Any = protocol,
        merges: bool = True,
    ) -> None:
        self.code, self.tokens, self.room, self.most, self.alone = code, tokens, room, most, alone
        self.merges, self.parts, self.has_others = merges, frozenset(range(parts)), requests > 1
        self.items: list[Any] = []
        self._numbers: dict[Any, int] = {}
        route = self.number(protocol.RequestState(0, tries))
        self._firsts = [
            tuple(
                SystemState(route, (0, False), (), (), ((),) * len(PAIRS), frozenset(), each, False,
                      frozenset(range(has if number % 2 else 0)))
                for number, each in enumerate(budgets)
            )
            for budgets in divided(budget, requests)
        ]  # fmt: skip
        self.classes: list[EquivalenceClass] = []
        self._class_numbers: dict[Any, int] = {}
        self.class_of: dict[SystemState, int] = {}
        self.outcomes: set[tuple[tuple[str, int], ...]] = set()
        self._before: dict[tuple[int, ...], Any] = {}
        self.num_steps = 0

    def number(self, item: Any) -> int:
        """The number of a state or letter."""
        found = self._numbers.setdefault(item, len(self.items))
        if found == len(self.items):
            self.items.append(item)
        return found

    # ---- what can happen to a request ------------------------------------------------------------------------------

    def events(self, system: SystemState) -> list[Event]:
        """All that can happen next."""
        budget, items = system.budget, self.items
        found: list[Event] = []
        for channel, envelopes in enumerate(system.envelopes):
            for place, number in enumerate(envelopes):
                is_down = isinstance(items[number].message, InstanceDown)
                if place and not is_down:
                    continue
                found.append(Event("deliver", (channel, place)))
                if not is_down:
                    found += [Event("lose", (channel, place), label=GOES_WRONG)] * (budget.losses > 0)
                    found += [Event("repeat", (channel, place), label=GOES_WRONG)] * (budget.repeats > 0)
        route = items[system.route]
        if route.phase is RequestPhase.QUEUED:
            found.append(Event("begin"))
        sources, receivers = [items[each] for each in system.sources], [items[each] for each in system.receivers]
        found += self._at_source(sources)
        found += self._at_receiver(receivers, system.has)
        # The others may have the room at any time.
        certain = {GOES_ON} if self.has_others else {GOES_ON, SOURCE_ROOM, RECEIVER_ROOM}
        goes_on = any(event.label in certain for event in found)
        waiting = [("route", 0, route)] + [("source", each.attempt, each) for each in sources]
        waiting += [("receiver", each.attempt, each) for each in receivers]
        waiting = [each for each in waiting if self.code.has_deadline(each[2])]
        # If everybody waits for room, somebody's time is over first.
        needs_room = any(state.phase in (SourcePhase.QUEUED, ReceiverPhase.QUEUED) for state in (*sources, *receivers))
        for role, what, _ in waiting:
            if not goes_on:
                found.append(Event("expire", (role, what), False, STUCK if needs_room else GOES_ON))
            if budget.early:
                found.append(Event("expire", (role, what), True, GOES_WRONG))
        if budget.aborts and not system.client[1]:
            found.append(Event("abort", label=GOES_WRONG))
        if budget.crashes:
            for instance, fate in itertools.product((SOURCE, RECEIVER), ("lost", "left")):
                found.append(Event("crash", instance, fate, f"{instance} fails, what is on its way there is {fate}"))
        return found

    def _at_source(self, states: list[Any]) -> Iterator[Event]:
        has_room = _used(states) < self.room
        for state in states:
            if state.phase is SourcePhase.QUEUED and has_room:
                yield Event("source", state.attempt, Admitted(), SOURCE_ROOM)
            elif state.phase is SourcePhase.RUNNING:
                yield Event("source", state.attempt, _sampled(state, state.start + 1 == self.tokens, self.parts))

    def _at_receiver(self, states: list[Any], has: frozenset[int]) -> Iterator[Event]:
        has_room = _used(states) < self.room
        for state in states:
            if state.phase is ReceiverPhase.QUEUED and has_room:
                yield Event("receiver", state.attempt, Admitted(has), RECEIVER_ROOM)
            elif state.phase is ReceiverPhase.RUNNING:
                yield Event("receiver", state.attempt, _sampled(state, state.num_tokens + 1 == self.tokens))

    # ---- what follows ----------------------------------------------------------------------------------------------

    def after(self, system: SystemState, event: Event) -> SystemState:
        """The state after an event. Raises Violation."""
        kind, what, more, _ = event
        match kind:
            case "deliver" | "lose" | "repeat":
                channel, place = what
                envelopes = system.envelopes[channel]
                envelope = self.items[envelopes[place]]
                if kind == "repeat":
                    return self._arrive(system.spend("repeats"), envelope)
                rest = (
                    *system.envelopes[:channel],
                    envelopes[:place] + envelopes[place + 1 :],
                    *system.envelopes[channel + 1 :],
                )
                system = system._replace(envelopes=rest)
                return system.spend("losses") if kind == "lose" else self._arrive(system, envelope)
            case "begin":
                is_alone = self.alone and self.items[system.route].number > 0
                return self._route(system, Begin("" if is_alone else SOURCE, RECEIVER))
            case "abort":
                return self._route(system.spend("aborts"), Abort())
            case "source":
                return self._source(system, what, "", more)
            case "receiver":
                return self._receiver(system, what, more)
            case "expire":
                role, which = what
                system = system.spend("early") if more else system
                if role == "route":
                    return self._route(system, Expired())
                return (
                    self._source(system, which, "", Expired())
                    if role == "source"
                    else self._receiver(system, which, Expired())
                )
        return self._crashed(system, what, are_lost=more == "lost")

    def _crashed(self, system: SystemState, instance: str, *, are_lost: bool) -> SystemState:
        """An instance loses its states, and perhaps what is on its way to it. The router hears of it some time."""
        envelopes = system.envelopes
        if are_lost:
            envelopes = tuple(() if PAIRS[number][1] == instance else each for number, each in enumerate(envelopes))
        is_running = self.items[system.route].phase is RequestPhase.RUNNING
        envelopes = self._posted(envelopes, [Envelope(ROUTER, NOBODY, InstanceDown(instance))] * is_running)
        system = system.spend("crashes")._replace(envelopes=envelopes)
        if instance == SOURCE:
            return system._replace(sources=())
        return system._replace(receivers=(), arrived=frozenset())

    def _arrive(self, system: SystemState, envelope: Envelope) -> SystemState:
        if envelope.to == ROUTER:
            return self._route(system, envelope.message)
        if envelope.to == SOURCE:
            return self._source(system, envelope.message.attempt, envelope.sender, envelope.message)
        return self._receiver(system, envelope.message.attempt, envelope.message, is_true=envelope.is_true)

    def _route(self, system: SystemState, event: Any) -> SystemState:
        before = self.items[system.route]
        after, sent = self.code.advance_request(before, event)
        has_failed = after.phase is RequestPhase.FAILED and before.phase is not RequestPhase.FAILED
        if has_failed and after.tries and not isinstance(event, Abort):
            raise Violation("a request fails although there are tries")
        client = system.client
        for to, message in sent:
            client = self._answered(*client, message) if to == CLIENT else client
        envelopes = self._posted(
            system.envelopes, [Envelope(to, ROUTER, message) for to, message in sent if to != CLIENT]
        )
        return system._replace(route=self.number(after), client=client, envelopes=envelopes)

    def _answered(self, count: int, is_ended: bool, message: Any) -> tuple[int, bool]:
        if is_ended:
            raise Violation(f"an answer goes on after its end: {message}")
        if isinstance(message, Failed):
            return count, True
        assert isinstance(message, Token)
        if message.position != count:
            raise Violation(f"a client has {count} tokens and gets number {message.position}")
        if message.is_last != (count + 1 == self.tokens):
            raise Violation(f"an answer ends with {count + 1} tokens")
        return count + 1, message.is_last

    def _source(self, system: SystemState, attempt: Attempt, sender: str, event: Any) -> SystemState:
        number = self._find(system.sources, attempt)
        before = None if number is None else self.items[number]
        after, sent = self.code.advance_source(before, sender, event)
        envelopes = [Envelope(to, SOURCE, message, _has(before, message)) for to, message in sent]
        sources = self._changed(system.sources, number, after)
        return system._replace(sources=sources, envelopes=self._posted(system.envelopes, envelopes))

    def _receiver(self, system: SystemState, attempt: Attempt, event: Any, *, is_true: bool = True) -> SystemState:
        number = self._find(system.receivers, attempt)
        before = None if number is None else self.items[number]
        arrived = system.arrived
        is_pulling = before is not None and before.phase is ReceiverPhase.PULLING
        if is_true and is_pulling and isinstance(event, CachePart):
            arrived |= {(attempt, event.part)}
        after, sent = self.code.advance_receiver(before, event)
        if (
            after is not None
            and after.phase is ReceiverPhase.RUNNING
            and (before is None or before.phase != after.phase)
        ):
            lacking = {(attempt, each) for each in self.parts - system.has} - arrived
            if after.source and lacking:
                raise Violation(f"a receiver decodes without {sorted(map(str, lacking))}")
        if after is None or after.phase is ReceiverPhase.ENDED:
            arrived = frozenset(each for each in arrived if each[0] != attempt)
        envelopes = self._posted(system.envelopes, [Envelope(to, RECEIVER, message) for to, message in sent])
        receivers = self._changed(system.receivers, number, after)
        return system._replace(receivers=receivers, arrived=arrived, envelopes=envelopes)

    def _find(self, numbers: tuple[int, ...], attempt: Attempt) -> int | None:
        return next((number for number in numbers if self.items[number].attempt == attempt), None)

    def _changed(self, numbers: tuple[int, ...], before: int | None, after: Any) -> tuple[int, ...]:
        kept = [number for number in numbers if number != before]
        return tuple(sorted(kept if after is None else [*kept, self.number(after)]))

    def _posted(self, envelopes: tuple[tuple[int, ...], ...], more: list[Envelope]) -> tuple[tuple[int, ...], ...]:
        for envelope in more:
            channel = NUMBER[envelope.sender, envelope.to]
            envelopes = (*envelopes[:channel], (*envelopes[channel], self.number(envelope)), *envelopes[channel + 1 :])
        return envelopes

    # ---- all states of a request -----------------------------------------------------------------------------------

    def plain(self, system: SystemState) -> SystemState:
        """The canonical form of a state: without messages that change nothing whenever they arrive."""
        if not self.merges:
            return system
        envelopes = tuple(
            tuple(each for each in queue if not self._is_irrelevant(system, each)) for queue in system.envelopes
        )
        return system if envelopes == system.envelopes else system._replace(envelopes=envelopes)

    def _is_irrelevant(self, system: SystemState, number: int) -> bool:
        """Whether a letter changes nothing, now and later. Now: with the code that is explored. Later: it is about an
        attempt that has ended where it arrives, and that nothing under way can begin again.
        """
        return self._is_late(system, number) and self._changes_nothing(system, self.items[number])

    def _changes_nothing(self, system: SystemState, envelope: Envelope) -> bool:
        try:
            return self._arrive(system, envelope) == system
        except Violation:
            return False

    def _is_late(self, system: SystemState, number: int) -> bool:
        envelope = self.items[number]
        message = envelope.message
        if envelope.to == ROUTER:
            state = self.items[system.route]
            if state.phase in (RequestPhase.ENDED, RequestPhase.FAILED) or isinstance(message, InstanceDown):
                return state.phase in (RequestPhase.ENDED, RequestPhase.FAILED)
            return bool(message.attempt.number < state.number)
        if isinstance(message, Cancel | Compute | Receive | ManifestRequest | PartsRequest):
            return False  # these are answered, or remembered after a crash
        states, begins = (
            (system.sources, Compute | ManifestRequest) if envelope.to == SOURCE else (system.receivers, Receive)
        )
        found = self._find(states, message.attempt)
        if found is not None and self.items[found].phase not in (SourcePhase.ENDED, ReceiverPhase.ENDED):
            return False
        under_way = (self.items[each].message for queue in system.envelopes for each in queue)
        return not any(isinstance(each, begins) and each.attempt == message.attempt for each in under_way)

    def _visit(self, first: SystemState) -> bool:
        """Finds the kinds of all states that are reachable from one, depth first: successors before predecessors.
        Returns whether there are fewer states than `most`. Raises Violation.
        """
        way = [] if first in self.class_of else [_Step(first, iter(self.events(first)))]
        on_the_way = {step.system for step in way}
        while way:
            step = way[-1]
            event = step.event = next(step.events, None)
            if event is None:
                way.pop()
                on_the_way.discard(step.system)
                found = self.class_of[step.system] = self._classify(step)
                if way:
                    way[-1].add(found)
                continue
            self.num_steps += 1
            try:
                after = self.plain(self.after(step.system, event))
                if after == step.system:
                    continue
                if after in on_the_way:
                    raise Violation("a way leads in a circle")
            except Violation as violation:
                trace = "\n  ".join(self._describe(each.system, each.event) for each in way)
                raise Violation(f"{violation}, after\n  {trace}") from None
            if after in self.class_of:
                step.add(self.class_of[after])
                continue
            if len(self.class_of) + len(way) >= self.most:
                return False
            way.append(_Step(after, iter(self.events(after))))
            on_the_way.add(after)
        return True

    def _classify(self, step: _Step) -> int:
        """The number of the kind of a state whose steps are known."""
        system = step.system
        sources = [self.items[each] for each in system.sources]
        receivers = [self.items[each] for each in system.receivers]
        phase = self.items[system.route].phase
        holds = any(each.phase not in (SourcePhase.ENDED, ReceiverPhase.ENDED) for each in (*sources, *receivers))
        is_over = phase in (RequestPhase.ENDED, RequestPhase.FAILED) and system.client[1] and not holds
        end = (phase.value, system.client[0]) if is_over else None
        observation = Observation(
            _used(sources), _used(receivers), end, phase is RequestPhase.FAILED, system.went_wrong
        )
        steps = frozenset(step.steps)
        if not self.merges:
            self.classes.append(EquivalenceClass(observation, steps))
            return len(self.classes) - 1
        for label, target in step.steps:
            following = self.classes[target]
            # A silent step: the state after it looks the same, and has all other steps too.
            if (
                label == GOES_ON
                and following.observation == observation
                and steps - {(label, target)} <= following.steps
            ):
                return target
        found = self._class_numbers.setdefault(EquivalenceClass(observation, steps), len(self.classes))
        if found == len(self.classes):
            self.classes.append(EquivalenceClass(observation, steps))
        return found

    # ---- all states of all requests --------------------------------------------------------------------------------

    def explore(self) -> bool:
        """Visits all states, and returns whether they were fewer than `most`. Raises Violation."""
        if not all(self._visit(self.plain(system)) for systems in self._firsts for system in systems):
            return False
        return all(self._visit_together(tuple(self.plain(each) for each in systems)) for systems in self._firsts)

    def _visit_together(self, firsts: tuple[SystemState, ...]) -> bool:
        """As `_visit`, of all requests. The order of requests does not count."""
        first = tuple(sorted(self.class_of[each] for each in firsts))
        still_open = [] if first in self._before else [first]
        self._before.setdefault(first, (firsts, ()))
        while still_open:
            classes = still_open.pop()
            for moves in self._moves(classes):
                self.num_steps += 1
                after = list(classes)
                for place, _, target in moves:
                    after[place] = target
                following = tuple(sorted(after))
                if following not in self._before:
                    self._before[following] = (
                        classes,
                        tuple((label, classes[place], to) for place, label, to in moves),
                    )
                    still_open.append(following)
            if self.num_states >= self.most:
                return False
        return True

    def _moves(self, numbers: tuple[int, ...]) -> list[list[tuple[int, str, int]]]:
        """What can happen: of each request that it happens to its place, the label, and the kind that follows."""
        classes = [self.classes[number] for number in numbers]
        observation = [kind.observation for kind in classes]
        if any(each.has_failed for each in observation) and not any(each.went_wrong for each in observation):
            self._violated(numbers, "a request fails and nothing went wrong")
        possible = {GOES_ON, GOES_WRONG}
        possible |= {SOURCE_ROOM} if sum(each.source_room for each in observation) < self.room else set()
        possible |= {RECEIVER_ROOM} if sum(each.receiver_room for each in observation) < self.room else set()
        all_moves = [(place, *step) for place, kind in enumerate(classes) for step in kind.steps]
        moves = [[each] for each in all_moves if each[1] in possible]
        if all(each[1] == GOES_WRONG for (each,) in moves):
            stuck = [[each] for each in all_moves if each[1] == STUCK]
            if not stuck:
                self._check_end(numbers)
            moves += stuck
        crashes = {each[1] for each in all_moves} - {GOES_ON, GOES_WRONG, SOURCE_ROOM, RECEIVER_ROOM, STUCK}
        return moves + [[each for each in all_moves if each[1] == crash] for crash in crashes]

    def _check_end(self, numbers: tuple[int, ...]) -> None:
        ends = [self.classes[number].observation.end for number in numbers]
        if None in ends:
            systems = self._way(numbers)[0]
            for system in systems:
                state = self.items[system.route]
                if state.phase not in (RequestPhase.ENDED, RequestPhase.FAILED) or not system.client[1]:
                    self._violated(numbers, f"a request waits for ever: {state}")
            self._violated(numbers, "memory is never given back")
        self.outcomes.add(tuple(sorted(end for end in ends if end is not None)))

    def _violated(self, numbers: tuple[int, ...], complaint: str) -> NoReturn:
        trace = "\n  ".join(self._way(numbers)[1])
        raise Violation(f"{complaint}, after\n  {trace}")

    def _way(self, numbers: tuple[int, ...]) -> tuple[list[SystemState], list[str]]:
        """States of some kinds that requests reach together, and the events that lead there."""
        all_moves: list[Any] = []
        before, moves = self._before[numbers]
        while moves:
            all_moves.append(moves)
            before, moves = self._before[before]
        systems, trace = list(before), list[str]()
        for moves in reversed(all_moves):
            following = list(systems)
            left = set(range(len(systems)))
            for label, kind, target in moves:
                place = next(each for each in left if self.class_of[systems[each]] == kind)
                left.discard(place)
                following[place] = self._walk(place, systems[place], label, target, trace)
            systems = following
        return [self._walk(place, system, "", 0, trace) for place, system in enumerate(systems)], trace

    def _walk(self, place: int, system: SystemState, label: str, target: int, trace: list[str]) -> SystemState:
        """The state of a kind after a step, and after what has to happen before it. Without a label: after all that
        happens silently.
        """
        while True:
            silent = None
            for event in self.events(system):
                after = self.plain(self.after(system, event))
                if event.label == label and self.class_of[after] == target:
                    trace.append(f"request {place}: {self._describe(system, event)}")
                    return after
                if event.label == GOES_ON and after != system and self.class_of[after] == self.class_of[system]:
                    silent = (event, after)
            if silent is None:
                assert not label, "a step that its kind has, and no state of it"
                return system
            trace.append(f"request {place}: {self._describe(system, silent[0])}")
            system = silent[1]

    @property
    def num_states(self) -> int:
        """Number of visited states, of one request and of all of them."""
        return len(self.class_of) + len(self._before)

    def _describe(self, system: SystemState, event: Event | None) -> str:
        assert event is not None
        if event.kind in ("deliver", "lose", "repeat"):
            channel, place = event.what
            envelope = self.items[system.envelopes[channel][place]]
            return f"{event.kind} {envelope.message} from {envelope.sender} to {envelope.to}"
        return f"{event.kind} {event.what} {event.more}"


class _Step:
    """A state on the path that is being explored.

    events  that have not been followed
    event   that is followed now
    steps   labels and kinds of the others
    """

    def __init__(self, system: SystemState, events: Iterator[Event]) -> None:
        self.system, self.events = system, events
        self.event: Event | None = None
        self.steps: set[tuple[str, int]] = set()

    def add(self, kind: int) -> None:
        """Notes the kind of the state after the event."""
        assert self.event is not None
        self.steps.add((self.event.label, kind))


def _sampled(state: Any, is_last: bool, parts: frozenset[int] = frozenset()) -> TokenSampled:
    """The next token of an engine, which does not count positions."""
    return TokenSampled(Token(state.attempt, NO_TEXT, is_last=is_last), parts)


def _used(states: list[Any]) -> int:
    """Attempts that have memory of their instance."""
    return sum(
        state.phase in (SourcePhase.RUNNING, SourcePhase.HELD, ReceiverPhase.PULLING, ReceiverPhase.RUNNING)
        for state in states
    )


def _has(state: Any, message: Any) -> bool:
    """Whether a source that sends a message has what is in it."""
    return not isinstance(message, CachePart) or (state is not None and state.phase is SourcePhase.HELD)


def changed(**parts: Any) -> Any:
    """The protocol with other functions."""
    names = ("advance_request", "advance_source", "advance_receiver", "has_deadline")
    return SimpleNamespace(**{name: getattr(protocol, name) for name in names} | parts)


def main() -> None:
    """Explores the system that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (
        ("requests", 2), ("tokens", 2), ("tries", 2), ("room", 1), ("parts", 1), ("has", 0), ("most", 2_000_000),
        ("crashes", 0), ("losses", 0), ("repeats", 0), ("early", 0), ("aborts", 0), ("alone", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = vars(parser.parse_args())
    budget = Budget(*(given.pop(name) for name in Budget._fields))
    begun, explorer = time.perf_counter(), ModelChecker(budget=budget, **given)
    is_all = explorer.explore()
    num_alone = len(explorer.class_of)
    print(
        f"{num_alone} states of one request, of {len(explorer.classes)} kinds; {explorer.num_states - num_alone}"
        f" combinations of {given['requests']}{'' if is_all else '; not all of them'}; {explorer.num_steps} steps;"
        f" no violation; {time.perf_counter() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
