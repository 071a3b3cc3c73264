"""Staging memory."""

from __future__ import annotations

import random

from quire.stores.direct import BLOCK_BYTES, padded
from quire.stores.staging import StagingBuffer, StagingPool

from ..effort import tries


def test_staging_memory_gives_each_byte_once(seed: int) -> None:
    rng = random.Random(seed)
    staging, buffers = StagingPool(64 * BLOCK_BYTES), list[StagingBuffer]()
    marks: dict[StagingBuffer, int] = {}
    num_refused = 0
    for step in range(tries(500)):
        if rng.random() < 0.8:
            buffer = staging.take(rng.randrange(1, 12 * BLOCK_BYTES))
            if buffer is None:
                num_refused += 1
            else:
                assert bytes(buffer.block[buffer.length :]) == bytes(padded(buffer.length) - buffer.length)
                buffer.block[:] = bytes([step % 256]) * len(buffer.block)
                marks[buffer] = step % 256
                buffers.append(buffer)
        elif buffers:
            given = [buffers.pop(rng.randrange(len(buffers))) for _ in range(min(len(buffers), rng.randrange(1, 4)))]
            staging.free(given)
        staging.check(buffers)
        assert all(bytes(buffer.block) == bytes([marks[buffer]]) * len(buffer.block) for buffer in buffers)
    staging.free(buffers)
    assert num_refused and staging.take(64 * BLOCK_BYTES) is not None
