"""Computes which tokens grammars allow next, on several threads."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.errors import QuireError

if TYPE_CHECKING:
    from llguidance import LLMatcher

TOO_COMPLEX = "the grammar became too complex here"
"""How the explanation begins of an answer that ended because of that."""

NO_TEXT = "no text that ends has the form"
"""The same for a form that nothing fulfils, such as a schema that refers to itself alone."""

Words = NDArray[np.uint32]


class Masks:
    """Masks of one model's tokens: uint32 [num_words], a bit each.

    num_threads   threads that compute masks, the one that waits included
    begins_early  whether a mask is begun when it is asked for. Right where an accelerator computes the logits, and the
                  processor is free. Where the processor computes them, a mask would take a core from threads that wait
                  for each other in every layer. There all masks of a step begin together, when one is waited for.
    """

    def __init__(self, num_words: int, num_threads: int, *, begins_early: bool) -> None:
        self._num_words, self._num_threads, self._begins_early = num_words, num_threads, begins_early
        self._todo: deque[PendingMask] = deque()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def ask(self, matcher: LLMatcher) -> PendingMask:
        """The mask of a matcher's next token. Until it is there, or withdrawn, nobody else may use the matcher."""
        mask = PendingMask(self, matcher)
        self._todo.append(mask)
        if self._begins_early:
            self._start(1)
        return mask

    def compute(self) -> None:
        """Computes the masks that no thread has begun."""
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
    """A mask that is computed when it is needed, or before."""

    def __init__(self, masks: Masks, matcher: LLMatcher) -> None:
        self._masks, self._matcher = masks, matcher
        self._words: Future[Words] = Future()

    def __call__(self) -> Words:
        """The mask. Waits for it. Raises QuireError if no token may come next, or if nobody can tell."""
        if not self._words.done():
            self._masks.compute()
        return self._words.result()

    def withdraw(self) -> None:
        """Says that the mask is not needed any more. Waits if it is being computed."""
        if not self._words.cancel():
            self._words.exception()

    def compute(self, num_words: int) -> None:
        """Computes the mask, unless it is withdrawn."""
        if not self._words.set_running_or_notify_cancel():
            return
        words = np.empty(num_words, np.uint32)
        try:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                error = self._matcher.get_error().strip().partition("\n")[0]
                raise QuireError(NO_TEXT if "NoExtensionBias" in error else f"{TOO_COMPLEX}: {error}")
        except BaseException as error:
            self._words.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._words.set_result(words)
