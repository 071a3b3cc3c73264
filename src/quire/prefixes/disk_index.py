"""The runs of one engine's namespace on a disk, by chunk, and how they continue each other.

Built from a complete listing, in 50 ms for 64,000 chunks: not on the engine's thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.cache.ledger import PAGE_TOKENS

if TYPE_CHECKING:
    from quire.stores.listing import StoredRun


@dataclass(frozen=True)
class TierCopy:
    """A tier's copy of a prefix: bytes of the chunks after its parent, and times in seconds since the epoch.

    pinned_until  0: not pinned; inf: without a time limit
    """

    num_bytes: int
    used: float
    pinned_until: float


class DiskPrefixIndex:
    """The runs, those used last first.

    run_of  for each chunk, the most recently used run that has it
    after   for each chunk, the chunks that follow it in some run
    pins    for each pinned chunk, the end of the pin
    chains  sequences of runs without branches in between
    """

    def __init__(self, stored: Sequence[StoredRun]) -> None:
        self.run_of: dict[bytes, StoredRun] = {}
        self.after: dict[bytes, set[bytes]] = defaultdict(set)
        self.pins: dict[bytes, float] = {}
        for run in reversed(stored):
            for before, name in zip((run.parent, *run.names), run.names, strict=False):
                self.run_of[name] = run
                self.after[before].add(name)
                if run.pinned_until:
                    self.pins[name] = max(run.pinned_until, self.pins.get(name, 0.0))
        self.chains = _chains(stored)
        self._chain_of = {run.names[-1]: chain for chain in self.chains for run in chain}

    def chain_start(self, run: StoredRun) -> StoredRun:
        """The first run of the chain that leads to a run."""
        return self._chain_of[run.names[-1]][0]

    def tier_copy(self, key: bytes, num_tokens: int) -> TierCopy | None:
        """The stored copy of the last `num_tokens` tokens up to a chunk, over all runs; None without any."""
        left, num_bytes, used, until = num_tokens // PAGE_TOKENS, 0.0, 0.0, 0.0
        end, is_there = key, False
        while left > 0 and (run := self.run_of.get(end)) is not None:
            count = min(left, run.names.index(end) + 1)
            num_bytes += run.num_bytes * count / len(run.names)
            used, until = max(used, run.used), max(until, run.pinned_until)
            left, end, is_there = left - count, run.parent, True
        return TierCopy(round(num_bytes), used, until) if is_there else None

    def descendants(self, key: bytes) -> list[bytes]:
        """All descendants of a chunk."""
        found = list(self.after.get(key, ()))
        for name in found:  # grows as it runs; keys are digests of all before them, so there is no circle
            found.extend(self.after.get(name, ()))
        return found


def _chains(stored: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """The chains of the runs. Of runs with equal chunks, only the one used last."""
    runs: dict[bytes, StoredRun] = {}
    for run in stored:
        known = runs.get(run.names[-1])
        if known is None or (len(known.names), known.used) < (len(run.names), run.used):
            runs[run.names[-1]] = run
    after: dict[bytes, list[StoredRun]] = defaultdict(list)
    for run in runs.values():
        after[run.parent].append(run)
    chains: list[list[StoredRun]] = []
    todo = [[run] for run in runs.values() if not run.start or len(after[run.parent]) > 1 or run.parent not in runs]
    for chain in todo:
        while len(following := after[chain[-1].names[-1]]) == 1 and following[0].start:
            chain.append(following[0])
        chains.append(chain)
    return chains
