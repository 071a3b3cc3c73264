"""Offloaded weights with a GPU: some matrices stay on the GPU, others are in the host's memory or on the disk and are
copied to the GPU for every pass.

Each layer is copied into one of two buffers on the device while the layer before is computed. A matrix always has the
same place in the same buffer, so the products need not know that it is copied. Between the last layer and the first
one, copying waits if the number of copied layers is odd, because both then have the same buffer.

Matrices on the disk are read into two buffers of the host (`WeightStream`): while a layer is computed and the next one
is copied, the one after that is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from quire.config import format_bytes
from quire.errors import ConfigError
from quire.models.image_folder import ImageEntry, ImageError, aligned
from quire.models.images import ensure_image, section_of
from quire.models.quants import Blocks, LazyWeight, block_bytes
from quire.models.triton_ops import PackedLinear, TritonLinear, TritonOps
from quire.offload.host import pinned
from quire.offload.model import OffloadedModel
from quire.offload.stream import WeightStream
from quire.offload.units import Split, percent
from quire.offload.weight_placement import NUM_BUFFERS, ReadRange, TierAssigner, WeightPlacement

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from quire.kernels.memory import WeightMemory
    from quire.models.image_folder import Image
    from quire.models.images import ImageSpec
    from quire.models.layers import Ops
    from quire.models.plan import Model
    from quire.models.quants import Weight

log = logging.getLogger("quire")

ALIGNMENT = 256
"""Matrices in a buffer begin at multiples of it, as torch's own allocations do."""

DEVICE, HOST, DISK = range(3)
"""Tiers of a matrix."""


class CopiedTensor(NamedTuple):
    """A tensor that is copied for every pass.

    name   name of its bytes in the image
    host   the tensor on the host; a meta tensor if its bytes come from the disk
    there  the tensor on the device
    """

    name: str
    host: Tensor
    there: Tensor


class DiskSource(NamedTuple):
    """The matrices that a `CopyStream` reads from the disk.

    path       path of the image
    layers     by layer, the byte ranges to read
    bandwidth  most bytes per second; None: no limit
    """

    path: Path
    layers: Sequence[Sequence[ReadRange]]
    bandwidth: float | None


class ImageWritingOps(TritonOps):
    """See `TritonOps`. Writes the matrices of layers to an image, the `memory`, and keeps none."""

    def __init__(self, memory: WeightMemory) -> None:
        super().__init__()
        self._memory = memory

    def linear(self, parts: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype) -> TritonLinear | PackedLinear:
        """See TritonOps."""
        product = super().linear(parts, bias, dtype)
        if _layer_of(parts) is None:
            return product
        for name, tensor in _named(_name_of(parts), product):

            def fill(target: Tensor, tensor: Tensor = tensor) -> None:
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor)

            self._memory.place(name, tensor.nbytes, fill)
            tensor.data = tensor.new_empty(0)
        return product


class PlacingOps(TritonOps):
    """See `TritonOps`. Places the matrices of layers by shares.

    places   by layer, the tensors of its matrices
    tiers    the tier of each matrix; indexed like `places`
    copied   by layer, the tensors that are copied for every pass
    """

    def __init__(self, split: Split, device: torch.device, image: Image | None) -> None:
        """split: shares of device, host and disk. image: has the matrices of the disk; None if it has no share."""
        super().__init__()
        self.places: dict[int, list[ImageEntry]] = {}
        self.tiers: dict[int, list[int]] = {}
        self.copied: dict[int, list[CopiedTensor]] = {}
        self._device = device
        self._assigner = TierAssigner(split)
        self._entries: dict[str, list[ImageEntry]] = {}
        for entry in () if image is None else (entry for section in image.sections for entry in section.entries):
            self._entries.setdefault(entry.name.rpartition(" ")[0], []).append(entry)

    def linear(self, parts: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype) -> TritonLinear | PackedLinear:
        """See TritonOps."""
        layer, name = _layer_of(parts), _name_of(parts)
        if layer is None:
            return super().linear(parts, bias, dtype)
        product, entries = None, self._entries.get(name)
        if entries is None:  # there is no image, and nothing is on the disk
            product = super().linear(parts, bias, dtype)
            entries = [ImageEntry(each, 0, tensor.nbytes) for each, tensor in _named(name, product)]
        tier = self._assigner.tier(sum(entry.num_bytes for entry in entries))
        if tier == DISK:
            product = super().linear([_unread(part, self._device) for part in parts], bias, dtype)
        elif product is None:
            product = super().linear(parts, bias, dtype)
        assert product is not None
        sizes = [(each, tensor.nbytes) for each, tensor in _named(name, product)]
        if sizes != [(entry.name, entry.num_bytes) for entry in entries]:
            raise ImageError(f"it does not have {name} as this model needs it")
        of_layer = self.copied.setdefault(layer, [])
        for entry, tensor in zip(entries, product.tensors, strict=True):
            self.places.setdefault(layer, []).append(entry)
            self.tiers.setdefault(layer, []).append(tier)
            if tier == DEVICE:
                continue
            host = torch.empty_like(tensor, device="meta")
            if tier == HOST:
                host = pinned(tensor.nbytes, tensor.device, self).view(tensor.dtype).view(tensor.shape).copy_(tensor)
            of_layer.append(CopiedTensor(entry.name, host, tensor))
            tensor.data = tensor.new_empty(0)  # until the stream assigns its memory
        return product


