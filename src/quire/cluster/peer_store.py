"""Other instances as a tier of the cache: the caches that they hold for requests that this instance continues.

A source announces the chunks of a prompt, and later the packed rest of it. Both are found here like chunks on a disk,
and arrive by the same transfers. Nothing is stored here. The engine's thread requests; a connection's thread delivers.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.cache.keys import ChunkKeys
from quire.cache.run import Run, RunIdentity, complete_run, run_bytes
from quire.cache.store import Transfer
from quire.cache.table import ChunkTable
from quire.cluster.messages import Attempt
from quire.errors import ExtentError, QuireError
from quire.stores.signer import ExtentSigner
from quire.stores.tiers import Tier


@dataclass(eq=False)
class Offer:
    """The part of an attempt's cache that a source has.

    keys        keys of its chunks
    shared      run of the shared chunks so far; None: none yet
    own         run of the rest, once the prompt is computed; None: not yet, or no rest
    is_cached   whether the chunks may be in the source's cache without the source knowing the attempt
    has_failed  whether a pull of it has failed
    """

    attempt: Attempt
    source: str
    keys: ChunkKeys
    shared: Run | None = None
    own: Run | None = None
    is_cached: bool = False
    has_failed: bool = False

    @property
    def names(self) -> list[bytes]:
        """The keys of all its chunks and its handle."""
        return [name for run in (self.shared, self.own) if run is not None for name in run.names]


@dataclass(eq=False)
class Pull:
    """A part of a transfer that is requested from a source.

    number  number that identifies the pull in the answer
    offer   offer of the source
    groups  parts of the attempt, one group per run
    runs    runs in the order of their extents: for each layer one extent per run
    """

    number: int
    offer: Offer
    groups: list[list[int]]
    transfer: Transfer
    runs: list[Run]
    num_bytes: int = 0

    @property
    def attempt(self) -> Attempt:
        """The attempt that the pull belongs to."""
        return self.offer.attempt

    @property
    def source(self) -> str:
        """The source that gets the request."""
        return self.offer.source

    @property
    def names(self) -> list[bytes]:
        """Keys of the prompt's first chunks, if the source must find them in its cache; otherwise empty."""
        return list(self.offer.shared.names) if self.offer.is_cached and self.offer.shared is not None else []

    @property
    def parts(self) -> frozenset[int]:
        """All parts."""
        return frozenset(itertools.chain(*self.groups))


