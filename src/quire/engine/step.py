"""A step as data: what a runner computes, and its result. Plain values without objects of the cache, the model or a
request, so that runners can be exchanged. All but `Slice.allowed`, which may wait for another thread, can be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.attention.rows import Profiled, RowSlice
from quire.cache.ledger import PAGE_TOKENS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.cache.retention.decisions import RetentionDecision
    from quire.cache.store import Transfer
    from quire.engine.outputs import Logprob
    from quire.engine.params import SamplingParams
    from quire.structured.guide import Allowed

NO_TOKEN = -1
"""In place of a token: the row failed, or follows a refused draft."""


@dataclass(slots=True)
class Slice(RowSlice):
    """Rows of one sequence in a step: tokens [start, start + num_rows).

    A sequence with drafts has several slices of one row, next to each other. The first row's token is certain. Each
    other row's token is a draft, which is accepted only if the row before yields this token.

    sequence_id  the sequence
    samples      whether the last row yields a token
    draft        the row's token, if it is a draft; else NO_TOKEN
    decides      whether retention decides on the prompt, which ends with the last row
    scores       whether the log-probabilities of the prompt's tokens are requested
    pools        how the rows are pooled for an embedding: "mean" or "last"; empty without an embedding
    allowed      the tokens that may come next; None: every token. Masks are requested only after the logits.
    """

    sequence_id: int = 0
    samples: bool = False
    decides: bool = False
    scores: bool = False
    pools: str = ""
    draft: int = NO_TOKEN
    allowed: Allowed | None = None

    def can_advance_to(self, row: Slice) -> bool:
        """Whether `row`, of the same sequence in the next step, differs only by its position: one slot later in the
        same chunks.
        """
        return (
            # A path whose chunks change gets a new array of them.
            self.chunks is row.chunks
            and row.start % PAGE_TOKENS != 0
            and (self.filled, self.num_dropped, self.samples) == (row.filled, row.num_dropped, row.samples)
            and self.reads_all == row.reads_all
            and not (row.decides or row.scores or row.pools or self.decides or self.scores or self.pools)
            and _look_alike(self.profiled, row.profiled)
        )


def _look_alike(last: Profiled | None, row: Profiled | None) -> bool:
    if last is None or row is None:
        return last is row
    return (
        last.sums is row.sums
        and not (last.last_rows or row.last_rows)
        and (last.peaks, last.near) == (row.peaks, row.near)
    )


class NewSequence(NamedTuple):
    """A sequence that is in a step for the first time: all that a runner must remember of it.

    output_ids  tokens that another engine has generated
    """

    sequence_id: int
    params: SamplingParams
    prompt_ids: list[int]
    seed: int
    output_ids: list[int]


@dataclass(slots=True)
class Step:
    """One pass of the model. Valid until it is committed.

    slices     slices of one row, neighbours if they share chunks; then slices of several rows
    tokens     int64 [R], of all rows
    positions  int64 [R]
    begun      sequences that appear for the first time
    ended      sequences that will not appear again
    moved      if the rows are those of the step before, each one token later: the indices of the slices that changed
               chunks. None: other rows
    ready      int32 [L], for chunks in transfer: 1 once a layer has arrived, -1 if it will not arrive; None: all chunks
               are there
    """

    slices: list[Slice]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    begun: list[NewSequence] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    moved: list[int] | None = None
    ready: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """No row can be computed before a transfer of chunks has arrived."""

    transfer: Transfer

    def sleep(self, seconds: float) -> None:
        """Returns when more has arrived, when nothing more will, or after `seconds`."""
        self.transfer.wait(seconds)


class Failure(NamedTuple):
    """Why a slice failed. If its prompt failed, the whole request does, because its sequences share the prompt."""

    reason: str
    is_of_prompt: bool = False


@dataclass(slots=True)
class Result:
    """The result of a step. Dictionaries are keyed by the index of a slice in the step.

    token_ids        tokens of the slices that sample, in order; NO_TOKEN if there is none
    logprobs         log-probabilities of these tokens, or None; empty if no sequence asked for any
    errors           slices that failed; they do not affect other slices
    decided          retention's decisions on the prompts that end in this step
    prompt_logprobs  log-probabilities of the tokens that follow a slice's rows within the prompt
    pooled           float32 [E]: the sum of a slice's hidden states, or the last one
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    errors: dict[int, Failure] = field(default_factory=dict)
    decided: dict[int, RetentionDecision] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[dict[int, Logprob]]] = field(default_factory=dict)
    pooled: dict[int, NDArray[np.float32]] = field(default_factory=dict)


class Runner(Protocol):
    """Computes steps in the order of their creation."""

    @property
    def vocab_size(self) -> int:
        """Valid token ids are below it."""

    def run(self, step: Step) -> Result:
        """Computes a step."""

    def check(self, live: set[int]) -> None:
        """Proves that it remembers only sequences in `live`, by id."""
