"""Simulations, over one window, of caches that the engine does not have: keys per token, keys quantized after rotation.

A row sees its own chunk exact, earlier chunks as the codec's kernels encode and decode them, and sinks exact, like an
engine in strict mode. In float32 the result equals the reference backend's to the last digits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.attention.reference import attend_dense, rotate
from quire.attention.spec import Scoring
from quire.cache.codecs.nuq import NuqTables
from quire.cache.codecs.packing import MAX_BITS
from quire.cache.ledger import PAGE_TOKENS
from quire.calibrate.fit import Codebook, LayerFit, padded, quantize_dequantize, uniform_tables
from quire.engine.runner import LOGIT_ROWS
from quire.models.plan import Model
from quire.models.shape import ModelShape

Stored = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, keys, values) -> keys and values as a cache returns them, float32 [T, H, D]."""


def per_channel(tables: NuqTables) -> Stored:
    """Keys and values as a codec with these tables stores them, rotated or not."""
    names = NuqTables.__dataclass_fields__
    layers = [
        NuqTables(**{name: getattr(tables, name)[layer : layer + 1] for name in names})
        for layer in range(len(tables.key_bits))
    ]
    return lambda layer, keys, values: quantize_dequantize(layers[layer], keys, values)


def per_token(
    key_fits: Sequence[LayerFit],
    value_fits: Sequence[LayerFit],
    bits: int,
    slots: int,
    *,
    kinds: Sequence[str],
    spends: bool,
) -> Stored:
    """Keys stored like values: a range for each token, a codebook and a width for each head.

    key_fits  fits with keys in the place of values
    bits      average width
    kinds     kinds of codebooks to choose from
    spends    whether widths are allocated by their benefit; otherwise all are equal
    """
    sources = (key_fits, value_fits)
    chosen = [
        [min(kinds, key=lambda kind: float(fit.value_cost[kind][:, bits].sum())) for fit in fits] for fits in sources
    ]
    costs = [
        torch.stack([fit.value_cost[kind] for fit, kind in zip(fits, of_fits, strict=True)])
        for fits, of_fits in zip(sources, chosen, strict=True)
    ]
    cost = torch.stack(costs)
    widths = spread_bits(cost, bits) if spends else torch.full(cost.shape[:-1], bits)
    tables = [
        [_head_tables(*each, slots) for each in zip(fits, of_fits, of_widths, strict=True)]
        for fits, of_fits, of_widths in zip(sources, chosen, widths, strict=True)
    ]

    def stored(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros_like(keys)
        found = [
            quantize_dequantize(layers[layer], nothing, x)[1] for layers, x in zip(tables, (keys, values), strict=True)
        ]
        return found[0], found[1]

    return stored


def spread_bits(cost: Tensor, bits: int) -> Tensor:
    """Widths [...] with an average of `bits`: each further bit goes where it saves most.

    cost  float64 [..., 6], by width. The minimum is the larger of two bits and one bit below the average
    """
    flat = cost.flatten(0, -2)
    widths = torch.full((len(flat),), max(2, bits - 1))
    for _ in range(bits * len(flat) - int(widths.sum())):
        now, then = (flat.gather(1, at[:, None])[:, 0] for at in (widths, (widths + 1).clamp_max(MAX_BITS)))
        widths[(now - then).masked_fill(widths == MAX_BITS, -torch.inf).argmax()] += 1
    return widths.view(cost.shape[:-1])


def _head_tables(fit: LayerFit, kind: str, widths: Tensor, slots: int) -> NuqTables:
    """Tables of a layer with widths [H], for values only; keys get no bits."""
    nothing = torch.zeros(*fit.key_weight.shape, 1)
    even = uniform_tables(Codebook(nothing, nothing), fit.key_weight, 0, fit.value_codebooks[kind, 1], slots)
    codebooks = [
        padded(Codebook(*(part[head] for part in fit.value_codebooks[kind, bits])))
        for head, bits in enumerate(widths.tolist())
    ]
    edges, stands_for = (torch.stack(part)[None] for part in zip(*codebooks, strict=True))
    return dataclasses.replace(even, value_bits=widths.to(torch.uint8)[None], value_edges=edges, value_books=stands_for)


def rotation(shape: ModelShape, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [num_tokens, D / 2]."""
    (rope,) = shape.ropes  # a model that does not rotate has no rotation to move
    cos, sin = rope.tables(num_tokens)
    return torch.from_numpy(cos), torch.from_numpy(sin)


class SimulatedPlan:
    """The StepPlan of one whole window.

    rotated  whether `stored` takes and returns rotated keys
    sinks    first tokens that stay exact
    """

    def __init__(self, shape: ModelShape, num_tokens: int, stored: Stored, *, rotated: bool, sinks: int) -> None:
        self._shape = shape
        self._tables = rotation(shape, num_tokens)
        self._at = torch.arange(num_tokens)
        self._stored, self._rotated, self._sinks = stored, rotated, sinks
        self._keys = self._values = torch.empty(0)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See StepPlan."""
        self._keys, self._values = k.float(), v.float()

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See StepPlan."""
        keys, values = self._turn(self._keys), self._values
        if self._rotated:
            old_keys, old_values = self._stored(layer, keys, values)
        else:
            old_keys, old_values = self._stored(layer, self._keys, values)
            old_keys = self._turn(old_keys)
        old_keys[: self._sinks], old_values[: self._sinks] = keys[: self._sinks], values[: self._sinks]
        queries = self._turn(q).unflatten(1, (self._shape.num_kv_heads, -1))
        out = []
        for start in range(0, len(q), PAGE_TOKENS):
            end = min(start + PAGE_TOKENS, len(q))
            k = torch.cat((old_keys[:start], keys[start:end])).transpose(0, 1)
            v = torch.cat((old_values[:start], values[start:end])).transpose(0, 1)
            at = self._at[:end]
            out.append(attend_dense(queries[start:end], k, v, at[start:], at, Scoring(self._shape.sliding_window)).o)
        return torch.cat(out).flatten(1).to(q.dtype)

    def _turn(self, x: Tensor) -> Tensor:
        return rotate(x, self._tables, self._at)


@torch.inference_mode()
def simulated_loss(model: Model, window: Sequence[int], plan: SimulatedPlan) -> float:
    """Mean negative log-likelihood of a window's tokens but the first. The plan covers all tokens but the last."""
    tokens = torch.tensor(window)
    hidden = model.hidden(tokens[:-1], torch.arange(len(window) - 1), plan)
    total = 0.0
    for start in range(0, len(hidden), LOGIT_ROWS):
        logits = model.head(hidden[start : start + LOGIT_ROWS])[:, : model.shape.vocab_size]
        targets = tokens[start + 1 : start + 1 + len(logits)]
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="none").double().sum())
    return total / len(hidden)
