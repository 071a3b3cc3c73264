"""Explores the protocol of a hand-over: every order of events of a small world, depth first, with the code that runs.

    python -m tests.worlds --requests 2 --crashes 1 --losses 1 --repeats 1

A world has a router, two instances of which one computes prompts and one decodes, some requests with answers of a few
tokens, and messages under way. Messages of a request between two processes arrive in order, as on a connection; all
others in any order. In a world, at most so many messages are lost, arrive twice, and instances fail and come back with
nothing. A deadline ends when nothing else can happen to its request, and `early` times before that.

No world may answer a position twice or out of order, answer after the end, decode from half a cache, or fail while
there are tries. From every world there is a way on until all requests have ended; then nobody holds anything. No way
leads in a circle.

Worlds that differ in nothing that matters are visited once. Letters that change nothing whenever they arrive are
dropped, and of two requests that are alike the order does not count. Which request a loss, a repeat, an early deadline
or an abort happens to is settled at the beginning, so that requests have nothing in common but crashes and room. Once
there are no more crashes, a request that does not wait for room goes on alone: whatever the other one does meanwhile
neither helps nor hinders it, in any order (a persistent set: Godefroid, LNCS 1032, chapter 4).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from quire.cluster import protocol
from quire.cluster.messages import (
    CLIENT,
    ROUTER,
    Abort,
    Admitted,
    Ask,
    Attempt,
    Begin,
    Cancel,
    Compute,
    Down,
    Expired,
    Failed,
    Part,
    Receive,
    Sampled,
    Sent,
    Token,
    Want,
)
from quire.cluster.protocol import Intake, Route, Supply

SOURCE, RECEIVER = "p", "d"
PAIRS = (
    (ROUTER, SOURCE), (ROUTER, RECEIVER), (SOURCE, ROUTER), (RECEIVER, ROUTER), (SOURCE, RECEIVER), (RECEIVER, SOURCE),
    ("nobody", ROUTER),
)  # fmt: skip
NUMBER = {pair: number for number, pair in enumerate(PAIRS)}


class Violation(Exception):
    """A world that must not be. The message has the events that lead to it."""


class Letter(NamedTuple):
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


class Left(NamedTuple):
    """A budget, all but the crashes by request."""

    crashes: int
    losses: tuple[int, ...]
    repeats: tuple[int, ...]
    early: tuple[int, ...]
    aborts: tuple[int, ...]

    def spend(self, name: str, request: int) -> Left:
        """With one less of something for a request."""
        counts = getattr(self, name)
        return self._replace(**{name: (*counts[:request], counts[request] - 1, *counts[request + 1 :])})

    def mirrored(self) -> Left:
        """With the requests exchanged."""
        return Left(self.crashes, *(counts[::-1] for counts in self[1:]))


def divided(budget: Budget, requests: int) -> list[Left]:
    """All divisions of a budget among requests."""
    ways = [
        [counts for counts in itertools.product(range(total + 1), repeat=requests) if sum(counts) == total]
        for total in budget[1:]
    ]
    return [Left(budget.crashes, *counts) for counts in itertools.product(*ways)]


class World(NamedTuple):
    """States are numbers of `Explorer.items`, so that worlds are small and compare fast.

    routes     of each request
    clients    of each request: tokens that its client has, and whether the answer has ended
    sources    of attempts at the source, rising
    receivers  of attempts at the receiver, rising
    letters    by pair of processes and then by request, in the order of arrival
    arrived    (attempt, part) that a receiver truly has
    budget     what may still go wrong
    """

    routes: tuple[int, ...]
    clients: tuple[tuple[int, bool], ...]
    sources: tuple[int, ...]
    receivers: tuple[int, ...]
    letters: tuple[tuple[int, ...], ...]
    arrived: frozenset[Any]
    budget: Left


class Event(NamedTuple):
    """kind: deliver, lose, repeat, begin, source, receiver, expire, crash or abort."""

    kind: str
    what: Any = None
    more: Any = None


class Explorer:
    """All worlds that follow from one.

    code    the protocol, or a changed one
    room    attempts that each instance has memory for
    parts   of every cache
    has     parts that the receiver has of every second request
    alone   whether later attempts have no source: their receiver computes the prompt
    most    worlds after which it gives up
    merges  whether worlds that differ in nothing that matters are visited once
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
        self.merges = merges
        self.outcomes: set[tuple[tuple[str, int], ...]] = set()
        self.parts, self.has = frozenset(range(parts)), frozenset(range(has))
        self.items: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._twins: dict[int, int] = {}
        routes = tuple(self.number(protocol.Routed(request, tries)) for request in range(requests))
        self.budgets = divided(budget, requests)
        self.firsts = [
            World(routes, ((0, False),) * requests, (), (), ((),) * (len(PAIRS) * requests), frozenset(), left)
            for left in self.budgets
        ]
        self.num_ends = self.num_events = self.num_worlds = 0

    def number(self, item: Any) -> int:
        """The number of a state or letter."""
        found = self._numbers.setdefault(item, len(self.items))
        if found == len(self.items):
            self.items.append(item)
        return found

    # ---- what can happen -------------------------------------------------------------------------------------------

    def events(self, world: World) -> list[Event]:
        """All that can happen next."""
        budget, items = world.budget, self.items
        found: list[Event] = []
        busy: set[int] = set()  # requests to which something happens without a deadline
        for channel, letters in enumerate(world.letters):
            request = channel % len(world.routes)
            for place, number in enumerate(letters):
                letter = items[number]
                busy.add(request)
                is_down = isinstance(letter.message, Down)
                if place and not is_down:
                    continue
                found.append(Event("deliver", (channel, place)))
                if not is_down:
                    found += [Event("lose", (channel, place))] * (budget.losses[request] > 0)
                    found += [Event("repeat", (channel, place))] * (budget.repeats[request] > 0)
        for request, number in enumerate(world.routes):
            if items[number].phase is Route.QUEUED:
                busy.add(request)
                found.append(Event("begin", request))
        sources, receivers = [items[each] for each in world.sources], [items[each] for each in world.receivers]
        found += self._at_source(sources, busy)
        found += self._at_receiver(receivers, busy)
        goes_on = any(event.kind not in ("lose", "repeat") for event in found)
        waiting = [("route", request, items[number]) for request, number in enumerate(world.routes)]
        waiting += [("source", each.attempt, each) for each in sources]
        waiting += [("receiver", each.attempt, each) for each in receivers]
        waiting = [each for each in waiting if self.code.has_deadline(each[2])]
        idle = [each for each in waiting if _request_of(each[2]) not in busy]
        # If everybody waits for room, somebody's time is over first.
        for role, what, _ in idle or ([] if goes_on else waiting):
            found.append(Event("expire", (role, what), False))
        found += [
            Event("expire", (role, what), True) for role, what, each in waiting if budget.early[_request_of(each)]
        ]
        for request, (_, is_ended) in enumerate(world.clients):
            if budget.aborts[request] and not is_ended:
                found.append(Event("abort", request))
        if budget.crashes:
            return found + [Event("crash", each, lost) for each in (SOURCE, RECEIVER) for lost in (True, False)]
        return self._of_one(world, found, {_request_of(each) for each in (*sources, *receivers) if _lacks_room(each)})

    def _of_one(self, world: World, events: list[Event], lacking: set[int]) -> list[Event]:
        """The events of one request, if it has some and does not wait for room; otherwise all."""
        for request in {*range(len(world.routes))} - lacking if self.merges else ():
            own = [event for event in events if self._request_at(world, event) == request]
            if own:
                return own
        return events

    def _request_at(self, world: World, event: Event) -> int:
        """The request that an event happens to. It is no crash."""
        if event.kind in ("deliver", "lose", "repeat"):
            return int(event.what[0]) % len(world.routes)
        what = event.what[1] if event.kind == "expire" else event.what
        return what.request if isinstance(what, Attempt) else what

    def _at_source(self, states: list[Any], busy: set[int]) -> Iterator[Event]:
        used = sum(state.phase in (Supply.RUNNING, Supply.HELD) for state in states)
        for state in states:
            if state.phase in (Supply.QUEUED, Supply.RUNNING):
                busy.add(state.attempt.request)
            if state.phase is Supply.QUEUED and used < self.room:
                yield Event("source", state.attempt, Admitted())
            elif state.phase is Supply.RUNNING:
                yield Event("source", state.attempt, Sampled(state.start + 1 == self.tokens, self.parts))

    def _at_receiver(self, states: list[Any], busy: set[int]) -> Iterator[Event]:
        used = sum(state.phase in (Intake.PULLING, Intake.RUNNING) for state in states)
        for state in states:
            if state.phase in (Intake.QUEUED, Intake.RUNNING):
                busy.add(state.attempt.request)
            if state.phase is Intake.QUEUED and used < self.room:
                has = self.has if state.attempt.request % 2 else frozenset[int]()
                yield Event("receiver", state.attempt, Admitted(has))
            elif state.phase is Intake.RUNNING:
                yield Event("receiver", state.attempt, Sampled(state.num_tokens + 1 == self.tokens))

    # ---- what follows ----------------------------------------------------------------------------------------------

    def after(self, world: World, event: Event) -> World:
        """The world after an event. Raises Violation."""
        kind, what, more = event
        budget = world.budget
        if kind in ("deliver", "lose", "repeat"):
            channel, place = what
            letters = world.letters[channel]
            letter = self.items[letters[place]]
            rest = (*world.letters[:channel], letters[:place] + letters[place + 1 :], *world.letters[channel + 1 :])
            request = self._request_at(world, event)
            if kind == "lose":
                return world._replace(letters=rest, budget=budget.spend("losses", request))
            if kind == "repeat":
                return self._arrive(world._replace(budget=budget.spend("repeats", request)), letter)
            return self._arrive(world._replace(letters=rest), letter)
        if kind == "begin":
            is_alone = self.alone and self.items[world.routes[what]].number > 0
            return self._route(world, what, Begin("" if is_alone else SOURCE, RECEIVER))
        if kind == "abort":
            return self._route(world._replace(budget=budget.spend("aborts", what)), what, Abort())
        if kind == "source":
            return self._source(world, what, "", more)
        if kind == "receiver":
            return self._receiver(world, what, more)
        if kind == "expire":
            if more:
                world = world._replace(budget=budget.spend("early", self._request_at(world, event)))
            role, which = what
            if role == "route":
                return self._route(world, which, Expired())
            if role == "source":
                return self._source(world, which, "", Expired())
            return self._receiver(world, which, Expired())
        return self._crashed(world, what, are_lost=more)

    def _crashed(self, world: World, instance: str, *, are_lost: bool) -> World:
        """An instance loses its states, and perhaps what is on its way to it. The router hears of it some time."""
        letters = world.letters
        if are_lost:
            letters = tuple(
                () if PAIRS[number // len(world.routes)][1] == instance else each
                for number, each in enumerate(world.letters)
            )
        running = [request for request, number in enumerate(world.routes) if self.items[number].phase is Route.RUNNING]
        told = [Letter(f"{ROUTER} {request}", "nobody", Down(instance)) for request in running]
        world = world._replace(budget=world.budget._replace(crashes=world.budget.crashes - 1))
        if instance == SOURCE:
            return world._replace(sources=(), letters=self._posted(letters, told))
        return world._replace(receivers=(), arrived=frozenset(), letters=self._posted(letters, told))

    def _arrive(self, world: World, letter: Letter) -> World:
        message = letter.message
        if letter.to.startswith(ROUTER):
            return self._route(world, _request_of(letter), message)
        if letter.to == SOURCE:
            return self._source(world, message.attempt, letter.sender, message)
        return self._receiver(world, message.attempt, message, is_true=letter.is_true)

    def _route(self, world: World, request: int, event: Any) -> World:
        before = self.items[world.routes[request]]
        after, sent = self.code.route(before, event)
        has_failed = after.phase is Route.FAILED and before.phase is not Route.FAILED
        if has_failed and after.tries and not isinstance(event, Abort):
            raise Violation("a request fails although there are tries")
        clients = world.clients
        for to, message in sent:
            if to == CLIENT:
                answer = self._answered(*clients[request], message)
                clients = (*clients[:request], answer, *clients[request + 1 :])
        routes = (*world.routes[:request], self.number(after), *world.routes[request + 1 :])
        letters = self._posted(world.letters, [Letter(to, ROUTER, message) for to, message in sent if to != CLIENT])
        return world._replace(routes=routes, clients=clients, letters=letters)

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

    def _source(self, world: World, attempt: Attempt, sender: str, event: Any) -> World:
        number = self._find(world.sources, attempt)
        before = None if number is None else self.items[number]
        after, sent = self.code.supply(before, sender, event)
        letters = [Letter(to, SOURCE, message, _has(before, message)) for to, message in sent]
        sources = self._changed(world.sources, number, after)
        return world._replace(sources=sources, letters=self._posted(world.letters, letters))

    def _receiver(self, world: World, attempt: Attempt, event: Any, *, is_true: bool = True) -> World:
        number = self._find(world.receivers, attempt)
        before = None if number is None else self.items[number]
        arrived = world.arrived
        is_pulling = before is not None and before.phase is Intake.PULLING
        if is_true and is_pulling and isinstance(event, Part):
            arrived |= {(attempt, event.part)}
        after, sent = self.code.take(before, event)
        if after is not None and after.phase is Intake.RUNNING and (before is None or before.phase != after.phase):
            has = self.has if attempt.request % 2 else frozenset[int]()
            lacking = {(attempt, each) for each in self.parts - has} - arrived
            if after.source and lacking:
                raise Violation(f"a receiver decodes without {sorted(map(str, lacking))}")
        if after is None or after.phase is Intake.ENDED:
            arrived = frozenset(each for each in arrived if each[0] != attempt)
        letters = self._posted(world.letters, [Letter(to, RECEIVER, message) for to, message in sent])
        receivers = self._changed(world.receivers, number, after)
        return world._replace(receivers=receivers, arrived=arrived, letters=letters)

    def _find(self, numbers: tuple[int, ...], attempt: Attempt) -> int | None:
        return next((number for number in numbers if self.items[number].attempt == attempt), None)

    def _changed(self, numbers: tuple[int, ...], before: int | None, after: Any) -> tuple[int, ...]:
        kept = [number for number in numbers if number != before]
        return tuple(sorted(kept if after is None else [*kept, self.number(after)]))

    # ---- fewer worlds ----------------------------------------------------------------------------------------------

    def plain(self, world: World) -> World:
        """A world that stands for this one: without letters that change nothing whenever they arrive, and, of two
        requests that are alike, in the order that comes first.
        """
        if not self.merges:
            return world
        letters = tuple(tuple(each for each in queue if not self._is_vain(world, each)) for queue in world.letters)
        if letters != world.letters:
            world = world._replace(letters=letters)
        if len(world.routes) != 2 or self.has:
            return world
        other = self._mirrored(world)
        return min(world, other, key=lambda each: (*each[:5], each.budget))

    def _is_vain(self, world: World, number: int) -> bool:
        """Whether a letter changes nothing, now and later: it is about an attempt that has ended where it arrives, and
        that nothing under way can begin again.
        """
        letter = self.items[number]
        message = letter.message
        if letter.to.startswith(ROUTER):
            state = self.items[world.routes[_request_of(letter)]]
            is_over = state.phase in (Route.ENDED, Route.FAILED)
            return is_over or (not isinstance(message, Down) and message.attempt.number < state.number)
        if isinstance(message, Cancel | Compute | Receive | Ask | Want):
            return False  # these are answered, or remembered after a crash
        states, begins = (world.sources, Compute) if letter.to == SOURCE else (world.receivers, Receive)
        found = self._find(states, message.attempt)
        if found is not None and self.items[found].phase not in (Supply.ENDED, Intake.ENDED):
            return False
        under_way = (self.items[each].message for queue in world.letters for each in queue)
        return not any(isinstance(each, begins) and each.attempt == message.attempt for each in under_way)

    def _mirrored(self, world: World) -> World:
        """The world with the two requests exchanged."""
        arrived = frozenset((_mirror(attempt), part) for attempt, part in world.arrived)
        return World(
            tuple(self._twin(each) for each in world.routes[::-1]),
            world.clients[::-1],
            tuple(sorted(self._twin(each) for each in world.sources)),
            tuple(sorted(self._twin(each) for each in world.receivers)),
            tuple(
                tuple(self._twin(each) for each in world.letters[number ^ 1]) for number in range(len(world.letters))
            ),
            arrived,
            world.budget.mirrored(),
        )

    def _twin(self, number: int) -> int:
        """The number of an item of the other request."""
        found = self._twins.get(number)
        if found is None:
            found = self._twins[number] = self.number(_mirror(self.items[number]))
        return found

    def _posted(self, letters: tuple[tuple[int, ...], ...], more: list[Letter]) -> tuple[tuple[int, ...], ...]:
        for letter in more:
            num_requests = len(letters) // len(PAIRS)
            channel = NUMBER[letter.sender, letter.to.split()[0]] * num_requests + _request_of(letter)
            queue = (*letters[channel], self.number(letter))
            letters = (*letters[:channel], queue, *letters[channel + 1 :])
        return letters

    # ---- all worlds ------------------------------------------------------------------------------------------------

    def explore(self) -> bool:
        """Visits all worlds, and returns whether they were fewer than `most`. Raises Violation."""
        done: set[World] = set()
        firsts = dict.fromkeys(self.plain(each) for each in self.firsts)
        is_all = all(first in done or self._explore(first, done) for first in firsts)
        self.num_worlds = len(done)
        return is_all

    def _explore(self, first: World, done: set[World]) -> bool:
        """Visits all worlds that follow from one."""
        open_worlds = {first}  # on the way that is being followed
        way: list[tuple[World, Iterator[Event], Event | None]] = [(first, self._going_on(first), None)]
        while way:
            world, events, _ = way[-1]
            event = next(events, None)
            if event is None:
                way.pop()
                open_worlds.discard(world)
                done.add(world)
                continue
            self.num_events += 1
            try:
                following = self.plain(self.after(world, event))
                if following in open_worlds and following != world:
                    raise Violation("a way leads in a circle")
                if following in done or following == world:
                    continue
                events_after = self._going_on(following)
            except Violation as violation:
                told = [self._told(before, step) for (before, _, _), (_, _, step) in itertools.pairwise(way)]
                steps = "\n  ".join([*(each for each in told if each), self._told(world, event)])
                raise Violation(f"{violation}, after\n  {steps}") from None
            if len(done) + len(open_worlds) >= self.most:
                return False
            open_worlds.add(following)
            way.append((following, events_after, event))
        return True

    def _going_on(self, world: World) -> Iterator[Event]:
        events = self.events(world)
        if not any(self._is_way_on(world, event) for event in events):
            self._check_end(world)
            self.num_ends += 1
            phases = (self.items[number].phase.value for number in world.routes)
            self.outcomes.add(tuple(sorted(zip(phases, (count for count, _ in world.clients), strict=True))))
        return iter(events)

    def _is_way_on(self, world: World, event: Event) -> bool:
        """Whether a world goes on by an event, if nothing goes wrong: also a deadline may change nothing."""
        if event.kind == "expire":
            return not event.more and self.after(world, event) != world
        return event.kind not in ("lose", "repeat", "crash", "abort")

    def _check_end(self, world: World) -> None:
        for request, number in enumerate(world.routes):
            state = self.items[number]
            if state.phase not in (Route.ENDED, Route.FAILED) or not world.clients[request][1]:
                raise Violation(f"request {request} waits for ever: {state}")
            if state.phase is Route.FAILED and world.budget in self.budgets:
                raise Violation(f"request {request} fails and nothing went wrong")
        for number in (*world.sources, *world.receivers):
            if self.items[number].phase not in (Supply.ENDED, Intake.ENDED):
                raise Violation(f"memory is never given back: {self.items[number]}")

    def _told(self, world: World, event: Event | None) -> str:
        if event is None:
            return ""
        if event.kind in ("deliver", "lose", "repeat"):
            channel, place = event.what
            letter = self.items[world.letters[channel][place]]
            return f"{event.kind} {letter.message} from {letter.sender} to {letter.to}"
        return f"{event.kind} {event.what} {event.more}"


def _mirror(item: Any) -> Any:
    """An item of the other one of two requests."""
    if isinstance(item, Attempt):
        return Attempt(1 - item.request, item.number)
    if isinstance(item, protocol.Routed):
        return replace(item, request=1 - item.request)
    if isinstance(item, Letter):
        to = f"{ROUTER} {1 - int(item.to.split()[1])}" if " " in item.to else item.to
        message = item.message if isinstance(item.message, Down) else _mirror(item.message)
        return item._replace(to=to, message=message)
    return replace(item, attempt=_mirror(item.attempt))


def _request_of(item: Any) -> int:
    """The request of a letter or state."""
    if isinstance(item, Letter):
        return int(item.to.split()[1]) if isinstance(item.message, Down) else int(item.message.attempt.request)
    return int(item.request if isinstance(item, protocol.Routed) else item.attempt.request)


def _lacks_room(state: Any) -> bool:
    return state.phase in (Supply.QUEUED, Intake.QUEUED)


def _has(state: Any, message: Any) -> bool:
    """Whether a source that sends a message has what is in it."""
    return not isinstance(message, Part) or (state is not None and state.phase is Supply.HELD)


def changed(**parts: Any) -> Any:
    """The protocol with other functions."""
    names = ("route", "supply", "take", "has_deadline")
    return SimpleNamespace(**{name: getattr(protocol, name) for name in names} | parts)


def sent_to(to: str, sent: list[Sent]) -> list[Sent]:
    """The messages that do not go to somebody."""
    return [each for each in sent if each.to != to]


def main() -> None:
    """Explores the worlds that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (
        ("requests", 2), ("tokens", 2), ("tries", 2), ("room", 1), ("parts", 1), ("has", 0), ("most", 2_000_000),
        ("crashes", 0), ("losses", 0), ("repeats", 0), ("early", 0), ("aborts", 0), ("alone", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = vars(parser.parse_args())
    budget = Budget(*(given.pop(name) for name in Budget._fields))
    begun, explorer = time.perf_counter(), Explorer(budget=budget, **given)
    is_all = explorer.explore()
    print(
        f"{explorer.num_worlds if is_all else given['most']} worlds{'' if is_all else ', not all of them'},"
        f" {explorer.num_events} events, {explorer.num_ends} ends; no violation; {time.perf_counter() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
