"""A model whose weights are partly on the disk."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.config import format_bytes
from quire.kernels.memory import Fill, HugePageAllocator, huge_pages
from quire.models.image_folder import Image, ImageEntry, ImageError
from quire.models.images import ensure_image
from quire.models.plan import Model
from quire.offload.blocks import BlockPlan, run
from quire.offload.hidden import HiddenStates
from quire.offload.ops import RelocatableOps
from quire.offload.stream import WeightStream
from quire.offload.units import Split, percent
from quire.offload.weight_placement import WeightPlacement, enclosing_blocks, place_by_split, place_within_memory
from quire.stores.direct import DirectFile, reads_direct

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.images import ImageSpec
    from quire.models.layers import Ops
    from quire.models.plan import StepPlan
    from quire.offload.device import CopyStream

log = logging.getLogger("quire")


class OffloadedModel(Model):
    """See `models.plan.Model`. Each layer waits for its weights, and gives their memory back.

    weights   the placement of the matrices
    stream    loads matrices that are not on the computing device
    states    activations of micro-batches between layers
    folder    the folder of the weights on the disk, in which other files may be made; None: there is none
    overlaps  whether transfers overlap with computing
    """

    def __init__(
        self,
        model: Model,
        weights: WeightPlacement,
        stream: WeightStream | CopyStream,
        folder: Path | None,
        *,
        overlaps: bool = True,
    ) -> None:
        self.shape = model.shape
        self.folder = folder
        self.key_bias = model.key_bias
        self.weights = weights
        self.stream = stream
        self.states = HiddenStates()
        self.overlaps = overlaps
        self._model = model
        weakref.finalize(self, stream.close)

    def hidden(self, tokens: Tensor, positions: Tensor, plan: StepPlan) -> Tensor:
        """See Model. The plan may be a block's."""
        if isinstance(plan, BlockPlan):
            self.stream.begin()
            return run(self._model, tokens, positions, plan, self.stream, self.states, overlaps=self.overlaps)
        return super().hidden(tokens, positions, plan)

    def begin(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """See Model. Layers must then be used in order, each once."""
        self.stream.begin()
        return self._model.begin(tokens, positions)

    def layer(self, index: int, state: tuple[Tensor, ...], plan: StepPlan) -> tuple[Tensor, ...]:
        """See Model. Raises QuireError if the layer's weights cannot be read."""
        self.stream.take(index)
        state = self._model.layer(index, state, plan)
        self.stream.give(index)
        return state

    def finish(self, state: tuple[Tensor, ...]) -> Tensor:
        """See Model."""
        return self._model.finish(state)

    def head(self, hidden: Tensor) -> Tensor:
        """See Model."""
        return self._model.head(hidden)


class _Resident:
    """Memory for packed weights: reads the resident matrices; the stream loads the others later."""

    def __init__(self, image: Image, weights: WeightPlacement) -> None:
        self._order = (entry for section in image.sections for entry in section.entries)
        self._streamed = {place.name for layer in weights.streamed for piece in layer for place in piece.places}
        self._file = DirectFile(image.path, is_direct=reads_direct(image.path))
        # One mapping: pages have 2 MiB, and in blocks for a few matrices the last page of each block is mostly empty.
        self._free = huge_pages(max(1, weights.resident_bytes))
        self._later = torch.empty(0, dtype=torch.uint8)

    def place(self, name: str, num_bytes: int, fill: Fill) -> torch.Tensor:
        """See WeightMemory.place. Raises ImageError if the next matrix of the image is another one, OSError if it
        cannot be read.
        """
        place = next(self._order, None)
        if place is None or (place.name, place.num_bytes) != (name, num_bytes):
            raise ImageError(f"it does not have {name} where this model needs it")
        if name in self._streamed:
            # The stream moves it before its first use. Until then no bytes are needed, only their number.
            if len(self._later) < num_bytes:
                self._later = HugePageAllocator().take(num_bytes)
            return self._later[:num_bytes]
        start, size = enclosing_blocks(place)
        block, self._free = self._free[:size], self._free[size:]
        self._file.read(block.numpy().data, start, lambda num_bytes: None)
        at = place.offset - start
        return block[at : at + num_bytes]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def load_offloaded(
    wanted: ImageSpec,
    build: Callable[[Ops], Model],
    *,
    memory: int | None = None,
    split: Split | None = None,
    outside: Mapping[str, int] | None = None,
    bandwidth: float | None = None,
    overlaps: bool = True,
) -> OffloadedModel:
    """Loads a model with its matrices placed in memory and on the disk.

    The first start writes the model's layer image. Weights are then read from it, never from the checkpoint.

    memory     bytes for weights and buffers, which are filled; None: as `split` says
    split      shares of the layers' bytes in memory and on the disk
    outside    bytes of each matrix outside of layers that has no panels, by name
    bandwidth  most bytes per second that are read while computing; None: no limit
    overlaps   whether the next layer is read while one is computed
    Raises ImageError if the image cannot be written or read, and ConfigError if the memory is too small.
    """
    image = ensure_image(wanted, lambda memory: build(RelocatableOps(memory)))
    layers: list[Sequence[ImageEntry]] = []
    fixed: list[ImageEntry] = []
    for section in image.sections:
        if section.name.startswith("layers."):
            layers.append(section.entries)
        else:
            fixed += section.entries
    names = {place.name.partition(" ")[0] for place in fixed}
    unpacked = sum(size for name, size in (outside or {}).items() if name not in names)
    if split is None:
        assert memory is not None, "neither a memory nor a split"
        weights = place_within_memory(layers, fixed, memory, unpacked=unpacked)
    else:
        weights = place_by_split(layers, fixed, split, unpacked=unpacked)
    resident = _Resident(image, weights)
    try:
        ops = RelocatableOps(resident)
        model = build(ops)
    finally:
        resident.close()
    stream = WeightStream(image.path, weights.streamed, ops.move, bandwidth, overlaps=overlaps)
    log.info(
        "weights: %s of the layers in memory (requested %s), %s from the disk in every pass; %s in memory in all",
        percent(weights.split.shares[0]),
        percent(weights.requested.shares[0]),
        format_bytes(weights.streamed_bytes),
        format_bytes(weights.memory_bytes),
    )
    return OffloadedModel(model, weights, stream, image.path.parent, overlaps=overlaps)
