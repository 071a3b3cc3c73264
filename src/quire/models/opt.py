"""OPT: learned positions, LayerNorm, one wide ReLU layer, biases; the 350m size has norms after the sublayers.

LayerNorm and the activation are torch's own. OPT is here because the papers measure on it, not for speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from quire.models.plan import Model
from quire.models.shape import OPT_POSITION_OFFSET

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from quire.models.layers import Linear, Ops
    from quire.models.loading import WeightSource
    from quire.models.plan import StepPlan
    from quire.models.shape import ModelShape

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu_, "gelu": functional.gelu}


class _Norm(NamedTuple):
    weight: Tensor  # [E]
    bias: Tensor  # [E]

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, eps)


class _Layer(NamedTuple):
    attn_norm: _Norm
    qkv: Linear
    o: Linear
    mlp_norm: _Norm
    up: Linear
    down: Linear


class OptDecoder(Model):
    """OPT in both its orders: norms before the sublayers (most sizes) or after the residual sum (350m)."""

    def __init__(self, shape: ModelShape, weights: WeightSource, ops: Ops) -> None:
        self.shape = shape
        self._heads = shape.num_q_heads + 2 * shape.num_kv_heads
        self._split = (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads)
        self._activation = _ACTIVATIONS[shape.activation]
        self._embed, head = weights.embedding("embed", tied=shape.tied_embeddings)
        # Cuts off the two padding rows once, so that a position is the index of its row.
        self._positions = weights.tensor("positions.weight")[OPT_POSITION_OFFSET:]

        def norm(name: str) -> _Norm:
            return _Norm(weights.tensor(f"{name}.weight"), weights.tensor(f"{name}.bias"))

        self._layers = [
            _Layer(
                attn_norm=norm(f"{at}.attn_norm"),
                qkv=weights.linear(f"{at}.q", f"{at}.k", f"{at}.v", bias=shape.qkv_bias),
                o=weights.linear(f"{at}.o", bias=shape.o_bias),
                mlp_norm=norm(f"{at}.mlp_norm"),
                up=weights.linear(f"{at}.up", bias=shape.mlp_bias),
                down=weights.linear(f"{at}.down", bias=shape.mlp_bias),
            )
            for at in (f"layers.{index}" for index in range(shape.num_layers))
        ]
        self.key_bias = weights.key_bias(shape)
        self._norm = norm("norm") if shape.final_norm else None
        projected = "project_in.weight" in shape.tensor_shapes
        self._project_in = weights.linear("project_in", bias=False) if projected else None
        self._project_out = weights.linear("project_out", bias=False) if projected else None
        self._head = head or weights.head("head")

    def begin(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor]:
        """The embedded tokens and positions, [R, E]."""
        x = self._embed(tokens)
        if self._project_in is not None:
            x = self._project_in(x)
        return (x + functional.embedding(positions, self._positions),)

    def layer(self, index: int, state: tuple[Tensor, ...], plan: StepPlan) -> tuple[Tensor]:
        """One layer, [R, E] -> [R, E]."""
        (x,) = state
        eps, first = self.shape.norm_eps, self.shape.norm_first
        attn_norm, qkv, o, mlp_norm, up, down = self._layers[index]
        inner = attn_norm(x, eps) if first else x
        q, k, v = qkv(inner).view(-1, self._heads, self.shape.head_dim).split_with_sizes(self._split, 1)
        plan.write(index, k, v)
        x = o(plan.attend(index, q)).add_(x)
        if not first:
            x = attn_norm(x, eps)
        inner = mlp_norm(x, eps) if first else x
        x = down(self._activation(up(inner))).add_(x)
        return (x if first else mlp_norm(x, eps),)

    def finish(self, state: tuple[Tensor, ...]) -> Tensor:
        """The last norm's output, if there is one, [R, E]."""
        return self._norm(state[0], self.shape.norm_eps) if self._norm is not None else state[0]

    def head(self, hidden: Tensor) -> Tensor:
        """See `plan.Model.head`."""
        return self._head(hidden if self._project_out is None else self._project_out(hidden))