class PeerStore(Tier):
    """Finds the offers of sources, by the keys of chunks and by handles.

    table, ask  set by the engine before the first offer: its chunk table, and a function that is called with each pull,
                on the engine's thread
    """

    name = "neighbour"
    keeps = False
    table: ChunkTable
    ask: Callable[[Pull], None]

    def __init__(self, signer: ExtentSigner) -> None:
        self._signer = signer
        self._offers: dict[Attempt, Offer] = {}
        self._by_name: dict[bytes, list[Offer]] = {}  # the latest one last
        self._received: dict[str, tuple[int, int]] = {}
        self._pulls: dict[int, Pull] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("num_pulls", "num_read", "bytes_read", "bytes_pages", "bytes_sums", "bytes_state", "num_damaged",
             "num_failed"),
            0,
        )  # fmt: skip

    # ---- messages of sources ---------------------------------------------------------------------------------------

    def offer(
        self,
        attempt: Attempt,
        source: str,
        keys: ChunkKeys,
        num_shared: int,
        own: Run | None = None,
        *,
        is_cached: bool = False,
    ) -> None:
        """Registers an offer: a source has the first `num_shared` chunks of a prompt, and the run of the rest once it
        is computed.

        is_cached  see Offer; a source that lacks the chunks reports that when it is asked
        """
        self.withdraw(attempt)
        names, shared = tuple(keys.first(num_shared)), None
        if names:
            shared = complete_run(self.table, RunIdentity(names, keys.tokens(0, num_shared), keys.namespace))
        found = self._offers[attempt] = Offer(attempt, source, keys, shared, own, is_cached)
        for name in found.names:
            self._by_name.setdefault(name, []).append(found)

    def note_state(self, num_bytes: int) -> None:
        """Counts the bytes of a manifest's description of a cache."""
        self._counts["bytes_state"] += num_bytes

    def withdraw(self, attempt: Attempt) -> None:
        """Forgets an offer. Pulls under way continue."""
        offer = self._offers.pop(attempt, None)
        if offer is not None:
            for name in offer.names:
                offers = self._by_name[name]
                offers.remove(offer)
                if not offers:
                    del self._by_name[name]

    def received(self, source: str) -> tuple[int, int]:
        """The last pull that received something from a source, and the total bytes received from it."""
        return self._received.get(source, (0, 0))

    def forget(self, source: str) -> None:
        """Forgets a source that is gone."""
        self._received.pop(source, None)

    def arrive(self, number: int, extents: Iterator[memoryview]) -> bool:
        """Takes the extents of a pull: for each layer, one per run. Returns False if one is damaged or missing. On a
        connection's thread.
        """
        pull = self.find_pull(number)
        if pull is None:
            return True  # no transfer waits for them
        names = [b"".join(run.names) for run in pull.runs]
        num_layers = len(pull.transfer.ready)
        for count, extent in enumerate(extents, 1):
            index = (count - 1) % len(pull.runs)
            try:
                self._signer.verify(names[index], extent)
            except ExtentError:
                self._counts["num_damaged"] += 1
                return False
            self._note_extent(pull, len(extent))
            pull.transfer.arrive(pull.runs[index], extent)
            if count == num_layers * len(pull.runs):
                self._note_end(pull)
                return True
        return False

    def find_pull(self, number: int) -> Pull | None:
        """The pull with this number, if its transfer still waits."""
        with self._lock:
            pull = self._pulls.get(number)
        return None if pull is None or pull.transfer.is_over else pull

    def note_layer(self, pull: Pull, layer: int, num_bytes: Sequence[int]) -> None:
        """Counts a received layer of simulated bytes. num_bytes: bytes of each run."""
        for run, of_run in zip(pull.runs, num_bytes, strict=True):
            self._note_extent(pull, of_run)
            pull.transfer.note(run, layer)
        if layer + 1 == len(pull.transfer.ready):
            self._note_end(pull)

    def fail(self, number: int, reason: str) -> None:
        """Fails a pull whose source lacks the requested chunks or does not answer."""
        with self._lock:
            pull = self._pulls.pop(number, None)
        if pull is not None and not pull.transfer.is_over:
            pull.offer.has_failed = True
            self._counts["num_failed"] += 1
            pull.transfer.fail(QuireError(reason), pull.runs[0])

    def _note_extent(self, pull: Pull, num_bytes: int) -> None:
        pull.num_bytes += num_bytes
        self._received[pull.source] = (pull.number, self.received(pull.source)[1] + num_bytes)
        self._counts["bytes_read"] += num_bytes

    def _note_end(self, pull: Pull) -> None:
        """Counts the bytes of pages, with their positions, and of column sums, which are in the last rows. The other
        received bytes are headers, masks and exact first tokens.
        """
        self._counts["num_read"] += len(pull.runs)
        for run in pull.runs:
            num_bytes, first = run_bytes(self.table, run), len(run.kinds) - run.num_attached
            sums = int(self.table.sizes[run.kinds[first:]][run.masks[first:] != 0].sum())
            self._counts["bytes_sums"] += sums
            self._counts["bytes_pages"] += num_bytes - sums

    # ---- a store: see Store ----------------------------------------------------------------------------------------

    def find(self, name: bytes) -> Run | None:
        """The run of a source with this chunk or handle."""
        offer = self._latest(name)
        if offer is None:
            return None
        return offer.own if offer.own is not None and name in offer.own.names else offer.shared

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Requests the runs from their sources."""
        by_offer: dict[Offer, list[Run]] = {}
        own = next((self._latest(run.names[0]) for run in runs if not run.is_shared), None)
        for run in runs:
            transfer.sources[run] = self.name
            # Several sources may have a chunk. Prefer the one that holds it for this sequence.
            is_there = own is not None and own.shared is not None and {*run.names} <= {*own.shared.names}
            offer = own if is_there else self._latest(run.names[0])
            if offer is None:
                transfer.fail(QuireError("the source has withdrawn its offer"), run)
                return
            by_offer.setdefault(offer, []).append(run)
        for offer, found in by_offer.items():
            groups, number = [list(_parts(offer, run)) for run in found], next(self._numbers)
            pull = Pull(number, offer, groups, transfer, found)
            with self._lock:
                self._pulls = {each: old for each, old in self._pulls.items() if not old.transfer.is_over}
                self._pulls[number] = pull
            self._counts["num_pulls"] += 1
            self.ask(pull)

    def drop(self, names: Iterable[bytes]) -> None:
        """Forgets offers with any of these names: the failed ones, or else the latest one."""
        for name in names:
            offers = self._by_name.get(name, [])
            for offer in [each for each in offers if each.has_failed] or offers[-1:]:
                self.withdraw(offer.attempt)

    def _latest(self, name: bytes) -> Offer | None:
        offers = self._by_name.get(name)
        return offers[-1] if offers else None

    # ---- a tier: see Tier ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Forgets everything."""
        self._offers.clear()
        self._by_name.clear()

    def stats(self) -> dict[str, Any]:
        """Counts since start. bytes_read: of extents, bytes_pages and bytes_sums included, bytes_state not included."""
        return {"bytes": 0, "cap_bytes": 0, "chunks": 0, "is_on": True, **self._counts}


def _parts(offer: Offer, run: Run) -> Iterator[int]:
    """The parts of an attempt that belong to a run."""
    num_shared = 0 if offer.shared is None else len(offer.shared.names)
    if not run.is_shared:
        yield num_shared
        return
    indices = {name: index for index, name in enumerate(offer.keys.first(num_shared))}
    for name in run.names:
        yield indices[name]
