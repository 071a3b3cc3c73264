"""The placement of a model's matrices: which tier keeps each. Arithmetic on sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.models.image_folder import ImageEntry
from quire.offload.units import Share, Split
from quire.options import format_bytes

ALIGNMENT = 4096
"""Reads begin and end at multiples of this; see `stores.direct`."""

NUM_BUFFERS = 2
"""Buffers for loaded layers: one is computed while the other is filled. More buffers only hide stalls of the disk."""

_STEPS = 1000
"""Shares that are tried to fill a memory."""


@dataclass(frozen=True)
class ReadRange:
    """Consecutive bytes of the file: whole blocks around neighbouring matrices."""

    offset: int
    num_bytes: int
    places: tuple[ImageEntry, ...]


class TierAssigner:
    """Gives each matrix its tier, layer by layer.

    Every layer has nearly the same share of each tier, so that all layers take the same time to load. At each matrix
    the tier that is farthest behind its share gets it. The realised bytes of a tier differ from the requested ones by
    less than the largest matrix, and a tier with a share of 0 gets nothing.

    Source: FlexGen's public code walks the tensors of each layer alone, and realises 80 % where 50 % is requested if
    one tensor has 80 % of a layer's bytes. Ours carries the difference on to the next layer.
    """

    def __init__(self, split: Split) -> None:
        self._split = split
        self._placed = [0] * len(split.shares)

    def tier(self, size: int) -> int:
        """The tier of the next matrix, which has `size` bytes."""
        total = sum(self._placed) + size
        behind = [share * total - placed for share, placed in zip(self._split.shares, self._placed, strict=True)]
        tier = max(range(len(behind)), key=lambda each: behind[each])
        self._placed[tier] += size
        return tier


def assign_tiers(sizes: Sequence[Sequence[int]], split: Split) -> list[list[int]]:
    """The tier of every matrix, given their bytes [layers][matrices]."""
    found = TierAssigner(split)
    return [[found.tier(size) for size in layer] for layer in sizes]


def realised_split(sizes: Sequence[Sequence[int]], tiers: Sequence[Sequence[int]], num_tiers: int) -> Split:
    """The shares of bytes that result from the tiers of all matrices."""
    placed = [0] * num_tiers
    for layer, of_layer in zip(sizes, tiers, strict=True):
        for size, tier in zip(layer, of_layer, strict=True):
            placed[tier] += size
    total = sum(placed)
    return Split(tuple(Share(size / total) for size in placed))


def read_ranges(layer: Sequence[ImageEntry], tiers: Sequence[int], tier: int) -> tuple[ReadRange, ...]:
    """The ranges to read for the matrices of a layer on a tier. Neighbours share a range, and ranges share no block."""
    found: list[ReadRange] = []
    for place, home in zip(layer, tiers, strict=True):
        if home != tier:
            continue
        start, size = enclosing_blocks(place)
        if found and found[-1].offset + found[-1].num_bytes >= start:
            last = found.pop()
            found.append(ReadRange(last.offset, start + size - last.offset, (*last.places, place)))
        else:
            found.append(ReadRange(start, size, (place,)))
    return tuple(found)


def buffer_sizes(layers: Sequence[int]) -> list[int]:
    """Bytes of each buffer, given the bytes that are loaded for each layer. Layers without loaded bytes use no buffer.

    The others take turns with the buffers, pass after pass. If their number is a multiple of the number of buffers, a
    buffer has the same layers in every pass, and is as large as the largest of these.
    """
    loaded = [size for size in layers if size]
    count = min(NUM_BUFFERS, len(loaded))
    period = math.gcd(count, len(loaded))
    return [max(loaded[buffer % period :: period]) for buffer in range(count)]


@dataclass(frozen=True)
class WeightPlacement:
    """The tiers of a model's matrices: in memory, or on the disk and loaded for every pass.

    layers     matrices of each layer
    tiers      the tier of each matrix, indexed like `layers`; the last tier of `requested` is the disk
    fixed      matrices outside of layers, which stay in memory
    requested  the requested split
    unpacked   bytes of other matrices outside of layers, which are not in the file and stay in memory too
    """

    layers: tuple[tuple[ImageEntry, ...], ...]
    tiers: tuple[tuple[int, ...], ...]
    fixed: tuple[ImageEntry, ...]
    requested: Split
    unpacked: int = 0

    @property
    def streamed(self) -> tuple[tuple[ReadRange, ...], ...]:
        """The ranges to read for each layer."""
        disk = len(self.requested.shares) - 1
        return tuple(read_ranges(layer, tiers, disk) for layer, tiers in zip(self.layers, self.tiers, strict=True))

    @property
    def streamed_bytes(self) -> int:
        """Bytes that are read in every pass."""
        return sum(piece.num_bytes for layer in self.streamed for piece in layer)

    @property
    def buffers(self) -> list[int]:
        """Bytes of each buffer for loaded layers."""
        return buffer_sizes([sum(piece.num_bytes for piece in layer) for layer in self.streamed])

    @property
    def resident_bytes(self) -> int:
        """Bytes of the file's matrices that stay in memory, in whole blocks."""
        resident = list(self.fixed)
        for layer, tiers in zip(self.layers, self.tiers, strict=True):
            resident += [place for place, tier in zip(layer, tiers, strict=True) if tier == 0]
        return sum(enclosing_blocks(place)[1] for place in resident)

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory: resident matrices, others outside of layers, and the buffers."""
        return self.unpacked + self.resident_bytes + sum(self.buffers)

    @property
    def split(self) -> Split:
        """The realised shares of the layers' bytes."""
        sizes = [[place.num_bytes for place in layer] for layer in self.layers]
        return realised_split(sizes, self.tiers, len(self.requested.shares))


def enclosing_blocks(place: ImageEntry) -> tuple[int, int]:
    """Offset and bytes of the whole blocks around a matrix."""
    start = place.offset // ALIGNMENT * ALIGNMENT
    return start, -(-(place.offset + place.num_bytes - start) // ALIGNMENT) * ALIGNMENT


def place_by_split(
    layers: Sequence[Sequence[ImageEntry]], fixed: Sequence[ImageEntry], split: Split, *, unpacked: int = 0
) -> WeightPlacement:
    """Places a model's matrices by shares of memory and disk."""
    tiers = assign_tiers([[place.num_bytes for place in layer] for layer in layers], split)
    return WeightPlacement(tuple(map(tuple, layers)), tuple(map(tuple, tiers)), tuple(fixed), split, unpacked)


def place_within_memory(
    layers: Sequence[Sequence[ImageEntry]], fixed: Sequence[ImageEntry], memory: int, *, unpacked: int = 0
) -> WeightPlacement:
    """Places as much as possible in `memory` bytes, buffers included.

    Raises ConfigError if the buffers do not fit with everything else on the disk.
    """
    for step in range(_STEPS, -1, -1):
        share = step / _STEPS
        weights = place_by_split(layers, fixed, Split((Share(share), Share(1 - share))), unpacked=unpacked)
        if weights.memory_bytes <= memory:
            return weights
    raise ConfigError(
        f"offload.memory is {format_bytes(memory)}; embedding, output head and two layers of this model need"
        f" {format_bytes(weights.memory_bytes)}"
    )
