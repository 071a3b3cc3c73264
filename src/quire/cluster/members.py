"""What a router knows of its instances, and how it chooses among them. Knows no connection and no process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS
from quire.cluster.bodies import InstanceLoad, InstanceReady, RemotePrefix
from quire.cluster.messages import Attempt

MOST_KEYS = 200_000
"""Keys of chunks that the index remembers, some 30 MB."""

TRANSFER_SECONDS_PER_TOKEN = 25e-6
"""Until an instance has measured it: 40 KB a token at 1.6 GB/s. The router only compares; the instance decides."""


class Health(Enum):
    """Whether an instance gets attempts.

    STARTING  loads its model
    SERVING   gets attempts
    DRAINING  finishes those that it has
    DOWN      failed or ended
    """

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    DOWN = "down"


ROLES = ("prefill", "decode", "mixed")


@dataclass(eq=False, slots=True)
class Member:
    """An instance.

    name        with the number of its start
    place       without it: a restarted instance takes the place of the one before
    ready       what it has measured; see `set_ready`
    load        what it said last; see `set_load`
    stats       counters of its engine, a little older
    seen        when, on the router's clock
    is_loading  whether it has said that it loads
    rows        of prompts that it computes, by attempt; `num_rows` together
    sequences   attempts that it decodes or will
    group       of instances on one machine, among which caches should stay
    """

    name: str
    place: str
    role: str
    health: Health = Health.STARTING
    ready: InstanceReady | None = None
    load: InstanceLoad | None = None
    stats: dict[str, Any] | None = None
    seen: float = 0.0
    is_loading: bool = False
    rows: dict[Attempt, int] = field(default_factory=dict)
    sequences: set[Attempt] = field(default_factory=set)
    group: str = ""
    num_rows: int = 0

    # These follow from `ready` and `load`. Every choice of an instance compares them for all, so they are kept.
    seconds_per_row: float = field(default=1e-3, init=False)
    batch: int = field(default=1, init=False)
    used_memory: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.ready is not None:
            self.set_ready(self.ready)

    def set_ready(self, ready: InstanceReady) -> None:
        """It has measured what it can do."""
        self.ready, self.seconds_per_row, self.batch = ready, ready.seconds_per_row, ready.batch or 1

    def set_load(self, load: InstanceLoad, now: float) -> None:
        """It has said how full it is."""
        self.load, self.seen = load, now
        self.used_memory = 1 - load.free_bytes / load.total_bytes if load.total_bytes else 0.0

    @property
    def is_serving(self) -> bool:
        """Whether it gets attempts."""
        return self.health is Health.SERVING

    def begin_prefill(self, attempt: Attempt, num_rows: int) -> None:
        """It is to compute a prompt."""
        self.end_prefill(attempt)
        self.rows[attempt] = num_rows
        self.num_rows += num_rows

    def end_prefill(self, attempt: Attempt) -> None:
        """It has computed the prompt of an attempt, or will not."""
        self.num_rows -= self.rows.pop(attempt, 0)

    @property
    def machine(self) -> str:
        """Where it runs; empty: on the router's machine. Instances on one machine have one disk."""
        address = urlsplit("" if self.ready is None else self.ready.address)
        return (address.hostname or "") if address.scheme == "tcp" else ""

    @property
    def transfer_seconds(self) -> float:
        """Time in which it gets a token of a cache from another instance."""
        costs = (self.stats or {}).get("costs", {})
        speed = costs.get("fetched_bytes_per_second")
        return costs["chunk_bytes"] / PAGE_TOKENS / speed if speed else TRANSFER_SECONDS_PER_TOKEN

    def fullness(self) -> float:
        """How full it is as a receiver: by sequences or by memory, whichever is more. Full is 1."""
        by_batch, by_memory = len(self.sequences) / self.batch, self.used_memory
        return by_memory if by_memory > by_batch else by_batch  # not max: this runs for every instance and request

    def forget(self, attempt: Attempt) -> None:
        """An attempt has ended."""
        self.end_prefill(attempt)
        self.sequences.discard(attempt)


