"""The cached prefixes of a cluster: the router asks every instance, and puts the answers together."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.async_prefixes import AsyncPrefixes
from quire.cluster import wire
from quire.cluster.members import Member
from quire.cluster.messages import ROUTER
from quire.cluster.neighbours import Neighbours
from quire.engine.engine import Engine
from quire.engine.known import KnownPrefix, Salts
from quire.engine.prefixes import Prefix
from quire.engine.stock import Held
from quire.engine_thread import EngineThread
from quire.errors import QuireError
from quire.load import Loaded

Found = TypeVar("Found")

LOOK_SECONDS = 0.1
"""Interval at which the router looks whether an instance that it asked is still there."""

PREFIXES, KNOWN, FIND, DROP = "prefixes", "known", "find", "drop"


@dataclass(frozen=True)
class Question:
    """Router to instance.

    about  PREFIXES or KNOWN: all of them; FIND or DROP: the one with a key
    salts  what the salts begin with that may be seen
    """

    number: int
    about: str
    salts: str
    key: str = ""


@dataclass(frozen=True)
class Answer:
    """Instance to router.

    prefixes  in the arena
    known     in the arena and on a disk; one or none, if it was asked for by its key
    dropped   chunks by tier; None: there was no such prefix
    error     why there is no answer; then the rest means nothing
    """

    number: int
    prefixes: list[Prefix] = dataclasses.field(default_factory=list)
    known: list[KnownPrefix] = dataclasses.field(default_factory=list)
    dropped: dict[str, int] | None = None
    error: str = ""


wire.register(Question, Answer)


class Shelf(AsyncPrefixes):
    """The prefixes of an instance.

    send  sends a message to somebody
    """

    def __init__(self, thread: EngineThread, send: Callable[[str, Any], object]) -> None:
        self._thread = thread
        self._send = send

    @property
    def _parts(self) -> Loaded:
        if self._thread.loaded is None:
            raise QuireError("the instance has no engine")
        return self._thread.loaded

    async def _ask(self, question: Callable[[Engine], Found]) -> Found:
        loop, found = asyncio.get_running_loop(), asyncio.Future[Found]()

        def run() -> None:
            try:
                answer = question(self._parts.engine)
            except BaseException as error:
                loop.call_soon_threadsafe(found.set_exception, error)
            else:
                loop.call_soon_threadsafe(found.set_result, answer)

        self._thread.submit(run)
        return await found

    def hear(self, question: Question) -> None:
        """Answers on a thread of its own: a disk is read, and the engine may be in a long step."""
        threading.Thread(target=self._answer, args=(question,), name="quire-prefixes", daemon=True).start()

    def _answer(self, question: Question) -> None:
        try:
            self._send(ROUTER, asyncio.run(self._found(question)))
        except Exception as error:  # also an answer that is too large to travel
            self._send(ROUTER, Answer(question.number, error=str(error) or type(error).__name__))

    async def _found(self, question: Question) -> Answer:
        number, visible = question.number, Salts(question.salts)
        match question.about:
            case "prefixes":
                return Answer(number, prefixes=await self.prefixes(visible))
            case "known":
                return Answer(number, known=await self.known_prefixes(visible))
            case "find":
                found = await self.find_prefix(question.key, visible)
                return Answer(number, known=[] if found is None else [found])
            case "drop":
                dropped = await self.drop_prefix(question.key, visible)
                if dropped is not None:
                    dropped.pop(Neighbours.name, None)  # each instance drops its own
                return Answer(number, dropped=dropped)
        raise QuireError(f"{question.about!r} is no question")


class Shelves:
    """The prefixes of all instances.

    members  the router's, by name
    send     sends a message to an instance
    """

    def __init__(self, members: Mapping[str, Member], send: Callable[[str, Any], None]) -> None:
        self._members = members
        self._send = send
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}

    def hear(self, answer: Answer) -> None:
        """An instance has answered. Late answers are dropped."""
        asked = self._asked.get(answer.number)
        if asked is not None and not asked.done():
            asked.set_result(answer)

    async def prefixes(self, visible: Salts) -> list[Prefix]:
        """Those of each instance, parents first, with its name."""
        answers = await self._ask_all(PREFIXES, visible)
        return [
            dataclasses.replace(each, instance=name) for name, answer in answers.items() for each in answer.prefixes
        ]

    async def known_prefixes(self, visible: Salts) -> list[KnownPrefix]:
        """Those of all instances together, those used last first."""
        answers = await self._ask_all(KNOWN, visible)
        return together([each for answer in answers.values() for each in answer.known])

    async def find_prefix(self, key: str, visible: Salts) -> KnownPrefix | None:
        """The prefix with this key, wherever it is."""
        answers = await self._ask_all(FIND, visible, key)
        found = together([each for answer in answers.values() for each in answer.known])
        return found[0] if found else None

    async def drop_prefix(self, key: str, visible: Salts) -> dict[str, int] | None:
        """Drops it everywhere. Returns the number of dropped chunks of all instances by tier; None if none had it."""
        answers = await self._ask_all(DROP, visible, key)
        found = [each.dropped for each in answers.values() if each.dropped is not None]
        tiers = dict.fromkeys(tier for dropped in found for tier in dropped)
        return {tier: sum(dropped.get(tier, 0) for dropped in found) for tier in tiers} if found else None

    async def _ask_all(self, about: str, visible: Salts, key: str = "") -> dict[str, Answer]:
        """The answers of all instances that have loaded, by name. One that goes meanwhile has no prefixes any more.

        Raises QuireError if an instance cannot answer.
        """
        asked: dict[str, asyncio.Future[Answer]] = {}
        numbers = []
        for name, member in self._members.items():
            if member.ready is not None:
                numbers.append(number := next(self._numbers))
                asked[name] = self._asked[number] = asyncio.Future()
                self._send(name, Question(number, about, visible.begin, key))
        try:
            while waits := [each for name, each in asked.items() if name in self._members and not each.done()]:
                await asyncio.wait(waits, timeout=LOOK_SECONDS)
        finally:
            for number in numbers:
                del self._asked[number]
        found = {name: each.result() for name, each in asked.items() if each.done()}
        for name, answer in found.items():
            if answer.error:
                raise QuireError(f"instance {name}: {answer.error}")
        return found


def together(found: Sequence[KnownPrefix]) -> list[KnownPrefix]:
    """Prefixes of several caches, those used last first. What has one key is one, with the bytes of all."""
    by_key: dict[str, KnownPrefix] = {}
    for each in sorted(found, key=lambda prefix: -prefix.used):
        known = by_key.get(each.key)
        by_key[each.key] = each if known is None else dataclasses.replace(known, tiers=_added(known.tiers, each.tiers))
    return sorted(by_key.values(), key=lambda prefix: (-prefix.used, prefix.num_tokens))


def _added(one: dict[str, Held], other: dict[str, Held]) -> dict[str, Held]:
    found = dict(one)
    for tier, held in other.items():
        known = found.get(tier, Held(0, 0.0, 0.0))
        found[tier] = Held(
            known.num_bytes + held.num_bytes, max(known.used, held.used), max(known.pinned_until, held.pinned_until)
        )
    return found
