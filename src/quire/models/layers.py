"""A decoder's operations, in their plainest implementation, in torch.

The backends `CpuOps` and `TritonOps` implement the same methods; tests compare them with `TorchOps`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from quire.models.quants import BLOCK_KINDS, Blocks, Weight, plain, read

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.cpu_ops import CpuOps
    from quire.models.ffn.gated import GateActivation, Gated
    from quire.models.ffn.plain import Plain
    from quire.models.mixers.attention import Attention
    from quire.models.norms import Norm
    from quire.models.shape import LayerShape, ModelShape
    from quire.models.triton_ops import TritonOps

HEAD_BLOCK = 4096
"""Rows of a 16-bit output head that are widened to float32 at once: 9 MiB for SmolLM2, 64 MiB at 4,096 channels."""


Linear = Callable[["Tensor"], "Tensor"]
"""One packed weight matrix: x [R, K] -> x @ weight.T + bias, [R, N], newly allocated: the caller may write into it."""

Embedding = Callable[["Tensor"], "Tensor"]
"""Token ids int64 [R] -> [R, E]."""


class Layer(NamedTuple):
    """One layer of a decoder.

    norms      of the layer, by the names of `NormPlaces`
    next_norm  that of the next layer's input, or the model's last; None: the residual stream goes on as it is
    """

    shape: LayerShape
    mixer: Attention
    ffn: Gated | Plain
    norms: Mapping[str, Norm]
    next_norm: Norm | None


State = tuple["Tensor", ...]
"""What lies between layers; see Decoder."""

Stack = Callable[[State, int], State]
"""All layers of a decoder in one call: the state before the first one, and the plan's address -> the state after the
last one; see StepPlan.address."""


class GatedLinear:
    """A product followed by the gate."""

    __slots__ = ("_activation", "_gated", "linear")

    def __init__(self, ops: Ops, linear: Linear, activation: GateActivation) -> None:
        self._gated = ops.gated
        self._activation = activation
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [R, K] -> [R, F]."""
        return self._gated(self.linear(x), self._activation)


class ConcatLinear:
    """Several products of the same rows, with their outputs concatenated, plus a bias."""

    __slots__ = ("_bias", "_parts")

    def __init__(self, parts: Sequence[Linear], bias: Tensor | None) -> None:
        self._parts = parts
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [R, K] -> [R, N]."""
        out = torch.cat([part(x) for part in self._parts], 1)
        return out if self._bias is None else out.add_(self._bias)


class BlockLinear:
    """The definition of a packed product: decodes HEAD_BLOCK rows of the blocks at a time, in every call, and
    multiplies in float32.

    dtype  dtype of the result
    """

    __slots__ = ("_bias", "_blocks", "_dtype")

    def __init__(self, blocks: Blocks, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._blocks = blocks
        self._bias = bias
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [R, K] -> [R, N]."""
        wide, blocks = x.float(), self._blocks
        starts = range(0, len(blocks.raw), HEAD_BLOCK)
        rows = (blocks.rows(slice(start, start + HEAD_BLOCK)) for start in starts)
        out = torch.cat([functional.linear(wide, plain(each, torch.float32)) for each in rows], 1)
        return (out if self._bias is None else out.add_(self._bias.float())).to(self._dtype)


def block_rows(blocks: Blocks, dtype: torch.dtype) -> Embedding:
    """An embedding over blocks. Decodes the rows it looks up."""
    return lambda index: plain(blocks.rows(index), dtype)


class TorchLinear:
    """F.linear over the given weight, without packing or copying."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return functional.linear(x, self.weight, self.bias)


class TorchHead:
    """Float32 logits over the given weight, [V, E].

    torch's CPU products write the type they read, so HEAD_BLOCK rows of the weight at a time are widened to float32.
    """

    __slots__ = ("_weight",)

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [R, E] -> [R, V], float32."""
        weight = self._weight
        if weight.dtype == torch.float32:
            return functional.linear(x, weight)
        if weight.is_cuda:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        wide = x.float()
        out = wide.new_empty(len(x), len(weight))
        for start in range(0, len(weight), HEAD_BLOCK):
            block = slice(start, start + HEAD_BLOCK)
            torch.mm(wide, weight[block].float().t(), out=out[:, block])
        return out


class TorchOps:
    """The definition of every operation, on any device. Backends differ from it only by rounding. R rows, E channels.
    All but logits are in the model's dtype; sums are float32.

    kinds  block types that the products support. Matrices of other types are passed as plain tensors
    """

    kinds: Collection[str] = BLOCK_KINDS

    def linear(self, parts: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """Packs weights [N, K], one below the other, and bias [N] once. Reads weights from the file only if needed. The
        caller keeps no reference, so the packed copy is the only one. dtype: of rows, bias and plain weights.

        Keeps the tensors themselves.
        """
        if len(parts) > 1:
            return ConcatLinear([self.linear([weight], None, dtype) for weight in parts], bias)
        weight = read(parts[0])
        return BlockLinear(weight, bias, dtype) if isinstance(weight, Blocks) else TorchLinear(weight, bias)

    def head(self, weight: Weight, dtype: torch.dtype) -> Linear:
        """The output head: x [R, E] -> float32 logits [R, V], never rounded to 16 bits."""
        weight = read(weight)
        return BlockLinear(weight, None, torch.float32) if isinstance(weight, Blocks) else TorchHead(weight)

    def embedding(self, weight: Weight, dtype: torch.dtype) -> Embedding:
        """Rows of a matrix [V, E]."""
        weight = read(weight)
        if isinstance(weight, Blocks):
            return block_rows(weight, dtype)
        return functools.partial(functional.embedding, weight=weight)

    def tied(self, weight: Weight, dtype: torch.dtype) -> tuple[Embedding, Linear]:
        """An embedding and the head over the same matrix [V, E], stored once if the backend's layout allows."""
        weight = read(weight)
        return self.embedding(weight, dtype), self.head(weight, dtype)

    def stack(self, layers: Sequence[Layer], shape: ModelShape) -> Stack | None:
        """The layers of a model as one call; None if the backend can only run them one by one."""
        return None

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; x [R, E], or [R, h, D] with strided rows. torch
        accumulates 16-bit inputs in float32.
        """
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then norm(residual): both [R, E], returns [R, E]. The residual is rounded to the
        model's dtype before it is normalised, because it is stored in that dtype.
        """
        return functional.rms_norm(residual.add_(x), weight.shape, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` over the last dimension of x [R, E]."""
        return functional.layer_norm(x, weight.shape, weight, bias, eps)

    def gated_linear(
        self, parts: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, activation: GateActivation
    ) -> Linear:
        """The product with weights [2F, K], gates first, followed by `gated`: x [R, K] -> [R, F]."""
        return GatedLinear(self, self.linear(parts, bias, dtype), activation)

    def gated(self, gate_up: Tensor, activation: GateActivation) -> Tensor:
        """act(gate) * up of gate_up [R, 2F], gate first; returns [R, F]. Computes the activation in the model's dtype,
        then the product.
        """
        gate, up = gate_up.chunk(2, dim=-1)
        return gate_activation(gate, activation).mul_(up)


def gate_activation(gate: Tensor, activation: GateActivation) -> Tensor:
    """The activation of gates."""
    if activation == "gelu-tanh":
        return functional.gelu(gate, approximate="tanh")
    return functional.silu(gate)


Ops: TypeAlias = "TorchOps | CpuOps | TritonOps"
"""The operations of a backend."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called float32, bfloat16 or float16."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
