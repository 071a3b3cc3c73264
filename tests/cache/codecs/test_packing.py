"""Codes of 1 to 5 bits in 64-byte lines, compared with a packer that places one bit at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.codecs.packing import LANES, Lines, parts
from tests.effort import examples

WIDTHS = [1, 2, 3, 4, 5]
PART_WIDTHS = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1]}


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [n, F, 32] of one width as lines."""
    numbers = np.arange(codes[0].numel(), dtype=np.int32).reshape(1, -1, LANES)
    return Lines(numbers, [bits]).pack(codes.flatten(1))


def unpack(lines: torch.Tensor, fields: int, bits: int) -> torch.Tensor:
    numbers = np.arange(fields * LANES, dtype=np.int32).reshape(1, -1, LANES)
    return Lines(numbers, [bits]).unpack(lines).view(-1, fields, LANES)


def place_of_bit(fields: int, bits: int, field: int, lane: int, bit: int) -> int:
    """Where bit number `bit` of the code in a lane of a field lies, counted in bits from the first line's start."""
    above = bits  # bits of the code that are not placed yet
    lines = 0
    for width in PART_WIDTHS[bits]:
        above -= width
        if bit >= above:
            per_line = 16 // width
            line, index = divmod(field, per_line)
            return ((lines + line) * 32 + lane) * 16 + index * width + bit - above
        lines += fields * width // 16
    raise AssertionError


def packed_bit_by_bit(codes: torch.Tensor, bits: int) -> bytes:
    """The lines of codes [F, 32]: bit n of the result is bit n % 8 of byte n // 8."""
    fields = len(codes)
    number = 0
    for field, lane in codes.nonzero().tolist():
        code = int(codes[field, lane])
        for bit in range(bits):
            if code >> bit & 1:
                number |= 1 << place_of_bit(fields, bits, field, lane, bit)
    return number.to_bytes(fields * bits * 4, "little")


@pytest.mark.parametrize("fields", [16, 32])
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_code_at_every_place(bits: int, fields: int) -> None:
    """One code among zeros, then the same one among codes of all ones: nothing of it lies anywhere else."""
    for code in range(1 << bits):
        # All places of a lane at once, one page each; lanes are alike, so three of them.
        for lane in (0, 13, 31):
            codes = torch.zeros(fields, fields, LANES, dtype=torch.uint8)
            codes[range(fields), range(fields), lane] = code
            rest = torch.full_like(codes, (1 << bits) - 1)
            rest[range(fields), range(fields), lane] = code
            for pages in (codes, rest):
                lines = pack(pages, bits)
                assert torch.equal(unpack(lines, fields, bits), pages.long())
            for field in range(0, fields, 5):
                expected = packed_bit_by_bit(codes[field], bits)
                assert bytes(pack(codes[field : field + 1], bits)[0].tolist()) == expected, (code, lane, field)


@examples(40)
@given(bits=st.sampled_from(WIDTHS), fields=st.sampled_from([16, 32, 48]), seed=st.integers(0, 2**31))
def test_lines_are_those_of_the_bit_by_bit_packer(bits: int, fields: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (2, fields, LANES), generator=generator, dtype=torch.uint8)
    lines = pack(codes, bits)
    assert lines.shape == (2, fields * LANES * bits // 8)
    assert [bytes(page.tolist()) for page in lines] == [packed_bit_by_bit(page, bits) for page in codes]
    assert torch.equal(unpack(lines, fields, bits), codes.long())


@pytest.mark.parametrize("bits", WIDTHS)
def test_bits_of_two_codes_never_share_a_place(bits: int) -> None:
    places = {
        place_of_bit(16, bits, field, lane, bit) for field in range(16) for lane in range(LANES) for bit in range(bits)
    }
    assert places == set(range(16 * LANES * bits)), "the packer of these tests fills its lines without a hole"
    assert [width for width, _ in parts(bits)] == PART_WIDTHS[bits]


def test_worked_lines() -> None:
    """Codes of three bits: the upper two of fields 0 to 7, those of fields 8 to 15, then all lowest bits."""
    codes = torch.zeros(1, 16, LANES, dtype=torch.uint8)
    codes[0, 1, 0] = 0b101
    codes[0, 15, 31] = 0b011
    lines = pack(codes, 3)[0].view(3, LANES, 2)
    words = lines[..., 0].int() | lines[..., 1].int() << 8
    assert words.nonzero().tolist() == [[0, 0], [1, 31], [2, 0], [2, 31]]
    assert words[0, 0] == 0b10 << 2 and words[1, 31] == 0b01 << 14
    assert words[2, 0] == 1 << 1 and words[2, 31] == 1 << 15


@examples(20)
@given(widths=st.lists(st.integers(0, 5), min_size=1, max_size=6), fields=st.sampled_from([16, 32]), seed=st.integers())
def test_blocks_lie_one_behind_the_other_whatever_numbers_they_hold(widths: list[int], fields: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    numbers = torch.randperm(len(widths) * fields * LANES, generator=generator, dtype=torch.int32)
    numbers = numbers.view(-1, fields, LANES)
    of_block = [torch.randint(0, 1 << bits, (fields, LANES), generator=generator) for bits in widths]
    codes = torch.empty(1, numbers.numel(), dtype=torch.int64)
    for places, block in zip(numbers, of_block, strict=True):
        codes[0, places] = block
    lines = Lines(numbers.numpy(), widths)
    expected = [packed_bit_by_bit(block, bits) for block, bits in zip(of_block, widths, strict=True) if bits]
    assert bytes(lines.pack(codes)[0].tolist()) == b"".join(expected)
    assert torch.equal(lines.unpack(lines.pack(codes)), codes)


def test_codes_of_no_bits_take_no_lines() -> None:
    codes = torch.zeros(3, 16, LANES, dtype=torch.uint8)
    assert pack(codes, 0).shape == (3, 0)
    assert torch.equal(unpack(pack(codes, 0), 16, 0), codes.long())
