"""Operations whose weights may move: products that are loaded for every pass, on the CPU.

A product of float32 has no panels, and oneDNN's own layout cannot be stored. Here such a product multiplies plain
numbers, whether they are loaded or stay in memory, so that a placement changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from quire.kernels.memory import WeightMemory
from quire.models.cpu_ops import CpuOps
from quire.models.cpu_panels import Panels
from quire.models.ffn.gated import GateActivation
from quire.models.layers import Linear
from quire.models.quants import Blocks, LazyWeight, Weight, read


class RelocatableLinear:
    """A product over plain numbers in memory for packed weights."""

    __slots__ = ("bias", "name", "weight")

    def __init__(self, weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype, memory: WeightMemory) -> None:
        outputs, inputs = weight.shape
        self.name = f"{weight.name if isinstance(weight, LazyWeight) else ''} plain {dtype}"
        self.bias = bias

        def fill(target: torch.Tensor) -> None:
            source = read(weight)
            assert not isinstance(source, Blocks), f"plain numbers, but {source.kind}"
            target.view(dtype).view(outputs, inputs).copy_(source)

        placed = memory.place(self.name, outputs * inputs * dtype.itemsize, fill)
        self.weight = placed.view(dtype).view(outputs, inputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return functional.linear(x, self.weight, self.bias)

    def move(self, name: str, numbers: torch.Tensor) -> None:
        """Continues with other memory that has the same numbers."""
        self.weight = numbers.view(self.weight.dtype).view(self.weight.shape)


class RelocatableOps(CpuOps):
    """See `models.layers.TorchOps`. Knows which product has which matrix."""

    def __init__(self, memory: WeightMemory) -> None:
        super().__init__(memory)
        self._moves: dict[str, Callable[[str, torch.Tensor], None]] = {}

    def panels(
        self,
        parts: Sequence[Weight],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        gated: GateActivation | None = None,
    ) -> Panels:
        """Panels, whose memory may move."""
        found = super().panels(parts, bias, dtype, gated=gated)
        self._moves.update(dict.fromkeys(found.names, found.move))
        return found

    def plain(self, weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        """Plain numbers, whose memory may move."""
        found = RelocatableLinear(weight, bias, dtype, self._memory)
        self._moves[found.name] = found.move
        return found

    def stack(self, layers: object, shape: object) -> None:
        """Layers run one by one, because each waits for its weights."""

    def move(self, name: str, memory: torch.Tensor) -> None:
        """Passes the new memory of a matrix to its product."""
        self._moves[name](name, memory)
