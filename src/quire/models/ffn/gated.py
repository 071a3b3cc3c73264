"""The gated feed-forward part: down(act(gate(x)) * up(x))."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.loading import WeightSource

GateActivation = Literal["silu", "gelu-tanh"]


@dataclass(frozen=True, kw_only=True)
class GatedShape:
    """The gated feed-forward part of a layer in numbers."""

    ffn_size: int
    activation: GateActivation = "silu"
    bias: bool = False

    def tensor_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors (matrices [out, in])."""
        shapes: dict[str, tuple[int, ...]] = {
            "gate.weight": (self.ffn_size, hidden_size),
            "up.weight": (self.ffn_size, hidden_size),
            "down.weight": (hidden_size, self.ffn_size),
        }
        if self.bias:
            shapes |= {"gate.bias": (self.ffn_size,), "up.bias": (self.ffn_size,), "down.bias": (hidden_size,)}
        return shapes

    def load(self, at: str, weights: WeightSource) -> Gated:
        """Packs its products. at: the prefix of its tensors' names."""
        return Gated(self, at, weights)


class Gated:
    """The definition, over the packed products of a backend."""

    def __init__(self, shape: GatedShape, at: str, weights: WeightSource) -> None:
        self.gate_up = weights.gated_linear(f"{at}.gate", f"{at}.up", bias=shape.bias, activation=shape.activation)
        self.down = weights.linear(f"{at}.down", bias=shape.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """X [R, E] -> [R, E]."""
        return self.down(self.gate_up(x))
