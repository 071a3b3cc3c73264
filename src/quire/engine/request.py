"""A request and its sequences: state that the scheduler changes and the output side reads. No torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.keys import ChunkKeys
from quire.cache.namespace import Namespace
from quire.cache.path import Path, SwappedPath
from quire.engine.outputs import Logprob
from quire.engine.params import CacheHints, SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.engine.step import Slice
    from quire.structured.guide import Guide

DEFAULT_NAMESPACE = Namespace()
NO_HINTS = CacheHints()


class SequenceState(Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One of the n answers of a request.

    path.num_tokens (computed) <= len(token_ids). Tokens between the two are prefilled next; the last token is computed
    when the next one is to be sampled. In the calendar, path.num_tokens lags behind until `Calendar.settle`. If steps
    are skipped (`FastForward.advance`), so does token_ids.

    token_ids      prompt, then generated tokens: one growing list
    max_tokens     number of generated tokens at which it ends by length
    seed           seed of its random numbers
    guide          proposes its next tokens; None: no guide
    sequence_id    number in the order of queueing; the largest is the youngest
    admitted       number of its last admission, in the order of admissions
    high_water     most tokens ever computed; tokens below it are computed again after a preemption
    is_quiet       whether it is in the calendar
    clock_offset           computed tokens minus the calendar's clock, while it is in the calendar
    slice          its row in steps while it decodes one token at a time; None before
    swapped        its path while that is in a store; None otherwise
    is_prefetched  whether chunks were looked for in a store before its admission
    fetched        by store, prompt tokens that came from it before the first preemption
    is_begun       whether any step included it
    kept_fraction  share of the prompt's tokens that retention keeps, over all heads; None before it decides and without
                   retention
    will_hand_over         whether another engine continues it after its next token
    num_prompt     tokens of the prompt
    keys           the keys of its chunks
    """

    request: Request
    index: int
    token_ids: list[int]
    max_tokens: int
    namespace: Namespace = DEFAULT_NAMESPACE
    seed: int = 0
    guide: Guide | None = None
    sequence_id: int = 0
    admitted: int = 0
    path: Path = field(default_factory=Path)
    state: SequenceState = SequenceState.WAITING
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    swapped: SwappedPath | None = None
    is_prefetched: bool = False
    fetched: dict[str, int] = field(default_factory=dict)
    high_water: int = 0
    is_quiet: bool = False
    clock_offset: int = 0
    slice: Slice | None = None
    is_begun: bool = False
    kept_fraction: float | None = None
    will_hand_over: bool = False
    num_prompt: int = field(init=False)
    keys: ChunkKeys = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_ids)
        self.keys = ChunkKeys(self.namespace, self.token_ids)

    def move(self, namespace: Namespace) -> None:
        """Moves a sequence that waits without pages to another engine, whose chunks have this namespace."""
        assert self.state is SequenceState.WAITING, f"a sequence that is {self.state.value}"
        self.namespace, self.keys, self.path = namespace, ChunkKeys(namespace, self.token_ids), Path()
        self.swapped, self.slice, self.is_begun, self.is_prefetched = None, None, False, False

    @property
    def name(self) -> str:
        """Its name in logs: the request's id, and its index if the request has several sequences."""
        several = self.request.params.n > 1
        return f"{self.request.request_id}/{self.index}" if several else self.request.request_id

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are stored."""
        return len(self.token_ids) - 1 if self.is_quiet else self.path.num_tokens

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether its next row is that of its last token, which it generated."""
        computed = self.num_computed + 1
        return computed == len(self.token_ids) and computed > self.num_prompt

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """`num_cached_tokens` by origin. Tokens that were fetched and evicted again before admission do not count, nor
        does the last token of a chunk that was fetched whole: it is computed.
        """
        left, found = self.num_cached_tokens, dict[str, int]()
        for name, count in self.fetched.items():
            if counted := min(count, left):
                found[name] = counted
                left -= counted
        return {"arena": left, **found} if left else found

    @property
    def priority(self) -> int:
        """`CacheHints.cache_priority` of its request."""
        return self.request.hints.cache_priority

    @property
    def lifetime(self) -> float | None:
        """`CacheHints.cache_lifetime` of its request, in seconds."""
        return self.request.hints.cache_lifetime

    @property
    def reads_cache(self) -> bool:
        """Whether rows of the prompt may be taken from the cache instead of computed."""
        params = self.request.params
        return self.index > 0 or (params.prompt_logprobs is None and params.pooling != "mean")

    @property
    def pooling(self) -> str:
        """How the rows of its prompt are pooled for an embedding: "mean" or "last"; empty without an embedding."""
        return self.request.params.pooling or "" if self.num_generated == 0 else ""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt rows need logits. Only the first sequence of a request computes them, and only once."""
        return self.request.params.prompt_logprobs is not None and self.index == 0 and self.num_generated == 0

    @property
    def waits_for_prompt_logprobs(self) -> bool:
        """Whether it must wait for the first sequence to compute the prompt's log-probabilities. These are reported
        with the first token of any sequence.
        """
        if self.index == 0 or self.request.params.prompt_logprobs is None:
            return False
        first = self.request.sequences[0]
        return first.num_generated == 0 and first.state is not SequenceState.FINISHED


@dataclass(eq=False)
class Request:
    """A caller's request and its sequences. Times are in seconds of the engine's clock.

    pooled  parts of the embedding, each with the position of its first row
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    arrival: float
    hints: CacheHints = NO_HINTS
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    pooled: list[tuple[int, NDArray[np.float32]]] = field(default_factory=list)
    first_token_at: float | None = None
    num_pinned_tokens: int | None = None

    def add_prompt_logprobs(self, start: int, entries: list[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        """Adds the log-probabilities of rows of its prompt from position `start` on. Returns those of all rows that
        have any, once the prompt is complete.
        """
        found = self.prompt_logprobs
        assert found is not None
        del found[start + 1 :]  # after a preemption they are computed again
        found += entries
        if len(found) < len(self.prompt_ids):
            return []
        complete = [named for named in found[1:] if named is not None]
        assert len(complete) == len(found) - 1, "a row of the prompt has no log-probabilities"
        return complete

    def add_pooled(self, start: int, part: NDArray[np.float32]) -> None:
        """Adds a part of its embedding, of rows from position `start` on. Rows that are computed again after a
        preemption replace their earlier part.
        """
        self.pooled = [(place, each) for place, each in self.pooled if place < start] + [(start, part)]

    def take_embedding(self) -> list[float]:
        """Returns the embedding of its prompt and drops its parts."""
        parts, self.pooled = [part for _, part in self.pooled], []
        if self.params.pooling == "last":
            return list(map(float, parts[-1]))
        return list(map(float, np.stack(parts).sum(0, dtype=np.float64) / len(self.prompt_ids)))

    @property
    def finished(self) -> bool:
        """Whether every sequence is complete."""
        return self.sequences[-1].state is SequenceState.FINISHED and all(
            sequence.state is SequenceState.FINISHED for sequence in self.sequences
        )
