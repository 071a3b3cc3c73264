"""All layers of a decoder in one foreign call, if every product is in panels; see kernels/stack.cpp.

`models.decoder` is its definition; tests/kernels/test_stack.py compares the two. benchmarks/stack_cpu.py prints the
time it saves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from quire.kernels import runtime
from quire.kernels.memory import HugePageAllocator
from quire.models.cpu_panels import GATES, Matrix, Panels
from quire.models.ffn.gated import Gated, GatedShape
from quire.models.layers import GatedLinear, Layer, Linear, State

if TYPE_CHECKING:
    from quire.models.norms import Norm
    from quire.models.shape import ModelShape

_PTR, _I64, _F64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double

_SCRATCH = ("qkv", "q", "k", "attended", "wide", "inner", "out", "beside", "integers")

_ACTIVATIONS = {"relu": 0, "relu-squared": 1}
"""Numbers of the activations of plain parts in kernels/elementwise.h. The others are torch's alone."""


class _StackNorm(ctypes.Structure):
    """Mirror of `StackNorm` in kernels/stack.cpp."""

    _fields_ = (("weight", _PTR), ("bias", _PTR))


class _StackLayer(ctypes.Structure):
    """Mirror of `StackLayer` in kernels/stack.cpp."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "o", "up", "down")),
        *((name, _StackNorm) for name in ("attn", "attn_out", "mlp", "mlp_out", "next")),
        *((name, _PTR) for name in ("q_norm", "k_norm", "channel_scales")),
        *((name, _I64) for name in ("kv_heads", "group", "head_dim", "norms_rows", "parallel", "sums")),
        *((name, _I64) for name in ("gate", "activation")),
        ("residual_scale", _F64),
        ("position_share", _F64),
        ("position_step", _I64),
    )


class _StackRows(ctypes.Structure):
    """Mirror of `StackRows` in kernels/stack.cpp."""

    _fields_ = tuple((name, _PTR) for name in ("residual", "x", *_SCRATCH))


class _StackKind(ctypes.Structure):
    """Mirror of `StackKind` in kernels/stack.cpp."""

    _fields_ = (("eps", _F64), ("is_layer", _I64), ("is_fused", _I64))


class PanelStack:
    """The layers, and scratch for the largest number of rows so far."""

    def __init__(self, layers: Sequence[Layer], shape: ModelShape) -> None:
        """layers: `takes` is true of them. The stack keeps their products alive."""
        runtime.check_mirrors(_StackNorm, _StackLayer, _StackRows, _StackKind)
        self._layers = layers  # the structures below point into their tensors
        self._is_fused = shape.is_fused
        self._kind = _StackKind(shape.norm.eps, shape.norm.kind == "layer", shape.is_fused)
        self._array = (_StackLayer * len(layers))(*map(_structure, layers))
        self._address = ctypes.addressof(self._array)
        array = list(self._array)
        qkv, attended = max(each.qkv.outputs for each in array), max(each.o.inputs for each in array)
        inner, out = max(each.down.inputs for each in array), array[0].o.outputs
        self._most_inputs = max(out, attended, inner)
        widths = (qkv, qkv, qkv, attended, 2 * inner, inner, out, out)
        self._row_bytes = tuple(2 * width for width in widths)
        self._rows = _StackRows()
        self._capacity = 0
        self._scratch: list[torch.Tensor] = []
        self._run = runtime.kernels().quire_stack

    @staticmethod
    def takes(layers: Sequence[Layer]) -> bool:
        """Whether the kernels have the activations of all layers, and all products are in panels and return
        bfloat16.
        """
        if not all(
            isinstance(each.shape.ffn, GatedShape) or each.shape.ffn.activation in _ACTIVATIONS for each in layers
        ):
            return False
        products = [_panels(product) for layer in layers for product in _products(layer).values()]
        return all(product is not None and product.out_dtype == torch.bfloat16 for product in products)

    def __call__(self, state: State, plan: int) -> State:
        """The state after the last layer, in the tensors of the one before the first: bfloat16 [R, E], dense. plan:
        address of the C++ plan.
        """
        residual = state[1] if self._is_fused else state[0]
        x = state[0] if self._is_fused else torch.empty_like(residual)
        rows = len(x)
        if rows > self._capacity:
            self._grow(rows)
        self._rows.x, self._rows.residual = x.data_ptr(), residual.data_ptr()
        self._run(
            ctypes.addressof(self._kind), self._address, len(self._array), plan, ctypes.addressof(self._rows), rows
        )
        return state

    def _grow(self, rows: int) -> None:
        self._capacity = max(rows, 2 * self._capacity)
        allocator = HugePageAllocator()
        packed_rows = runtime.kernels().quire_quantized_bytes(
            runtime.DTYPE_IDS[torch.bfloat16], self._capacity, self._most_inputs
        )
        sizes = (*(self._capacity * num_bytes for num_bytes in self._row_bytes), packed_rows)
        self._scratch = [allocator.take(num_bytes) for num_bytes in sizes]
        for name, tensor in zip(_SCRATCH, self._scratch, strict=True):
            setattr(self._rows, name, tensor.data_ptr())


def _panels(product: Linear) -> Panels | None:
    """The panels of a product; also those inside a `GatedLinear`. None for any other product."""
    inner = product.linear if isinstance(product, GatedLinear) else product
    return inner if isinstance(inner, Panels) else None


def _structure(layer: Layer) -> _StackLayer:
    shape, mixer, attention = layer.shape, layer.mixer, layer.shape.mixer
    found = _StackLayer()
    for name, product in _products(layer).items():
        panels = _panels(product)
        assert panels is not None, f"{name} is not in panels"
        setattr(found, name, panels.matrix)
    norms: Mapping[str, Norm] = layer.norms
    for place in ("attn", "attn_out", "mlp", "mlp_out"):
        setattr(found, place, _norm(norms.get(f"{place}_norm")))
    found.next = _norm(layer.next_norm)
    found.q_norm, found.k_norm = _address(mixer.q_norm), _address(mixer.k_norm)
    found.channel_scales = _address(mixer.channel_scales)
    found.kv_heads, found.head_dim = attention.num_kv_heads, attention.head_dim
    found.group = attention.num_q_heads // attention.num_kv_heads
    found.norms_rows = attention.qk_norm == "rows"
    found.parallel, found.sums = shape.norms.parallel, shape.norms.sums
    if isinstance(shape.ffn, GatedShape):
        found.gate = GATES[shape.ffn.activation]
    else:
        found.activation = _ACTIVATIONS[shape.ffn.activation]
    found.residual_scale = shape.residual_scale
    found.position_share, found.position_step = attention.position_scale or (0.0, 0)
    return found


def _norm(norm: Norm | None) -> _StackNorm:
    return _StackNorm() if norm is None else _StackNorm(_address(norm.weight), _address(norm.bias))


def _address(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype == torch.bfloat16 and tensor.is_contiguous(), f"{tensor.dtype}"
    return tensor.data_ptr()


def _products(layer: Layer) -> dict[str, Linear]:
    up = layer.ffn.gate_up if isinstance(layer.ffn, Gated) else layer.ffn.up
    return {"qkv": layer.mixer.qkv, "o": layer.mixer.o, "up": up, "down": layer.ffn.down}
