"""Computes the masks of allowed tokens on several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.errors import QuireError

if TYPE_CHECKING:
    from llguidance import LLMatcher

TOO_COMPLEX = "the grammar became too complex here"
"""The explanation of an answer that ended for this reason begins with this text."""

NO_TEXT = "no finite text fulfils the constraint"
"""As TOO_COMPLEX, for an unsatisfiable constraint, such as a schema that refers only to itself."""

GRAMMAR_FAILED = "the grammar failed"
"""As TOO_COMPLEX, for any other error of llguidance."""

TokenBitmask = NDArray[np.uint32]
Renew = Callable[[], "LLMatcher | None"]


class MaskExecutor:
    """Computes masks of one model's tokens: uint32 [num_words], one bit a token.

    num_threads   threads that compute masks, the waiting thread included
    begins_early  whether a mask is started when it is submitted. True if an accelerator computes the logits, so that
                  the processor is free. If the processor computes them, a mask would take a core from threads that wait
                  for each other in every layer: all masks of a step then start together, when one is waited for.
    """

    def __init__(self, num_words: int, num_threads: int, *, begins_early: bool) -> None:
        self._num_words, self._num_threads, self._begins_early = num_words, num_threads, begins_early
        self._todo: deque[PendingMask] = deque()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, matcher: LLMatcher, renew: Renew | None = None) -> PendingMask:
        """Submits the mask of a matcher's next token. Until it is computed or cancelled, nobody else may use the
        matcher.

        renew  returns another matcher in the same state, for when the lexer has too many states; None: no such matcher
        """
        mask = PendingMask(self, matcher, renew)
        self._todo.append(mask)
        if self._begins_early:
            self._start(1)
        return mask

    def compute(self) -> None:
        """Computes all masks that no thread has started."""
        self._start(min(self._num_threads, len(self._todo)) - 1)
        self._work()

    def _start(self, num_threads: int) -> None:
        if num_threads <= 0:
            return
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._num_threads, "quire-masks")
        for _ in range(num_threads):
            self._pool.submit(self._work)

    def _work(self) -> None:
        while True:
            try:
                mask = self._todo.popleft()
            except IndexError:
                return
            mask.compute(self._num_words)


class PendingMask:
    """A mask that is computed when needed, or before. Refers to its matcher until it is computed or cancelled."""

    def __init__(self, masks: MaskExecutor, matcher: LLMatcher, renew: Renew | None) -> None:
        self._masks = masks
        self._source: tuple[LLMatcher, Renew | None] | None = (matcher, renew)
        self._words: Future[TokenBitmask] = Future()

    def __call__(self) -> TokenBitmask:
        """Waits for the mask. Raises QuireError if no token may come next, or if the grammar fails."""
        if not self._words.done():
            self._masks.compute()
        return self._words.result()

    def cancel(self) -> None:
        """Cancels a mask that is no longer needed. Waits if it is being computed."""
        if not self._words.cancel():
            self._words.exception()
        self._source = None

    def compute(self, num_words: int) -> None:
        """Computes the mask, unless it is cancelled."""
        if not self._words.set_running_or_notify_cancel():
            return
        assert self._source is not None
        matcher, renew = self._source
        words = np.empty(num_words, np.uint32)
        try:
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if renew is not None and _is_worn(matcher) and (renewed := renew()) is not None:
                matcher = renewed
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if matcher.is_error():
                raise QuireError(grammar_error_text(matcher.get_error()))
        except BaseException as error:
            self._words.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._words.set_result(words)
        finally:
            self._source = None


def _is_worn(matcher: LLMatcher) -> bool:
    """Whether a matcher failed because its lexer, which others may share, has no room for further states."""
    return matcher.is_error() and "too many states" in matcher.get_error()


def grammar_error_text(error: str) -> str:
    """The text for a user about an error of llguidance."""
    if "NoExtension" in error:
        return NO_TEXT
    for words, reason in _REASONS.items():
        if words in error:
            return f"{TOO_COMPLEX}: {reason}"
    return f"{GRAMMAR_FAILED}: {error.strip().partition(chr(10))[0][:300]}"


_REASONS = {
    "too many states": "the expressions in it need too many states; use fewer counted repetitions that overlap",
    "too many expressions": "telling its expressions apart takes too much work",
    "Too many items": "it can be read in too many ways",
    "Current row has": "it can be read in too many ways",
}
