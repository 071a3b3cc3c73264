"""Faults that tests switch on: an instance that copies slowly, overwrites what it has let go, damages extents, or loses
and repeats messages.

QUIRE_FAULTS says which, as in `delay=0.05,poison`, when an instance starts. Without it nothing here has an effect.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.cache.ledger import UNIT
from quire.cache.table import ChunkTable
from quire.cluster.bodies import InstanceLoad, InstanceReady
from quire.cluster.connections import Bulk, PeerConnections
from quire.cluster.engine_attempts import EngineAttempts
from quire.cluster.messages import ROUTER, Attempt

VARIABLE = "QUIRE_FAULTS"


@dataclass(frozen=True)
class Faults:
    """What goes wrong in an instance.

    delay    seconds before each extent is sent
    poison   free pages are overwritten whenever an attempt ends
    corrupt  share of the extents with a wrong bit
    lose     share of the messages that are not sent
    repeat   share of the messages that are sent twice
    peers    whether messages to the router are safe
    seed     of what happens to which
    """

    delay: float = 0.0
    poison: bool = False
    corrupt: float = 0.0
    lose: float = 0.0
    repeat: float = 0.0
    peers: bool = False
    seed: int = 0

    @classmethod
    def from_environment(cls) -> Faults:
        """Those that the environment names. Raises ValueError for others."""
        found: dict[str, Any] = {}
        none: dict[str, Any] = dataclasses.asdict(cls())
        for word in filter(None, os.environ.get(VARIABLE, "").split(",")):
            name, _, value = word.partition("=")
            if name not in none:
                raise ValueError(f"{VARIABLE}: there is no fault {name!r}; there are {', '.join(none)}")
            found[name] = type(none[name])(value or True)
        return cls(**found)

    def engine_attempts(self) -> type[EngineAttempts]:
        """The class of an instance's attempts."""
        return PoisoningAttempts if self.poison else EngineAttempts

    def connections(self, name: str, *given: Any, **more: Any) -> PeerConnections:
        """An instance's connections."""
        if self in (Faults(), Faults(poison=True)):
            return PeerConnections(name, *given, **more)
        return FaultyConnections(self, name, *given, **more)


class PoisoningAttempts(EngineAttempts):
    """Overwrites what its engine has let go."""

    def end(self, attempt: Attempt) -> None:
        """See EngineAttempts. A later command releases what an export has."""
        super().end(attempt)
        self._submit(self._poison)

    def _poison(self) -> None:
        table = self.engine.scheduler.manager.table
        assert isinstance(table, ChunkTable), "a table without pages"
        poison_free(table)


class FaultyConnections(PeerConnections):
    """Loses, repeats and delays what is sent. `counts` tells by fault how often."""

    def __init__(self, faults: Faults, name: str, *given: Any, **more: Any) -> None:
        super().__init__(name, *given, **more)
        self.counts: Counter[str] = Counter()
        self._faults = faults
        self._random = random.Random(f"{name} {faults.seed}")

    def send(self, to: str, message: Any, bulk: Bulk | None = None) -> bool:
        """See PeerConnections."""
        faults = self._faults
        if isinstance(message, InstanceLoad | InstanceReady) or (to == ROUTER and faults.peers):
            return super().send(to, message, bulk)
        if self._random.random() < faults.lose:
            self.counts["lose"] += 1
            if bulk is not None:
                bulk.done()
            return True
        if bulk is None and self._random.random() < faults.repeat:
            self.counts["repeat"] += 1
            super().send(to, message)
        return super().send(to, message, None if bulk is None else _FaultyBulk(bulk, faults, self._random, self.counts))


class _FaultyBulk:
    """Extents that are sent late, and some of them damaged."""

    def __init__(self, bulk: Bulk, faults: Faults, draw: random.Random, counts: Counter[str]) -> None:
        self.num_extents = bulk.num_extents
        self.done = bulk.done
        self._bulk, self._faults, self._random, self._counts = bulk, faults, draw, counts

    def pack(self) -> Iterator[memoryview]:
        """See Bulk."""
        for extent in self._bulk.pack():
            if self._faults.delay:
                self._counts["delay"] += 1
                time.sleep(self._faults.delay)
            if self._random.random() < self._faults.corrupt:
                self._counts["corrupt"] += 1
                extent[self._random.randrange(len(extent))] ^= 1
            yield extent


def poison_free(table: ChunkTable) -> int:
    """Fills what no page of the table holds with 0xFF, also where pages lay before: NaN in every format. Returns the
    bytes.
    """
    ledger = table.ledger
    is_free = np.ones(ledger.num_bytes // UNIT, bool)
    ids = ledger.allocated_ids()
    if len(ids):
        sizes = ledger.page_bytes(ids)
        for size in np.unique(sizes).tolist():
            is_free[ids[sizes == size][:, None] + np.arange(size // UNIT)] = False
    table.arena.data.numpy()[: ledger.num_bytes].reshape(-1, UNIT)[is_free] = 0xFF
    return int(is_free.sum()) * UNIT
