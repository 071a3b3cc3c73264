"""Weights beside a GPU: matrices that stay there, and matrices in the host's memory that are copied for every pass.

Each layer is copied into one of two buffers on the device while the layer before is computed. A matrix always has the
same place in the same buffer, so the products never learn that it came and went. Between the last layer and the first
one, copying waits if the number of copied layers is odd, because both then have the same buffer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from quire.config import format_bytes
from quire.models.images import section_of
from quire.models.quants import Unread
from quire.models.triton_ops import PackedLinear, TritonLinear, TritonOps
from quire.offload.homes import NUM_BUFFERS, Homes, Place, Weights
from quire.offload.host import pinned
from quire.offload.model import OffloadedModel
from quire.offload.units import Split, percent

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.layers import Ops
    from quire.models.plan import Model
    from quire.models.quants import Weight

log = logging.getLogger("quire")

ALIGNMENT = 256
"""Matrices in a buffer begin at multiples of it, as torch's own allocations do."""


class Copied(NamedTuple):
    """A tensor that is copied for every pass: on the host, and on the device."""

    host: Tensor
    there: Tensor


class PlacingOps(TritonOps):
    """See `TritonOps`. Leaves the matrices of layers on the device or moves them to the host, as shares say.

    places   by layer, the matrices with their bytes
    tiers    0: on the device, 1: on the host; like `places`
    copied   by layer, the tensors on the host
    """

    def __init__(self, split: Split) -> None:
        super().__init__()
        self.places: dict[int, list[Place]] = {}
        self.tiers: dict[int, list[int]] = {}
        self.copied: dict[int, list[Copied]] = {}
        self._homes = Homes(split)

    def linear(self, parts: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype) -> TritonLinear | PackedLinear:
        """See TritonOps."""
        product = super().linear(parts, bias, dtype)
        first = parts[0]
        assert isinstance(first, Unread), "a matrix without a name"
        section = section_of(first.name)
        if not section.startswith("layers."):
            return product
        layer = int(section.removeprefix("layers."))
        num_bytes = sum(tensor.nbytes for tensor in product.tensors)
        tier = self._homes.tier(num_bytes)
        self.places.setdefault(layer, []).append(Place(first.name, 0, num_bytes))
        self.tiers.setdefault(layer, []).append(tier)
        of_layer = self.copied.setdefault(layer, [])
        for tensor in product.tensors if tier else ():
            host = pinned(tensor.nbytes, tensor.device, self).view(tensor.dtype).view(tensor.shape)
            of_layer.append(Copied(host.copy_(tensor), tensor))
            tensor.data = tensor.new_empty(0)  # until the stream gives it a place
        return product


class CopyStream:
    """Copies layers to the device, each ahead of its use. See `WeightStream`, whose place it takes.

    num_loads, bytes_read  layers and bytes that were copied so far
    wait_seconds           0: the device waits, not the host
    """

    def __init__(self, layers: Sequence[Sequence[Copied]], device: torch.device, *, overlaps: bool = True) -> None:
        self._items = [tuple(layer) for layer in layers if layer]
        self._order = {index: order for order, index in enumerate(i for i, layer in enumerate(layers) if layer)}
        self._overlaps = overlaps
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        sizes = [sum(_aligned(each.host.nbytes) for each in item) for item in self._items]
        count = min(NUM_BUFFERS, len(self._items))
        self._buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(count)]
        for order, item in enumerate(self._items):
            buffer, at = self._buffers[order % count], 0
            for host, there in item:
                there.data = buffer[at : at + host.nbytes].view(host.dtype).view(host.shape)
                at += _aligned(host.nbytes)
        self._next = 0  # the next layer that is copied, counted since the start
        self._given = 0  # layers that were computed
        self._copied: list[torch.cuda.Event | None] = [None] * count
        self.num_loads = self.bytes_read = 0
        self.wait_seconds = 0.0

    def begin(self) -> None:
        """Begins a pass. The last one may have ended early."""
        count = max(1, len(self._items))
        if self._given % count:
            self._given = -(-self._given // count) * count
            self._next = self._given

    def take(self, layer: int) -> None:
        """Makes the device wait for a layer's weights, and begins to copy the next layer's."""
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
        """Gives a layer's buffer back once it has been computed."""
        if layer in self._order:
            self._given += 1

    def close(self) -> None:
        """Waits until nothing moves."""
        if self._stream is not None:
            self._stream.synchronize()

    def _may_copy(self) -> bool:
        """Whether the next layer has another buffer than the one that is computed now."""
        count = len(self._items)
        buffers = [number % count % NUM_BUFFERS for number in (self._next, self._given)]
        return self._next == self._given + 1 and buffers[0] != buffers[1]

    def _copy(self) -> None:
        order = self._next % len(self._items)
        with self._on_stream():
            # All that the device was given so far is done before: also the layer that had this buffer.
            for host, there in self._items[order]:
                there.copy_(host, non_blocking=True)
        self._copied[order % len(self._buffers)] = None if self._stream is None else self._stream.record_event()
        self._next += 1
        self.num_loads += 1
        self.bytes_read += sum(each.host.nbytes for each in self._items[order])

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


def load_on_device(
    build: Callable[[Ops], Model], split: Split, device: torch.device, *, overlaps: bool = True
) -> OffloadedModel:
    """Loads a model whose matrices are on the device and in the host's memory.

    split     shares of the layers' bytes
    overlaps  whether the next layer is copied while one is computed
    """
    begun = time.perf_counter()
    ops = PlacingOps(split)
    model = build(ops)
    layers = range(model.shape.num_layers)
    places = tuple(tuple(ops.places[layer]) for layer in layers)
    weights = Weights(places, tuple(tuple(ops.tiers[layer]) for layer in layers), (), split)
    stream = CopyStream([ops.copied[layer] for layer in layers], device, overlaps=overlaps)
    log.info(
        "weights: %s of the layers on the device (requested %s), %s copied there in every pass; loaded in %.1f s",
        percent(weights.split.shares[0]),
        percent(split.shares[0]),
        format_bytes(sum(each.host.nbytes for layer in layers for each in ops.copied[layer])),
        time.perf_counter() - begun,
    )
    return OffloadedModel(model, weights, stream, None, overlaps=overlaps)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
