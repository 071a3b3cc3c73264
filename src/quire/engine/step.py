"""A step as data: what a runner computes, and what came out of it. Plain values that can be pickled: no object of the
cache, the model or a request, so that whoever runs a step can be exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.attention.rows import Profiled, RowSlice
from quire.cache.ledger import PAGE_TOKENS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.cache.retention.decisions import Decided
    from quire.cache.store import Transfer
    from quire.engine.outputs import Logprob
    from quire.engine.params import SamplingParams

NO_TOKEN = -1
"""In place of a token: the row failed, or stood behind a draft that was refused."""


@dataclass(slots=True)
class Slice(RowSlice):
    """Rows of one sequence in a step: tokens [start, start + num_rows).

    A sequence with drafts has several slices of one row, side by side: the first one's token is certain, each other
    one's is a draft, which counts only if the row before yields that very token.

    sequence_id  of whom the rows are
    samples      whether the last row yields a token
    draft        the row's token, if it is a draft; else NO_TOKEN
    decides      whether retention decides on the prompt, which ends with the last row
    scores       whether the log-probabilities of the prompt's tokens are wanted
    allowed      uint32 [ceil(vocabulary / 32)]: bit t of word w allows token 32 * w + t; None allows every token
    """

    sequence_id: int = 0
    samples: bool = False
    decides: bool = False
    scores: bool = False
    draft: int = NO_TOKEN
    allowed: NDArray[np.uint32] | None = None

    def goes_on_as(self, row: Slice) -> bool:
        """Whether a row, of the same sequence in the next step, stands one slot on in the same chunks: then nothing but
        its position is new.
        """
        return (
            # A path's chunk ids live in one array that only grows: the same array and length mean the same chunks.
            self.chunks.base is row.chunks.base
            and row.chunks.base is not None
            and len(self.chunks) == len(row.chunks)
            and row.start % PAGE_TOKENS != 0
            and (self.filled, self.num_gone, self.samples) == (row.filled, row.num_gone, row.samples)
            and not (row.decides or row.scores or self.decides or self.scores)
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


class Begun(NamedTuple):
    """A sequence that is in a step for the first time: all that a runner has to remember of it."""

    sequence_id: int
    params: SamplingParams
    prompt_ids: list[int]
    seed: int


@dataclass(slots=True)
class Step:
    """One pass of the model. Valid until it is committed.

    slices     of one row first, those that share chunks side by side; then those of several rows
    tokens     int64 [R], of all rows
    positions  int64 [R]
    begun      sequences that no step before had
    ended      sequences that no step after will have
    moved      the rows are those of the step before, each one token on: these of their slices are new, the others are
               in the same chunks. None: other rows
    ready      int32 [L]: of chunks that are still under way, 1 once a layer is there, -1 if it will not be; None: all
               are there
    """

    slices: list[Slice]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    begun: list[Begun] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    moved: list[int] | None = None
    ready: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """No row can be computed before chunks have arrived that are under way."""

    transfer: Transfer

    def sleep(self, seconds: float) -> None:
        """Returns when more has arrived, or nothing more will; after some time at most."""
        self.transfer.wait(seconds)


class Failure(NamedTuple):
    """Why a slice failed, and whether its whole request does, for the sequences have the prompt in common."""

    reason: str
    is_of_prompt: bool = False


@dataclass(slots=True)
class Result:
    """What a step yields. Slices are named by their place in the step.

    token_ids        of the slices that sample, in their order; NO_TOKEN where there is none
    logprobs         of these tokens, where a sequence asked for them; empty if none did
    errors           of slices that failed; the others are as if these were not there
    decided          what retention keeps of the prompts that end in this step
    prompt_logprobs  of the tokens that follow a slice's rows within the prompt
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    errors: dict[int, Failure] = field(default_factory=dict)
    decided: dict[int, Decided] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[dict[int, Logprob]]] = field(default_factory=dict)


class Proposal(NamedTuple):
    """What a sequence may go on with.

    drafts   tokens that are likely to follow, at most as many as were asked for
    allowed  of the next token, and of the one after each draft: the sets of `Slice.allowed`; empty allows every token
    """

    drafts: list[int]
    allowed: list[NDArray[np.uint32] | None]


class Guide(Protocol):
    """Proposes tokens before each step of one sequence: a drafter, a grammar, or both."""

    def propose(self, token_ids: list[int], most: int) -> Proposal:
        """What may follow all tokens so far, in `most` drafts at most."""
        ...


class Runner(Protocol):
    """Computes steps, in the order in which they were made."""

    def run(self, step: Step) -> Result:
        """Computes a step."""
        ...
