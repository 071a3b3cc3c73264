"""Bytes that move while others compute: their order and their errors."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import QuireError
from quire.kernels.memory import huge_pages
from quire.offload.mover import NOTHING, IoRequest, Mover
from quire.stores.direct import BLOCK_BYTES, DirectFile
from quire.stores.throttle import Throttle

from ..effort import tries
from ..offloaded import delayed, patched


@pytest.fixture
def mover(tmp_path: Path) -> Iterator[Mover]:
    made = Mover(tmp_path, Throttle(None))
    yield made
    made.close()


def part(offset: int, value: int = 0, blocks: int = 1) -> tuple[IoRequest, torch.Tensor]:
    """A part at a block of the file, and its memory, filled with a byte."""
    memory = huge_pages(blocks * BLOCK_BYTES).fill_(value)
    return IoRequest(offset * BLOCK_BYTES, memory), memory


def test_the_file_has_no_name(tmp_path: Path, mover: Mover) -> None:
    assert not [*tmp_path.iterdir()]


def test_bytes_come_back_and_are_counted(mover: Mover) -> None:
    written = [part(place, place + 1, blocks=2)[0] for place in (0, 2, 6)]
    mover.write(written).wait()
    read, memory = part(2, 0, blocks=2)
    mover.read([read]).wait()
    assert (memory == 3).all()
    assert (mover.bytes_written, mover.bytes_read) == (6 * BLOCK_BYTES, 2 * BLOCK_BYTES)


def test_no_parts_are_done_at_once(mover: Mover) -> None:
    assert mover.read([]) is NOTHING and mover.write([]).done.is_set()
    NOTHING.wait()


def test_a_read_waits_for_the_write_before_it(mover: Mover) -> None:
    """Two threads: without the dependency the read overtakes a slow write in most of the tries."""
    write = DirectFile.write

    def slow(*arguments: Any) -> None:
        time.sleep(0.005)
        write(*arguments)

    with patched(DirectFile, write=slow):
        for number in range(tries(20)):
            source, _ = part(0, number % 250 + 1)
            target, memory = part(0)
            mover.read([target], mover.write([source])).wait()
            assert (memory == number % 250 + 1).all(), "the read was first"


def test_chains_of_any_length_end(mover: Mover, seed: int) -> None:
    """No order of dependencies on earlier tickets makes the two threads wait for each other."""
    generator = random.Random(seed)
    with delayed(seed, 0.001):
        for _ in range(tries(3)):
            tickets, wanted, targets = [NOTHING], bytes(8), []
            for _ in range(60):
                after = generator.sample(tickets[-6:], min(3, len(tickets[-6:])))
                values = bytearray(wanted)
                parts = []
                for place in generator.sample(range(8), generator.randrange(1, 5)):
                    values[place] = generator.randrange(1, 255)
                    parts.append(part(place, values[place])[0])
                tickets.append(mover.write(parts, tickets[-1], *after))
                wanted = bytes(values)
            for place in range(8):
                target, memory = part(place)
                if wanted[place]:
                    tickets.append(mover.read([target], tickets[60]))
                    targets.append((memory, wanted[place]))
            for ticket in tickets:
                ticket.wait()
            assert all((memory == value).all() for memory, value in targets)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_what_cannot_be_moved_is_an_error_and_no_hang(mover: Mover, kind: str) -> None:
    mover.write([part(0, 1)[0]]).wait()
    counted = mover.bytes_read, mover.bytes_written
    with patched(DirectFile, **{kind: _failing}):
        ticket = getattr(mover, kind)([part(0)[0], part(0)[0]])
        with pytest.raises(QuireError, match="the offloaded cache cannot be moved: .*Input/output error"):
            ticket.wait()
        mover.settle()
    assert (mover.bytes_read, mover.bytes_written) == counted, "parts that failed are counted"
    target, memory = part(0)
    mover.read([target]).wait()
    assert (memory == 1).all()


def _failing(*arguments: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("is_over", [False, True])
def test_what_waits_for_a_failed_part_fails_too(mover: Mover, is_over: bool) -> None:
    """Otherwise a read would find the bytes from before the write that failed."""
    mover.write([part(0, 1)[0]]).wait()

    def failing(*arguments: Any) -> None:
        time.sleep(0 if is_over else 0.05)
        _failing()

    with patched(DirectFile, write=failing):
        ticket = mover.write([part(0, 2)[0]])
        if is_over:
            ticket.done.wait()
        with pytest.raises(QuireError, match="Input/output error"):
            mover.read([part(0)[0]], ticket).wait()


def test_an_unexpected_error_of_a_thread_is_no_hang(mover: Mover) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("a defect")

    with patched(DirectFile, read=broken):
        for _ in range(4):
            with pytest.raises(QuireError, match="a defect"):
                mover.read([part(0)[0]]).wait()
    mover.write([part(0, 1)[0]]).wait()


def test_a_mover_settles_when_nothing_moves(mover: Mover) -> None:
    moved: list[float] = []
    write = DirectFile.write

    def slow(*arguments: Any) -> None:
        time.sleep(0.02)
        write(*arguments)
        moved.append(time.monotonic())

    mover.settle()
    with patched(DirectFile, write=slow):
        for place in range(5):
            mover.write([part(place, 1)[0]])
        mover.settle()
    assert len(moved) == 5


def test_closing_fails_what_is_left_and_ends_the_threads(tmp_path: Path) -> None:
    mover = Mover(tmp_path, Throttle(None))
    release = threading.Event()

    def blocked(*arguments: Any) -> None:
        release.wait(5)

    with patched(DirectFile, read=blocked):
        tickets = [mover.read([part(0)[0]]) for _ in range(6)]
        time.sleep(0.02)
        closing = threading.Thread(target=mover.close)
        closing.start()
        with pytest.raises(QuireError, match="it was closed"):
            tickets[-1].wait()
        release.set()
        closing.join(5)
    assert not closing.is_alive() and all(ticket.done.is_set() for ticket in tickets)
    assert not any(thread.is_alive() for thread in mover._threads)
    with pytest.raises(QuireError, match="was closed"):
        mover.read([part(0)[0]])
    mover.settle()
    mover.close()


def test_a_part_waits_for_the_bandwidth(tmp_path: Path) -> None:
    taken: list[tuple[int, bool]] = []
    throttle = Throttle(None)
    throttle.take = lambda size, first=False: taken.append((size, first))  # type: ignore[method-assign]
    mover = Mover(tmp_path, throttle)
    mover.write([part(0, 1, blocks=3)[0]]).wait()
    mover.read([part(1)[0]]).wait()
    mover.close()
    assert taken == [(3 * BLOCK_BYTES, True), (BLOCK_BYTES, True)], "before weights"


# ---- activations -----------------------------------------------------------------------------------------------------


def test_parts_that_are_given_lazily_are_all_moved(mover: Mover) -> None:
    memories: list[torch.Tensor] = []

    def parts(make: Callable[[int], int]) -> Iterator[IoRequest]:
        for place in range(5):
            found, memory = part(place, make(place))
            memories.append(memory)
            yield found

    mover.write(parts(lambda place: place + 1)).wait()
    memories.clear()
    mover.read(parts(lambda place: 0)).wait()
    assert [int(memory[-1]) for memory in memories] == [1, 2, 3, 4, 5]
