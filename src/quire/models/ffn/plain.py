"""The plain feed-forward part: down(act(up(x)))."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from quire.models.loading import WeightSource

Activation = Literal["relu", "gelu", "relu-squared"]


@dataclass(frozen=True, kw_only=True)
class PlainShape:
    """The plain feed-forward part of a layer in numbers."""

    ffn_size: int
    activation: Activation = "relu"
    bias: bool = False

    def tensor_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors (matrices [out, in])."""
        shapes: dict[str, tuple[int, ...]] = {
            "up.weight": (self.ffn_size, hidden_size),
            "down.weight": (hidden_size, self.ffn_size),
        }
        if self.bias:
            shapes |= {"up.bias": (self.ffn_size,), "down.bias": (hidden_size,)}
        return shapes

    def load(self, at: str, weights: WeightSource) -> Plain:
        """Packs its products. at: the prefix of its tensors' names."""
        return Plain(self, at, weights)


class Plain:
    """The definition, over the packed products of a backend. The activation is torch's own."""

    def __init__(self, shape: PlainShape, at: str, weights: WeightSource) -> None:
        self._activation = _activation(shape.activation)
        self.up = weights.linear(f"{at}.up", bias=shape.bias)
        self.down = weights.linear(f"{at}.down", bias=shape.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """X [R, E] -> [R, E]."""
        return self.down(self._activation(self.up(x)))


def _activation(name: Activation) -> Callable[[Tensor], Tensor]:
    import torch  # the shape alone is used without torch

    match name:
        case "relu":
            return torch.relu_
        case "gelu":
            return torch.nn.functional.gelu
        case "relu-squared":
            return lambda x: x.relu_().square_()
