"""All layers of a gated decoder in one foreign call, where every product is in panels; see kernels/stack.cpp.

`models.decoder` is its definition: tests/kernels/test_stack.py holds the two together;
benchmarks/stack_cpu.py prints what it saves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from quire.kernels import runtime
from quire.kernels.memory import Carver
from quire.models.layers import GatedLayer

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64


class _Matrix(ctypes.Structure):
    _fields_ = (("packed", _PTR), ("bias", _PTR), ("outputs", _I64), ("inputs", _I64))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _PTR) for name in ("q_norm", "k_norm", "mlp_norm", "next_norm")),
    )


class _Rows(ctypes.Structure):
    _fields_ = tuple((name, _PTR) for name in ("residual", "x", "qkv", "q", "k", "attended", "inner", "out"))


class PanelStack:
    """The layers, and scratch for as many rows as a step ever had."""

    def __init__(self, layers: Sequence[GatedLayer], eps: float) -> None:
        """layers: all their products are `PanelLinear`s, whose memory they keep."""
        self._layers = layers  # the structures below point into their tensors
        self._array = (_Layer * len(layers))(*map(_structure, layers))
        self._address = ctypes.addressof(self._array)
        self._eps = eps
        first = self._array[0]
        self._widths = (
            first.qkv.outputs,
            first.qkv.outputs,
            first.qkv.outputs,
            first.o.inputs,
            first.down.inputs,
            first.o.outputs,
        )
        self._rows = _Rows()
        self._capacity = 0
        self._scratch: list[torch.Tensor] = []
        kernels = runtime.kernels()
        assert ctypes.sizeof(_Layer) * 1000 + ctypes.sizeof(_Rows) == kernels.quire_stack_bytes(), (
            "the kernels were built from another version of stack.cpp"
        )
        self._run = kernels.quire_stack

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, plan: int) -> torch.Tensor:
        """The last norm's output, in x: both bfloat16 [R, E], dense, and overwritten. plan: address of the C++ plan."""
        rows = len(x)
        if rows > self._capacity:
            self._grow(rows)
        self._rows.x, self._rows.residual = x.data_ptr(), residual.data_ptr()
        self._run(self._address, len(self._array), self._eps, plan, ctypes.addressof(self._rows), rows)
        return x

    def _grow(self, rows: int) -> None:
        self._capacity = max(rows, 2 * self._capacity)
        carver = Carver()
        self._scratch = [carver.take(self._capacity * width * 2) for width in self._widths]
        for name, tensor in zip(("qkv", "q", "k", "attended", "inner", "out"), self._scratch, strict=True):
            setattr(self._rows, name, tensor.data_ptr())


def _structure(layer: GatedLayer) -> _Layer:
    from quire.models.cpu_ops import PanelLinear

    found = _Layer()
    for name in ("qkv", "o", "gate_up", "down"):
        product = getattr(layer, name)
        assert isinstance(product, PanelLinear), f"{name} is a {type(product).__name__}, not in panels"
        bias = None if product.bias is None else product.bias.data_ptr()
        setattr(found, name, _Matrix(product.packed.data_ptr(), bias, *product.shape))
    for name in ("q_norm", "k_norm", "mlp_norm", "next_norm"):
        weight = getattr(layer, name)
        assert weight is None or (weight.dtype == torch.bfloat16 and weight.is_contiguous()), f"{name}: {weight.dtype}"
        setattr(found, name, None if weight is None else weight.data_ptr())
    return found