def _layer_of(parts: Sequence[Weight]) -> int | None:
    """The layer of a product; None if it belongs to none."""
    section = section_of(_name_of(parts))
    return int(section.removeprefix("layers.")) if section.startswith("layers.") else None


def _name_of(parts: Sequence[Weight]) -> str:
    first = parts[0]
    assert isinstance(first, LazyWeight), "a matrix without a name"
    return first.name


def _named(name: str, product: TritonLinear | PackedLinear) -> list[tuple[str, Tensor]]:
    """The tensors of a product, with their names in an image."""
    return [(f"{name} {number}", tensor) for number, tensor in enumerate(product.tensors)]


def _unread(weight: Weight, device: torch.device) -> Weight:
    """A matrix of arbitrary numbers: its product has tensors of the same names and shapes as that of the real one."""
    assert isinstance(weight, LazyWeight), "a matrix without a name"
    kind, (outputs, inputs) = weight.kind, weight.shape
    if kind is None:
        return dataclasses.replace(weight, read=lambda: torch.empty(weight.shape, dtype=weight.dtype, device=device))
    size = outputs, block_bytes(kind, inputs)
    return dataclasses.replace(
        weight, read=lambda: Blocks(kind, torch.empty(size, dtype=torch.uint8, device=device), inputs)
    )


