"""The number of threads that share a loop when some are late. A fake thread pool records its calls."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.kernels import runtime
from quire.kernels.memory import HugePageAllocator
from quire.models.cpu_panels import Panels
from tests.effort import EFFORT
from tests.kernels.test_stack import answers
from tests.tiny_models import tiny_shape

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system does not count lost cores"),
]

PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
COUNT_THREADS = ctypes.CFUNCTYPE(ctypes.c_int)
RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

LATE = 0.02
"""Seconds that a thread is waited for, on any machine more than the kernels bear."""

RIVAL = "import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"


class Pool:
    """Runs what it is given on the calling thread and, where one is to be late, then on another, whose core is held."""

    def __init__(self, threads: int, core: int) -> None:
        self.thread_counts: list[int] = []
        self.late_from = threads + 1
        self.loses_its_core = True
        self._core = core
        self._functions = PARALLEL(self._parallel), COUNT_THREADS(lambda: 1)
        addresses = [ctypes.cast(function, ctypes.c_void_p) for function in self._functions]
        runtime.kernels().quire_threads(*addresses, threads)

    def _parallel(self, run: int, data: int, threads: int, _: int) -> None:
        self.thread_counts.append(threads)
        RUN(run)(data)
        if threads >= self.late_from:
            late = threading.Thread(target=self._come_late, args=(run, data))
            late.start()
            late.join()

    def _come_late(self, run: int, data: int) -> None:
        RUN(run)(data)
        if self.loses_its_core:
            os.sched_setaffinity(0, [self._core])
            end = time.monotonic() + LATE
            while time.monotonic() < end:
                pass
        else:
            time.sleep(LATE)
        RUN(run)(data)

    def loop(self, rows: int = 8) -> int:
        """Runs one loop; how many threads it was given."""
        x, out, before = torch.rand(rows, 64), torch.empty(rows, dtype=torch.int64), len(self.thread_counts)
        runtime.kernels().quire_argmax(x.data_ptr(), 64, rows, 64, out.data_ptr())
        assert torch.equal(out, x.argmax(1))
        return self.thread_counts[-1] if len(self.thread_counts) > before else 1

    def most(self, seconds: float) -> int:
        """The most threads that loops were given for so long."""
        end, found = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            found = max(found, self.loop())
            time.sleep(0.0005)
        return found


@pytest.fixture(scope="module")
def held_core() -> Iterator[int]:
    """A core that another program keeps busy."""
    core = max(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", RIVAL.format(core=core)], stdout=subprocess.PIPE) as rival:
        assert rival.stdout is not None
        rival.stdout.readline()
        yield core
        rival.kill()


@pytest.fixture
def make_pool(held_core: int) -> Iterator[Callable[[int], Pool]]:
    """Pools in place of the real one."""
    threads = runtime.num_threads()
    yield lambda count: Pool(count, held_core)
    runtime.set_num_threads(threads)


MakePool = Callable[[int], Pool]


def test_nobody_is_left_out_while_all_come_in_time(make_pool: MakePool) -> None:
    pool = make_pool(4)
    assert {pool.loop() for _ in range(1000)} == {4}
    assert pool.loop(3) == 3 and pool.loop(1) == 1


def test_a_thread_that_comes_late_is_left_out_and_tried_again(make_pool: MakePool) -> None:
    """One core of four is held, and later it is free."""
    pool = make_pool(4)
    pool.late_from = 4
    pool.loop()
    assert [pool.loop() for _ in range(5)] == [3] * 5
    pool.thread_counts.clear()
    assert pool.most(1.5) == 4
    assert pool.thread_counts.count(3) > 20 * pool.thread_counts.count(4) > 0
    pool.late_from = 5
    pool.most(2.0)
    assert pool.most(0.3) == 4 and set(pool.thread_counts[-50:]) == {4}


def test_one_that_takes_long_but_keeps_its_core_is_waited_for(make_pool: MakePool) -> None:
    """Something else may take a core meanwhile, but not every time."""
    found = []
    for _ in range(20):
        pool = make_pool(4)
        pool.late_from, pool.loses_its_core = 4, False
        pool.loop()
        found.append(pool.loop())
    assert 4 in found


def test_more_threads_are_left_out_down_to_one(make_pool: MakePool) -> None:
    pool = make_pool(3)
    pool.late_from = 2
    assert [pool.loop() for _ in range(3)] == [3, 2, 1]
    pool.late_from = 4
    pool.most(2.0)
    assert {pool.loop() for _ in range(5)} == {3}


def test_a_new_number_of_threads_begins_with_all_of_them(make_pool: MakePool) -> None:
    pool = make_pool(2)
    pool.late_from = 2
    assert [pool.loop() for _ in range(2)] == [2, 1]
    assert make_pool(2).loop() == 2


def helper_seconds() -> float:
    """Processor time of the kernels' own thread; 0 where it has not been needed yet."""
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() != "quire-helper":
                continue
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="the helper takes no core of its caller's",
)


