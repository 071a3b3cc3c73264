"""Placement of matrices: realised shares, what is read, and how much memory it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.models.image_folder import ImageEntry
from quire.offload.units import Share, Split
from quire.offload.weight_placement import (
    ALIGNMENT,
    NUM_BUFFERS,
    assign_tiers,
    buffer_sizes,
    place_by_split,
    place_within_memory,
    read_ranges,
    realised_split,
)
from tests.effort import examples
from tests.opt_paper import percents

layers_of = st.lists(st.lists(st.integers(1, 10_000), min_size=1, max_size=7), min_size=1, max_size=24)
splits = (
    st.lists(st.integers(0, 10), min_size=2, max_size=3)
    .filter(any)
    .map(lambda parts: Split(tuple(Share(part / sum(parts)) for part in parts)))
)


@examples(100)
@given(layers_of, splits)
def test_realised_shares_differ_by_less_than_the_largest_matrix(sizes: list[list[int]], split: Split) -> None:
    tiers = assign_tiers(sizes, split)
    found = realised_split(sizes, tiers, len(split.shares))
    total, largest = sum(map(sum, sizes)), max(map(max, sizes))
    for got, wanted in zip(found.shares, split.shares, strict=True):
        assert abs(got - wanted) * total <= largest + 1e-6
        if wanted == 0:
            assert got == 0


def test_the_difference_of_a_layer_is_made_up_for_in_the_next_ones() -> None:
    """FlexGen's public code puts 80 % of every layer on the second tier here."""
    sizes = [[80, 10, 5, 5]] * 10
    split = percents(0, 50, 50)
    found = realised_split(sizes, assign_tiers(sizes, split), 3)
    assert found.shares[0] == 0 and found.shares[1] == pytest.approx(0.5, abs=0.03)


def test_layers_have_similar_shares() -> None:
    sizes = [[25, 10, 45, 20]] * 20
    tiers = assign_tiers(sizes, percents(40, 60))
    on_disk = [sum(size for size, tier in zip(sizes[0], layer, strict=True) if tier) for layer in tiers]
    assert max(on_disk) - min(on_disk) <= 45


def laid_out(sizes: list[list[int]], outside: int = 5000) -> tuple[list[list[ImageEntry]], list[ImageEntry]]:
    """Places as an image has them: layers begin at whole blocks, matrices at multiples of 128."""
    at, layers = 0, []
    for number, layer in enumerate(sizes):
        at = -(-at // ALIGNMENT) * ALIGNMENT
        places = []
        for index, size in enumerate(layer):
            at = -(-at // 128) * 128
            places.append(ImageEntry(f"layers.{number}.{index}", at, size))
            at += size
        layers.append(places)
    at = -(-at // ALIGNMENT) * ALIGNMENT
    return layers, [ImageEntry("head", at, outside)]


@examples(100)
@given(layers_of, splits)
def test_pieces_are_whole_blocks_that_contain_their_matrices_and_do_not_overlap(
    sizes: list[list[int]], split: Split
) -> None:
    layers, _ = laid_out(sizes)
    for layer, tiers in zip(layers, assign_tiers(sizes, split), strict=True):
        for tier in range(len(split.shares)):
            found = read_ranges(layer, tiers, tier)
            names = [place.name for piece in found for place in piece.places]
            assert names == [place.name for place, home in zip(layer, tiers, strict=True) if home == tier]
            end = 0
            for piece in found:
                assert piece.offset % ALIGNMENT == 0 and piece.num_bytes % ALIGNMENT == 0 and piece.offset >= end
                end = piece.offset + piece.num_bytes
                for place in piece.places:
                    assert piece.offset <= place.offset and place.offset + place.num_bytes <= end


@examples(50)
@given(layers_of, st.integers(0, 400_000))
def test_what_fits_into_a_memory_fits(sizes: list[list[int]], memory: int) -> None:
    layers, fixed = laid_out(sizes)
    try:
        weights = place_within_memory(layers, fixed, memory)
    except ConfigError as error:
        nothing = place_by_split(layers, fixed, percents(0, 100))
        assert nothing.memory_bytes > memory and "offload.memory" in str(error)
        return
    assert weights.memory_bytes <= memory
    share = weights.requested.shares[0]
    if share < 1:  # one step more would not fit
        more = Share(share + 0.001)
        assert place_by_split(layers, fixed, Split((more, Share(1 - more)))).memory_bytes > memory


def test_memory_counts_slots_and_what_is_outside_of_layers() -> None:
    layers, fixed = laid_out([[ALIGNMENT * 3, ALIGNMENT]] * 4, outside=2 * ALIGNMENT)
    all_on_disk = place_by_split(layers, fixed, percents(0, 100))
    assert all_on_disk.buffers == [4 * ALIGNMENT] * NUM_BUFFERS and all_on_disk.streamed_bytes == 16 * ALIGNMENT
    assert all_on_disk.memory_bytes == (2 + NUM_BUFFERS * 4) * ALIGNMENT
    in_memory = place_by_split(layers, fixed, percents(100, 0))
    assert in_memory.memory_bytes == 18 * ALIGNMENT and in_memory.streamed_bytes == 0


@examples(50)
@given(st.lists(st.integers(0, 9), max_size=8))
def test_a_buffer_is_as_large_as_the_largest_layer_it_ever_has(layers: list[int]) -> None:
    sizes, loaded = buffer_sizes(layers), [size for size in layers if size]
    largest = [0] * len(sizes)
    for number in range(4 * len(loaded)):  # passes over the loaded layers, counted since the start
        buffer = number % len(sizes)
        largest[buffer] = max(largest[buffer], loaded[number % len(loaded)])
    assert sizes == largest and len(sizes) == min(NUM_BUFFERS, len(loaded))
