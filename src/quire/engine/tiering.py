"""The engine's side of its tiers: moves between steps, pins on the disk, and measured costs."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.manager import CacheManager
from quire.engine.step import Step
from quire.stores.tiers import Tiers

log = logging.getLogger("quire")

IDLE_BYTES = 8 << 20
"""Bytes that an idle engine copies to its tiers before it looks for new requests: 3 ms."""

RETRY_SECONDS = 0.02
"""Interval at which an idle engine offers chunks again to a store that has no room for them."""

CLOSING_SECONDS = 5.0
"""Time in which a closing engine may finish writing to its tiers."""

PIN_SECONDS = 60.0
"""Time in which a prefix must reach the disk to be pinned there."""

PIN_CHECK_SECONDS = 0.1
"""Interval between checks whether all chunks of such a prefix are on the disk."""

TYPICAL_TOKENS = 1024
"""Tokens of the prompt whose estimated speed the statistics report."""


@dataclass
class _Pin:
    """A prefix that is to be pinned on the disk.

    names   keys of its chunks
    until   end of the pin, seconds since the epoch
    deadline  when to give up, monotonic
    next_check_at     when to check again whether it is on the disk, monotonic
    """

    names: list[bytes]
    until: float
    deadline: float
    next_check_at: float = 0.0


class Tiering:
    """Moves chunks between arena and tiers while the engine has time, and reports the tiers' statistics.

    tiers  stores of the cache; None: there are none, and nothing moves
    """

    def __init__(self, manager: CacheManager, tiers: Tiers | None) -> None:
        self.manager = manager
        self.tiers = tiers
        self._pins: list[_Pin] = []

    def record_step(self, step: Step, seconds: float) -> None:
        """Records the seconds of a step as costs of computing, and pins prefixes that have reached the disk."""
        if self.tiers is None:
            return
        if self._pins:
            self._settle_pins()
        costs = self.manager.fetching.costs
        if step.ready is not None:
            return  # it waited for chunks
        if len(step.slices) == len(step.tokens):
            costs.note_decode(seconds)
            return
        tall = [piece for piece in step.slices if piece.num_rows > 1]
        positions = sum(piece.num_rows * (piece.start + piece.num_rows / 2) for piece in tall)
        costs.note_prefill(sum(piece.num_rows for piece in tall), positions, seconds)

    def idle(self) -> float | None:
        """Moves chunks while there are no requests. Returns the seconds after which there is more to do; None if there
        is nothing.
        """
        demotion = self.manager.demotion
        copied = demotion.run(IDLE_BYTES) if demotion.is_waiting else 0
        if self._pins:
            self._settle_pins()
        if demotion.is_waiting and copied:
            return 0.0
        return RETRY_SECONDS if demotion.is_waiting or self._pins else None

    def flush(self, seconds: float) -> bool:
        """Waits until the tiers have stored all cached chunks. False if this takes more than `seconds`."""
        if self.tiers is None:
            return True
        demotion, end = self.manager.demotion, time.monotonic() + seconds
        while (left := self.idle()) is not None and time.monotonic() < end:
            time.sleep(left)
        return self.tiers.flush(max(0.0, end - time.monotonic())) and not demotion.is_waiting

    def close(self) -> None:
        """Writes the remaining chunks to the tiers, and closes them."""
        if self.tiers is not None:
            self.flush(CLOSING_SECONDS)
            self.tiers.close()

    def pin(self, keys: ChunkKeys, num_tokens: int, seconds: float) -> int:
        """Pins the whole chunks of a computed prompt on the disk, once they are stored. Returns their token count."""
        assert self.tiers is not None, "nothing to pin on"
        names = keys.first(num_tokens // PAGE_TOKENS)
        self._pins.append(_Pin(names, time.time() + seconds, time.monotonic() + PIN_SECONDS))
        return len(names) * PAGE_TOKENS

    def unpin(self, keys: ChunkKeys, num_tokens: int) -> None:
        """Ends the pins of a prompt and of its prefixes on the disk."""
        if self.tiers is not None:
            names = keys.first(num_tokens // PAGE_TOKENS)
            self._pins = [pin for pin in self._pins if pin.names[-1] not in names]
            self.tiers.unpin(names)

    def drop(
        self, names: list[bytes], descendants: Sequence[bytes] = (), kept: Collection[bytes] = frozenset()
    ) -> dict[str, int]:
        """Drops a prefix, given by the keys of its chunks, from the arena and the tiers: its last chunk, descendants of
        this, and ancestors without other children. Chunks that requests read stay, and so do ancestors of other pins.
        Returns the number of chunks dropped, by tier.

        descendants  keys of descendants of its last chunk in a tier
        kept   keys of its chunks that a tier needs for other prefixes
        """
        manager = self.manager
        manager.pins.end_of(names, len(names) - 1)
        dropped = manager.tree.discard(names)
        for dropped_chunks in dropped:
            manager.table.free(dropped_chunks.rows)
        from_arena = [name for dropped_chunks in dropped for name in dropped_chunks.identity.names]
        if self.tiers is None:
            return {"arena": len(from_arena)}
        far = {*from_arena, *descendants, *names} - manager.tree.names_along(names) - set(kept)
        self._pins = [pin for pin in self._pins if pin.names[-1] not in far]
        self.tiers.unpin(far)
        found = {"arena": len(from_arena), **self.tiers.count(far)}
        self.tiers.drop(far)
        return found

    def stats(self) -> dict[str, Any]:
        """Statistics of each tier and of the moves; empty without tiers."""
        if self.tiers is None:
            return {}
        fetching = self.manager.fetching
        counts = {**asdict(fetching.counts), "lost": self.manager.demotion.num_lost}
        seconds = fetching.costs.prefill(0, TYPICAL_TOKENS)
        known = {
            "chunk_bytes": self.manager.statistics.chunk_bytes,
            "fetched_bytes_per_second": fetching.costs.speed,
            "prefill_tokens_per_second": TYPICAL_TOKENS / seconds if seconds else None,
        }
        return {"tiers": self.tiers.stats(), "moves": counts, "costs": known}

    def _settle_pins(self) -> None:
        tiers, left, now = self.tiers, [], time.monotonic()
        assert tiers is not None
        for pin in self._pins:
            if now < pin.next_check_at:
                left.append(pin)
                continue
            pin.next_check_at = now + PIN_CHECK_SECONDS
            if all(tiers.find(name) is not None for name in pin.names):
                if not tiers.pin(pin.names, pin.until):
                    log.warning(
                        "a prefix of %d tokens is not pinned on the disk: together with the existing pins it would"
                        " exceed half of this engine's part of tiers.disk", len(pin.names) * PAGE_TOKENS,
                    )  # fmt: skip
            elif now < pin.deadline:
                left.append(pin)
            else:
                num_tokens = len(pin.names) * PAGE_TOKENS
                log.warning("a prefix of %d tokens is not pinned: the disk did not take it", num_tokens)
        self._pins = left
