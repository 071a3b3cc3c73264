"""A decoder's operations on a GPU: fused element-wise kernels, torch's matrix products, and its own for a single row.

    norm(x) = x / sqrt(mean(x^2) + eps) * weight            add_norm(x, r): r += x, then norm(r)
    gated(g, u) = g / (1 + exp(-g)) * u                     linear(x) = x weight^T + bias

Sums in float32, and so are the logits that a head returns. Defined by `layers.TorchOps`; tests/kernels/
triton_interpreter and tests/gpu compare the two.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from quire.models.layers import GatedLinear, TorchHead, TorchLinear
from quire.models.quants import BLOCK_KINDS, Blocks, read
from quire.models.triton_packed import PackedMatrix, unit_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire.models.ffn.gated import GateActivation
    from quire.models.layers import Embedding, Linear
    from quire.models.quants import Weight

VECTOR_ROWS, VECTOR_COLUMNS, VECTOR_STAGES = 8, 512, 4
"""Tile of the one-row product and number of tiles in flight: 24 KiB per program, six programs per multiprocessor by
registers. An H200 at copy speed needs about 35 KiB per multiprocessor in flight; 4,096 rows are 512 programs, one wave.
"""

NORM_ELEMENTS = 4096
"""Elements a program of a norm holds, as whole rows: 32 a thread."""

GATED_ELEMENTS = 1024
"""Elements a program of `gated` makes."""


@triton.jit(do_not_specialize=["num_rows"])
def _norm(
    x,             # [R, HEADS, E], strides row_stride, head_stride, 1; the summand where ADD
    residual,      # [R, E], dense; updated; None unless ADD
    weight,        # [E]
    out,           # [R, HEADS, E], dense
    num_rows,      # R * HEADS
    row_stride, head_stride, eps,
    HEADS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(R * HEADS / ROWS)]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, BLOCK)
    # Loaded first, so that its latency overlaps that of the sum.
    w = tl.load(weight + e, mask=e < E, other=0.0).to(tl.float32)
    mask = (row < num_rows)[:, None] & (e < E)[None, :]
    source = x + (row // HEADS * row_stride + row % HEADS * head_stride)[:, None] + e[None, :]
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    dense = row[:, None] * E + e[None, :]
    if ADD:
        # Rounded to the stored dtype, so that the next layer adds to the value that this one normalised.
        rounded = (value + tl.load(residual + dense, mask=mask, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + dense, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / E + eps)
    tl.store(out + dense, (value * scale[:, None] * w[None, :]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated(
    gate_up,       # [R, 2 F], dense
    out,           # [R, F], dense
    F: tl.constexpr, BLOCK: tl.constexpr,
    TANH: tl.constexpr,  # gelu with tanh; otherwise silu
):  # fmt: skip
    # grid: [ceil(F / BLOCK), R]
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    gate = tl.load(gate_up + row * (2 * F) + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * F) + F + f, mask=f < F, other=0.0).to(tl.float32)
    slope = gate
    if TANH:
        # It is silu at another place: (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)). Below -80 the result is 0 in any case.
        slope = tl.maximum(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate), -80.0)
    tl.store(out + row * F + f, (gate / (1.0 + tl.exp(-slope)) * up).to(out.dtype.element_ty), mask=f < F)


@triton.jit
def _vector_linear(
    x,             # [K]
    weight,        # [N, K], dense
    bias,          # [N] or None
    out,           # [N]
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(N / ROWS)]
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_n = n < N
    k = tl.arange(0, COLUMNS)
    rows = weight + n.to(tl.int64)[:, None] * K
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Loads several tiles ahead through shared memory: the assembler would move loads to registers down to their uses,
    # with one in flight per thread.
    for first in tl.range(0, K, COLUMNS, num_stages=STAGES):
        in_k = first + k < K
        tile = tl.load(
            rows + (first + k)[None, :], mask=in_n[:, None] & in_k[None, :], other=0.0, eviction_policy="evict_first"
        )
        part = tl.load(x + first + k, mask=in_k, other=0.0, eviction_policy="evict_last")
        acc += tile.to(tl.float32) * part.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=in_n)


class TritonLinear:
    """torch's product over the given weight; for one row, a kernel that only streams the weight.

    wide  an output head without bias: returns float32
    """

    __slots__ = ("_bias", "_many", "_vector", "_weight", "_wide")

    def __init__(self, weight: Tensor, bias: Tensor | None, vector: bool, *, wide: bool = False) -> None:
        self._weight = weight
        self._bias = bias
        self._wide = wide
        self._many = TorchHead(weight) if wide else TorchLinear(weight, bias)
        self._vector = vector and weight.is_contiguous() and weight.shape[1] * weight.element_size() % 16 == 0

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the weight. Their memory may be replaced between products."""
        return [self._weight]

    def __call__(self, x: Tensor) -> Tensor:
        """See layers.Linear."""
        if len(x) != 1 or not self._vector:
            return self._many(x)
        n, k = self._weight.shape
        assert x.shape == (1, k) and x.stride(1) == 1 and x.dtype == self._weight.dtype, (
            f"{x.dtype} {tuple(x.shape)} for a weight [{n}, {k}]"
        )
        out = torch.empty(1, n, dtype=torch.float32 if self._wide else x.dtype, device=x.device)
        _vector_linear[(triton.cdiv(n, VECTOR_ROWS),)](
            x, self._weight, self._bias, out,
            N=n, K=k, ROWS=VECTOR_ROWS, COLUMNS=VECTOR_COLUMNS, STAGES=VECTOR_STAGES,
            BIAS=self._bias is not None, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        return out


class PackedLinear:
    """A product with parts in blocks, possibly beside plain parts: one launch per part, outputs concatenated.

    wide  an output head: returns float32
    """

    __slots__ = ("_bias", "_outputs", "_parts", "_sums", "_wide")

    def __init__(
        self, parts: Sequence[PackedMatrix | Tensor], bias: Tensor | None, vector: bool, *, wide: bool = False
    ) -> None:
        counts = [part.shape[0] for part in parts]
        biases = [None] * len(parts) if bias is None else bias.split(counts)
        self._parts = [part if isinstance(part, PackedMatrix) else TritonLinear(part, None, vector) for part in parts]
        self._bias = biases
        self._outputs = counts
        self._sums = any(isinstance(part, PackedMatrix) and part.format.minima for part in parts)
        self._wide = wide

    @property
    def tensors(self) -> list[Tensor]:
        """See TritonLinear."""
        return [tensor for part in self._parts for tensor in part.tensors]

    def __call__(self, x: Tensor) -> Tensor:
        """See layers.Linear."""
        out = torch.empty(len(x), sum(self._outputs), dtype=torch.float32 if self._wide else x.dtype, device=x.device)
        if not len(x):
            return out
        sums = unit_sums(x) if self._sums and len(x) > 1 else None
        for part, bias, columns in zip(self._parts, self._bias, out.split(self._outputs, 1), strict=True):
            if isinstance(part, PackedMatrix):
                part.multiply(x, bias, columns, sums)
            else:
                columns.copy_(part(x))
                if bias is not None:
                    columns.add_(bias)
        return out


class TritonOps:
    """See `layers.TorchOps`; tensors on one GPU.

    vector  whether our own kernel multiplies single rows; otherwise torch does, except for blocks. `scripts/gpu.sh
            decode` prints both
    """

    kinds = BLOCK_KINDS

    def __init__(self, vector: bool = True) -> None:
        self._vector = vector

    def linear(self, parts: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype) -> TritonLinear | PackedLinear:
        """Keeps a single tensor itself; repacks blocks."""
        matrices = [read(weight) for weight in parts]
        weights = [weight for weight in matrices if isinstance(weight, Tensor)]
        assert all(weight.dtype == dtype for weight in weights), f"plain weights must be {dtype}"
        if len(weights) < len(matrices):
            packed = [PackedMatrix(weight) if isinstance(weight, Blocks) else weight for weight in matrices]
            return PackedLinear(packed, bias, self._vector)
        return TritonLinear(weights[0] if len(weights) == 1 else torch.cat(weights), bias, self._vector)

    def gated_linear(
        self, parts: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, activation: GateActivation
    ) -> Linear:
        """The product, then the gate in a kernel of its own."""
        return GatedLinear(self, self.linear(parts, bias, dtype), activation)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Torch's own."""
        return functional.layer_norm(x, weight.shape, weight, bias, eps)

    def stack(self, layers: object, shape: object) -> None:
        """None: layers run one by one, and a CUDA graph captures the step."""

    def head(self, weight: Weight, dtype: torch.dtype) -> Linear:
        """Keeps the tensor itself; repacks blocks."""
        weight = read(weight)
        if isinstance(weight, Blocks):
            return PackedLinear([PackedMatrix(weight)], None, self._vector, wide=True)
        assert weight.dtype == dtype, f"{weight.dtype}, not {dtype}"
        return TritonLinear(weight, None, self._vector, wide=True)

    def embedding(self, weight: Weight, dtype: torch.dtype) -> Embedding:
        """Keeps the tensor itself; repacks blocks."""
        weight = read(weight)
        if isinstance(weight, Blocks):
            return functools.partial(PackedMatrix(weight).rows, dtype=dtype)
        assert weight.dtype == dtype, f"{weight.dtype}, not {dtype}"
        return functools.partial(functional.embedding, weight=weight)

    def tied(self, weight: Weight, dtype: torch.dtype) -> tuple[Embedding, Linear]:
        """One matrix serves both."""
        weight = read(weight)
        if isinstance(weight, Blocks):
            packed = PackedMatrix(weight)
            head = PackedLinear([packed], None, self._vector, wide=True)
            return functools.partial(packed.rows, dtype=dtype), head
        return self.embedding(weight, dtype), self.head(weight, dtype)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension of [R, E] or [R, h, D]."""
        assert x.dim() in (2, 3) and x.stride(-1) == 1 and weight.shape == x.shape[-1:], (
            f"{tuple(x.shape)}, strides {x.stride()}"
        )
        heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
        return self._launch_norm(x, None, weight, eps, heads, head_stride)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Residual += x in place, then its norm; both [R, E]."""
        assert x.dim() == 2 and x.shape == residual.shape and x.stride(1) == 1 and residual.is_contiguous(), (
            f"{x.stride()}, {residual.stride()}"
        )
        return self._launch_norm(x, residual, weight, eps, 1, 0)

    def gated(self, gate_up: Tensor, activation: GateActivation) -> Tensor:
        """act(gate) * up of [R, 2F]."""
        assert gate_up.dim() == 2 and gate_up.is_contiguous() and gate_up.shape[1] % 2 == 0, (
            f"{tuple(gate_up.shape)}, {gate_up.stride()}"
        )
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
        if rows:
            _gated[(triton.cdiv(width, GATED_ELEMENTS), rows)](
                gate_up,
                out,
                F=width,
                BLOCK=GATED_ELEMENTS,
                TANH=activation == "gelu-tanh",
                num_warps=4,
                enable_fp_fusion=True,
            )
        return out

    def _launch_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, heads: int, head_stride: int
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows, width = len(x) * heads, x.shape[-1]
        if rows:
            block = triton.next_power_of_2(width)
            per_program = max(1, min(32, NORM_ELEMENTS // block))
            _norm[(triton.cdiv(rows, per_program),)](
                x, residual, weight, out, rows, x.stride(0), head_stride, eps,
                HEADS=heads, E=width, BLOCK=block, ROWS=per_program, ADD=residual is not None,
                num_warps=min(16, max(4, block // 512)), enable_fp_fusion=True,
            )  # fmt: skip
        return out
