"""Retention with a cache on the disk: blocks of pages that come and go, and an engine that answers as in memory."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cache.table import ChunkTable
from quire.config import EngineConfig
from quire.engine.offloading import cache_bytes
from quire.errors import ConfigError, QuireError
from quire.offload.mover import Mover
from quire.offload.paged import PagedArena, Pager, blocks_of
from quire.offload.table import OffloadedTable
from quire.offload.units import Share
from quire.stores.direct import BLOCK_BYTES, DirectFile
from quire.stores.throttle import Throttle
from tests.effort import combine, tries, whole
from tests.engine.test_offloading import (
    CHUNK,
    CODECS,
    ON_DISK,
    PARAMS,
    PROMPTS,
    SHARED,
    Run,
    expected,
    greedy,
    least,
    numbers,
    running,
)  # fmt: skip
from tests.engine.test_offloading import model as model
from tests.offloaded import POISON, delayed, patched


@contextlib.contextmanager
def poisoned(budget: int | None = None) -> Iterator[None]:
    """A block that has left memory has other bytes until it is read again. budget: instead of the one that is given."""
    make, drop = PagedArena.__init__, PagedArena._drop

    def made(self: PagedArena, num_bytes: int, given: int, mover: Mover) -> None:
        make(self, num_bytes, given if budget is None else budget, mover)

    def dropped(self: PagedArena, blocks: Any) -> None:
        drop(self, blocks)
        self.data.view(-1, BLOCK_BYTES)[blocks] = POISON

    with patched(PagedArena, __init__=made, _drop=dropped):
        yield


# The arena.


@pytest.fixture
def mover(tmp_path: Path) -> Iterator[Mover]:
    made = Mover(tmp_path, Throttle(None))
    yield made
    made.close()


def test_blocks_of_stretches_are_those_that_they_touch() -> None:
    starts, sizes = np.array([0, 4095, 8192, 3 * 4096 + 5]), np.array([1, 2, 4096, 9000])
    assert blocks_of(starts, sizes).tolist() == [0, 1, 2, 3, 4, 5]
    assert blocks_of(starts[:0], sizes[:0]).tolist() == []


class Oracle:
    """An arena, and the bytes that it must have."""

    def __init__(self, mover: Mover, blocks: int, budget: int) -> None:
        self.arena = PagedArena(blocks * BLOCK_BYTES, budget * BLOCK_BYTES, mover)
        self.bytes = np.random.default_rng(budget).integers(0, 256, blocks * BLOCK_BYTES).astype(np.uint8)
        ids = np.arange(blocks, dtype=np.int32) * (BLOCK_BYTES // 128)
        self.arena.store(ids, BLOCK_BYTES, self.bytes.reshape(blocks, -1))

    def use(self, generator: random.Random, batches: int) -> None:
        """A step: micro-batches use blocks in turn, each brought while the one before is computed."""
        # Often the same few blocks: they are used again while they are being stored.
        arena, every = self.arena, range(generator.choice((9, len(self.bytes) // BLOCK_BYTES)))
        arena.begin()
        sets = [np.array(sorted(generator.sample(every, generator.randrange(1, 8)))) for _ in range(batches)]
        tickets = [arena.load_blocks(sets[0])]
        for number, blocks in enumerate(sets):
            if number + 1 < batches:
                tickets.append(arena.load_blocks(sets[number + 1]))
            tickets[number].wait()
            changed = blocks[[generator.random() < 0.5 for _ in blocks]]
            for block in blocks.tolist():
                part = slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
                found = self.arena.data[part].numpy()
                assert np.array_equal(found, self.bytes[part]), f"block {block} has other bytes"
                if block in changed:
                    at = generator.randrange(BLOCK_BYTES)
                    found[at] = self.bytes[block * BLOCK_BYTES + at] = generator.randrange(256)
            keep = blocks[[generator.random() < 0.2 for _ in blocks]]
            arena.release_blocks(blocks, changed, keep)


@pytest.mark.parametrize("budget", [0, 5, 12, 100])
def test_blocks_have_their_bytes_whenever_they_are_used(mover: Mover, seed: int, budget: int) -> None:
    generator = random.Random(f"{seed} {budget}")
    oracle = Oracle(mover, 40, budget)
    with poisoned(), delayed(seed, 0.004):
        for number in range(tries(40)):
            oracle.use(generator, generator.randrange(1, 6))
            if number % 5 == 0:  # pages between two steps
                ids, size = np.array([generator.randrange(39) * 32 + 7], np.int32), 700
                image = np.frombuffer(generator.randbytes(size), np.uint8)
                oracle.arena.store(ids, size, image[None])
                oracle.bytes[int(ids[0]) * 128 :][:size] = image
                assert np.array_equal(oracle.arena.images(ids, size)[0], image)
    assert (mover.bytes_read > 0) == (budget < 40)


def test_memory_is_bounded_by_the_budget_and_what_is_used(mover: Mover, seed: int) -> None:
    """A step over everything, block by block: what is not used is within the budget once it is stored."""
    arena, budget = PagedArena(64 * BLOCK_BYTES, 16 * BLOCK_BYTES, mover), 16
    for _ in range(3):
        arena.begin()
        for first in range(0, 64, 4):
            blocks = np.arange(first, first + 4)
            arena.load_blocks(blocks).wait()
            arena.release_blocks(blocks, blocks, blocks[:0]).wait()
            arena._finish()
            assert arena.num_resident <= budget + 4
    arena.begin()
    assert arena.num_resident <= budget and int(arena._is_resident.sum()) == arena.num_resident


def test_what_came_first_stays_when_everything_is_used_in_turns(mover: Mover) -> None:
    """A quarter fits; a quarter of the reads is saved. The least recently used rule would save none."""
    arena = PagedArena(64 * BLOCK_BYTES, 16 * BLOCK_BYTES, mover)

    def step() -> int:
        before = mover.bytes_read
        arena.begin()
        for block in range(64):
            blocks = np.array([block])
            arena.load_blocks(blocks).wait()
            arena.release_blocks(blocks, blocks, blocks[:0]).wait()
        return (mover.bytes_read - before) // BLOCK_BYTES

    assert step() == 0
    assert all(46 <= step() <= 54 for _ in range(3))


def test_what_nothing_uses_any_more_makes_room(mover: Mover) -> None:
    arena = PagedArena(64 * BLOCK_BYTES, 16 * BLOCK_BYTES, mover)
    for first in (0, 32):
        for _ in range(5):
            arena.begin()
            for block in range(first, first + 12):
                blocks = np.array([block])
                arena.load_blocks(blocks).wait()
                arena.release_blocks(blocks, blocks, blocks[:0]).wait()
            mover.settle()
    before = mover.bytes_read
    arena.begin()
    arena.load_blocks(np.arange(32, 44)).wait()
    assert mover.bytes_read == before, "the newer ones, which are used, are not in memory"


def test_pages_that_hold_nothing_are_not_read(mover: Mover) -> None:
    arena = PagedArena(8 * BLOCK_BYTES, 0, mover)
    arena.begin()
    arena.load_blocks(np.arange(4)).wait()
    arena.release_blocks(np.arange(4), np.arange(4), np.arange(0)).wait()
    arena.begin()
    arena.discard_blocks(np.array([0, 2 * BLOCK_BYTES + 128]), np.array([2 * BLOCK_BYTES, BLOCK_BYTES]))
    arena.load_blocks(np.arange(4)).wait()
    assert mover.bytes_read == 2 * BLOCK_BYTES, "two blocks are whole, two are shared with others"


@pytest.mark.parametrize("kind", ["read", "write"])
def test_blocks_survive_a_disk_that_fails(mover: Mover, seed: int, kind: str) -> None:
    generator, oracle = random.Random(seed), Oracle(mover, 30, 4)
    move, is_failing = getattr(DirectFile, kind), [False]

    def failing(*arguments: Any) -> None:
        if is_failing[0] and generator.random() < 0.3:
            raise OSError(errno.EIO, "Input/output error")
        move(*arguments)

    num_failed = 0
    with patched(DirectFile, **{kind: failing}), poisoned():
        for number in range(tries(30)):
            is_failing[0] = number % 3 == 1
            try:
                oracle.use(generator, 4)
            except QuireError:
                num_failed += 1
        is_failing[0] = False
        for _ in range(5):
            oracle.use(generator, 4)
    assert num_failed > 0 or kind == "write"


# The engine.

RETAIN: dict[str, dict[str, Any]] = {
    "budget": {"retain.budget": 0.5},
    "threshold": {"retain.threshold": 0.9},
    "little": {"retain.budget": 0.2},
}


LONG = [*(SHARED + numbers(20 + place, 50 + 9 * place) for place in range(3)), numbers(30, 170), *PROMPTS[:3]]
"""Prompts of several chunks, whose tokens are packed."""

MANY = [greedy(2 + 17 * (place % 4)) for place in range(len(LONG))]


def retaining(name: str, codec: str) -> dict[str, Any]:
    return {"retain.profile_rows": 8} | RETAIN[name] | CODECS[codec]


@combine(
    strength=1,
    retain=[*RETAIN],
    codec=whole(["dense", "g4 sinks", "nuq3", "g4", "nuq2", "nuq3 no sinks"], 4),
    share=[True, False],
    micro_batch=[2, 1, 4],
    overlap=[True, False],
)
def test_tokens_are_those_of_retention_in_memory(
    model: Path, retain: str, codec: str, share: bool, micro_batch: int, overlap: bool
) -> None:
    options = retaining(retain, codec) | {"cache.share": share} | ON_DISK
    wanted = expected(model, options, LONG, MANY)
    options |= {"offload.overlap": overlap, "offload.micro_batch": micro_batch}
    num_packed, move = [0], ChunkTable.move

    def counted(self: ChunkTable, codec: Any, moves: Any) -> None:
        num_packed[0] += moves.pages.shape[1]
        move(self, codec, moves)

    memory = {"cache.memory": least(model, options)}
    with poisoned(budget=0), patched(ChunkTable, move=counted), running(model, options | memory) as run:
        assert run.ask(LONG, MANY) + run.ask(LONG, MANY) == wanted
        moved = run.engine.offloaded
        assert moved is not None and moved()["cache_bytes_read"] > 0 < moved()["cache_bytes_written"]
    assert num_packed[0] > 0 or retain == "threshold"


def test_moves_that_take_any_time_change_nothing(model: Path, seed: int) -> None:
    for number in range(tries(1)):
        generator = random.Random(f"{seed} {number}")
        options = retaining(generator.choice([*RETAIN]), generator.choice(("dense", "g4 sinks"))) | ON_DISK
        wanted = expected(model, options, LONG[:4], [greedy(40)] * 4)
        options |= {"offload.micro_batch": generator.choice((1, 2, 4)), "cache.memory": least(model, options)}
        budget = generator.choice((0, 1 << 18))
        with poisoned(budget), delayed(number, 0.004), running(model, options) as run:
            assert run.ask(LONG[:4], [greedy(40)] * 4) == wanted[:4]


def test_fewer_bytes_are_read_than_of_whole_chunks(model: Path) -> None:
    """With a fifth of the tokens, in as much memory."""
    prompts, params = [[number % 251 for number in range(200)]] * 1, [greedy(40)]
    options = ON_DISK | {"cache.share": False, "cache.memory": least(model, retaining("budget", "dense") | ON_DISK)}
    with running(model, options | {"offload.cache": "4MiB"}) as run:
        assert isinstance(run.table, OffloadedTable)
        run.table.near = Share(0.0)
        run.ask(prompts, params)
        whole_chunks = run.table.mover.bytes_read
    with poisoned(budget=0), running(model, options | {"retain.budget": 0.2, "retain.profile_rows": 8}) as run:
        run.ask(prompts, params)
        assert run.engine.offloaded is not None
        assert 0 < run.engine.offloaded()["cache_bytes_read"] < 0.6 * whole_chunks


def test_memory_stays_within_what_was_given(model: Path) -> None:
    options = retaining("threshold", "dense") | ON_DISK | {"offload.micro_batch": 4, "scheduler.max_running": 8}
    memory = least(model, options)
    most, load_blocks = [0], PagedArena.load_blocks

    def watched(self: PagedArena, *arguments: Any) -> Any:
        found = load_blocks(self, *arguments)
        most[0] = max(most[0], self.num_resident * BLOCK_BYTES)
        return found

    with (
        patched(PagedArena, load_blocks=watched),
        delayed(0, 0.004),
        running(model, options | {"cache.memory": memory}) as run,
    ):
        run.ask([*LONG, *LONG[:1]], [greedy(25)] * 8)
    assert 0.6 * memory < most[0] <= memory


def test_pages_that_are_taken_anew_are_not_read(model: Path) -> None:
    """Their bytes in the file are those of a sequence that has ended."""
    options, load, wanted = retaining("budget", "dense") | ON_DISK | {"cache.share": False}, Pager.load, [0]

    def counted(self: Pager, *arguments: Any) -> Any:
        self.arena._loading.clear()
        found = load(self, *arguments)
        wanted[-1] += sum(len(blocks) for _, blocks in self.arena._loading) * BLOCK_BYTES
        return found

    with poisoned(budget=0), running(model, options | {"cache.memory": least(model, options)}) as run:
        for place in range(3):
            wanted.append(0)
            with patched(Pager, load=counted):
                run.ask([numbers(60 + place, 192)], [greedy(1)])
    assert wanted[-1] < CHUNK / 2, "all of three chunks, beside their sums"


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_move_that_fails_is_an_error_and_no_hang(model: Path, seed: int, kind: str) -> None:
    generator = random.Random(f"{seed} {kind}")
    options = retaining(generator.choice([*RETAIN]), "dense") | ON_DISK | {"offload.micro_batch": 1}
    options |= {"cache.memory": least(model, options)}
    wanted = expected(model, options, LONG[:4], [greedy(40)] * 4)[:4]
    for _ in range(tries(1)):
        with poisoned(budget=0), running(model, options) as run:
            arena: Any = run.engine.scheduler.manager.table.arena
            mover: Mover = arena.mover
            move, left = getattr(mover._file, kind), [generator.randrange(1, 300)]

            def failing(*arguments: Any, move: Any = move, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] == 0:
                    raise OSError(errno.EIO, "Input/output error")
                move(*arguments)

            others = [[number, *prompt] for number, prompt in enumerate(LONG[:4])]
            # What makes room ahead of its need may fail unseen: it stays where it is, and nothing is lost.
            raised = pytest.raises(QuireError, match="offloaded cache cannot be moved")
            with patched(mover._file, **{kind: failing}), raised if kind == "read" else contextlib.suppress(QuireError):
                run.ask(others, [greedy(40)] * 4)
            if arena._lost is None:
                assert run.ask(LONG[:4], [greedy(40)] * 4) == wanted
            else:
                with pytest.raises(QuireError, match="the offloaded cache has lost pages"):
                    run.llm.generate(PROMPTS[:1], greedy(1), use_tqdm=False)


def test_beside_a_gpu_retention_is_refused_with_the_reason() -> None:
    pages = np.full((2, 2), 4096, np.int32)
    options = {"retain.budget": 0.5, "offload.mode": "auto", "offload.cache": "4MiB", "attention.backend": "triton"}
    with pytest.raises(ConfigError, match=r"leaves memory \(offload.cache\) is for a CPU"):
        cache_bytes(EngineConfig.from_options(options), 256, pages, None)


def test_a_pager_has_its_parameters(model: Path) -> None:
    options = retaining("budget", "dense") | ON_DISK | {"offload.micro_batch": 2}
    run = Run(model, options | {"cache.memory": "3MiB"})
    attention: Any = run.engine.runner.attention
    pager = attention._table
    assert (
        isinstance(pager, Pager) and pager.max_batch_chunks >= 4 and pager.table is run.engine.scheduler.manager.table
    )
    assert run.ask(PROMPTS[:2], PARAMS[:2]) == expected(model, options)[:2]
    run.llm.close()
