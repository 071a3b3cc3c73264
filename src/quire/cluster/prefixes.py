"""The cached prefixes of a cluster: the router asks every instance, and merges the answers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from quire.cluster import wire
from quire.cluster.connections import PeerConnections
from quire.cluster.members import Member
from quire.cluster.messages import ROUTER
from quire.cluster.peer_store import PeerStore
from quire.engine.engine import Engine
from quire.engine_thread import EngineThread
from quire.errors import InstancesFailedError, QuireError
from quire.load import LoadedEngine
from quire.prefixes.async_prefixes import AsyncPrefixes
from quire.prefixes.cached import DISK, CachedPrefix, SaltFilter
from quire.prefixes.disk_index import TierCopy
from quire.prefixes.listing import Prefix

Item = TypeVar("Item")

log = logging.getLogger("quire")

LOOK_SECONDS = 0.1
"""Interval at which the router checks that the instances it asked are still connected."""


class PrefixQueryKind(Enum):
    """The kind of a query.

    PREFIXES  prefixes in the arena
    KNOWN     prefixes in the arena and on a disk
    FIND      the prefix with a key
    DROP      drop the prefix with a key
    """

    PREFIXES = "prefixes"
    KNOWN = "known"
    FIND = "find"
    DROP = "drop"


@dataclass(frozen=True)
class PrefixQuery:
    """Router to instance.

    salts  prefix of the visible salts
    key    key of the last chunk of the prefix, for FIND and DROP
    """

    number: int
    kind: PrefixQueryKind
    salts: str
    key: bytes = b""


@dataclass(frozen=True)
class PrefixReply:
    """Instance to router.

    prefixes  prefixes in the arena
    known     prefixes in the arena and on a disk; for FIND at most one
    dropped   number of chunks by tier; None: no such prefix
    error     why there is no answer; the other fields then mean nothing
    """

    number: int
    prefixes: list[Prefix] = dataclasses.field(default_factory=list)
    known: list[CachedPrefix] = dataclasses.field(default_factory=list)
    dropped: dict[str, int] | None = None
    error: str = ""


wire.register(PrefixQuery, PrefixReply)


class PrefixService(AsyncPrefixes):
    """The prefixes of an instance."""

    def __init__(self, thread: EngineThread, connections: PeerConnections) -> None:
        self._thread = thread
        self._connections = connections

    @property
    def _parts(self) -> LoadedEngine:
        if self._thread.loaded is None:
            raise QuireError("the instance has no engine")
        return self._thread.loaded

    async def _ask(self, question: Callable[[Engine], Item]) -> Item:
        found = Future[Item]()

        def run() -> None:
            try:
                found.set_result(question(self._parts.engine))
            except BaseException as error:
                found.set_exception(error)

        self._thread.submit(run)
        return await asyncio.wrap_future(found)

    def handle(self, question: PrefixQuery) -> None:
        """Answers on a thread of its own, because it may read a disk and wait for a long step of the engine."""
        threading.Thread(target=self._answer, args=(question,), name="quire-prefixes", daemon=True).start()

    def _answer(self, question: PrefixQuery) -> None:
        try:
            self._connections.send(ROUTER, asyncio.run(self._answered(question)))
        except QuireError as error:  # raised also for an answer that is too large to send
            self._connections.send(ROUTER, PrefixReply(question.number, error=str(error)))
        except Exception:
            log.exception("a question about prefixes")
            self._connections.send(ROUTER, PrefixReply(question.number, error="it failed to answer; see the log"))

    async def _answered(self, question: PrefixQuery) -> PrefixReply:
        number, visible = question.number, SaltFilter(question.salts)
        match question.kind:
            case PrefixQueryKind.PREFIXES:
                return PrefixReply(number, prefixes=await self.prefixes(visible))
            case PrefixQueryKind.KNOWN:
                return PrefixReply(number, known=await self.known_prefixes(visible))
            case PrefixQueryKind.FIND:
                found = await self.find_prefix(question.key.hex(), visible)
                return PrefixReply(number, known=[] if found is None else [found])
            case PrefixQueryKind.DROP:
                dropped = await self.drop_prefix(question.key.hex(), visible)
                if dropped is not None:
                    dropped.pop(PeerStore.name, None)  # each instance drops its own
                return PrefixReply(number, dropped=dropped)


class ClusterPrefixes:
    """The prefixes of all instances.

    members  the router's instances, by name
    places   places of all instances, restarting ones included
    send     sends a message to an instance; returns whether it is on its way
    """

    def __init__(
        self, members: Mapping[str, Member], places: Collection[str], send: Callable[[str, Any], bool]
    ) -> None:
        self._members, self._places = members, places
        self._send = send
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[PrefixReply]] = {}
        self._end: Exception | None = None

    def handle(self, answer: PrefixReply) -> None:
        """Takes the answer of an instance. Drops late answers."""
        reply = self._pending.get(answer.number)
        if reply is not None and not reply.done():
            reply.set_result(answer)

    def close(self, error: Exception) -> None:
        """Fails all pending and later queries with an error."""
        self._end = error
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(error)

    async def prefixes(self, visible: SaltFilter) -> list[Prefix]:
        """The prefixes of each instance, parents first, with the instance's name."""
        answers = await self._ask_all(PrefixQueryKind.PREFIXES, visible)
        return [
            dataclasses.replace(each, instance=name) for name, answer in answers.items() for each in answer.prefixes
        ]

    async def known_prefixes(self, visible: SaltFilter) -> list[CachedPrefix]:
        """The merged prefixes of all instances, those used last first."""
        answers = await self._ask_all(PrefixQueryKind.KNOWN, visible)
        return merge_prefixes([(self._machine(name), answer.known) for name, answer in answers.items()])

    async def find_prefix(self, key: bytes, visible: SaltFilter) -> CachedPrefix | None:
        """The prefix with this key on any instance."""
        answers = await self._ask_all(PrefixQueryKind.FIND, visible, key)
        found = merge_prefixes([(self._machine(name), answer.known) for name, answer in answers.items()])
        return found[0] if found else None

    async def drop_prefix(self, key: bytes, visible: SaltFilter) -> dict[str, int] | None:
        """Drops a prefix everywhere. Returns the total number of dropped chunks by tier; None if no instance had it.

        Raises InstancesFailedError while an instance restarts: it would find the prefix on its disk again.
        """
        ready = {member.place for member in self._members.values() if member.ready is not None}
        if pending := [place for place in self._places if place not in ready]:
            raise InstancesFailedError(
                f"{' and '.join(pending)} cannot be asked yet, and prefixes are dropped everywhere; try again later"
            )
        answers = await self._ask_all(PrefixQueryKind.DROP, visible, key)
        if all(each.dropped is None for each in answers.values()):
            return None
        total = Counter[str]()
        for tier, counts in _by_tier((self._machine(name), answer.dropped or {}) for name, answer in answers.items()):
            total[tier] += machine_total(tier, counts)
        return dict(total)

    def _machine(self, name: str) -> str:
        member = self._members.get(name)
        return "" if member is None else member.machine

    async def _ask_all(self, kind: PrefixQueryKind, visible: SaltFilter, key: bytes = b"") -> dict[str, PrefixReply]:
        """The answers of all loaded instances, by name. An instance that ends meanwhile counts as having no prefixes.

        Raises InstancesFailedError if an instance cannot answer, and EngineStoppedError if the cluster is closed.
        """
        if self._end is not None:
            raise self._end
        replies: dict[str, asyncio.Future[PrefixReply]] = {}
        numbers = []
        for name, member in self._members.items():
            if member.ready is not None:
                numbers.append(number := next(self._numbers))
                replies[name] = self._pending[number] = asyncio.Future()
                if not self._send(name, PrefixQuery(number, kind, visible.begin, key)):
                    replies[name].set_result(PrefixReply(number, error="it takes no messages now; try again"))
        try:
            while waits := [each for name, each in replies.items() if name in self._members and not each.done()]:
                await asyncio.wait(waits, timeout=LOOK_SECONDS)
        finally:
            for number in numbers:
                del self._pending[number]
        found = {name: each.result() for name, each in replies.items() if each.done()}
        for name, answer in found.items():
            if answer.error:
                raise InstancesFailedError(f"instance {name}: {answer.error}")
        return found


