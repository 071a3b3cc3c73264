"""Attention as a mixer: q, k and v of each row, attention over the tokens that it sees, and the output product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quire.errors import ModelError
from quire.models.rope import MAX_SIZE, Rope

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.models.layers import Ops
    from quire.models.loading import WeightSource
    from quire.models.plan import StepPlan

QkNorm = Literal["", "heads", "rows"]
"""RMS norm of q and k before rotation: none, over each head, or over all heads of a row."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention of one layer in numbers."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    """None: it does not rotate."""
    window: int | None = None
    """Number of tokens a query sees, itself included: key j is visible to query i if i - window < j <= i. None: all."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm = ""
    scale: float | None = None
    """Factor of q . k; None: 1 / sqrt(head_dim)."""
    soft_cap: float | None = None
    """c: a score s becomes c * tanh(s / c); None: it stays as it is."""
    position_scale: tuple[float, int] | None = None
    """(b, n): the query at position p is multiplied by 1 + b * log(1 + floor(p / n)). Source: Llama 4, Ministral 3."""

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_dim"):
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise ModelError(f"{name} is {getattr(self, name)}; it must lie between 1 and {MAX_SIZE}")
        if self.num_q_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_q_heads} query heads cannot be shared among {self.num_kv_heads} key-value heads"
            )
        if self.rope is not None and self.rope.dim != self.head_dim:
            raise ModelError(f"rope is made for heads of {self.rope.dim} channels, and they have {self.head_dim}")
        if self.window is not None and self.window < 1:
            raise ModelError(f"sliding_window is {self.window}; it must be positive")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ModelError(f"the soft cap of scores is {self.soft_cap}; it must be positive")

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or all value heads) together."""
        return self.num_kv_heads * self.head_dim

    @property
    def score_scale(self) -> float | None:
        """Factor of q . k with the magnitude of the rotation; None: 1 / sqrt(head_dim)."""
        if self.rope is None or self.rope.score_scale == 1:
            return self.scale
        return self.rope.score_scale * (self.head_dim**-0.5 if self.scale is None else self.scale)

    def tensor_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors (matrices [out, in])."""
        shapes: dict[str, tuple[int, ...]] = {
            "q.weight": (self.q_size, hidden_size),
            "k.weight": (self.kv_size, hidden_size),
            "v.weight": (self.kv_size, hidden_size),
            "o.weight": (hidden_size, self.q_size),
        }
        if self.qkv_bias:
            shapes |= {"q.bias": (self.q_size,), "k.bias": (self.kv_size,), "v.bias": (self.kv_size,)}
        if self.o_bias:
            shapes["o.bias"] = (hidden_size,)
        if self.qk_norm:
            q, k = (self.head_dim, self.head_dim) if self.qk_norm == "heads" else (self.q_size, self.kv_size)
            shapes |= {"q_norm.weight": (q,), "k_norm.weight": (k,)}
        return shapes


class Attention:
    """The definition, over the packed products of a backend. Neither rotates nor masks; the plan does.

    q_norm, k_norm  weights [D], or [H * G * D] and [H * D], or None
    channel_scales  [D], or None; see Rope.query_scales
    """

    def __init__(self, shape: AttentionShape, at: str, weights: WeightSource, ops: Ops, eps: float) -> None:
        self.shape = shape
        self._ops = ops
        self._eps = eps
        self._split = (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads)
        self.qkv = weights.linear(f"{at}.q", f"{at}.k", f"{at}.v", bias=shape.qkv_bias)
        self.q_norm = weights.tensor(f"{at}.q_norm.weight") if shape.qk_norm else None
        self.k_norm = weights.tensor(f"{at}.k_norm.weight") if shape.qk_norm else None
        self.o = weights.linear(f"{at}.o", bias=shape.o_bias)
        scales = () if shape.rope is None else shape.rope.query_scales
        self.channel_scales = weights.constant(scales) if scales else None

    def __call__(self, index: int, x: Tensor, positions: Tensor | None, plan: StepPlan) -> Tensor:
        """X [R, E] -> [R, E]. index: of the layer. positions: int64 [R], only if the queries' scale depends on them."""
        shape = self.shape
        q, k, v = self.qkv(x).view(len(x), -1, shape.head_dim).split_with_sizes(self._split, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.channel_scales is not None:
            q = q * self.channel_scales
        if shape.position_scale is not None:
            assert positions is not None
            q = q * position_scales(positions, *shape.position_scale).to(q.dtype)[:, None, None]
        plan.write(index, k, v)
        return self.o(plan.attend(index, q))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.shape.qk_norm == "heads":
            return self._ops.norm(x, weight, self._eps)
        return self._ops.norm(x.flatten(1), weight, self._eps).view(x.shape)


def position_scales(positions: Tensor, share: float, step: int) -> Tensor:
    """See AttentionShape.position_scale; float32 [R]."""
    steps: torch.Tensor = (positions // step).float()
    return 1 + share * steps.log1p()
