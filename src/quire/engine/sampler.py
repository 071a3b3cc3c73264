"""Turns logits into token ids and log-probabilities. Knows rows and ids, not text, stop strings or requests.

A row's token depends only on its own logits, parameters, tokens and seed, never on the batch. Sums whose order matters
run per row on the host, over the few candidates that can matter. The one exception is softmax. Its CPU kernel handles
each row separately; on other devices the last bit of a sum may depend on the row's alignment.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.engine.candidates import (
    BLOCK_ROWS,
    Floats,
    Ints,
    best_ids,
    descending_order,
    entries_at_least,
    lane_maxima,
    mask_disallowed,
    num_above,
)
from quire.engine.outputs import Logprob
from quire.engine.params import SamplingParams
from quire.kernels import runtime
from quire.structured.masks import TokenBitmask

# Float32 probabilities of a row sum to 1 within 2e-6. Sets of candidates exceed the required mass by this much.
MASS_SLACK = 1e-5

_NO_TOKEN = "no token can be chosen: the logits hold NaN or infinity, or every token is ruled out"
_SMALLEST = np.finfo(np.float32).tiny
_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class SampleRow:
    """One row's parameters and history. Keep one per sequence: each step counts only the new tokens in `output_ids`.

    `output_ids` may be the sequence's own growing list. If it becomes shorter, it is counted anew.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: list[int]
    seed: int
    """Any integer. Sequence i of a request has `sequence_seed(seed, i)`."""
    allowed: int | TokenBitmask | None = None
    """The only token that may be chosen, or those that may be, one bit each (`Slice.allowed`); None: all."""
    tally: _Tally | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def step(self) -> int:
        """Index of the row's token among the sequence's generated tokens."""
        return len(self.output_ids)

    @property
    def is_plain(self) -> bool:
        """Whether the row's token is the argmax of the raw logits, so that nothing else has to be computed."""
        return self.params.greedy and not self.params.needs_logits_processing and self.allowed is None

    def after(self, drafts: Sequence[int]) -> SampleRow:
        """The row that follows `drafts`. `allowed` and the tally are left out: they are those of another row."""
        return SampleRow(self.params, self.prompt_ids, [*self.output_ids, *drafts], self.seed)


@dataclass(slots=True)
class SamplerOutput:
    """The tokens that one step chose."""

    token_ids: Tensor
    """int64 [n] on the host; -1 in the rows of `errors`."""
    logprobs: list[dict[int, Logprob] | None]
    """For each row that asked: the chosen token first, then the best ones in order. Without text."""
    errors: dict[int, str]
    """Row -> reason why no token could be chosen. Other rows are unaffected."""


def uniform(seed: int, step: int) -> float:
    """The random number in [0, 1) of one step of one sequence: 53 bits of splitmix64's hash of (seed, step)."""
    return (_mix(_mix(seed) + step * _GOLDEN) >> 11) * 2.0**-53


