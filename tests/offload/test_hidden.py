"""Hidden states of micro-batches that leave memory and come back."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from quire.errors import QuireError
from quire.offload.hidden import HiddenStates, states_bytes
from quire.offload.host import HostMemory
from quire.offload.mover import Mover
from quire.offload.units import Share
from quire.stores.direct import DirectFile
from tests.offload.test_mover import _failing
from tests.offload.test_mover import mover as mover

from ..effort import tries
from ..offloaded import delayed, patched
from ..tiny_models import tiny_shape


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
