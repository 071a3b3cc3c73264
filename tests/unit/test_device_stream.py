"""Layers that are copied to a device for every pass: each has its bytes while it is computed. There is no GPU here; the
copies go to other memory.
"""

from __future__ import annotations

import random

import pytest
import torch

from quire.offload.device import ALIGNMENT, Copied, CopyStream

CPU = torch.device("cpu")


def layers_of(streamed: list[bool]) -> list[list[Copied]]:
    """Layers with two matrices each, or none."""
    found: list[list[Copied]] = []
    for number, is_streamed in enumerate(streamed):
        sizes = (3 + number, 5) if is_streamed else ()
        found.append([Copied(torch.full((7, size), 10.0 * number + size), torch.empty(0)) for size in sizes])
    return found


def compute(layers: list[list[Copied]], index: int) -> None:
    for host, there in layers[index]:
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
    storages = [there.untyped_storage() for layer in layers for _, there in layer]
    found = {storage.data_ptr(): storage.nbytes() for storage in storages}
    largest = sum(-(-host.nbytes // ALIGNMENT) * ALIGNMENT for host, _ in layers[-1])
    assert list(found.values()) == [largest, largest]
