"""Layers that are copied to a device for every pass, from memory or from a file: each has its bytes while it is
computed. There is no GPU here; the copies go to other memory.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import QuireError
from quire.models.image_folder import ImageEntry
from quire.offload.device import ALIGNMENT, CopiedTensor, CopyStream, DiskSource
from quire.offload.weight_placement import ALIGNMENT as BLOCK
from quire.offload.weight_placement import ReadRange
from quire.stores.direct import DirectFile

from ..offloaded import patched

CPU = torch.device("cpu")


def layers_of(streamed: list[bool]) -> list[list[CopiedTensor]]:
    """Layers with two matrices each, or none."""
    found: list[list[CopiedTensor]] = []
    for number, is_streamed in enumerate(streamed):
        sizes = (3 + number, 5) if is_streamed else ()
        found.append([CopiedTensor("", torch.full((7, size), 10.0 * number + size), torch.empty(0)) for size in sizes])
    return found


def compute(layers: list[list[CopiedTensor]], index: int) -> None:
    for _, host, there in layers[index]:
        assert torch.equal(there, host), f"layer {index} has other bytes"


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("streamed", [[True], [True] * 2, [True] * 3, [False, True, True, False, True, True], [False]])
def test_every_layer_is_there_while_it_is_computed(streamed: list[bool], overlaps: bool) -> None:
    layers = layers_of(streamed)
    stream = CopyStream(layers, CPU, overlaps=overlaps)
    for number in range(5):
        stream.begin()
        for index in range(len(layers)):
            stream.take(index)
            compute(layers, index)
            stream.give(index)
        ahead = overlaps and sum(streamed) > 1 and sum(streamed) % 2 == 0
        assert stream.num_loads == (number + 1) * sum(streamed) + ahead, "a layer was copied twice in a pass"
    stream.close()


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_pass_may_end_early(overlaps: bool, seed: int) -> None:
    generator = random.Random(seed)
    layers = layers_of([True, True, False, True, True, True])
    stream = CopyStream(layers, CPU, overlaps=overlaps)
    for _ in range(200):
        stream.begin()
        for index in range(len(layers)):
            stream.take(index)
            if generator.random() < 0.1:
                break
            compute(layers, index)
            stream.give(index)


def test_layers_have_two_buffers_between_them() -> None:
    layers = layers_of([True] * 5)
    CopyStream(layers, CPU)
    storages = [there.untyped_storage() for layer in layers for _, _, there in layer]
    found = {storage.data_ptr(): storage.nbytes() for storage in storages}
    largest = sum(-(-host.nbytes // ALIGNMENT) * ALIGNMENT for _, host, _ in layers[-1])
    assert list(found.values()) == [largest, largest]


class OnDisk:
    """Layers of which some matrices are in a file. A layer's matrix in the file has bytes of a value of its own."""

    def __init__(self, folder: Path, tiers: list[str], *, overlaps: bool = True) -> None:
        """tiers: of each layer, `d` for a matrix in the file, `h` for one on the host, in their order."""
        self.values: list[list[int]] = []
        self.layers: list[list[CopiedTensor]] = []
        pieces: list[tuple[ReadRange, ...]] = []
        data = bytearray()
        for number, of_layer in enumerate(tiers):
            values, copied, places = [], [], []
            for index, tier in enumerate(of_layer):
                value, name, size = 16 * number + index + 1, f"{number} {index}", 2 * BLOCK + 128 * index
                host = torch.full((size,), value, dtype=torch.uint8)
                if tier == "d":
                    offset = len(data)
                    data += bytes([value]) * size + bytes(-size % BLOCK)
                    places.append(ReadRange(offset, len(data) - offset, (ImageEntry(name, offset, size),)))
                    host = host.to("meta")
                values.append(value)
                copied.append(CopiedTensor(name, host, torch.empty(0, dtype=torch.uint8)))
            self.values.append(values)
            self.layers.append(copied)
            pieces.append(tuple(places))
        path = folder / "weights"
        path.write_bytes(data)
        self.disk_layers = [number for number, of_layer in enumerate(pieces) if of_layer]
        self.disk_bytes = sum(piece.num_bytes for of_layer in pieces for piece in of_layer)
        self.stream = CopyStream(self.layers, CPU, disk=DiskSource(path, pieces, None), overlaps=overlaps)

    def compute(self, index: int) -> None:
        for (_, _, there), value in zip(self.layers[index], self.values[index], strict=True):
            assert len(there) and (there == value).all(), f"layer {index} has other bytes"


TIERS = [["d"], ["d", "d"], ["dh", "h", "d"], ["", "d", "hd", "", "dd", "h"], ["d"] * 5, ["h", "d", "h", "h"]]


@pytest.fixture(params=[True, False], ids=["overlap", "no overlap"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[list[str]], OnDisk]]:
    found: list[OnDisk] = []

    def make(tiers: list[str]) -> OnDisk:
        found.append(OnDisk(tmp_path, tiers, overlaps=request.param))
        return found[-1]

    yield make
    for each in found:
        each.stream.close()


@pytest.mark.parametrize("tiers", TIERS, ids=str)
def test_what_is_in_a_file_is_there_too(made: Callable[[list[str]], OnDisk], tiers: list[str]) -> None:
    layers = made(tiers)
    for _ in range(5):
        layers.stream.begin()
        for index in range(len(tiers)):
            layers.stream.take(index)
            layers.compute(index)
            layers.stream.give(index)
    # Two buffers of the file's may be full beside five passes.
    assert 5 * layers.disk_bytes <= layers.stream.bytes_from_disk <= 7 * layers.disk_bytes


@pytest.mark.parametrize("tiers", TIERS, ids=str)
def test_a_pass_over_a_file_may_end_early(made: Callable[[list[str]], OnDisk], tiers: list[str], seed: int) -> None:
    layers, generator = made(tiers), random.Random(seed)
    for _ in range(100):
        layers.stream.begin()
        for index in range(len(tiers)):
            layers.stream.take(index)
            if generator.random() < 0.2:
                break
            layers.compute(index)
            layers.stream.give(index)


def test_the_next_layers_are_read_while_one_is_computed(tmp_path: Path) -> None:
    layers = OnDisk(tmp_path, ["d"] * 6)
    layers.stream.begin()
    layers.stream.take(0)  # and copies layer 1
    deadline = time.monotonic() + 10
    while layers.stream.bytes_from_disk < layers.disk_bytes // 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert layers.stream.bytes_from_disk == layers.disk_bytes // 2, "layers 0 and 1, and one ahead"
    layers.stream.close()


def test_a_file_that_cannot_be_read_ends_the_pass(tmp_path: Path) -> None:
    layers, read = OnDisk(tmp_path, ["d"] * 4), DirectFile.read

    def failing(self: DirectFile, view: memoryview, offset: int, *more: Any) -> None:
        if offset >= layers.disk_bytes // 2:
            raise OSError(errno.EIO, "Input/output error")
        read(self, view, offset, *more)

    with patched(DirectFile, read=failing), pytest.raises(QuireError, match="weights cannot be read: .*Input/output"):
        for _ in range(2):
            layers.stream.begin()
            for index in range(4):
                layers.stream.take(index)
                layers.compute(index)
                layers.stream.give(index)
    layers.stream.close()
