"""All layers of a gated decoder in one foreign call, if every product is in panels; see kernels/stack.cpp.

`models.decoder` is its definition; tests/kernels/test_stack.py compares the two. benchmarks/stack_cpu.py prints the
time it saves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from quire.kernels import runtime
from quire.kernels.memory import HugePageAllocator
from quire.models.cpu_panels import Matrix, Panels
from quire.models.ffn.gated import Gated, GatedShape
from quire.models.layers import GatedLinear, Layer, Linear
from quire.models.shape import USUAL_NORMS

_PTR = ctypes.c_void_p

_SCRATCH = ("qkv", "q", "k", "attended", "wide", "inner", "out", "integers")


class _StackLayer(ctypes.Structure):
    """Mirror of `StackLayer` in kernels/stack.cpp."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _PTR) for name in ("q_norm", "k_norm", "mlp_norm", "next_norm")),
    )


class _StackRows(ctypes.Structure):
    """Mirror of `StackRows` in kernels/stack.cpp."""

    _fields_ = tuple((name, _PTR) for name in ("residual", "x", *_SCRATCH))


class PanelStack:
    """The layers, and scratch for the largest number of rows so far."""

    def __init__(self, layers: Sequence[Layer], eps: float) -> None:
        """layers: `takes` is true of them. The stack keeps their products alive."""
        runtime.check_mirrors(_StackLayer, _StackRows)
        self._layers = layers  # the structures below point into their tensors
        self._array = (_StackLayer * len(layers))(*map(_structure, layers))
        self._address = ctypes.addressof(self._array)
        self._eps = eps
        first, kernels = self._array[0], runtime.kernels()
        qkv, inner = first.qkv.outputs, first.down.inputs
        self._most_inputs = max(first.qkv.inputs, first.o.inputs, inner)
        widths = (qkv, qkv, qkv, first.o.inputs, 2 * inner, inner, first.o.outputs)
        self._row_bytes = tuple(2 * width for width in widths)
        self._rows = _StackRows()
        self._capacity = 0
        self._scratch: list[torch.Tensor] = []
        self._run = kernels.quire_stack

    @staticmethod
    def takes(layers: Sequence[Layer]) -> bool:
        """Whether all layers are of the usual kind, and all products are in panels and return bfloat16."""
        if not all(map(_is_usual, layers)):
            return False
        products = [_panels(product) for layer in layers for product in _products(layer).values()]
        return all(product is not None and product.out_dtype == torch.bfloat16 for product in products)

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
    found = _StackLayer()
    for name, product in _products(layer).items():
        panels = _panels(product)
        assert panels is not None, f"{name} is not in panels"
        setattr(found, name, panels.matrix)
    assert layer.next_norm is not None
    norms = {
        "q_norm": layer.mixer.q_norm,
        "k_norm": layer.mixer.k_norm,
        "mlp_norm": layer.norms["mlp_norm"].weight,
        "next_norm": layer.next_norm.weight,
    }
    for name, weight in norms.items():
        assert weight is None or (weight.dtype == torch.bfloat16 and weight.is_contiguous()), f"{name}: {weight.dtype}"
        setattr(found, name, None if weight is None else weight.data_ptr())
    return found


def _products(layer: Layer) -> dict[str, Linear]:
    assert isinstance(layer.ffn, Gated)
    return {"qkv": layer.mixer.qkv, "o": layer.mixer.o, "gate_up": layer.ffn.gate_up, "down": layer.ffn.down}


def _is_usual(layer: Layer) -> bool:
    """Whether the kernels have the layer's kind."""
    shape, mixer = layer.shape, layer.shape.mixer
    return (
        isinstance(shape.ffn, GatedShape)
        and shape.ffn.activation == "silu"
        and shape.norms == USUAL_NORMS
        and shape.residual_scale == 1
        and mixer.qk_norm in ("", "heads")
        and mixer.position_scale is None
        and not (mixer.rope is not None and mixer.rope.query_scales)
        and layer.next_norm is not None
        and layer.next_norm.is_rms
    )
