"""The router's model of its instances, and its choice among them. Knows no connection and no process."""

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
"""Maximum number of chunk keys in the index, some 30 MB."""

TRANSFER_SECONDS_PER_TOKEN = 25e-6
"""The default before an instance has measured it: 40 KB a token at 1.6 GB/s. The router only compares instances; each
instance decides for itself whether to fetch."""


class Health(Enum):
    """Whether an instance gets attempts.

    STARTING  loads its model
    SERVING   gets attempts
    DRAINING  finishes its attempts
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

    name        name of the instance, with the number of its start
    place       the name without this number: a restarted instance takes the place of the one before
    ready       its measurements; see `set_ready`
    load        its last reported load; see `set_load`
    stats       counters of its engine, a little older
    seen        time of the last load, on the router's clock
    is_loading  whether it has reported that it loads
    rows        rows of the prompts that it computes, by attempt; `num_rows` is their sum
    sequences   attempts that it decodes or will decode
    group       name shared by instances on one machine, among which caches should stay
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

    # Derived from `ready` and `load`, and stored because every choice compares them for all instances.
    seconds_per_row: float = field(default=1e-3, init=False)
    batch: int = field(default=1, init=False)
    used_memory: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.ready is not None:
            self.set_ready(self.ready)

    def set_ready(self, ready: InstanceReady) -> None:
        """Stores the instance's measurements."""
        self.ready, self.seconds_per_row, self.batch = ready, ready.seconds_per_row, ready.batch or 1

    def set_load(self, load: InstanceLoad, now: float) -> None:
        """Stores the instance's load."""
        self.load, self.seen = load, now
        self.used_memory = 1 - load.free_bytes / load.total_bytes if load.total_bytes else 0.0

    @property
    def is_serving(self) -> bool:
        """Whether it gets attempts."""
        return self.health is Health.SERVING

    def begin_prefill(self, attempt: Attempt, num_rows: int) -> None:
        """Adds a prompt that the instance will compute."""
        self.end_prefill(attempt)
        self.rows[attempt] = num_rows
        self.num_rows += num_rows

    def end_prefill(self, attempt: Attempt) -> None:
        """Removes a prompt that the instance has computed or will not compute."""
        self.num_rows -= self.rows.pop(attempt, 0)

    @property
    def machine(self) -> str:
        """The machine of the instance; empty: the router's machine. Instances on one machine share one disk."""
        address = urlsplit("" if self.ready is None else self.ready.address)
        return (address.hostname or "") if address.scheme == "tcp" else ""

    @property
    def transfer_seconds(self) -> float:
        """Seconds to fetch the cache of one token from another instance."""
        costs = (self.stats or {}).get("costs", {})
        speed = costs.get("fetched_bytes_per_second")
        return costs["chunk_bytes"] / PAGE_TOKENS / speed if speed else TRANSFER_SECONDS_PER_TOKEN

    def fullness(self) -> float:
        """The fullness as a receiver, by sequences or by memory, whichever is larger; 1 is full."""
        by_batch, by_memory = len(self.sequences) / self.batch, self.used_memory
        return by_memory if by_memory > by_batch else by_batch  # not max: this runs for every instance and request

    def forget(self, attempt: Attempt) -> None:
        """Forgets an attempt that has ended."""
        self.end_prefill(attempt)
        self.sequences.discard(attempt)


class PrefixIndex:
    """Which instances may have which chunks, by the chunks that were routed to them. Approximate, because instances
    evict; it only influences routing.

    One table serves all instances: a key has a bit for each of them.
    """

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._numbers: dict[str, int] = {}

    def add(self, instance: str, keys: Sequence[bytes]) -> None:
        """Notes the chunks that an instance will have. The end of a prompt is evicted before its beginning."""
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
        """Number of leading chunks that each instance may have, by name; instances without any are left out."""
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
        """Forgets the chunks of an instance that has lost them."""
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
    """Keys of the chunks of a list that may grow, for the index only: keys of an instance also depend on its model."""
    return ChunkKeys(("router", salt), token_ids)


@dataclass(frozen=True)
class RoutingDecision:
    """The instances of an attempt.

    source     None: the receiver computes the prompt
    num_rows   expected number of prompt rows to compute
    remote_prefix  a prefix of the prompt that the computing instance may fetch from another one
    """

    source: Member | None
    receiver: Member
    num_rows: int
    remote_prefix: RemotePrefix | None = None


class ServingInstances(NamedTuple):
    """The instances that get attempts: those that compute prompts, those that decode, and all. A list is empty if all
    instances of its roles are down.
    """

    computing: list[Member]
    decoding: list[Member]
    all: list[Member]

    @classmethod
    def of(cls, members: Iterable[Member]) -> ServingInstances:
        """The serving instances among `members`."""
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
    """Chooses the instances of an attempt; None if none is available now.

    keys        keys of the prompt's whole chunks
    num_tokens  number of tokens to compute if nothing is cached
    routing     see ClusterConfig
    avoided     names of instances that are chosen last
    alone       whether one instance must do everything, without help of another one
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
        queue_seconds = member.num_rows * member.seconds_per_row  # seconds for the prompts that are queued
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
    """The members with the earliest first token, if each computes what it has not cached. A fast pre-selection among
    many members.
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
    """An instance's expected work for a prompt. remote_prefix: see RoutingDecision."""

    seconds: float
    num_rows: int
    remote_prefix: RemotePrefix | None


def _estimate_prefill(
    member: Member, num_tokens: int, num_cached: int, remote_prefix: RemotePrefix | None
) -> PrefillEstimate:
    """The faster of two ways: computing everything not cached, or fetching a prefix from another instance first.

    num_cached  number of leading chunks that the instance may have
    """
    rows = max(1, num_tokens - PAGE_TOKENS * num_cached)
    computing = PrefillEstimate(rows * member.seconds_per_row, rows, None)
    if remote_prefix is None or remote_prefix.num_chunks <= num_cached:
        return computing
    num_fetched = PAGE_TOKENS * (remote_prefix.num_chunks - num_cached)
    rows = max(1, num_tokens - PAGE_TOKENS * remote_prefix.num_chunks)
    seconds = num_fetched * member.transfer_seconds + rows * member.seconds_per_row
    return min(computing, PrefillEstimate(seconds, rows, remote_prefix), key=lambda work: work.seconds)
