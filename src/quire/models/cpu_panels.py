"""Products with matrices in panels of 32 outputs, in 16 bits or packed as in the file.

kernels/linear.cpp and kernels/packed.h have the layouts.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator, Sequence

import torch

from quire.kernels import runtime
from quire.kernels.memory import WeightMemory
from quire.models.ffn.gated import GateActivation
from quire.models.quants import GROUP_CODES, Blocks, LazyWeight, Weight, kind_of, read

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64

_PAIRS = {torch.bfloat16: 0, torch.float16: 1}
_PACKED = {
    name: number
    for number, name in enumerate(
        ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", GROUP_CODES), start=2
    )
}
"""Numbers of the types in kernels/packed.h."""

KINDS = frozenset(_PACKED)
"""Block types that products read as they are."""

DTYPES = frozenset(_PAIRS)
"""Dtypes of plain matrices that have panels."""

LAYOUT = 1
"""Version of the packed bytes. Files of packed weights with another version are written again. It is also raised if the
input of packing changes: `quants.group_codes`, `quants.eight_bit_codes`, the order of rows in `weights`."""


GATE_LANES = 16
"""Gates of a panel; as many ups follow them."""

GATES: dict[GateActivation | None, int] = {None: 0, "silu": 1, "gelu-tanh": 2}
"""Numbers of the activations of gates in kernels/common.h; 0: there are no gates."""

MOST_PARTS = 4
"""Maximum number of parts of a product, as in linear.h."""


class _Part(ctypes.Structure):
    """Mirror of `Part` in kernels/linear.h: outputs of one type."""

    _fields_ = (("panels", _PTR), ("kind", _I64), ("outputs", _I64))


class Matrix(ctypes.Structure):
    """Mirror of `Matrix` in kernels/linear.h."""

    _fields_ = (
        ("parts", ctypes.POINTER(_Part)),
        ("num_parts", _I64),
        ("bias", _PTR),
        ("outputs", _I64),
        ("inputs", _I64),
        ("gated", _I64),
    )


class _Rows(ctypes.Structure):
    """Mirror of `Rows` in kernels/linear.h."""

    _fields_ = (("kind", _I64), ("x", _PTR), ("stride", _I64), ("count", _I64), ("scratch", _PTR))


def has_panels(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether a weight can be in panels, for rows of the dtype."""
    kind = kind_of(weight)
    return kind in KINDS or (kind == dtype and dtype in _PAIRS and weight.shape[1] % 2 == 0)