def merge_prefixes(found: Sequence[tuple[str, Sequence[CachedPrefix]]]) -> list[CachedPrefix]:
    """Merges the prefixes of several instances, those used last first. Prefixes with the same key become one.

    found  for each instance: its machine and its prefixes
    """
    by_key: dict[str, list[tuple[str, CachedPrefix]]] = {}
    for machine, known in found:
        for each in known:
            by_key.setdefault(each.key, []).append((machine, each))
    merged = [
        dataclasses.replace(max((each for _, each in same), key=lambda each: each.used), tiers=_tiers(same))
        for same in by_key.values()
    ]
    return sorted(merged, key=lambda prefix: (-prefix.used, prefix.num_tokens))


def _tiers(found: Sequence[tuple[str, CachedPrefix]]) -> dict[str, TierCopy]:
    """The tier copies of one prefix, summed over all instances."""
    total: dict[str, TierCopy] = {}
    for tier, held in _by_tier((machine, each.tiers) for machine, each in found):
        known = total.get(tier, TierCopy(0, 0.0, 0.0))
        total[tier] = TierCopy(
            known.num_bytes + machine_total(tier, [each.num_bytes for each in held]),
            max(known.used, *(each.used for each in held)),
            max(known.pinned_until, *(each.pinned_until for each in held)),
        )
    return total


def group_by_machine(found: Iterable[tuple[str, Item]]) -> list[list[Item]]:
    """Groups items of instances by the instances' machines."""
    groups: dict[str, list[Item]] = {}
    for machine, each in found:
        groups.setdefault(machine, []).append(each)
    return list(groups.values())


def _by_tier(found: Iterable[tuple[str, Mapping[str, Item]]]) -> Iterator[tuple[str, list[Item]]]:
    """Groups items of instances by tier and machine."""
    for own in group_by_machine(found):
        for tier in dict.fromkeys(tier for each in own for tier in each):
            yield tier, [each[tier] for each in own if tier in each]


def machine_total(tier: str, amounts: Sequence[int]) -> int:
    """The total of several instances on a machine, which share the folder of a disk."""
    return max(amounts) if tier == DISK else sum(amounts)