def sequence_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of a request: `seed` for the first sequence, unrelated seeds for the others."""
    return seed if index == 0 else _mix(_mix(seed) ^ index)


def _mix(value: int) -> int:
    # Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014), splitmix64.
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


class Sampler:
    """Chooses one token per row. Holds no state between steps."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", eos_token_ids: Sequence[int] = ()) -> None:
        """`min_tokens` rules out the `eos_token_ids`. Columns from `vocab_size` on (padded heads) are ignored."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.eos_token_ids = tuple(eos_token_ids)
        self._limited_torch_threads = (
            runtime.limited_torch_threads if self.device.type == "cpu" else contextlib.nullcontext
        )

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> SamplerOutput:
        """Chooses a token for each row. Does not change `logits`.

        logits  float32 [n, V >= vocab_size]
        rows    n rows

        Effects apply in this order: logit_bias; repetition, frequency and presence penalties; min_tokens; allowed;
        temperature; min_p; top_k; top_p (the token that crosses p stays). Then one uniform number per (seed, step) goes
        through the inverse distribution function, with tokens in order of descending probability, equal ones by id.
        Log-probabilities are of the logits before all these effects.

        Differs from vLLM: if several logits equal the k-th, top_k keeps the lower ids, exactly k in all.
        """
        assert logits.dtype == torch.float32, f"logits in {logits.dtype}: rounded to 16 bits they decide ties by id"
        assert logits.dim() == 2 and len(logits) == len(rows), f"logits {tuple(logits.shape)} for {len(rows)} rows"
        assert logits.shape[1] >= self.vocab_size, f"{logits.shape[1]} logits per row, vocabulary of {self.vocab_size}"
        logits = logits[:, : self.vocab_size]
        plain = [row.is_plain for row in rows]
        if any(plain):
            chosen = best_ids(logits).cpu()
            others = [index for index, is_plain in enumerate(plain) if not is_plain]
        else:
            chosen = torch.empty(len(rows), dtype=torch.int64)
            others = list(range(len(rows)))
        with self._limited_torch_threads():
            for block in _blocks(others):
                chosen[block] = self._choose(_rows(logits, block, copies=True), [rows[index] for index in block])
            errors = dict.fromkeys((chosen < 0).nonzero()[:, 0].tolist(), _NO_TOKEN)
            logprobs: list[dict[int, Logprob] | None] = [None] * len(rows)
            wanting = [
                index for index, row in enumerate(rows) if row.params.logprobs is not None and index not in errors
            ]
            for block in _blocks(wanting):
                found = _logprobs(
                    _rows(logits, block), chosen[block], [rows[index].params.logprobs or 0 for index in block]
                )
                for index, entry in zip(block, found, strict=True):
                    logprobs[index] = entry
        return SamplerOutput(chosen, logprobs, errors)

    @torch.no_grad()
    def prompt_logprobs(self, logits: Tensor, targets: Tensor | Sequence[int], k: int) -> list[dict[int, Logprob]]:
        """The log-probabilities of each row's target, the token that really followed, and of its k best tokens.

        logits   float32 [n, V >= vocab_size]; row i predicts targets[i]
        targets  n token ids
        returns  n dicts: the target first, then the best tokens in order; NaN without rank if a row has no softmax
        """
        targets = torch.as_tensor(targets, dtype=torch.int64).cpu()
        assert len(logits) == len(targets), f"{len(logits)} rows of logits for {len(targets)} targets"
        logits = logits[:, : self.vocab_size]
        with self._limited_torch_threads():
            return [
                entry
                for block in _blocks(range(len(targets)))
                for entry in _logprobs(_rows(logits, block), targets[block], [k] * len(block))
            ]

    def _choose(self, scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Tokens of rows that need more than an argmax of raw logits; -1: none. Overwrites scores, f32 [n, V]."""
        self._process(scores, rows)
        chosen = torch.empty(len(rows), dtype=torch.int64)
        greedy = [index for index, row in enumerate(rows) if row.params.greedy]
        drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
        if greedy:
            chosen[greedy] = best_ids(scores[greedy] if drawn else scores).cpu()
        if drawn:
            chosen[drawn] = _draw_rows(scores[drawn] if greedy else scores, [rows[index] for index in drawn])
        return chosen

    def _process(self, scores: Tensor, rows: Sequence[SampleRow]) -> None:
        """Applies bias, penalties, min_tokens and allowed in place. Each but the last is one scatter for all rows."""
        flat = scores.view(-1)
        biased = [(i, *self._bias(row)) for i, row in enumerate(rows) if row.params.logit_bias]
        if biased:
            where = self._flat_indices([(i, ids) for i, ids, _ in biased])
            flat[where] += torch.from_numpy(np.concatenate([bias for _, _, bias in biased])).to(scores.device)
        penalised = [
            (i, *_penalties(row))
            for i, row in enumerate(rows)
            if row.params.needs_penalties and not isinstance(row.allowed, int)
        ]
        if penalised:
            where = self._flat_indices([(i, ids) for i, ids, _, _ in penalised])
            factor = torch.from_numpy(np.concatenate([factor for _, _, factor, _ in penalised])).to(scores.device)
            subtracted = torch.from_numpy(np.concatenate([less for _, _, _, less in penalised])).to(scores.device)
            values = flat[where]
            flat[where] = torch.where(values > 0, values / factor, values * factor) - subtracted
        forbidden = [(i, self._ending_ids(row)) for i, row in enumerate(rows) if row.step < row.params.min_tokens]
        if forbidden:
            flat[self._flat_indices(forbidden)] = -math.inf
        masks = [None if isinstance(row.allowed, int) else row.allowed for row in rows]
        if any(words is not None for words in masks):
            mask_disallowed(scores, masks)
        for scored, row in zip(scores, rows, strict=True):
            if isinstance(row.allowed, int):
                only = scored[row.allowed].clone()
                scored.fill_(-math.inf)[row.allowed] = only

    def _flat_indices(self, ids_of_rows: Sequence[tuple[int, Ints]]) -> Tensor:
        for _, ids in ids_of_rows:
            # An id outside the row would silently change another row.
            assert not len(ids) or 0 <= ids.min() <= ids.max() < self.vocab_size, f"ids {ids.min()} to {ids.max()}"
        flat = np.concatenate([ids + index * self.vocab_size for index, ids in ids_of_rows])
        return torch.from_numpy(flat).to(self.device)

    def _bias(self, row: SampleRow) -> tuple[Ints, Floats]:
        biases = {token_id: x for token_id, x in (row.params.logit_bias or {}).items() if token_id < self.vocab_size}
        return np.array(list(biases), np.int64), np.array(list(biases.values()), np.float32)

    def _ending_ids(self, row: SampleRow) -> Ints:
        ids = {*self.eos_token_ids, *(row.params.stop_token_ids or ())}
        return np.array([token_id for token_id in ids if token_id < self.vocab_size], np.int64)


