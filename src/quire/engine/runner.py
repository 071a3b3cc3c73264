"""Runs steps in this process: attention's plan, the model, the sampler, and retention's decisions about prompts. Knows
rows and sequence ids, not admission or text.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.attention.plan import AttentionBackend, AttentionPlan
from quire.engine.outputs import Logprob
from quire.engine.sampler import Sampler, SampleRow
from quire.engine.step import NO_TOKEN, Failure, Result, Slice, Step
from quire.errors import QuireError
from quire.models.plan import Model

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.cache.retention.decisions import Recover, RetentionDecision


DecodeFunction = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""Runs a step in which every row decodes: (tokens, positions, plan) -> logits [R, V]. Tokens and positions are int64
[R], plan is the backend's newest."""

DecideFunction = Callable[[Sequence[int], "NDArray[np.int32]", "Recover | None"], "RetentionDecision"]
"""Decides what heads keep of a prompt: (its ids, sums, recover). Sums, int32 [chunks], name the table rows of the
prompt's column sums; recover is None if not needed."""

PromptObserver = Callable[[int, int, torch.Tensor], None]
"""Receives the prompt rows that have log-probabilities to compute, instead of the code that computes them: (sequence
id, start, hidden [rows, E] of the tokens from `start` on, valid during the call); again after a preemption."""

NOT_FINITE = "the logits of the prompt hold NaN or infinity"

LOGIT_ROWS = 32
"""Prompt rows per computation of logits: 19 MB in float32 at a vocabulary of 152,064. More rows are no faster."""


