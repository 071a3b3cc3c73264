"""The work of a step, from its slices: the features of a latency model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.cache.ledger import PAGE_TOKENS
from quire.timing.latency import StepWork, pairs_of

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.engine.step import Result, Slice, Step

Shared = tuple[tuple[int, int], ...]

NOTHING: Shared = ()


class WorkMeter:
    """Counts the work of consecutive steps. A step whose rows are those of the step before, one token later, costs
    nothing but a sum. It sees every step before the step is committed.

    A slice of several rows is a prompt's, and so is the single row that ends a prompt. All others decode, drafts too.
    With retention a decoding sequence attends to at most 64 tokens in each chunk that it keeps. Heads that keep less
    than its longest head attend to less, which a fit shares out among all tokens.

    window  tokens that a row attends to at most; None: all
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self._last = StepWork()
        self._first = -2
        self._dropped: list[int] = []
        self._shared: list[Shared] = []

    def of(self, step: Step) -> StepWork:
        """The work of a step."""
        first = int(step.positions[0])
        is_next = first == self._first + 1 and len(self._dropped) == len(step.slices)
        found = self._moved(step.slices, step.moved) if step.moved is not None and is_next else None
        self._first = first
        if found is None:
            found = self._count(step.slices)
        self._last = found
        return found

    def _moved(self, slices: Sequence[Slice], moved: Sequence[int]) -> StepWork | None:
        """The work of the last step's rows one token later; None if they must be counted again."""
        last = self._last
        if self.window is not None or last.prompt_rows:
            return None
        grown = last.decode_rows
        for index in moved:
            piece = slices[index]
            if piece.shared != self._shared[index]:
                return None
            grown -= (piece.num_dropped - self._dropped[index]) * PAGE_TOKENS
            self._dropped[index] = piece.num_dropped
        return StepWork(0, 0.0, last.decode_rows, last.context + grown, last.unique + grown, 0)

    def _count(self, slices: Sequence[Slice]) -> StepWork:
        most = math.inf if self.window is None else self.window
        prompts = [piece for piece in slices if piece.num_rows > 1 or piece.reads_all]
        decodes = [piece for piece in slices if not (piece.num_rows > 1 or piece.reads_all)] if prompts else slices
        pairs = sum(pairs_of(piece.start, piece.num_rows, most) for piece in prompts)
        self._dropped, self._shared = [piece.num_dropped for piece in slices], [piece.shared for piece in slices]
        # Retention has packed the tokens that are left into the chunks that are left.
        contexts = [piece.start + 1 - piece.num_dropped * PAGE_TOKENS for piece in decodes]
        # Tokens before the window are attended to no more.
        passed = [0] * len(contexts) if self.window is None else [max(0, each - self.window) for each in contexts]
        common = _common([piece.shared for piece in decodes], contexts, passed) if any(self._shared) else 0
        context = sum(contexts) - sum(passed)
        num_rows = sum(piece.num_rows for piece in prompts)
        return StepWork(num_rows, float(pairs), len(decodes), float(context), float(context - common), len(prompts))


class CountingRunner:
    """Takes the place of the runner of an engine with a model, and counts the work of each step that it runs.

    inner    the runner that was there before
    work     of the last step; None: there was none, or it waited for chunks
    seconds  that counting it took
    """

    def __init__(self, engine: Engine) -> None:
        self._meter = WorkMeter(engine.runner.model.shape.sliding_window)
        self.inner, engine.any_runner = engine.any_runner, self
        self.vocab_size = self.inner.vocab_size
        self.forget()

    def forget(self) -> None:
        """Another step is about to begin."""
        self.work: StepWork | None = None
        self.seconds = 0.0

    def run(self, step: Step) -> Result:
        """See Runner."""
        begun = time.perf_counter()
        work = self._meter.of(step)
        self.work = work if step.ready is None else None
        self.seconds = time.perf_counter() - begun
        return self.inner.run(step)

    def check(self, live: set[int]) -> None:
        """See Runner."""
        self.inner.check(live)


def _common(paths: Sequence[Shared], contexts: Sequence[int], passed: Sequence[int]) -> int:
    """Tokens of a row's context that the row before it attends to as well, summed over all rows. Equal beginnings are
    neighbours.

    passed  tokens at the beginning of each context that its row does not attend to
    """
    found, before, seen_from = 0, NOTHING, 0
    for shared, context, own_from in zip(paths, contexts, passed, strict=True):
        num_chunks = 0
        for (number, count), (other, limit) in zip(before, shared, strict=False):
            if number != other:
                break
            num_chunks += count if count < limit else limit
        num_tokens = min(num_chunks * PAGE_TOKENS, context)
        found += max(0, num_tokens - max(own_from, seen_from))
        before, seen_from = shared, own_from
    return found
