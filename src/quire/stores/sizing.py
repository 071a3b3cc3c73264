"""What a disk would hold of a model's cache, and how fast it is: arithmetic and one measurement, without a store."""

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
"""Enough for a disk with a cache of its own to show its speed; 0.1 s at 1 GB/s."""

MIN_MEASURED_BYTES = 2 << 20
"""In a folder without free room: half of what its cap leaves for directories and locks."""

HEAD_BYTES = 1 << 10
"""Of a run's header besides keys and tokens, roughly: the namespace as JSON, and the lengths of extents."""


def disk_bytes_per_token(chunk_bytes: int, num_layers: int, num_heads: int) -> float:
    """Bytes that a token takes on the disk, with headers and padding, in runs as long as demotion makes them.

    chunk_bytes  of a sealed chunk's pages, in all layers and heads
    """
    n = max(1, min(RUN_CHUNKS, RUN_BYTES // max(1, chunk_bytes)))
    extent = HEADER_BYTES + n * (6 + 9 * num_heads) + n * chunk_bytes / num_layers
    header = HEAD_BYTES + n * (KEY_BYTES + 4 * PAGE_TOKENS + 6)
    return (num_layers * padded(round(extent)) + padded(header)) / (n * PAGE_TOKENS)


def tokens_that_fit(cap: int, bytes_per_token: float) -> int:
    """Tokens that a folder of `cap` bytes holds, in whole chunks."""
    return int(max(0, cap - SLACK_BYTES) / bytes_per_token / PAGE_TOKENS) * PAGE_TOKENS


def measure_disk(folder: Path, num_bytes: int = MEASURED_BYTES) -> float:
    """Bytes per second of writing and then reading a file past the page cache, in the folder or, if there is none, in
    the nearest one above it. Where engines have the folder's room, of a shorter file. Raises OSError.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    room = free_bytes(place)
    if room is not None:
        num_bytes = max(min(num_bytes, padded(room)), MIN_MEASURED_BYTES)
    return measure_speed(place, num_bytes, lambda size: None, is_direct=allows_direct(place))