@needs_two_cores
@pytest.mark.parametrize("rows, inputs", [(4, 64), (192, 65536)])
def test_who_is_left_alone_is_helped_and_gets_the_same(make_pool: MakePool, rows: int, inputs: int) -> None:
    """In short items, and in such that a helper's turn and its nap pass within one."""
    rng = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(count, inputs, generator=rng).bfloat16() for count in (32 * 7, rows))
    linear = Panels([weight], None, torch.bfloat16, HugePageAllocator())
    make_pool(1)
    expected = linear(x)
    pool = make_pool(2)
    pool.late_from = 2
    pool.loop()
    pool.thread_counts.clear()
    before, begun = helper_seconds(), time.monotonic()

    def has_all() -> bool:
        return helper_seconds() > before + 0.2 and 2 in pool.thread_counts

    while time.monotonic() < begun + (0.5 if EFFORT == "short" and has_all() else 4):
        assert torch.equal(linear(x), expected)
    assert helper_seconds() > before + 0.2
    assert 2 in pool.thread_counts, "never tried again"


@needs_two_cores
def test_layers_are_shared_with_a_helper(held_core: int) -> None:
    """With torch's own pool, one of whose threads has half a core."""
    shape = tiny_shape("llama", head_dim=16, hidden_size=512, ffn_size=40)
    threads, before, end = runtime.num_threads(), helper_seconds(), time.monotonic() + 10
    try:
        runtime.set_num_threads(1)
        expected = answers(shape, stacked=True)
        runtime.set_num_threads(2)
        while helper_seconds() < before + 0.1:
            assert answers(shape, stacked=True) == expected
            assert time.monotonic() < end, "no help in ten seconds"
    finally:
        runtime.set_num_threads(threads)


@needs_two_cores
def test_the_helper_sleeps_when_nobody_is_alone(make_pool: MakePool) -> None:
    pool = make_pool(2)
    pool.late_from = 2
    pool.loop()
    pool.most(0.2)
    pool = make_pool(2)
    time.sleep(0.05)
    before = helper_seconds()
    pool.most(0.5)
    assert helper_seconds() == before > 0


def test_torch_waits_for_no_one_who_is_left_out(make_pool: MakePool) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        pool = make_pool(2)
        with runtime.limited_torch_threads():
            assert torch.get_num_threads() == 2
        pool.late_from = 2
        pool.loop()
        with runtime.limited_torch_threads():
            assert torch.get_num_threads() == 1
            assert in_another_thread(torch.get_num_threads) == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@needs_two_cores
def test_two_who_are_alone_share_one_helper(make_pool: MakePool) -> None:
    """It is with one at a time, and neither waits for what it does at the other's."""
    weight, x = torch.randn(32 * 40, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    linear = Panels([weight], None, torch.bfloat16, HugePageAllocator())
    make_pool(1)
    expected = linear(x)
    pool = make_pool(2)
    pool.late_from = 2
    before = helper_seconds()

    def work() -> int:
        done, end = 0, time.monotonic() + 2
        while time.monotonic() < end:
            assert torch.equal(linear(x), expected)
            done += 1
        return done

    with ThreadPoolExecutor(2) as both:
        done = [each.result(20) for each in [both.submit(work), both.submit(work)]]
    assert min(done) > 100 and helper_seconds() > before


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_process_goes_without(make_pool: MakePool) -> None:
    pool = make_pool(2)
    pool.late_from = 2
    pool.loop()
    pool.most(0.1)
    child = os.fork()
    if not child:
        pool.late_from = 3
        pool.most(0.1)
        os._exit(0)
    end = time.monotonic() + 20
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if found == (0, 0):
        os.kill(child, 9)
    assert found == (child, 0)


def in_another_thread(ask: Callable[[], int]) -> int:
    """What it returns on a thread of its own."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(ask).result()
