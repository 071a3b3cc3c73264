"""What a router knows of its instances, and how it chooses among them. Knows no connection and no process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS
from quire.cluster.bodies import Elsewhere, Load, Ready
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


@dataclass(eq=False)
class Member:
    """An instance.

    name        with the number of its start
    place       without it: a restarted instance takes the place of the one before
    ready       what it has measured
    load        what it said last
    stats       counters of its engine, a little older
    seen        when, on the router's clock
    is_loading  whether it has said that it loads
    rows        of prompts that it computes, by attempt
    sequences   attempts that it decodes or will
    group       of instances on one machine, among which caches should stay
    """

    name: str
    place: str
    role: str
    health: Health = Health.STARTING
    ready: Ready | None = None
    load: Load | None = None
    stats: dict[str, Any] | None = None
    seen: float = 0.0
    is_loading: bool = False
    rows: dict[Attempt, int] = field(default_factory=dict)
    sequences: set[Attempt] = field(default_factory=set)
    group: str = ""

    @property
    def serves(self) -> bool:
        """Whether it gets attempts."""
        return self.health is Health.SERVING

    def queue_seconds(self) -> float:
        """Time to compute the prompts that it has."""
        return sum(self.rows.values()) * self.seconds_per_row

    @property
    def seconds_per_row(self) -> float:
        """Of a prompt."""
        return 1e-3 if self.ready is None else self.ready.seconds_per_row

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
        batch = max(1, self.ready.batch if self.ready is not None else 1)
        by_batch = len(self.sequences) / batch
        if self.load is None or not self.load.total_bytes:
            return by_batch
        return max(by_batch, 1 - self.load.free_bytes / self.load.total_bytes)

    def forget(self, attempt: Attempt) -> None:
        """An attempt has ended."""
        self.rows.pop(attempt, None)
        self.sequences.discard(attempt)


class Index:
    """Which instance may have which chunks: those that it was given. Approximate, for instances evict. Only choices
    depend on it.
    """

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._known: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def add(self, instance: str, keys: Sequence[bytes]) -> None:
        """An instance is about to have these chunks. The end of a prompt is forgotten before its beginning."""
        for key in reversed(keys):
            self._known[instance, key] = None
            self._known.move_to_end((instance, key))
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def matched(self, instance: str, keys: Sequence[bytes]) -> int:
        """Number of first chunks that an instance may have."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if (instance, keys[middle - 1]) in self._known else (low, middle - 1)
        return low

    def forget(self, instance: str) -> None:
        """An instance has lost everything."""
        for each in [known for known in self._known if known[0] == instance]:
            del self._known[each]

    def __len__(self) -> int:
        return len(self._known)


def index_keys(salt: str, token_ids: list[int]) -> ChunkKeys:
    """Keys of the chunks of a list that may grow, for the index alone: an instance's own depend on its model."""
    return ChunkKeys(("router", salt), token_ids)


@dataclass(frozen=True)
class Choice:
    """Who does an attempt.

    source     None: the receiver computes the prompt
    num_rows   prompt rows that are expected to be computed
    elsewhere  an instance from which whoever computes may fetch the prompt's first chunks, and how many
    """

    source: Member | None
    receiver: Member
    num_rows: int
    elsewhere: Elsewhere | None = None


def choose(
    members: Iterable[Member],
    index: Index,
    keys: list[bytes],
    num_tokens: int,
    routing: str = "expected",
    *,
    avoided: Collection[str] = (),
    alone: bool = False,
    fetches: bool = True,
) -> Choice | None:
    """The instances of an attempt; None if there are none now.

    keys        of the prompt's whole chunks
    num_tokens  to compute if nothing is cached
    routing     see ClusterConfig
    avoided     names of instances that come last, whatever they promise
    alone       whether one instance must do all of it, with the help of no other one
    fetches     whether instances fetch prefixes from each other
    """
    serving = [each for each in members if each.serves]
    if not serving:
        return None
    computing = [each for each in serving if each.role == "prefill"] or [
        each for each in serving if each.role == "mixed"
    ]
    decoding = [each for each in serving if each.role == "decode"] or [each for each in serving if each.role == "mixed"]

    cached = {each.name: index.matched(each.name, keys) for each in serving}
    others = [] if alone or not fetches else [each for each in serving if each.name not in avoided]

    def work_of(member: Member) -> Work:
        near = [Elsewhere(each.name, cached[each.name]) for each in others if each.group == member.group]
        most = max(near, key=lambda each: each.num_chunks, default=None)
        return _work(member, num_tokens, cached[member.name], most)

    def first_token(member: Member) -> tuple[float, ...]:
        work, comes_last = work_of(member), member.name in avoided
        if routing == "queue":
            return (comes_last, sum(member.rows.values()), len(member.sequences))
        if routing == "affinity":
            return (comes_last, -cached[member.name], sum(member.rows.values()))
        return (comes_last, member.queue_seconds() + work.seconds, member.fullness())

    if alone or not computing or not decoding:
        computes = min(serving, key=first_token)  # half of the roles may be down
    else:
        computes = min(computing, key=first_token)
    work = work_of(computes)
    if alone or not computing or computes in decoding or not decoding:
        return Choice(None, computes, work.num_rows, work.elsewhere)

    def to_decode(member: Member) -> tuple[float, ...]:
        lacking = num_tokens - PAGE_TOKENS * cached[member.name]
        full = member.fullness()
        return (member.name in avoided, full >= 1, full + lacking * member.transfer_seconds)

    near = [each for each in decoding if each.group == computes.group]
    return Choice(computes, min(near or decoding, key=to_decode), work.num_rows, work.elsewhere)


class Work(NamedTuple):
    """What an instance would do for a prompt. elsewhere: see Choice."""

    seconds: float
    num_rows: int
    elsewhere: Elsewhere | None


def _work(member: Member, num_tokens: int, num_cached: int, elsewhere: Elsewhere | None) -> Work:
    """The faster one of computing what is not cached and of fetching what another instance may have.

    num_cached  first chunks that the instance may have
    """
    rows = max(1, num_tokens - PAGE_TOKENS * num_cached)
    computing = Work(rows * member.seconds_per_row, rows, None)
    if elsewhere is None or elsewhere.num_chunks <= num_cached:
        return computing
    num_fetched = PAGE_TOKENS * (elsewhere.num_chunks - num_cached)
    rows = max(1, num_tokens - PAGE_TOKENS * elsewhere.num_chunks)
    seconds = num_fetched * member.transfer_seconds + rows * member.seconds_per_row
    return min(computing, Work(seconds, rows, elsewhere), key=lambda work: work.seconds)
