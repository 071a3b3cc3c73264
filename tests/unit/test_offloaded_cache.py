"""A cache on the disk: every page has its bytes when it is read, and tokens are those of a cache in memory."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.attention.rows import RowSlice
from quire.cache.codecs.dense import DenseCodec
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.sinks import Sinks
from quire.offload.units import Share

from ..effort import tries
from ..offloaded import Machine, Made, delayed, poisoned

DENSE = DenseCodec(2, torch.float32)
LAYERS, HEADS = 3, 2
IRREGULAR: Any = SimpleNamespace(
    name="irregular", kernel_id=5, page_bytes=np.array([[128, 384], [512, 128], [4096, 640]], np.int32)
)
"""Pages whose size differs by layer and head."""

CODECS: dict[str, tuple[Any, ...]] = {"dense": (), "encoded": (IRREGULAR,), "encoded with sinks": (IRREGULAR,)}


def machine_of(folder: Path, generator: random.Random, codec: str, **more: Any) -> Machine:
    sinks = Sinks(1, LAYERS, HEADS, 2, torch.float32) if "sinks" in codec else None
    return Machine(folder, generator, DENSE, *CODECS[codec], shape=(LAYERS, HEADS), sinks=sinks, **more)


def random_machine(folder: Path, generator: random.Random, codec: str) -> Machine:
    max_chunks = generator.choice((2, 4))
    return machine_of(
        folder,
        generator,
        codec,
        memory=generator.choice((1.0, 1.0, 1.3, 3.0)),
        near=Share(generator.choice((0.0, 0.0, 0.3, 0.5, 1.0))),
        far_states=Share(generator.choice((0.0, 0.5, 1.0))),
        max_chunks=max_chunks,
        micro_batch=generator.choice((1, 2, 3, 9)),
        num_shared=generator.choice((None, None, 0, 1)),
        overlaps=generator.random() < 0.7,
    )


def rows_of(machine: Machine, made: Made, generator: random.Random) -> list[RowSlice]:
    """The next rows of a sequence: one, those that fill its chunk, many, or a row and drafts. None if it is full."""
    left = machine.max_chunks * PAGE_TOKENS - made.num_tokens
    to_fill = PAGE_TOKENS - made.num_tokens % PAGE_TOKENS
    match generator.randrange(5):
        case 0:
            count = 1
        case 1:
            count = to_fill
        case 2:
            count = to_fill + PAGE_TOKENS * generator.randrange(3)
        case 3:
            count = generator.randrange(1, 2 * PAGE_TOKENS)
        case _:
            # Where chunks are encoded, the row that fills one is no draft.
            most = to_fill - 1 if machine.table.encodes else 5
            count = min(generator.randrange(1, 6), most, left)
            if count > 1:
                last = machine.slice(made, count)
                at = made.num_tokens
                return [RowSlice(at + place, 1, last.chunks, last.shared) for place in range(count)]
            count = 1
    count = min(count, left)
    return [machine.slice(made, count)] if count else []


def opens_two(rows: list[RowSlice]) -> bool:
    """Whether a chunk that has tokens is filled, and the next one is left open."""
    start, end = rows[0].start, rows[-1].start + rows[-1].num_rows
    return start % PAGE_TOKENS > 0 and end % PAGE_TOKENS > 0 and end // PAGE_TOKENS > start // PAGE_TOKENS


def random_step(machine: Machine, generator: random.Random) -> None:
    chosen = generator.sample(machine.live, generator.randrange(1, len(machine.live) + 1))
    chosen.sort(key=lambda made: made.chunks[: made.num_shared])
    work = [(made, rows) for made in chosen if (rows := rows_of(machine, made, generator))]
    work.sort(key=lambda each: each[1][0].num_rows > 1)
    crossing = [each for each in work if opens_two(each[1])]
    if not machine.table.encodes:  # an engine's sequence has two open chunks only in the step that copied the first
        work = [each for each in work if each not in crossing[machine.max_running // 4 + 1 :]]
    if not work:
        return
    slices = [piece for _, rows in work for piece in rows]
    machine.step(slices)
    while generator.random() < 0.2:  # the step failed after its last layer, or was interrupted
        machine.step(slices)
    for made, rows in work:
        count = sum(piece.num_rows for piece in rows)
        if generator.random() < 0.3 and not (machine.table.encodes and len(rows) == 1):
            count = generator.randrange(not machine.table.encodes and len(rows) == 1, count) if count > 1 else count
        machine.commit(made, made.num_tokens + count)


def random_operation(machine: Machine, generator: random.Random) -> None:
    while machine.table.num_taken > 18 and machine.cached:
        machine.evict()
    chain = generator.choice(machine.cached)[: machine.max_chunks] if machine.cached else []
    is_full = len(machine.live) == machine.max_running
    match generator.randrange(8):
        case 0 | 1 if not is_full:
            machine.begin(generator.randrange(min(len(chain), machine.max_chunks - 1) + 1), chain)
        case 2 if not is_full and chain and not machine.table.encodes:
            machine.copy(chain, generator.randrange(1, len(chain) + 1))
        case 3 if machine.live:
            machine.end(generator.choice(machine.live), generator.random() < 0.7)
        case _ if machine.live:
            random_step(machine, generator)


@pytest.mark.parametrize("codec", CODECS)
def test_every_page_has_its_bytes_when_it_is_read(tmp_path: Path, codec: str, seed: int) -> None:
    for number in range(tries(8)):
        generator = random.Random(f"{seed} {codec} {number}")
        machine = random_machine(tmp_path, generator, codec)
        with poisoned(), delayed(number, 0.0005):
            for _ in range(60):
                random_operation(machine, generator)
                machine.check()
        machine.close()
