"""The stream of weights from the disk: order, overlap and faults."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import QuireError
from quire.models.image_folder import ImageEntry
from quire.offload.stream import WeightStream
from quire.offload.weight_placement import ALIGNMENT, ReadRange
from quire.stores.direct import DirectFile
from tests.effort import tries
from tests.engine.test_offloading_weights import _cache as _cache

BLOCKS = 3


def layers_of(count: int, blocks: int = BLOCKS) -> list[tuple[ReadRange, ...]]:
    size = blocks * ALIGNMENT
    return [(ReadRange(n * size, size, (ImageEntry(f"layer {n}", n * size + 128, size - 128),)),) for n in range(count)]


class Reader:
    """A stream over a file whose layer n has bytes n, and the memory that each layer was told."""

    def __init__(self, folder: Path, count: int, skipped: tuple[int, ...] = (), blocks: int = BLOCKS, **more: Any):
        path = folder / "weights"
        path.write_bytes(b"".join(bytes([n]) * blocks * ALIGNMENT for n in range(count)))
        layers = [() if n in skipped else layer for n, layer in enumerate(layers_of(count, blocks))]
        self.at: dict[str, torch.Tensor] = {}
        self.count, self.skipped = count, skipped
        self.stream = WeightStream(path, layers, self.moved, **more)

    def moved(self, name: str, memory: torch.Tensor) -> None:
        self.at[name] = memory

    def use(self, layer: int) -> None:
        self.stream.take(layer)
        if layer not in self.skipped:
            assert (self.at[f"layer {layer}"] == layer).all(), f"layer {layer} has other bytes"
        self.stream.give(layer)

    def run_pass(self) -> None:
        self.stream.begin()
        for layer in range(self.count):
            self.use(layer)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Callable[..., Reader]]:
    made: list[Reader] = []

    def make(*arguments: Any, **more: Any) -> Reader:
        made.append(Reader(tmp_path, *arguments, **more))
        return made[-1]

    yield make
    for each in made:
        each.stream.close()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_layer_has_its_bytes_in_every_pass(reader: Callable[..., Reader], count: int) -> None:
    made = reader(count)
    for _ in range(4):
        made.run_pass()


def test_layers_in_memory_are_not_read(reader: Callable[..., Reader]) -> None:
    made = reader(6, skipped=(0, 3, 5))
    for _ in range(3):
        made.run_pass()
    assert made.stream.num_loads <= 3 * 3 + 2
    assert not {"layer 0", "layer 3", "layer 5"} & set(made.at)


def test_a_pass_loads_every_layer_once_and_no_more_than_the_slots_ahead(reader: Callable[..., Reader]) -> None:
    made = reader(7)
    for number in range(1, 4):
        made.run_pass()
        assert 7 * number <= made.stream.num_loads <= 7 * number + 2
    while made.stream.num_loads < 7 * 3 + 2:
        time.sleep(0.001)
    time.sleep(0.02)
    assert made.stream.num_loads == 7 * 3 + 2 and made.stream.bytes_read == (7 * 3 + 2) * BLOCKS * ALIGNMENT


def test_a_pass_that_ends_early_leaves_the_next_one_whole(reader: Callable[..., Reader]) -> None:
    made = reader(7)
    generator = random.Random(0)
    for _ in range(tries(20)):
        made.stream.begin()
        for layer in range(generator.randrange(8)):
            made.use(layer)
        made.run_pass()


def test_reads_that_take_any_time_change_nothing(
    reader: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, generator = DirectFile.read, random.Random(1)

    def late(self: DirectFile, *arguments: Any) -> None:
        time.sleep(generator.random() * 0.003)
        read(self, *arguments)
        time.sleep(generator.random() * 0.003)

    monkeypatch.setattr(DirectFile, "read", late)
    made = reader(4, blocks=2)
    for _ in range(tries(20)):
        made.run_pass()


def test_a_layer_that_cannot_be_read_is_an_error_and_no_hang(
    reader: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = DirectFile.read, []

    def failing(self: DirectFile, view: memoryview, offset: int, before: Any) -> None:
        calls.append(offset)
        if len(calls) > 9:
            raise OSError(5, "Input/output error")
        read(self, view, offset, before)

    monkeypatch.setattr(DirectFile, "read", failing)
    made = reader(4)
    with pytest.raises(QuireError, match="weights cannot be read: .*Input/output error"):
        for _ in range(5):
            made.run_pass()


def test_closing_ends_a_wait(reader: Callable[..., Reader]) -> None:
    made = reader(3, bandwidth=1000.0)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            made.run_pass()
        except QuireError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    made.stream.close()
    thread.join(5)
    assert not thread.is_alive() and "were closed" in str(errors[0])


@pytest.mark.alone
def test_the_next_layer_is_read_while_one_is_computed(reader: Callable[..., Reader]) -> None:
    """Eight layers that take 30 ms to load and 30 ms to compute: 9 times 30 ms, not 16 times."""
    seconds, blocks = 0.03, 16
    made = reader(8, blocks=blocks, bandwidth=blocks * ALIGNMENT / seconds)
    made.run_pass()
    time.sleep(3 * seconds)  # two layers are ahead now
    begun = time.monotonic()
    made.stream.begin()
    for layer in range(8):
        made.stream.take(layer)
        time.sleep(seconds)
        made.stream.give(layer)
    took = time.monotonic() - begun
    assert 7 * seconds < took < 11 * seconds, f"{took / seconds:.1f} times the seconds of a layer"


def test_without_overlap_a_layer_is_read_when_it_is_taken(reader: Callable[..., Reader]) -> None:
    made = reader(4, overlaps=False)
    for number in range(2):
        made.stream.begin()
        for layer in range(4):
            time.sleep(0.01)
            assert made.stream.num_loads == 4 * number + layer
            made.use(layer)
