"""Decoder operations on the CPU: oneDNN matrix products over weights reordered once, and the C++ kernels for what lies
between them.
"""

from __future__ import annotations

import torch

from quire.kernels import runtime
from quire.models.layers import Linear, TorchLinear

KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
"""What the kernels call each dtype; the same as for dense pages."""

_ONEDNN_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear:
    """A weight in oneDNN's own blocked layout. SmolLM2's products at 1 / 8 / 32 rows: 6.1 / 7.8 / 14.9 ms against 13.5
    / 16.1 / 24.3 for F.linear
    (bfloat16, two threads); the layout serves every number of rows equally.
    """

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
    """See `models.layers.Ops`. float16 products stay with torch: oneDNN packs none for these CPUs."""

    def __init__(self) -> None:
        kernels = runtime.kernels()
        self._add_norm = kernels.quire_add_norm
        self._gated = kernels.quire_gated

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Reorders the weight; the plain copy may be dropped."""
        if weight.dtype in _ONEDNN_DTYPES and torch.backends.mkldnn.is_available():
            return PackedLinear(weight, bias)
        return TorchLinear(weight, bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """One pass over x [R, E], or over a view [R, h, D] whose heads are adjacent."""
        out = torch.empty(x.shape, dtype=x.dtype)
        width = x.shape[-1]
        if x.dim() == 2:
            self._add_norm(
                KINDS[x.dtype], x.data_ptr(), x.stride(0), None, weight.data_ptr(), eps, len(x), width, out.data_ptr()
            )
            return out
        for head in range(x.shape[1]):  # each head is a strided column of rows
            part = x[:, head]
            packed = torch.empty(part.shape, dtype=x.dtype)
            self._add_norm(
                KINDS[x.dtype],
                part.data_ptr(),
                part.stride(0),
                None,
                weight.data_ptr(),
                eps,
                len(x),
                width,
                packed.data_ptr(),
            )
            out[:, head] = packed
        return out

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Residual sum and norm in one pass."""
        out = torch.empty_like(x)
        rows, width = x.shape
        self._add_norm(
            KINDS[x.dtype],
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            rows,
            width,
            out.data_ptr(),
        )
        return out

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up in one pass."""
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2, dtype=gate_up.dtype)
        self._gated(KINDS[gate_up.dtype], gate_up.data_ptr(), rows, width // 2, out.data_ptr())
        return out
