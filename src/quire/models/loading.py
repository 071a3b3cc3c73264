"""Makes packed products from a checkpoint's tensors while a decoder is built."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from quire.models.quants import GROUP_CODES, PLAIN, Blocks, LazyWeight, eight_bit_codes, group_codes, loaded_row_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.ffn.gated import GateActivation
    from quire.models.layers import Embedding, Linear, Ops
    from quire.models.shape import ModelShape
    from quire.models.weights import Checkpoint

log = logging.getLogger("quire")

Form = Literal["native", "dequantized", "g4"]
"""Type of matrices in memory; see config.ModelConfig.weights."""

_NOT_MULTIPLIED = "positions.weight"


_OUTER = ("embed.weight", "head.weight")
"""The embedding and the output head, which g4 keeps in 8 bits; docs/lab/2026-11.md has the loss with 4 bits."""


def loaded_kind(name: str, size: Sequence[int], stored: str, form: Form, kinds: Collection[str]) -> str | None:
    """The block type of a tensor in a backend's memory; None for plain numbers.

    size    shape of the tensor
    stored  its type in the file
    kinds   block types that the backend multiplies
    """
    if len(size) != 2 or name == _NOT_MULTIPLIED or form == "dequantized":
        return None
    if form == "g4" and name not in _OUTER:
        return GROUP_CODES
    if stored in kinds:
        return stored
    return "Q8_0" if form == "g4" and size[1] % 32 == 0 else None


def loaded_bytes(size: Sequence[int], kind: str | None, item_bytes: int) -> int:
    """Bytes of a tensor in memory.

    kind        its block type, see `loaded_kind`
    item_bytes  bytes of a plain number
    """
    return math.prod(size) * item_bytes if kind is None else size[0] * loaded_row_bytes(kind, size[1])


@dataclasses.dataclass
class TensorGroup:
    """A group of a checkpoint's tensors with the same type in the file and the same type in memory.

    stored     GGUF's name of the type in the file
    held       the type in memory: the file's, G4 or Q8_0 of model.weights g4, or the model's dtype
    tensors    number of tensors
    numbers    total number of elements
    num_bytes  total bytes in memory
    """

    stored: str
    held: str
    tensors: int = 0
    numbers: int = 0
    num_bytes: int = 0


def group_tensors(weights: Checkpoint, dtype: torch.dtype, form: Form, kinds: Collection[str]) -> list[TensorGroup]:
    """Groups a checkpoint's tensors by type, the largest group first. Does not count a second copy of a tied head."""
    found: dict[tuple[str, str], TensorGroup] = {}
    for name, size in weights.shape.tensor_shapes.items():
        kind = loaded_kind(name, size, weights.kind(name), form, kinds)
        key = weights.kind(name), kind or str(dtype).removeprefix("torch.")
        entry = found.setdefault(key, TensorGroup(*key))
        entry.tensors += 1
        entry.numbers += math.prod(size)
        entry.num_bytes += loaded_bytes(size, kind, dtype.itemsize)
    return sorted(found.values(), key=lambda entry: -entry.num_bytes)


def loaded_sizes(weights: Checkpoint, dtype: torch.dtype, form: Form, kinds: Collection[str]) -> dict[str, int]:
    """Bytes of each tensor of a checkpoint in memory."""
    return {
        name: loaded_bytes(size, loaded_kind(name, size, weights.kind(name), form, kinds), dtype.itemsize)
        for name, size in weights.shape.tensor_shapes.items()
    }


