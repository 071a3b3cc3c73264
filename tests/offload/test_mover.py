"""Bytes that move while others compute: their order, their errors, and the activations of micro-batches in a file."""

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
from quire.offload.hidden import HiddenStates, states_bytes
from quire.offload.host import HostMemory
from quire.offload.mover import NOTHING, IoRequest, Mover
from quire.offload.units import Share
from quire.stores.direct import BLOCK_BYTES, DirectFile
from quire.stores.throttle import Throttle

from ..effort import tries
from ..offloaded import delayed, patched
from ..tiny_models import tiny_shape


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


def random_state(generator: random.Random, rows: int) -> tuple[torch.Tensor, ...]:
    numbers = torch.Generator().manual_seed(generator.randrange(1 << 30))
    return tuple(torch.randn(rows, width, generator=numbers).to(dtype) for width, dtype in WIDTHS)


WIDTHS = ((3, torch.float32), (700, torch.bfloat16))


def passes(states: HiddenStates, generator: random.Random, count: int, layers: int = 3) -> None:
    """The order of `blocks.run`: the next state is loaded while one is changed in place."""
    states.begin(count)
    rows = [generator.randrange(1, 30) for _ in range(count)]
    wanted = [random_state(generator, each) for each in rows]
    for index, state in enumerate(wanted):
        states.put(index, tuple(each.clone() for each in state))
    order = [index for _ in range(layers) for index in range(count)]
    tickets = {0: states.load(order[0])}
    for number, index in enumerate(order):
        if number + 1 < len(order):
            tickets[number + 1] = states.load(order[number + 1])
        tickets.pop(number).wait()
        state = states.get(index)
        assert_same(state, wanted[index])
        for each, other in zip(state, wanted[index], strict=True):
            each += 1
            other += 1
        states.put(index, (state[0], state[1].clone()))
        if states._is_far[index]:
            for each in state:
                each.fill_(torch.nan)  # a state in the file is a copy
    ends = [states.last(index) for index in range(count)]
    for end, expected in zip(ends, wanted, strict=True):
        assert_same(end, expected)


def assert_same(state: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for each, other in zip(state, wanted, strict=True):
        assert each.dtype == other.dtype and torch.equal(each, other), "a state has other numbers"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_every_state_comes_back(mover: Mover, seed: int, count: int, share: float) -> None:
    states = HiddenStates(mover, Share(share))
    generator = random.Random(seed)
    with delayed(seed, 0.001):
        for _ in range(tries(3)):  # with other numbers of rows each time
            passes(states, generator, count)
    assert (mover.bytes_written > 0) == (states.far_share > 0)


def test_a_share_is_realised_within_one_micro_batch(mover: Mover) -> None:
    for share in (0.0, 0.1, 0.25, 1 / 3, 0.5, 0.7, 0.99, 1.0):
        for count in range(2, 40):
            states = HiddenStates(mover, Share(share))
            states.begin(count)
            assert abs(states.far_share * count - share * count) < 1
            if share * count == int(share * count):
                assert states.far_share == pytest.approx(share)
    states = HiddenStates(mover, Share(1.0))
    states.begin(1)
    assert states.far_share == 0, "a single micro-batch stays in memory"


def test_what_is_told_of_states_is_that_of_all_steps(mover: Mover, seed: int) -> None:
    """The last step of a batch often has a single micro-batch."""
    states, generator = HiddenStates(mover, Share(1.0)), random.Random(seed)
    passes(states, generator, 3, layers=2)
    passes(states, generator, 1, layers=2)
    told = states.stats()
    assert told["hidden_near"] == pytest.approx(1 / 4)
    assert (told["hidden_bytes_read"], told["hidden_bytes_written"]) == (mover.bytes_read, mover.bytes_written)
    assert mover.bytes_read > 0


def test_bytes_of_states_are_those_of_their_rows(mover: Mover) -> None:
    """Padded to 4 KiB for each tensor, and nothing for the states in memory."""
    states = HiddenStates(mover, Share(0.5))
    states.begin(4)
    for index in range(4):
        states.put(index, (torch.zeros(3, 1024), torch.zeros(5)))
    mover.settle()
    assert states._is_far == [False, True, False, True]
    assert (mover.bytes_read, mover.bytes_written) == (0, 2 * (3 * 4096 + 4096))
    states.load(0)
    states.load(1).wait()
    assert mover.bytes_read == 3 * 4096 + 4096


def test_states_take_no_more_of_the_file_than_was_said(seed: int) -> None:
    """The host's memory has the file's place, and exactly that much room."""
    generator, shape = random.Random(seed), tiny_shape(hidden_size=700)
    for count in (2, 5):
        rows = [generator.randrange(1, 30) for _ in range(count)]
        host = HostMemory(states_bytes(shape, torch.float32, sum(rows), count), torch.device("cpu"))
        host.memory.fill_(0xFF)
        states = HiddenStates(host, Share(1.0))
        for _ in range(3):
            states.begin(count)
            wanted = [tuple(torch.randn(each, 700) for _ in range(2)) for each in rows]
            for index, state in enumerate(wanted):
                states.put(index, state)
            for index, state in enumerate(wanted):
                states.load(index).wait()
                assert_same(states.get(index), state)
    assert host.bytes_written == host.bytes_read > 0


def test_a_state_that_was_not_written_is_an_error(mover: Mover) -> None:
    """The write fails before the read is asked for: the read must not find what was there before."""
    states = HiddenStates(mover, Share(1.0))
    states.begin(2)
    states.put(0, (torch.zeros(4),))
    states.put(1, (torch.zeros(4),))
    states.load(0).wait()
    state = states.get(0)
    with patched(DirectFile, write=_failing):
        states.put(0, state)
        mover.settle()
        with pytest.raises(QuireError, match="Input/output error"):
            states.last(0)
    states.begin(2)  # the next step has its own errors only
    states.put(0, (torch.ones(4),))
    assert_same(states.last(0), (torch.ones(4),))


def test_a_step_after_one_that_failed_has_its_own_states(mover: Mover, seed: int) -> None:
    """A read of the first step is still under way when the second one begins."""
    states = HiddenStates(mover, Share(1.0))
    generator = random.Random(seed)
    read, slow = DirectFile.read, list[float]()

    def reading(*arguments: Any) -> None:
        seconds = slow.pop() if slow else 0
        time.sleep(seconds)
        read(*arguments)

    with patched(DirectFile, read=reading):
        for _ in range(tries(20)):
            states.begin(3)
            for index in range(3):
                states.put(index, random_state(generator, 40))
            mover.settle()
            slow[:] = [0.003 + 0.01 * generator.random()]
            states.load(0)
            time.sleep(0.002)
            passes(states, generator, 3, layers=6)


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
