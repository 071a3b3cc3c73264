"""Decoder operations on the CPU: our own matrix products for bfloat16, oneDNN's for float32, and the C++ kernels for
what lies between them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.nn.functional import embedding

from quire.kernels import runtime
from quire.kernels.memory import Carver
from quire.models.cpu_stack import PanelStack
from quire.models.layers import Embedding, Gated, GatedLayer, Linear, TorchHead, TorchLinear
from quire.models.quants import QuantizedTensor

_ROW_STEPS = ((4, 1), (8, 2), (32, 4), (64, 8), (128, 16), (256, 32))
"""(up to so many rows, in steps of so many); above 256 in steps of 64."""


def padded_rows(rows: int) -> int:
    """Rows to run `rows` in: the next of about forty sizes.

    oneDNN compiles a kernel for every matrix and number of rows, about 0.6 MB each, and keeps up to 1,024 of them: with
    steps of any size from 1 to 300 rows a process of 230 MB grew to 880. What is added costs under a sixth above 32
    rows, and below them a step is bound by weight bytes.
    """
    step = next((step for limit, step in _ROW_STEPS if rows <= limit), 64)
    return -(-rows // step) * step


def has_panels(dtype: torch.dtype) -> bool:
    """Whether matrices of the type become panels, which serve any number of rows and need no padding."""
    return dtype == torch.bfloat16


def packs_apart(dtype: torch.dtype) -> bool:
    """Whether an output head tied to the embedding is a second copy of it: oneDNN's layout cannot be read by rows."""
    return dtype == torch.float32 and torch.backends.mkldnn.is_available()


