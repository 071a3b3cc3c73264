"""The capacity of a disk for a model's cache, and its speed: arithmetic and one measurement, without a store."""

from __future__ import annotations

from pathlib import Path

from quire.cache.keys import KEY_BYTES
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.run import RUN_BYTES, RUN_CHUNKS
from quire.stores.direct import allows_direct, measure_speed, padded
from quire.stores.folder import SLACK_BYTES
from quire.stores.quotas import free_bytes
from quire.stores.signer import HEADER_BYTES

MEASURED_BYTES = 64 << 20
"""Bytes of a measurement: enough to exceed a disk's own cache; 0.1 s at 1 GB/s."""

MIN_MEASURED_BYTES = 2 << 20
"""Bytes of a measurement in a folder without free room: half of the cap's slack for directories and locks."""

HEAD_BYTES = 1 << 10
"""Approximate bytes of a run's header besides keys and tokens: the namespace as JSON, and the lengths of extents."""


def disk_bytes_per_token(chunk_bytes: int, num_layers: int, num_heads: int) -> float:
    """Bytes of a token on the disk, headers and padding included, in runs of the usual length of demotion.

    chunk_bytes  bytes of a sealed chunk's pages, in all layers and heads
    """
    n = max(1, min(RUN_CHUNKS, RUN_BYTES // max(1, chunk_bytes)))
    extent = HEADER_BYTES + n * (6 + 9 * num_heads) + n * chunk_bytes / num_layers
    header = HEAD_BYTES + n * (KEY_BYTES + 4 * PAGE_TOKENS + 6)
    return (num_layers * padded(round(extent)) + padded(header)) / (n * PAGE_TOKENS)


def tokens_that_fit(cap: int, bytes_per_token: float) -> int:
    """Tokens that a folder of `cap` bytes holds, in whole chunks."""
    return int(max(0, cap - SLACK_BYTES) / bytes_per_token / PAGE_TOKENS) * PAGE_TOKENS


def measure_disk(folder: Path, num_bytes: int = MEASURED_BYTES) -> float:
    """Bytes per second of writing and then reading a file past the page cache, in the folder or, if it does not exist,
    in the nearest existing one above it. Uses a shorter file if engines have reserved the room. Raises OSError.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    room = free_bytes(place)
    if room is not None:
        num_bytes = max(min(num_bytes, padded(room)), MIN_MEASURED_BYTES)
    return measure_speed(place, num_bytes, lambda size: None, is_direct=allows_direct(place))
