"""From a checkpoint's tensors to packed products: what a decoder asks for while it is built."""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from quire.errors import ConfigError
from quire.models.layers import Gated
from quire.models.quants import GROUP

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.layers import Embedding, Linear, Ops
    from quire.models.quants import QuantizedTensor
    from quire.models.shape import ModelShape
    from quire.models.weights import Checkpoint

log = logging.getLogger("quire")

NOTHING_IN_FOUR_BITS = (
    "model.weights is native, but this checkpoint holds no matrix in 4 bits (Q4_0 or Q4_1);"
    " use model.weights dequantized"
)

FOUR_BIT_ROWS = 16
"""The 4-bit product takes outputs by so many; matrices of other sizes are dequantized."""


class FourBit(Protocol):
    """Packs 4-bit matrices as they are stored."""

    def __call__(self, matrix: QuantizedTensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        """The product with the matrix; its outputs are float32 if `wide`, else of the model's dtype."""


def native_bytes(weights: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of a checkpoint's tensors where its 4-bit matrices stay so, the embedding apart: it is read by rows.

    Raises ConfigError if there are none.
    """
    shapes = weights.shape.tensor_shapes
    kept = {
        name
        for name, size in shapes.items()
        if name != "embed.weight" and weights.is_four_bit(name) and size[0] % FOUR_BIT_ROWS == 0
    }
    if not kept:
        raise ConfigError(NOTHING_IN_FOUR_BITS)
    total = 0
    for name, size in shapes.items():
        elements = math.prod(size)
        # Codes, and a scale and an offset for each group of 32.
        total += elements // 2 + elements // GROUP * 2 * dtype.itemsize if name in kept else elements * dtype.itemsize
    return total


class WeightSource:
    """Tensors in the dtype and on the device the model runs in, and products over them.

    four_bit  given, matrices the checkpoint holds in 4 bits stay so; of others `conclude` speaks
    """

    def __init__(
        self,
        weights: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        four_bit: FourBit | None = None,
    ) -> None:
        self._weights = weights
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._four_bit = four_bit
        self._kept = 0
        self._dequantized: list[str] = []

    def tensor(self, name: str) -> Tensor:
        """One tensor by its canonical name."""
        return self._weights.tensor(name, self._dtype).to(self._device)

    def embedding(self, name: str, *, tied: bool) -> tuple[Embedding, Linear | None]:
        """Rows of the matrix `NAME.weight`, and, if it is tied to the output head, the head over it."""
        weight = self.tensor(f"{name}.weight")
        if tied:
            return self._ops.tied(weight)
        return functools.partial(functional.embedding, weight=weight), None

    def key_bias(self, shape: ModelShape) -> Tensor | None:
        """See plan.Model: of every layer's and head's keys, float32 [L, H, D]."""
        if not shape.qkv_bias or shape.qk_norm:
            return None
        found = torch.stack([self.tensor(f"layers.{index}.k.bias").float() for index in range(shape.num_layers)])
        return found.view(shape.num_layers, shape.num_kv_heads, shape.head_dim)

    def head(self, name: str) -> Linear:
        """The output head over the matrix `NAME.weight`: float32 logits."""
        fused = self._stored((name,))
        if fused is not None and self._four_bit is not None:
            return self._four_bit(fused, None, wide=True)
        return self._ops.head(self.tensor(f"{name}.weight"))

    def linear(self, *names: str, bias: bool, gated: bool = False) -> Linear:
        """One product over the matrices `NAME.weight`, outputs one after the other; with `NAME.bias` if asked for. Of
        two the first may gate the second.
        """
        offset = torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None
        fused = self._stored(names)
        if fused is not None and self._four_bit is not None:
            product = self._four_bit(fused, offset)
            return Gated(self._ops, product) if gated else product
        matrices = [self.tensor(f"{name}.weight") for name in names]
        weight = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        return self._ops.gated_linear(weight, offset) if gated else self._ops.linear(weight, offset)

    def _stored(self, names: tuple[str, ...]) -> QuantizedTensor | None:
        """The 4-bit matrices one below the other, as the checkpoint holds them; None if they are to be dequantized."""
        if self._four_bit is None:
            return None
        stored = [self._weights.quantized(f"{name}.weight") for name in names]
        whole = [matrix for matrix in stored if matrix is not None]
        if len(whole) < len(stored) or sum(len(matrix.codes) for matrix in whole) % FOUR_BIT_ROWS:
            self._dequantized += names
            return None
        self._kept += len(names)
        return type(whole[0])(*(torch.cat(parts) for parts in zip(*whole, strict=True)))

    def conclude(self) -> None:
        """After the last matrix. Raises ConfigError if 4-bit products were asked for and there is none; warns if some
        matrices have been dequantized.
        """
        if self._four_bit is None:
            return
        if not self._kept:
            raise ConfigError(NOTHING_IN_FOUR_BITS)
        if self._dequantized:
            log.warning(
                "model.weights native: %d of %d matrices are dequantized, %s.weight first: they are not stored as Q4_0"
                " or Q4_1, or their outputs are no multiple of %d",
                len(self._dequantized),
                len(self._dequantized) + self._kept,
                self._dequantized[0],
                FOUR_BIT_ROWS,
            )
