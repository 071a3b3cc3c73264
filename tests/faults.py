"""Instances with faults: they copy slowly, overwrite what they have let go, damage extents, or lose and repeat
messages.

    python -m tests.faults FAULTS NUMBER      an instance with faults such as delay=0.05,poison; see `cluster.start`
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.cache.table import ChunkTable
from quire.cluster import instance, start
from quire.cluster.bodies import InstanceLoad, InstanceReady
from quire.cluster.connections import Bulk, PeerConnections
from quire.cluster.engine_attempts import EngineAttempts
from quire.cluster.messages import ROUTER, Attempt
from quire.cluster.processes import Processes

from .poison import poison_free


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
    def read(cls, text: str) -> Faults:
        """Those that a text names. Raises ValueError for others."""
        found: dict[str, Any] = {}
        none: dict[str, Any] = dataclasses.asdict(cls())
        for word in filter(None, text.split(",")):
            name, _, value = word.partition("=")
            if name not in none:
                raise ValueError(f"there is no fault {name!r}; there are {', '.join(none)}")
            found[name] = type(none[name])(value or True)
        return cls(**found)

    def install(self, set_attribute: Callable[[object, str, Any], None] = setattr) -> None:
        """Gives them to all instances of this process that are made from now on."""
        if self.poison:
            set_attribute(instance, "EngineAttempts", PoisoningAttempts)
        if self not in (Faults(), Faults(poison=True)):
            set_attribute(instance, "PeerConnections", partial(FaultyConnections, self))


class FaultyProcesses(Processes):
    """Instances with faults, in processes of their own. Started in the folder of the repository."""

    def __init__(self, faults: str) -> None:
        super().__init__()
        self.arguments = ("-m", "tests.faults", faults)


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


def main() -> int:
    """Runs an instance."""
    Faults.read(sys.argv[1]).install()
    return start.main()


if __name__ == "__main__":
    sys.exit(main())