class _Tally:
    """The distinct tokens of a sequence, with the number of times each was generated (0: only in the prompt).

    A step costs O(new tokens), not O(all tokens): with a repetition penalty, a prompt of 30k tokens is read once.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        unique = dict.fromkeys(prompt_ids)
        self.num_outputs = 0
        self._slots = {token_id: slot for slot, token_id in enumerate(unique)}
        self._ids = np.fromiter(unique, np.int64, len(unique))
        self._counts = np.zeros(len(unique), np.float32)

    def update(self, output_ids: Sequence[int]) -> None:
        for token_id in output_ids[self.num_outputs :]:
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._ids):
                room = max(16, slot)
                self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
            self._ids[slot] = token_id
            self._counts[slot] += 1
        self.num_outputs = len(output_ids)

    def seen(self) -> tuple[Ints, Floats]:
        """Ids and counts, [distinct tokens]."""
        return self._ids[: len(self._slots)], self._counts[: len(self._slots)]


def _penalties(row: SampleRow) -> tuple[Ints, Floats, Floats]:
    """Ids; for each, the repetition factor and the sum of frequency and presence penalty."""
    params = row.params
    if row.tally is None or row.tally.num_outputs > len(row.output_ids):
        row.tally = _Tally(row.prompt_ids if params.repetition_penalty != 1.0 else ())
    row.tally.update(row.output_ids)
    ids, counts = row.tally.seen()
    factor = np.full(len(ids), params.repetition_penalty, np.float32)
    less = np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty) * (counts > 0)
    return ids, factor, less.astype(np.float32)


def _draw_rows(scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Draws one token per row from the filtered softmax; -1: there is none. Overwrites scores, f32 [n, V]."""
    # The maximum is subtracted first: large logits divided by a small temperature lose the digits that differ.
    scores.sub_(scores.amax(-1, keepdim=True))
    if any(row.params.temperature != 1.0 for row in rows):
        temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32)
        scores.div_(temperatures[:, None].to(scores.device))
    probs = torch.softmax(scores, -1)
    lanes = lane_maxima(probs)
    # A NaN or +infinity in a row, or a row of -infinity, makes the row's whole softmax NaN.
    valid = ~np.isnan(lanes[:, 0])
    draws = [uniform(row.seed, row.step) for row in rows]
    floors = np.empty(len(rows), np.float32)
    for index, row in enumerate(rows):
        floors[index] = _candidate_floor(lanes[index], row.params, draws[index], probs.shape[1])
    candidates = entries_at_least(probs, floors)
    return torch.tensor(
        [
            _draw(ids, values, row.params, draw) if ok else -1
            for (ids, values), row, draw, ok in zip(candidates, rows, draws, valid, strict=True)
        ],
        dtype=torch.int64,
    )