class PackedLinear:
    """A float32 weight in oneDNN's own blocked layout, which serves every number of rows equally."""

    __slots__ = ("_apply", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.bias = bias
        self._apply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [R, K] -> [R, N]."""
        out: torch.Tensor = self._apply(x, self.weight, self.bias, "none", [], "")
        return out


class PanelLinear:
    """A bfloat16 weight in panels of 32 outputs, for our own product: dot products of bf16 where the CPU has them, in
    float32 elsewhere.

    oneDNN's calls cost 10 us each inside torch, 1.2 ms of an 8 ms step at batch 1, and it takes no bfloat16 where there
    is no AVX-512. `benchmarks/linear_cpu.py` prints both side by side, with bf16 dot products: 7.5 against 8.5 ms at 1
    row, 12.4 against 16.3 at 32, 120 against 120 at 512. Few rows are bound by reading the weights, which pages of 2
    MiB spare misses of the TLB; `carver` has them.

    gated  the weight is [2N, K], gates first; the product is silu(gate) * up, [R, N]
    """

    __slots__ = ("_apply", "bias", "gated", "packed", "shape")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, carver: Carver, *, gated: bool = False) -> None:
        kernels = runtime.kernels()
        n, k = weight.shape
        assert weight.dtype == torch.bfloat16 and k % 2 == 0, (
            f"panels hold pairs of bfloat16, not {weight.dtype} [{n}, {k}]"
        )
        weight = weight.contiguous()
        panels = -(-n // 32) if not gated else -(-(n // 2) // 16)
        self.packed = carver.take(panels * 32 * k * 2)
        n = n // 2 if gated else n
        self.shape = n, k
        self.gated = gated
        kernels.quire_pack_linear(weight.data_ptr(), n, k, gated, self.packed.data_ptr())
        self.bias = bias
        self._apply = kernels.quire_linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [R, K], bfloat16, rows an even number of elements apart -> [R, N]."""
        n, k = self.shape
        rows, width = x.shape
        stride, dense = x.stride()
        assert width == k and dense == 1 and stride % 2 == 0 and x.dtype is torch.bfloat16, (
            f"{x.dtype} {list(x.shape)}, strides {x.stride()}, for {k} inputs"
        )
        out = torch.empty(rows, n, dtype=torch.bfloat16)
        bias = None if self.bias is None else self.bias.data_ptr()
        self._apply(x.data_ptr(), stride, rows, self.packed.data_ptr(), bias, n, k, self.gated, out.data_ptr())
        return out


class PanelHead:
    """A 16-bit output head [V, E], E even, in panels: products and sums in float32, which it returns.

    Runs on every CPU: torch's 16-bit products round what they return to 16 bits, and a float32 copy of the matrix is
    twice its bytes.
    """

    __slots__ = ("_apply", "_dtype", "packed", "shape")

    def __init__(self, weight: torch.Tensor, carver: Carver) -> None:
        kernels = runtime.kernels()
        n, k = weight.shape
        assert weight.element_size() == 2 and k % 2 == 0, f"panels hold pairs of 16 bits, not {weight.dtype} [{n}, {k}]"
        weight = weight.contiguous()
        self.packed = carver.take(-(-n // 32) * 32 * k * 2)
        self.shape = n, k
        kernels.quire_pack_linear(weight.data_ptr(), n, k, False, self.packed.data_ptr())
        self._dtype = weight.dtype
        self._apply = kernels.quire_head

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [R, E], of the weight's dtype, rows an even number of elements apart -> float32 [R, V]."""
        n, k = self.shape
        rows, width = x.shape
        stride, dense = x.stride()
        assert width == k and dense == 1 and stride % 2 == 0 and x.dtype is self._dtype, (
            f"{x.dtype} {list(x.shape)}, strides {x.stride()}, for {k} inputs"
        )
        out = torch.empty(rows, n, dtype=torch.float32)
        kind = runtime.DTYPE_IDS[self._dtype]
        self._apply(kind, x.data_ptr(), stride, rows, self.packed.data_ptr(), n, k, out.data_ptr())
        return out

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, as `functional.embedding`: index int64 [R], below V, -> [R, E]."""
        assert index.dtype == torch.int64 and index.is_contiguous(), f"{index.dtype}, strides {index.stride()}"
        out = torch.empty(len(index), self.shape[1], dtype=self._dtype)
        runtime.kernels().quire_packed_rows(
            self.packed.data_ptr(), self.shape[1], index.data_ptr(), len(index), out.data_ptr()
        )
        return out


class FourBitLinear:
    """A matrix of 4-bit codes in groups of 32, as GGUF's Q4_0 and Q4_1 hold it, through torch's own int4 product.

    Batch 1 is bound by weight bytes: SmolLM2's products take 2.6 ms a step against 6.1 in bfloat16; from 8 rows on the
    dequantized ones win (6.3 against 7.8 ms, at 32 rows 21.7 against 14.9). In float32 the product is exact to 1e-6; in
    bfloat16 scales and offsets are rounded once more, which costs a fifth on top of bfloat16's own error.

    wide  multiply in float32, and return it: an output head
    """

    __slots__ = ("bias", "codes", "scales", "wide")

    def __init__(
        self, matrix: QuantizedTensor, bias: torch.Tensor | None, dtype: torch.dtype, *, wide: bool = False
    ) -> None:
        self.wide = wide
        dtype = torch.float32 if wide else dtype
        self.codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(matrix.codes.int(), 1)
        # The product computes (code - 8) * scale + offset.
        offset = matrix.mins + 8 * matrix.scales
        self.scales = torch.stack([matrix.scales, offset], -1).transpose(0, 1).to(dtype).contiguous()  # [K / 32, N, 2]
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [R, K] -> [R, N]."""
        x = x.float() if self.wide else x
        out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, 32, self.scales)
        return out if self.bias is None else out.add_(self.bias)


class CpuOps:
    """See `models.layers.Ops`. float16 products stay with torch: oneDNN packs none for these CPUs."""

    def __init__(self) -> None:
        kernels = runtime.kernels()
        self._add_norm = kernels.quire_add_norm
        self._gated = kernels.quire_gated
        self._carver = Carver()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Reorders the weight; the plain copy may be dropped."""
        if has_panels(weight.dtype) and weight.shape[1] % 2 == 0:
            return PanelLinear(weight, bias, self._carver)
        if weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
            return PackedLinear(weight, bias)
        return TorchLinear(weight, bias)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Panels finish the product while it is in registers; others gate in a pass of its own."""
        if has_panels(weight.dtype) and weight.shape[1] % 2 == 0:
            return PanelLinear(weight, bias, self._carver, gated=True)
        return Gated(self, self.linear(weight, bias))

    def stack(self, layers: Sequence[GatedLayer], eps: float) -> PanelStack | None:
        """One call if all products are in panels."""
        products = (product for layer in layers for product in (layer.qkv, layer.o, layer.gate_up, layer.down))
        return PanelStack(layers, eps) if all(isinstance(product, PanelLinear) for product in products) else None

    def head(self, weight: torch.Tensor) -> Linear:
        """Panels for 16 bits, oneDNN's layout for 32."""
        if weight.dtype == torch.float32:
            return self.linear(weight, None)
        return PanelHead(weight, self._carver) if weight.shape[1] % 2 == 0 else TorchHead(weight)

    def tied(self, weight: torch.Tensor) -> tuple[Embedding, Linear]:
        """One matrix of 16 bits. oneDNN's layout of 32 cannot be read by rows: two then."""
        head = self.head(weight)
        return (head.rows if isinstance(head, PanelHead) else functools.partial(embedding, weight=weight)), head

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

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up in one pass."""
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2, dtype=gate_up.dtype)
        self._gated(runtime.DTYPE_IDS[gate_up.dtype], gate_up.data_ptr(), rows, width // 2, out.data_ptr())
        return out
