"""Norms of the residual stream: RMS norm, and layer norm with or without a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quire.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.layers import Ops
    from quire.models.loading import WeightSource

NormKind = Literal["rms", "layer"]


@dataclass(frozen=True)
class NormShape:
    """The norms of a model in numbers; all of one kind.

    kind      rms, or layer: with the mean subtracted
    eps       added to the mean square, or to the variance
    has_bias  layer: whether a bias is added
    """

    eps: float
    kind: NormKind = "rms"
    has_bias: bool = False

    def __post_init__(self) -> None:
        if not self.eps >= 0:
            raise ModelError(f"the eps of norms is {self.eps}; it must be at least 0")

    def tensor_shapes(self, name: str, width: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of one norm."""
        return {f"{name}.{part}": (width,) for part in (("weight", "bias") if self.has_bias else ("weight",))}

    def load(self, name: str, weights: WeightSource, ops: Ops) -> Norm:
        """One norm of this kind."""
        return Norm(self, name, weights, ops)


class Norm:
    """One norm, [R, E] -> [R, E]. weight, bias: [E]; bias may be None."""

    __slots__ = ("_ops", "_shape", "bias", "weight")

    def __init__(self, shape: NormShape, name: str, weights: WeightSource, ops: Ops) -> None:
        self._shape = shape
        self._ops = ops
        self.weight = weights.tensor(f"{name}.weight")
        self.bias = weights.tensor(f"{name}.bias") if shape.has_bias else None

    @property
    def is_rms(self) -> bool:
        """Whether it is an RMS norm."""
        return self._shape.kind == "rms"

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x."""
        if self.is_rms:
            return self._ops.norm(x, self.weight, self._shape.eps)
        return self._ops.layer_norm(x, self.weight, self.bias, self._shape.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x to the residual stream in place, and returns the norm of the sum."""
        if self.is_rms:
            return self._ops.add_norm(x, residual, self.weight, self._shape.eps)
        return self(residual.add_(x))
