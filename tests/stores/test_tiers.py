"""Several stores as one, and what a store does that says nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quire.cache.run import Run
from quire.cache.store import Transfer
from quire.stores.memory import MemoryStore
from quire.stores.tiers import Tier, Tiers

from ..disk_runs import FakeRun, holds

KIB = 1 << 10


class Nowhere(Tier):
    """Has nothing, and says of itself only what a tier must say."""

    name, keeps = "nowhere", False

    def find(self, name: bytes) -> Run | None:
        """Nothing."""
        return None

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Brings nothing."""
        raise AssertionError("nobody asks for what it does not have")

    def drop(self, names: Iterable[bytes]) -> None:
        """Has nothing to drop."""

    def close(self) -> None:
        """Has no threads."""

    def stats(self) -> dict[str, Any]:
        """Counts nothing."""
        return {}


def test_a_run_comes_whole_into_every_store_and_from_the_nearest_one() -> None:
    near, far = (MemoryStore(100 * KIB, pinned=False) for _ in range(2))
    tiers, fake = Tiers([near, far]), FakeRun(1)
    assert tiers.wants(fake.names) == [True, True]
    tiers.put(fake.run, fake.pack())
    assert tiers.wants(fake.names) == [False, False]
    near.drop(fake.names)
    assert tiers.find(fake.names[0]) is fake.run and tiers.wants(fake.names) == [True, True]
    for store, is_there in ((near, False), (far, True), (tiers, True)):
        assert holds(store, fake) == is_there
    tiers.close()


def test_a_tier_that_says_nothing_else_takes_and_keeps_nothing() -> None:
    tier, fake = Nowhere(), FakeRun(1)
    tiers = Tiers([tier])
    assert tier.wants(fake.names) == tiers.wants(fake.names) == [False, False]
    tiers.put(fake.run, fake.pack())
    assert tiers.find(fake.names[0]) is None and tiers.stored() == [] and tiers.measure() is None
    assert not tiers.keeps and not tiers.is_persistent and not tiers.pin(fake.names, 1e12)
    assert tiers.flush(0.0) and tiers.stats() == {"nowhere": {}}
    tiers.unpin(fake.names)
    tiers.close()
