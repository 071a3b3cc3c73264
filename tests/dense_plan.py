"""The plainest StepPlan: every key and value of every sequence in one tensor each, full softmax attention, any dtype.

Shares no code with `quire.attention`; the models' tests use it as their attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.models.shape import ModelShape


class DensePlan:
    """Attention over sequences that grow step by step.

    Call `step` with the rows of the next forward pass; it returns their positions. Rows of one sequence follow each
    other, and a sequence continues where its last step ended.
    """

    def __init__(self, shape: ModelShape, max_context: int | None = None) -> None:
        self.shape = shape
        self._tables: list[tuple[Tensor, Tensor] | None] = []
        for layer in shape.layers:
            tables = None if layer.mixer.rope is None else layer.mixer.rope.tables(max_context or shape.max_context)
            self._tables.append(None if tables is None else (torch.from_numpy(tables[0]), torch.from_numpy(tables[1])))
        self._lengths: dict[int, int] = {}
        self._stored: dict[
            tuple[int, int], tuple[Tensor, Tensor]
        ] = {}  # (layer, sequence) -> rotated keys, values [S, H, D]
        self._rows: list[tuple[int, slice, Tensor]] = []  # sequence, rows of the step, their positions
        self._positions = torch.zeros(0, dtype=torch.int64)

    def step(self, rows: list[tuple[int, int]]) -> Tensor:
        """rows: (sequence id, number of rows) in row order; returns positions int64 [R]."""
        self._rows, first = [], 0
        for sequence, count in rows:
            start = self._lengths.get(sequence, 0)
            self._lengths[sequence] = start + count
            self._rows.append((sequence, slice(first, first + count), torch.arange(start, start + count)))
            first += count
        self._positions = torch.cat([positions for _, _, positions in self._rows])
        return self._positions

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        k = self._rotate(layer, k)
        for sequence, rows, _ in self._rows:
            new = k[rows].clone(), v[rows].clone()
            old = self._stored.get((layer, sequence))
            self._stored[layer, sequence] = (
                new if old is None else (torch.cat((old[0], new[0])), torch.cat((old[1], new[1])))
            )

    def attend(self, layer: int, q: Tensor) -> Tensor:
        shape = self.shape.layers[layer].mixer
        scale = 1 / math.sqrt(shape.head_dim) if shape.score_scale is None else shape.score_scale
        q = self._rotate(layer, q).unflatten(1, (shape.num_kv_heads, -1))  # [R, H, G, D]
        out = torch.empty(len(q), shape.q_size, dtype=q.dtype)
        for sequence, rows, positions in self._rows:
            keys, values = self._stored[layer, sequence]
            scores = torch.einsum("rhgd,shd->hgrs", q[rows].float(), keys.float()) * scale
            if shape.soft_cap is not None:
                scores = (scores / shape.soft_cap).tanh() * shape.soft_cap
            behind = positions[:, None] - torch.arange(len(keys))[None, :]
            visible = behind >= 0
            if shape.window is not None:
                visible &= behind < shape.window
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hgrs,shd->rhgd", weights, values.float()).flatten(1).to(q.dtype)
        return out

    def _rotate(self, layer: int, x: Tensor) -> Tensor:
        tables = self._tables[layer]
        if tables is None:
            return x
        cos, sin = (table[self._positions][:, None] for table in tables)  # [R, 1, D/2]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