class CopyStream:
    """Copies layers to the device, each ahead of its use. Has the interface of `WeightStream`.

    num_loads, bytes_read  layers and bytes that were copied so far
    """

    def __init__(
        self,
        layers: Sequence[Sequence[CopiedTensor]],
        device: torch.device,
        *,
        disk: DiskSource | None = None,
        overlaps: bool = True,
    ) -> None:
        """disk: None if nothing is there. Raises OSError, and ConfigError if there is not enough memory."""
        self._items = [tuple(layer) for layer in layers if layer]
        self._layers = [index for index, layer in enumerate(layers) if layer]
        self._order = {index: order for order, index in enumerate(i for i, layer in enumerate(layers) if layer)}
        self._overlaps = overlaps
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        sizes = [sum(aligned(each.host.nbytes, ALIGNMENT) for each in item) for item in self._items]
        count = min(NUM_BUFFERS, len(self._items))
        self._buffers = [
            torch.empty(max(sizes[buffer::count]), dtype=torch.uint8, device=device) for buffer in range(count)
        ]
        for order, item in enumerate(self._items):
            buffer, at = self._buffers[order % count], 0
            for _, host, there in item:
                there.data = buffer[at : at + host.nbytes].view(host.dtype).view(host.shape)
                at += aligned(host.nbytes, ALIGNMENT)
        self._next = 0  # the next layer that is copied, counted since the start
        self._given = 0  # number of layers computed so far
        self._copied: list[torch.cuda.Event | None] = [None] * count
        self.num_loads = self.bytes_read = 0
        self._read: dict[str, Tensor] = {}  # matrices read last, on the host
        self._taken: int | None = None  # a layer whose buffer the disk's stream waits for
        self._disk: WeightStream | None = None
        if disk is not None:
            memory = functools.partial(pinned, device=device, owner=self)
            moved = self._read.__setitem__
            self._disk = WeightStream(disk.path, disk.layers, moved, disk.bandwidth, overlaps=overlaps, memory=memory)

    @property
    def wait_seconds(self) -> float:
        """Seconds that the host waited for the disk. It never waits for copies; the device does."""
        return 0.0 if self._disk is None else self._disk.wait_seconds

    @property
    def bytes_from_disk(self) -> int:
        """Bytes of `bytes_read` that came from the disk."""
        return 0 if self._disk is None else self._disk.bytes_read

    def begin(self) -> None:
        """Begins a pass. The last one may have ended early."""
        count = max(1, len(self._items))
        if self._given % count:
            self._given = -(-self._given // count) * count
            if self._next > self._given:
                return  # the first layer has been copied ahead
            self._next = self._given
            if self._disk is not None:
                self._return()
                self._disk.begin()

    def take(self, layer: int) -> None:
        """Makes the device wait for a layer's weights, and starts to copy those of the next layer."""
        order = self._order.get(layer)
        if order is None:
            return
        assert self._given % len(self._items) == order, f"layer {layer} is taken out of order"
        if self._next == self._given:
            self._copy()
        event = self._copied[order % len(self._buffers)]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        if self._overlaps and self._may_copy():
            self._copy()

    def give(self, layer: int) -> None:
        """Releases the buffer of a layer that has been computed."""
        if layer in self._order:
            self._given += 1

    def close(self) -> None:
        """Waits until nothing moves."""
        if self._stream is not None:
            self._stream.synchronize()
        if self._disk is not None:
            self._disk.close()

    def _may_copy(self) -> bool:
        """Whether the next layer's buffer differs from that of the layer being computed."""
        count = len(self._items)
        buffers = [number % count % NUM_BUFFERS for number in (self._next, self._given)]
        return self._next == self._given + 1 and buffers[0] != buffers[1]

    def _copy(self) -> None:
        order = self._next % len(self._items)
        if self._disk is not None:
            self._return()
            self._disk.take(self._layers[order])
            self._taken = self._layers[order]
        with self._on_stream():
            # The copy waits for all earlier work of the device, including the layer that used this buffer.
            for name, host, there in self._items[order]:
                source = self._read[name].view(host.dtype).view(host.shape) if host.is_meta else host
                there.copy_(source, non_blocking=True)
        self._copied[order % len(self._buffers)] = None if self._stream is None else self._stream.record_event()
        self._next += 1
        self.num_loads += 1
        self.bytes_read += sum(each.host.nbytes for each in self._items[order])

    def _return(self) -> None:
        """Releases the disk stream's buffer of the layer that was copied last."""
        if self._taken is not None and self._disk is not None:
            if self._stream is not None:
                self._stream.synchronize()
            self._disk.give(self._taken)
            self._taken = None

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


def load_on_device(
    build: Callable[[Ops], Model],
    split: Split,
    device: torch.device,
    *,
    wanted: ImageSpec | None = None,
    bandwidth: float | None = None,
    overlaps: bool = True,
) -> OffloadedModel:
    """Loads a model whose matrices are on the device, in the host's memory and on the disk.

    Matrices on the disk are read from an image, which has the matrices of all layers in the device's format. The first
    start that needs the image writes it.

    split      shares of the layers' bytes on the device, the host and the disk
    wanted     the image; None if nothing is on the disk
    bandwidth  most bytes per second that are read from the disk while computing; None: no limit
    overlaps   whether the next layer is copied while one is computed
    Raises ImageError if the image cannot be written or read, ConfigError if there is not enough memory.
    """
    begun = time.perf_counter()
    image = None
    if split.shares[DISK] > 0:
        assert wanted is not None, "a share of the weights is on the disk, and there is no image"
        image = ensure_image(wanted, lambda memory: build(ImageWritingOps(memory)))
    ops = PlacingOps(split, device, image)
    model = build(ops)
    layers = range(model.shape.num_layers)
    places = tuple(tuple(ops.places[layer]) for layer in layers)
    weights = WeightPlacement(places, tuple(tuple(ops.tiers[layer]) for layer in layers), (), split)
    disk = None if image is None else DiskSource(image.path, weights.streamed, bandwidth)
    try:
        stream = CopyStream([ops.copied[layer] for layer in layers], device, disk=disk, overlaps=overlaps)
    except OSError as error:
        raise ConfigError(f"the layer image cannot be read: {error}") from error
    log.info(
        "weights: %s of the layers on the device (requested %s), %s copied there in every pass, of which %s from the"
        " disk; loaded in %.1f s",
        percent(weights.split.shares[DEVICE]),
        percent(split.shares[DEVICE]),
        format_bytes(sum(each.host.nbytes for layer in layers for each in ops.copied[layer])),
        format_bytes(0 if image is None else weights.streamed_bytes),
        time.perf_counter() - begun,
    )
    return OffloadedModel(model, weights, stream, None, overlaps=overlaps)