class WeightSource:
    """Tensors in the model's dtype and on its device, and products over them.

    form  type of matrices in memory
    """

    def __init__(
        self,
        weights: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        form: Form = "dequantized",
    ) -> None:
        self._weights = weights
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._form = form
        self._matrices = 0
        self._dequantized: dict[str, str] = {}

    def tensor(self, name: str) -> Tensor:
        """One tensor by its canonical name."""
        return self._weights.tensor(name, self._dtype).to(self._device)

    def embedding(self, name: str, *, tied: bool) -> tuple[Embedding, Linear | None]:
        """Rows of the matrix `NAME.weight`, and, if it is tied to the output head, the head over it."""
        weight = self._weight(name)
        if tied:
            return self._ops.tied(weight, self._dtype)
        return self._ops.embedding(weight, self._dtype), None

    def constant(self, numbers: Sequence[float]) -> Tensor:
        """Numbers in the model's dtype and on its device."""
        return torch.tensor(numbers, dtype=self._dtype, device=self._device)

    def key_bias(self, shape: ModelShape) -> Tensor | None:
        """The key bias of every layer and head, float32 [L, H, D]; see plan.Model."""
        if any(not layer.mixer.qkv_bias or layer.mixer.qk_norm for layer in shape.layers):
            return None
        found = torch.stack([self.tensor(f"layers.{index}.k.bias").float() for index in range(shape.num_layers)])
        return found.view(shape.num_layers, shape.num_kv_heads, shape.head_dim)

    def head(self, name: str) -> Linear:
        """The output head over the matrix `NAME.weight`: float32 logits."""
        return self._ops.head(self._weight(name), self._dtype)

    def linear(self, *names: str, bias: bool) -> Linear:
        """One product over the matrices `NAME.weight`, with concatenated outputs, and optionally `NAME.bias`."""
        return self._ops.linear(*self._parts(names, bias), self._dtype)

    def gated_linear(self, *names: str, bias: bool, activation: GateActivation) -> Linear:
        """The product over two matrices, of which the first gates the second."""
        return self._ops.gated_linear(*self._parts(names, bias), self._dtype, activation)

    def _parts(self, names: Sequence[str], bias: bool) -> tuple[list[LazyWeight], Tensor | None]:
        offset = torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None
        return _merged([self._weight(name) for name in names]), offset

    def _weight(self, name: str) -> LazyWeight:
        """One matrix, in blocks or plain."""
        self._matrices += 1
        stored = f"{name}.weight"
        kind = self._weights.kind(stored)
        outputs, inputs = self._weights.shape.tensor_shapes[stored]
        held = loaded_kind(stored, (outputs, inputs), kind, self._form, self._ops.kinds)
        if held is None and self._form == "native" and kind not in PLAIN:
            self._dequantized[stored] = kind

        def read() -> Tensor | Blocks:
            return self.tensor(stored) if held is None else self._blocks(stored, held)

        return LazyWeight(stored, held, self._dtype, (outputs, inputs), read)

    def _blocks(self, name: str, held: str) -> Blocks:
        blocks = self._weights.blocks(name) if held == self._weights.kind(name) else None
        if blocks is None:
            quantize = group_codes if held == GROUP_CODES else eight_bit_codes
            blocks = quantize(self._weights.tensor(name, torch.float32))
        return Blocks(blocks.kind, blocks.raw.to(self._device), blocks.inputs)

    def warn_about_dequantized(self) -> None:
        """Call this after the last matrix. Warns about packed matrices that were dequantized."""
        if self._dequantized:
            name, kind = next(iter(self._dequantized.items()))
            log.warning(
                "model.weights native: %d of %d matrices are dequantized, %s (%s) first: there is no kernel for %s",
                len(self._dequantized),
                self._matrices,
                name,
                kind,
                ", ".join(sorted(set(self._dequantized.values()))),
            )


def _merged(parts: Sequence[LazyWeight]) -> list[LazyWeight]:
    """Joins neighbouring parts of one type."""
    groups = (list(group) for _, group in itertools.groupby(parts, lambda part: part.kind))
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _joined(parts: list[LazyWeight]) -> LazyWeight:
    def read() -> Tensor | Blocks:
        found = [part.read() for part in parts]
        blocks = [part for part in found if isinstance(part, Blocks)]
        if blocks:
            return dataclasses.replace(blocks[0], raw=torch.cat([part.raw for part in blocks]))
        return torch.cat([part for part in found if isinstance(part, torch.Tensor)])

    shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
    return dataclasses.replace(parts[0], name="+".join(part.name for part in parts), shape=shape, read=read)