class Panels:
    """A product y = x W^T + bias. W consists of parts [N, K] of possibly different types, one below the other.

    Few rows are bound by reading the weights; `memory` has pages of 2 MiB, which avoid TLB misses. A foreign call costs
    3 us. oneDNN's call inside torch costs 10 us and does not take bfloat16 without AVX-512. `benchmarks/linear_cpu.py`
    prints both: with bfloat16 dot products 7.5 against 8.5 ms at 1 row, 12.4 against 16.3 at 32, 120 against 120 at
    512.

    dtype  dtype of the rows and the bias
    gated  the activation of gates, if there are any: the only part is then [2N, K], gates first, and the product is
           act(gate) * up, [R, N]
    wide   outputs are float32, for an output head
    """

    def __init__(
        self,
        parts: Sequence[Weight],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        memory: WeightMemory,
        *,
        gated: GateActivation | None = None,
        wide: bool = False,
    ) -> None:
        runtime.check_mirrors(_Part, Matrix, _Rows)
        assert not gated or len(parts) == 1, "gates and what they let through lie in one panel"
        assert len(parts) <= MOST_PARTS, f"{len(parts)} parts"
        inputs = parts[0].shape[1]
        counts = [weight.shape[0] // (2 if gated else 1) for weight in parts]
        self.names = [_name(weight, gated is not None) for weight in parts]
        self._panels = [
            _place(name, weight, count, gated is not None, memory)
            for name, weight, count in zip(self.names, parts, counts, strict=True)
        ]
        kinds = [_number(kind_of(weight)) for weight in parts]
        addresses = [panels.data_ptr() for panels in self._panels]
        self._parts = (_Part * len(parts))(*map(_Part, addresses, kinds, counts))
        self.is_packed = any(kind in _PACKED.values() for kind in kinds)
        # Row strides must be even for products that read pairs.
        self._step = 1 if all(kind in _PACKED.values() for kind in kinds) else 2
        self.bias = bias
        self.shape = sum(counts), inputs
        assert bias is None or (bias.dtype == dtype and bias.is_contiguous()), f"{bias.dtype} beside {dtype}"
        self.matrix = Matrix(
            self._parts, len(parts), None if bias is None else bias.data_ptr(), *self.shape, GATES[gated]
        )
        self._dtype = dtype
        self._kind = runtime.DTYPE_IDS[dtype]
        self.out_dtype = torch.float32 if wide else dtype
        self._apply = runtime.kernels().quire_multiply

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [R, K] -> [R, N]. If a part is in 16 bits, the row stride must be even."""
        n, k = self.shape
        rows, width = x.shape
        stride, dense = x.stride()
        assert width == k and dense == 1 and stride % self._step == 0 and x.dtype is self._dtype, (
            f"{x.dtype} {list(x.shape)}, strides {x.stride()}, for {k} inputs"
        )
        out = torch.empty(rows, n, dtype=self.out_dtype)
        scratch = self.scratch(rows)
        given = _Rows(self._kind, x.data_ptr(), stride, rows, None if scratch is None else scratch.data_ptr())
        self._apply(ctypes.byref(self.matrix), ctypes.byref(given), runtime.DTYPE_IDS[self.out_dtype], out.data_ptr())
        return out

    def move(self, name: str, panels: torch.Tensor) -> None:
        """Continues with other memory that has the bytes of a part."""
        index = self.names.index(name)
        assert len(panels) == len(self._panels[index]), f"{name}: {len(panels)} bytes for {len(self._panels[index])}"
        self._panels[index] = panels
        self._parts[index].panels = panels.data_ptr()

    def scratch(self, rows: int) -> torch.Tensor | None:
        """Scratch for `rows` rows as integers; None if no part is packed."""
        if not self.is_packed:
            return None
        return torch.empty(runtime.kernels().quire_quantized_bytes(self._kind, rows, self.shape[1]), dtype=torch.uint8)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the only part, as `functional.embedding`: index int64 [R], below N, -> [R, K] in the rows' dtype."""
        assert index.dtype == torch.int64 and index.is_contiguous(), f"{index.dtype}, strides {index.stride()}"
        out = torch.empty(len(index), self.shape[1], dtype=self._dtype)
        (panels,), (part,) = self._panels, self._parts
        self._read(part.kind, panels, index, out)
        return out

    def decoded(self, step: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The rows of the matrix in the order of the outputs, at most `step` of them at a time, [n, K].

        dtype  dtype of rows that are decoded from packed blocks; rows of 16 bits keep their own
        """
        assert not self.matrix.gated, "the outputs of a gated product are not rows"
        for panels, part in zip(self._panels, self._parts, strict=True):
            found = dtype if part.kind in _PACKED.values() else self._dtype
            for start in range(0, part.outputs, step):
                index = torch.arange(start, min(start + step, part.outputs))
                out = torch.empty(len(index), self.shape[1], dtype=found)
                self._read(part.kind, panels, index, out)
                yield out

    def without_gate(self) -> Panels:
        """The sums of a gated product [R, 2 * N'], before the gate: `gate_lanes` gates, their ups, and so on. N' is N
        rounded up to a multiple of gate_lanes; the sums beyond N are 0.
        """
        count, inputs = self.shape
        assert self.matrix.gated, "there is no gate"
        found = copy.copy(self)
        lanes = -(-count // GATE_LANES) * GATE_LANES
        found.shape = 2 * lanes, inputs
        if self.bias is not None:
            both = torch.nn.functional.pad(self.bias.view(2, count), (0, lanes - count))
            found.bias = both.view(2, -1, GATE_LANES).transpose(0, 1).reshape(-1)
        (part,) = self._parts
        found._parts = (_Part * 1)(_Part(part.panels, part.kind, 2 * lanes))
        bias = None if found.bias is None else found.bias.data_ptr()
        found.matrix = Matrix(found._parts, 1, bias, *found.shape, 0)
        return found

    def _read(self, kind: int, panels: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
        runtime.kernels().quire_panel_rows(
            kind,
            panels.data_ptr(),
            self.shape[1],
            index.data_ptr(),
            len(index),
            runtime.DTYPE_IDS[out.dtype],
            out.data_ptr(),
        )


def panel_bytes(kind: str | torch.dtype, outputs: int, inputs: int, *, gated: bool = False) -> int:
    """Bytes of a matrix [outputs, inputs] in panels; gated: of 2 * outputs rows."""
    count = -(-outputs // (GATE_LANES if gated else 2 * GATE_LANES))
    return count * int(runtime.kernels().quire_panel_bytes(_number(kind), inputs))


def _number(kind: str | torch.dtype) -> int:
    return _PACKED[kind] if isinstance(kind, str) else _PAIRS[kind]


def _name(weight: Weight, gated: bool) -> str:
    """The name of a matrix in memory for packed weights."""
    return f"{weight.name if isinstance(weight, LazyWeight) else ''} {kind_of(weight)}{' gated' * gated}"


def _place(name: str, weight: Weight, outputs: int, gated: bool, memory: WeightMemory) -> torch.Tensor:
    num_bytes = panel_bytes(kind_of(weight), outputs, weight.shape[1], gated=gated)
    return memory.place(name, num_bytes, lambda panels: _pack(read(weight), outputs, gated, panels))


def _pack(weight: torch.Tensor | Blocks, outputs: int, gated: bool, panels: torch.Tensor) -> None:
    """Into zeroed memory."""
    kernels, inputs = runtime.kernels(), weight.shape[1]
    source = (weight.raw if isinstance(weight, Blocks) else weight).contiguous()
    if isinstance(weight, Blocks):
        kernels.quire_pack_blocks(_number(weight.kind), source.data_ptr(), outputs, inputs, gated, panels.data_ptr())
    else:
        kernels.quire_pack_linear(source.data_ptr(), outputs, inputs, gated, panels.data_ptr())
