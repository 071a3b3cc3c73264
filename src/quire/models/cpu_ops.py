"""Decoder operations on the CPU: our own matrix products for 16 bits and packed blocks, oneDNN's products for float32,
and C++ kernels for all other operations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.nn.functional import embedding

from quire.kernels import runtime
from quire.kernels.memory import HugePageAllocator, WeightMemory
from quire.models.cpu_panels import GATES, KINDS, Panels, has_panels
from quire.models.cpu_stack import PanelStack
from quire.models.ffn.gated import GateActivation
from quire.models.layers import ConcatLinear, Embedding, GatedLinear, Layer, Linear, TorchHead, TorchLinear
from quire.models.quants import Blocks, Weight, kind_of, read
from quire.models.shape import ModelShape

_ROW_STEPS = ((4, 1), (8, 2), (32, 4), (64, 8), (128, 16), (256, 32))
"""(maximum rows, step): row counts up to the maximum are rounded up to a multiple of the step; above 256 the step is
64.
"""


def padded_rows(rows: int) -> int:
    """Rounds `rows` up to one of about forty sizes.

    oneDNN compiles a kernel of about 0.6 MB for every matrix and number of rows, and keeps up to 1,024 of them: with
    steps of any size from 1 to 300 rows a process of 230 MB grew to 880. Above 32 rows the padding costs less than a
    sixth; below, a step is bound by weight bytes.
    """
    step = next((step for limit, step in _ROW_STEPS if rows <= limit), 64)
    return -(-rows // step) * step


def has_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies plain weights of the type. It compiles a kernel per number of rows; panels serve any
    number. Its layout cannot be read by rows, so an output head tied to the embedding needs a second copy.
    """
    return dtype == torch.float32 and torch.backends.mkldnn.is_available()


class OneDnnLinear:
    """A float32 weight in oneDNN's own blocked layout, which suits every number of rows."""

    __slots__ = ("_apply", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.bias = bias
        self._apply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [R, K] -> [R, N]."""
        out: torch.Tensor = self._apply(x, self.weight, self.bias, "none", [], "")
        return out


class CpuOps:
    """See `models.layers.TorchOps`.

    memory  memory for panels
    """

    kinds = KINDS

    def __init__(self, memory: WeightMemory | None = None) -> None:
        kernels = runtime.kernels()
        self._add_norm = kernels.quire_add_norm
        self._gated = kernels.quire_gated
        self._layer_norm = kernels.quire_layer_norm
        self._memory = HugePageAllocator() if memory is None else memory

    def linear(self, parts: Sequence[Weight], bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        """Panels for 16 bits and packed blocks, oneDNN's layout for float32. The caller may drop the plain copies."""
        if all(has_panels(weight, dtype) for weight in parts):
            return self.panels(parts, bias, dtype)
        if len(parts) > 1:
            return ConcatLinear([self.linear([weight], None, dtype) for weight in parts], bias)
        return self.plain(parts[0], bias, dtype)

    def panels(
        self,
        parts: Sequence[Weight],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        gated: GateActivation | None = None,
    ) -> Panels:
        """A product in panels."""
        return Panels(parts, bias, dtype, self._memory, gated=gated)

    def plain(self, weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        """A product over plain numbers that have no panels."""
        found = read(weight)
        assert not isinstance(found, Blocks), f"there are no panels of {found.kind}"
        return OneDnnLinear(found, bias) if has_onednn(dtype) else TorchLinear(found, bias)

    def gated_linear(
        self, parts: Sequence[Weight], bias: torch.Tensor | None, dtype: torch.dtype, activation: GateActivation
    ) -> Linear:
        """With one type, panels gate the sums in registers. With several types, a separate pass gates them."""
        if len(parts) == 1 and has_panels(parts[0], dtype):
            return self.panels(parts, bias, dtype, gated=activation)
        return GatedLinear(self, self.linear(parts, bias, dtype), activation)

    def stack(self, layers: Sequence[Layer], shape: ModelShape) -> PanelStack | None:
        """One call if all products are in panels and return bfloat16."""
        return PanelStack(layers, shape) if PanelStack.takes(layers) else None

    def head(self, weight: Weight, dtype: torch.dtype) -> Linear:
        """Panels, or oneDNN's layout for float32."""
        if has_panels(weight, dtype):
            return Panels([weight], None, dtype, self._memory, wide=True)
        if dtype == torch.float32:
            return CpuOps.plain(self, weight, None, dtype)  # in subclasses, too: the head does not move
        found = read(weight)
        assert not isinstance(found, Blocks), f"there are no panels of {found.kind}"
        return TorchHead(found)

    def embedding(self, weight: Weight, dtype: torch.dtype) -> Embedding:
        """Panels for packed blocks; a plain tensor stays as it is."""
        if kind_of(weight) in KINDS:
            return Panels([weight], None, dtype, self._memory).rows
        found = read(weight)
        assert not isinstance(found, Blocks), f"there are no panels of {found.kind}"
        return functools.partial(embedding, weight=found)

    def tied(self, weight: Weight, dtype: torch.dtype) -> tuple[Embedding, Linear]:
        """Panels serve both. oneDNN's layout of float32 cannot be read by rows, so there are two copies."""
        weight = weight if has_panels(weight, dtype) else read(weight)
        head = self.head(weight, dtype)
        return (head.rows if isinstance(head, Panels) else self.embedding(weight, dtype)), head

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """One pass over x [R, E], or over a view [R, h, D] whose heads are adjacent."""
        return self._norms(x, None, weight, eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Residual sum and norm in one pass."""
        return self._norms(x, residual.data_ptr(), weight, eps)

    def _norms(self, x: torch.Tensor, residual: int | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        heads = x.shape[1] if x.dim() == 3 else 1
        source, target, stride, width = x.data_ptr(), out.data_ptr(), x.stride(0), x.shape[-1]
        self._add_norm(
            runtime.DTYPE_IDS[x.dtype], source, stride, residual, weight.data_ptr(), eps, len(x), heads, width, target
        )
        return out

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Mean, variance and result in three passes over a row in the cache."""
        out = torch.empty(x.shape, dtype=x.dtype)
        offset = None if bias is None else bias.data_ptr()
        source, (rows, width) = x.contiguous(), x.shape
        self._layer_norm(
            runtime.DTYPE_IDS[x.dtype], source.data_ptr(), weight.data_ptr(), offset, eps, rows, width, out.data_ptr()
        )
        return out

    def gated(self, gate_up: torch.Tensor, activation: GateActivation) -> torch.Tensor:
        """act(gate) * up in one pass."""
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2, dtype=gate_up.dtype)
        self._gated(
            runtime.DTYPE_IDS[gate_up.dtype], GATES[activation], gate_up.data_ptr(), rows, width // 2, out.data_ptr()
        )
        return out
