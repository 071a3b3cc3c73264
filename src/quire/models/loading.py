"""From a checkpoint's tensors to packed products: what a decoder asks for while it is built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.layers import Linear, Ops
    from quire.models.quants import QuantizedTensor
    from quire.models.weights import Checkpoint

log = logging.getLogger("quire")

FourBit = Callable[["QuantizedTensor", "Tensor | None"], "Linear"]
"""Packs a 4-bit matrix as it is stored, with its bias."""


class WeightSource:
    """Tensors in the dtype and on the device the model runs in, and products over them.

    four_bit  given, matrices the checkpoint holds in 4 bits stay so; others are dequantized, said once in the log
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
        self._told = False

    def tensor(self, name: str) -> Tensor:
        """One tensor by its canonical name."""
        return self._weights.tensor(name, self._dtype).to(self._device)

    def linear(self, *names: str, bias: bool) -> Linear:
        """One product over the matrices `NAME.weight`, outputs one after the other; with `NAME.bias` if asked for."""
        offset = torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None
        if self._four_bit is not None:
            stored = [self._weights.quantized(f"{name}.weight") for name in names]
            whole = [matrix for matrix in stored if matrix is not None]
            if len(whole) == len(stored):
                fused = type(whole[0])(*(torch.cat(parts) for parts in zip(*whole, strict=True)))
                return self._four_bit(fused, offset)
            if not self._told:
                log.info("%s.weight and perhaps others are not stored in 4 bits: they are dequantized", names[0])
                self._told = True
        matrices = [self.tensor(f"{name}.weight") for name in names]
        return self._ops.linear(matrices[0] if len(matrices) == 1 else torch.cat(matrices), offset)
