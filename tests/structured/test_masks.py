"""When masks are computed, on which threads, and what becomes of those that nobody needs."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

from quire.errors import QuireError
from quire.structured.masks import NO_TEXT, TOO_COMPLEX, MaskExecutor

WORDS = 5


class Matcher:
    """Writes a number into each word. meets: threads that wait for each other in there."""

    def __init__(self, number: int, error: str = "", meets: threading.Barrier | None = None) -> None:
        self.number, self.error, self.meets = number, error, meets
        self.thread: str | None = None

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        assert num_bytes == 4 * WORDS and self.thread is None, "it was computed before"
        self.thread = threading.current_thread().name
        if self.meets is not None:
            self.meets.wait(10)
        words = np.full(WORDS, self.number, np.uint32)
        ctypes.memmove(address, words.ctypes.data, num_bytes)

    def is_error(self) -> bool:
        return bool(self.error)

    def get_error(self) -> str:
        return self.error


def started(masks: MaskExecutor, matchers: list[Matcher]) -> list[Any]:
    return [masks.submit(matcher) for matcher in matchers]  # type: ignore[arg-type]


def test_masks_are_computed_together_when_the_first_is_needed() -> None:
    """On all threads: each matcher waits until two others are being computed."""
    masks, meets = MaskExecutor(WORDS, 3, begins_early=False), threading.Barrier(3)
    matchers = [Matcher(number, meets=meets) for number in range(6)]
    pending = started(masks, matchers)
    assert not any(matcher.thread for matcher in matchers)
    assert [mask().tolist() for mask in pending] == [[number] * WORDS for number in range(6)]
    names = {str(matcher.thread) for matcher in matchers}
    assert len(names) == 3 and threading.current_thread().name in names
    assert sum(name.startswith("quire-masks") for name in names) == 2
    assert pending[4]().tolist() == [4] * WORDS  # once computed it is there


def test_one_mask_or_one_thread_needs_no_other_thread() -> None:
    for num_threads, count in ((8, 1), (1, 5)):
        masks = MaskExecutor(WORDS, num_threads, begins_early=False)
        matchers = [Matcher(number) for number in range(count)]
        started(masks, matchers)[0]()
        assert {matcher.thread for matcher in matchers} == {threading.current_thread().name}
        assert masks._pool is None


def test_beside_an_accelerator_masks_begin_when_asked_for() -> None:
    meets = threading.Barrier(3)
    pending = started(
        MaskExecutor(WORDS, 2, begins_early=True), matchers := [Matcher(number, meets=meets) for number in (1, 2)]
    )
    meets.wait(10)  # both are being computed, and nobody has waited for one
    assert [mask()[0] for mask in pending] == [1, 2]
    assert all(str(matcher.thread).startswith("quire-masks") for matcher in matchers)


@pytest.mark.parametrize("begins_early", [False, True])
def test_a_mask_that_is_withdrawn_leaves_its_matcher_free(begins_early: bool) -> None:
    masks, meets = MaskExecutor(WORDS, 1, begins_early=begins_early), threading.Barrier(2)
    first, second, third = Matcher(1, meets=meets if begins_early else None), Matcher(2), Matcher(3)
    pending = started(masks, [first, second, third])
    pending[1].cancel()  # it has not begun: the only thread waits
    if begins_early:
        meets.wait(10)
    assert pending[2]()[0] == 3 and pending[0]()[0] == 1
    assert second.thread is None
    pending[0].cancel()
    assert pending[0]()[0] == 1  # too late


def test_withdrawing_waits_for_a_mask_that_is_being_computed() -> None:
    masks, meets = MaskExecutor(WORDS, 1, begins_early=True), threading.Barrier(2)
    (mask,) = started(masks, [matcher := Matcher(1, meets=meets)])
    while matcher.thread is None:
        pass
    ended = threading.Event()
    threading.Thread(target=lambda: (mask.cancel(), ended.set())).start()
    assert not ended.wait(0.1)
    meets.wait(10)
    assert ended.wait(10)


def test_a_mask_that_cannot_be_computed_says_why_and_holds_up_no_other() -> None:
    matchers = [Matcher(1, "NoExtensionBias: x\nmore"), Matcher(2, "Too many items\nmore"), Matcher(3), Matcher(4)]
    matchers[3].unsafe_compute_mask_ptr = broken  # type: ignore[method-assign]
    pending = started(MaskExecutor(WORDS, 2, begins_early=False), matchers)
    with pytest.raises(QuireError, match=f"^{NO_TEXT}$"):
        pending[0]()
    with pytest.raises(QuireError, match=f"^{TOO_COMPLEX}: it can be read in too many ways$"):
        pending[1]()
    assert pending[2]()[0] == 3
    with pytest.raises(MemoryError):
        pending[3]()


def broken(address: int, num_bytes: int) -> None:
    raise MemoryError