def _candidate_floor(best: Floats, params: SamplingParams, draw: float, vocab_size: int) -> float:
    """A probability such that the tokens at or above it decide the row's draw; NaN if there is no distribution.

    Every filter keeps the most probable tokens down to some probability, which makes such a floor possible. A filter
    that may drop the best token, or keep a less probable one in place of another, needs the whole row.

    best  f32 [lanes], descending: `lane_maxima` of the row's probabilities
    """
    # top_p is a share of the mass that min_p leaves, so all tokens that pass min_p are needed. They are few.
    floor = float(np.float32(params.min_p) * best[0])
    if 0 < params.top_k <= len(best):
        floor = max(floor, float(best[params.top_k - 1]))
    elif params.min_p == 0 and params.top_k <= 0:
        # Without any filter, the drawn number acts like top_p: the token that crosses it is needed.
        mass = (params.top_p if params.top_p < 1 else draw) + MASS_SLACK
        crossing = int(np.searchsorted(np.cumsum(best, dtype=np.float64), mass))
        # If the maxima do not reach the mass: all tokens below (1 - mass) / V together hold less than 1 - mass.
        floor = float(best[crossing]) if crossing < len(best) else (1 - mass) / vocab_size
    return max(floor, float(_SMALLEST))


def _draw(ids: Ints, probs: Floats, params: SamplingParams, draw: float) -> int:
    """Filters the candidates and inverts the distribution function at `draw`.

    Each filter shortens the order of descending probability at its end, and sets `total` to the mass that is left.
    """
    order = descending_order(probs)
    if params.top_k > 0:
        order = order[: params.top_k]
    mass = np.cumsum(probs[order], dtype=np.float64)
    # Without top_k and min_p, the candidates are part of a distribution with mass 1.
    total = float(mass[-1]) if params.top_k > 0 or params.min_p > 0 else 1.0
    if params.top_p < 1:
        mass = mass[: int(np.searchsorted(mass, params.top_p * total)) + 1]
        total = float(mass[-1])
    place = min(int(np.searchsorted(mass, draw * total, side="right")), len(mass) - 1)
    return int(ids[order[place]])


def _logprobs(scores: Tensor, targets: Tensor, counts: Sequence[int]) -> list[dict[int, Logprob]]:
    """Log-softmax of each row at its target and at its `counts[i]` best tokens.

    scores   f32 [n, V]
    targets  int64 [n] on the host
    """
    best: list[Ints] = [np.empty(0, np.int64)] * len(counts)
    if any(counts):
        lanes = lane_maxima(scores)
        floors = np.full(len(counts), np.inf, np.float32)
        for index, count in enumerate(counts):
            if count:
                floors[index] = lanes[index, count - 1] if count <= lanes.shape[1] else -np.inf
        best = [
            ids[descending_order(values)[:count]]
            for (ids, values), count in zip(entries_at_least(scores, floors), counts, strict=True)
        ]
    columns = targets[:, None].repeat(1, 1 + max(map(len, best)))
    for index, ids in enumerate(best):
        columns[index, 1 : 1 + len(ids)] = torch.from_numpy(ids)
    # Not logsumexp, which sums in another order for a single row.
    found = torch.log_softmax(scores, -1).gather(1, columns.to(scores.device)).tolist()
    entries = []
    for target, above, ids, values in zip(targets.tolist(), num_above(scores, targets), best, found, strict=True):
        entry = {target: Logprob(values[0], None if math.isnan(values[0]) else above + 1)}
        for rank, (token_id, logprob) in enumerate(zip(ids.tolist(), values[1:], strict=False), start=1):
            if token_id != target:
                entry[token_id] = Logprob(logprob, rank)
        entries.append(entry)
    return entries


def _blocks(indices: Sequence[int]) -> Iterator[list[int]]:
    for start in range(0, len(indices), BLOCK_ROWS):
        yield list(indices[start : start + BLOCK_ROWS])


def _rows(logits: Tensor, indices: list[int], *, copies: bool = False) -> Tensor:
    """The rows, [len(indices), V]: a contiguous copy, or, if they follow each other, a view of the caller's memory."""
    first, last = indices[0], indices[-1] + 1
    if last - first != len(indices):
        return logits[indices]
    return logits[first:last].clone(memory_format=torch.contiguous_format) if copies else logits[first:last]
