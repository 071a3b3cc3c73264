"""What a backend of attention has to know of a model's layers and of the chunks that they read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from quire.attention.pages import PageTable


@dataclass(frozen=True)
class Scoring:
    """How a layer scores a key for a query: cap(scale * q . k), for the keys that the query sees.

    window    a row at position i sees only positions above i - window; None: it sees all
    scale     factor of q . k; None: 1 / sqrt(head size)
    soft_cap  c: a score s becomes c * tanh(s / c); None: it stays as it is. Source: Gemma 2, arXiv 2408.00118
    """

    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None

    def scale_of(self, head_dim: int) -> float:
        """The factor of q . k for heads of this size."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale


PLAIN = Scoring()
"""Scores of all earlier tokens, divided by the square root of the head size."""


@dataclass(frozen=True)
class AttentionLayer:
    """The attention of one layer.

    first_lane    its first lane; those of its kv heads follow each other
    num_kv_heads  H
    group_size    G, query heads of a kv head
    head_dim      D
    rotation      index of its angles in `AttentionSpec.rotations`; None: it rotates neither keys nor queries
    """

    first_lane: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    rotation: int | None = None
    scoring: Scoring = PLAIN

    @property
    def num_heads(self) -> int:
        """H * G, query heads."""
        return self.num_kv_heads * self.group_size


Angles = tuple["torch.Tensor", "torch.Tensor"]
"""Cosines and sines, float32 [positions, D / 2] each. A channel that is not rotated has cosine 1 and sine 0."""


@dataclass(frozen=True)
class AttentionSpec:
    """The arguments from which a backend is built.

    table      the chunks; if sealed chunks are encoded, pages of every codec hold keys before rotation
    layers     in the model's order
    dtype      dtype of queries, keys, values, the output, and dense pages
    rotations  the angles that layers name
    strict     whether rows see earlier chunks of their own slice as stored, not as computed
    sparse_values  S: a slice of one row, unless it `reads_all`, adds up only the values with the largest weights: those
               of int(S * (n - 1)) of the n - 1 other slots that it sees, and its own. 1: all values
    """

    table: PageTable
    layers: tuple[AttentionLayer, ...]
    dtype: torch.dtype
    rotations: tuple[Angles, ...] = ()
    strict: bool = True
    sparse_values: float = 1.0

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @cached_property
    def num_lanes(self) -> int:
        """Number of lanes of all layers."""
        return sum(layer.num_kv_heads for layer in self.layers)

    def angles(self, layer: int) -> Angles | None:
        """The angles of a layer; None if it does not rotate."""
        rotation = self.layers[layer].rotation
        return None if rotation is None else self.rotations[rotation]

    def on_host(self, table: PageTable) -> AttentionSpec:
        """The same layers, with their angles and another table on the host."""
        rotations = tuple((cos.cpu(), sin.cpu()) for cos, sin in self.rotations)
        return replace(self, table=table, rotations=rotations)


def equal_layers(
    num_layers: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    *,
    rotation: int | None = None,
    scoring: Scoring = PLAIN,
) -> tuple[AttentionLayer, ...]:
    """Layers that are all alike, with their lanes in order."""
    return tuple(
        AttentionLayer(layer * num_kv_heads, num_kv_heads, group_size, head_dim, rotation, scoring)
        for layer in range(num_layers)
    )