class LocalRunner:
    """Computes each step where it is called. Remembers each sequence's parameters and tokens, for the sampler.

    decode       runs steps that only decode, in place of the model, for example as graphs; None: the model runs them
    decide       decides for retention; None without it
    padded_rows  n rows -> rows that the step runs with; added rows compute token 0, and their results are not used
    observer     receives the prompts of evaluations; None otherwise
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: Sampler,
        device: torch.device,
        *,
        decode: DecodeFunction | None = None,
        decide: DecideFunction | None = None,
        padded_rows: Callable[[int], int] = lambda rows: rows,
    ) -> None:
        self.model = model
        self.vocab_size = model.shape.vocab_size
        self.attention = attention
        self.sampler = sampler
        self.device = device
        self.decode = decode
        self.decide = decide
        self.padded_rows = padded_rows
        self.observer: PromptObserver | None = None
        self._rows: dict[int, SampleRow] = {}
        # Of the last step: the last row of each slice; parameters and tokens of the sequences whose slices sample; and
        # the sampler's rows, of the slices whose token is not given. Behind drafts these are copies.
        self._last_rows: list[int] = []
        self._histories: list[SampleRow] = []
        self._sampling: list[SampleRow] = []

    @torch.inference_mode()
    def run(self, step: Step) -> Result:
        """See Runner."""
        for sequence_id, params, prompt_ids, seed, output_ids in step.begun:
            self._rows[sequence_id] = SampleRow(params, prompt_ids, output_ids, seed)
        for sequence_id in step.ended:
            del self._rows[sequence_id]
        slices = step.slices
        is_new = step.moved is None
        if is_new:
            self._last_rows = [end - 1 for end in itertools.accumulate(piece.num_rows for piece in slices)]
        tokens, positions = self._inputs(step)
        plan = self.attention.plan(slices, step.moved, step.ready)
        sampling = [i for i, piece in enumerate(slices) if piece.samples] if is_new else range(len(slices))
        # The only token that is allowed needs no logits.
        chosen = [i for i in sampling if not self._is_given(slices[i])] if is_new else sampling
        result = Result()
        decides = is_new and any(piece.decides for piece in slices)
        scores = is_new and any(piece.scores for piece in slices)
        pools = is_new and any(piece.pools for piece in slices)
        is_decode = len(sampling) == len(slices) == len(step.tokens) and not (decides or scores or pools)
        logits: torch.Tensor | None = None
        if self.decode is not None and is_decode and step.ready is None:
            logits = self.decode(tokens, positions, plan)
            if len(chosen) < len(sampling):
                logits = logits.index_select(0, torch.tensor(chosen, device=self.device)) if chosen else None
        else:
            hidden = self.model.hidden(tokens, positions, plan)
            if scores:
                self._score(step, hidden, result)
            if pools:
                self._pool(step, hidden, result)
            if decides:
                self._decide(step, plan, result)
            if not sampling:
                return result
            if chosen:
                logits = self._logits(hidden, [self._last_rows[index] for index in chosen])
        self._sample(step, sampling, chosen, logits, result)
        return result

    def check(self, live: set[int]) -> None:
        """Proves that only sequences in `live` are remembered."""
        assert self._rows.keys() <= live, f"{len(self._rows.keys() - live)} sequences that ended are remembered"

    def _inputs(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions of all rows, padding included, int64 each, on the device."""
        rows = len(step.tokens)
        both = torch.zeros(2, self.padded_rows(rows), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        numbers = both.numpy()
        numbers[0, :rows], numbers[1, :rows] = step.tokens, step.positions
        if self.device.type != "cpu":
            both = both.to(self.device, non_blocking=True)
        return both[0], both[1]

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Logits [len(rows), V] of some rows of `hidden`."""
        padded = rows + rows[:1] * (self.padded_rows(len(rows)) - len(rows))
        if padded != list(range(len(hidden))):
            hidden = hidden.index_select(0, torch.tensor(padded, device=self.device))
        return self.model.head(hidden)[: len(rows)]

    def _is_given(self, piece: Slice) -> bool:
        """Whether a slice's token is known without logits, and nothing else is wanted of them. With min_tokens the
        sampler is still asked: it may rule the only allowed token out.
        """
        if not isinstance(piece.allowed, int):
            return False
        params = self._rows[piece.sequence_id].params
        return params.logprobs is None and not params.min_tokens

    def _sample(
        self, step: Step, sampling: Sequence[int], chosen: Sequence[int], logits: torch.Tensor | None, result: Result
    ) -> None:
        """Chooses the tokens of the slices `chosen`; those of the others in `sampling` are given. Accepts drafts up to
        the first that differs from the token of the row before it.
        """
        slices, reasons = step.slices, dict[int, str]()
        if step.moved is None:
            self._histories = [self._rows[slices[index].sequence_id] for index in sampling]
            self._sampling, reasons = self._sample_rows(step, sampling)
        if step.ready is not None and (step.ready < 0).any():
            result.token_ids = [NO_TOKEN] * len(sampling)  # the step read keys and values that did not arrive
            return
        errors = dict[int, str]()
        if logits is None:
            result.token_ids = [_only(slices[index]) for index in sampling]
        else:
            sampled = self.sampler.sample(logits, self._sampling)
            errors = {chosen[row]: reason for row, reason in sampled.errors.items()}
            result.token_ids = sampled.token_ids.tolist()
            result.logprobs = sampled.logprobs if any(sampled.logprobs) else []
            if len(chosen) < len(sampling):
                tokens = dict(zip(chosen, result.token_ids, strict=True))
                result.token_ids = [tokens[index] if index in tokens else _only(slices[index]) for index in sampling]
                beside = dict(zip(chosen, result.logprobs, strict=False))
                result.logprobs = [beside.get(index) for index in sampling] if beside else []
        refused = _refuse(step, sampling, result.token_ids) if step.moved is None else set()
        for index, reason in errors.items():
            if index not in refused:
                result.errors.setdefault(index, Failure(reasons.get(index, reason)))
        for history, token_id in zip(self._histories, result.token_ids, strict=True):
            if token_id != NO_TOKEN:
                history.output_ids.append(token_id)

    def _sample_rows(self, step: Step, sampling: Sequence[int]) -> tuple[list[SampleRow], dict[int, str]]:
        """The sampler's row of each slice whose token is chosen, and why no token is allowed in some slices. The row of
        a draft includes the drafts before it.
        """
        found, reasons = list[SampleRow](), dict[int, str]()
        drafts: list[int] = []
        for place, index in enumerate(sampling):
            piece, history = step.slices[index], self._histories[place]
            drafts = [] if piece.draft == NO_TOKEN else [*drafts, piece.draft]
            if self._is_given(piece):
                continue
            if drafts:
                history = history.after(drafts)
            try:
                history.allowed = piece.allowed() if callable(piece.allowed) else piece.allowed
            except QuireError as error:
                history.allowed, reasons[index] = np.zeros(-(-self.vocab_size // 32), np.uint32), str(error)
            found.append(history)
        return found, reasons

    def _score(self, step: Step, hidden: torch.Tensor, result: Result) -> None:
        """Computes the log-probabilities of prompts. Logits that are not finite are an error of their slice."""
        for index, (piece, last) in enumerate(zip(step.slices, self._last_rows, strict=True)):
            if not piece.scores:
                continue
            row = last + 1 - piece.num_rows
            if self.observer is not None:
                self.observer(piece.sequence_id, piece.start, hidden[row : last + 1])
                continue
            history = self._rows[piece.sequence_id]
            found = result.prompt_logprobs[index] = []
            stop = min(piece.start + piece.num_rows, len(history.prompt_ids) - 1)
            for entries in self._scored(history, hidden[row : row + stop - piece.start], piece.start):
                found += entries
                if any(math.isnan(next(iter(entry.values())).logprob) for entry in entries):
                    result.errors[index] = Failure(NOT_FINITE, is_of_prompt=True)
                    break

    def _pool(self, step: Step, hidden: torch.Tensor, result: Result) -> None:
        """Takes from the hidden states what embeddings need."""
        for index, (piece, last) in enumerate(zip(step.slices, self._last_rows, strict=True)):
            if piece.pools == "mean":
                rows = hidden[last + 1 - piece.num_rows : last + 1]
                result.pooled[index] = rows.sum(0, dtype=torch.float32).cpu().numpy()
            elif piece.pools and piece.samples:
                result.pooled[index] = hidden[last].float().cpu().numpy()

    def _scored(self, row: SampleRow, hidden: torch.Tensor, start: int) -> Iterator[list[dict[int, Logprob]]]:
        """The log-probabilities that prompt rows, from position `start` on, give to the tokens that follow them."""
        for first in range(0, len(hidden), LOGIT_ROWS):
            count = min(LOGIT_ROWS, len(hidden) - first)
            targets = row.prompt_ids[start + first + 1 : start + first + count + 1]
            logits = self._logits(hidden, list(range(first, first + count)))
            yield self.sampler.prompt_logprobs(logits, targets, row.params.prompt_logprobs or 0)
            del logits  # frees the memory for the next ones

    def _decide(self, step: Step, plan: AttentionPlan, result: Result) -> None:
        """Decides what sequences keep of prompts that end in this step."""
        assert self.decide is not None, "a prompt is to be decided on without retention"
        for index, piece in enumerate(step.slices):
            if piece.decides and index not in result.errors:
                assert piece.profiled is not None, "a prompt is decided on that was not profiled"
                recover = functools.partial(plan.recovered, index) if piece.profiled.last_rows else None
                prompt_ids = self._rows[piece.sequence_id].prompt_ids
                result.decided[index] = self.decide(prompt_ids, piece.profiled.sums, recover)


def _only(piece: Slice) -> int:
    assert isinstance(piece.allowed, int)
    return piece.allowed


def _refuse(step: Step, sampling: Sequence[int], token_ids: list[int]) -> set[int]:
    """Removes the tokens of refused drafts: those that the row before did not yield, and all after them. Returns the
    indices of their slices.
    """
    refused: set[int] = set()
    for place, index in enumerate(sampling):
        draft = step.slices[index].draft
        if draft != NO_TOKEN and token_ids[place - 1] != draft:
            token_ids[place] = NO_TOKEN
            refused.add(index)
    return refused