class PrefixIndex:
    """Which instances may have which chunks: those that they were given. Approximate, for instances evict. Only choices
    depend on it.

    One table serves all instances: a key has a bit for each of them.
    """

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._numbers: dict[str, int] = {}

    def add(self, instance: str, keys: Sequence[bytes]) -> None:
        """An instance is about to have these chunks. The end of a prompt is forgotten before its beginning."""
        known, bit = self._known, 1 << self._number(instance)
        for key in reversed(keys):
            having = known.get(key)
            if having is None:
                known[key] = bit
            else:
                known[key] = having | bit
                known.move_to_end(key)
        while len(known) > self._most:
            known.popitem(last=False)

    def matched(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Number of first chunks that instances may have, by name; those without any are left out."""
        having, counts = -1, dict[int, int]()
        for count, key in enumerate(keys):
            still = having & self._known.get(key, 0)
            if count and still != having:
                counts[having & ~still] = count
            having = still
            if not having:
                break
        if keys and having:
            counts[having] = len(keys)
        if not counts:
            return {}
        return {
            name: count
            for name, number in self._numbers.items()
            for some, count in counts.items()
            if some >> number & 1
        }

    def forget(self, instance: str) -> None:
        """An instance has lost everything."""
        number = self._numbers.pop(instance, None)
        if number is not None:
            kept = ~(1 << number)
            self._known = OrderedDict((key, some & kept) for key, some in self._known.items() if some & kept)

    def _number(self, instance: str) -> int:
        number = self._numbers.get(instance)
        if number is None:
            used = {*self._numbers.values()}
            number = self._numbers[instance] = next(each for each in range(len(used) + 1) if each not in used)
        return number

    def __len__(self) -> int:
        return len(self._known)


def index_keys(salt: str, token_ids: list[int]) -> ChunkKeys:
    """Keys of the chunks of a list that may grow, for the index alone: an instance's own depend on its model."""
    return ChunkKeys(("router", salt), token_ids)


@dataclass(frozen=True)
class RoutingDecision:
    """Who does an attempt.

    source     None: the receiver computes the prompt
    num_rows   prompt rows that are expected to be computed
    remote_prefix  an instance from which whoever computes may fetch the prompt's first chunks, and how many
    """

    source: Member | None
    receiver: Member
    num_rows: int
    remote_prefix: RemotePrefix | None = None


class ServingInstances(NamedTuple):
    """The instances that get attempts: those that compute prompts, those that decode, and all. Empty lists: the roles
    of one half may be down.
    """

    computing: list[Member]
    decoding: list[Member]
    all: list[Member]

    @classmethod
    def of(cls, members: Iterable[Member]) -> ServingInstances:
        """Those among some instances."""
        found = [each for each in members if each.health is Health.SERVING]
        mixed = [each for each in found if each.role == "mixed"]
        first, second = ([each for each in found if each.role == role] for role in ("prefill", "decode"))
        return cls(first or mixed, second or mixed, found)


def choose_instances(
    serving: ServingInstances,
    index: PrefixIndex,
    keys: list[bytes],
    num_tokens: int,
    routing: str = "expected",
    *,
    avoided: Collection[str] = (),
    alone: bool = False,
    fetches: bool = True,
) -> RoutingDecision | None:
    """The instances of an attempt; None if there are none now.

    keys        of the prompt's whole chunks
    num_tokens  to compute if nothing is cached
    routing     see ClusterConfig
    avoided     names of instances that come last, whatever they promise
    alone       whether one instance must do all of it, with the help of no other one
    fetches     whether instances fetch prefixes from each other
    """
    computing, decoding, everybody = serving
    if not everybody:
        return None
    cached = index.matched(keys)
    others = (
        [each for each in everybody if each.name in cached and each.name not in avoided]
        if cached and fetches and not alone
        else []
    )

    def work_of(member: Member) -> PrefillEstimate:
        near = [RemotePrefix(each.name, cached[each.name]) for each in others if each.group == member.group]
        most = max(near, key=lambda each: each.num_chunks, default=None)
        return _estimate_prefill(member, num_tokens, cached.get(member.name, 0), most)

    def first_token(member: Member) -> tuple[float, ...]:
        comes_last = member.name in avoided
        if routing == "queue":
            return (comes_last, member.num_rows, len(member.sequences))
        if routing == "affinity":
            return (comes_last, -cached.get(member.name, 0), member.num_rows)
        queue_seconds = member.num_rows * member.seconds_per_row  # to compute the prompts that it has
        return (comes_last, queue_seconds + work_of(member).seconds, member.fullness())

    def first_of(candidates: list[Member]) -> Member:
        if routing == "expected" and not others and not avoided:
            return min(_soonest(candidates, cached, num_tokens), key=Member.fullness)
        return min(candidates, key=first_token)

    computes = first_of(everybody if alone or not computing or not decoding else computing)
    work = work_of(computes)
    if alone or not computing or computes in decoding or not decoding:
        return RoutingDecision(None, computes, work.num_rows, work.remote_prefix)

    def to_decode(member: Member) -> tuple[float, ...]:
        lacking = num_tokens - PAGE_TOKENS * cached.get(member.name, 0)
        full = member.fullness()
        return (member.name in avoided, full >= 1, full + lacking * member.transfer_seconds)

    near = [each for each in decoding if each.group == computes.group]
    return RoutingDecision(computes, min(near or decoding, key=to_decode), work.num_rows, work.remote_prefix)


def _soonest(members: list[Member], cached: Mapping[str, int], num_tokens: int) -> list[Member]:
    """The members with the earliest first token, of many that compute what they have not cached. As
    `choose_instances`, but with little work for each.
    """
    seconds = [(each.num_rows + num_tokens) * each.seconds_per_row for each in members]
    if cached:
        for index, each in enumerate(members):
            if (count := cached.get(each.name)) is not None:
                rows = max(1, num_tokens - PAGE_TOKENS * count)
                seconds[index] = (each.num_rows + rows) * each.seconds_per_row
    most = min(seconds) * (1 + 1e-9)
    return [each for each, time in zip(members, seconds, strict=True) if time <= most]


class PrefillEstimate(NamedTuple):
    """What an instance would do for a prompt. remote_prefix: see RoutingDecision."""

    seconds: float
    num_rows: int
    remote_prefix: RemotePrefix | None


def _estimate_prefill(
    member: Member, num_tokens: int, num_cached: int, remote_prefix: RemotePrefix | None
) -> PrefillEstimate:
    """The faster one of computing what is not cached and of fetching what another instance may have.

    num_cached  first chunks that the instance may have
    """
    rows = max(1, num_tokens - PAGE_TOKENS * num_cached)
    computing = PrefillEstimate(rows * member.seconds_per_row, rows, None)
    if remote_prefix is None or remote_prefix.num_chunks <= num_cached:
        return computing
    num_fetched = PAGE_TOKENS * (remote_prefix.num_chunks - num_cached)
    rows = max(1, num_tokens - PAGE_TOKENS * remote_prefix.num_chunks)
    seconds = num_fetched * member.transfer_seconds + rows * member.seconds_per_row
    return min(computing, PrefillEstimate(seconds, rows, remote_prefix), key=lambda work: work.seconds)
