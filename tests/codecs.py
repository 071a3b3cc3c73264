"""The codecs that tests go over: those of the registry that encode, and one that only tests have.

A test that takes a codec's name takes it from here, so that a new row of the registry runs in it. TOY is what a codec
takes: a class, and a row that a test puts into the registry (the fixture `toy_codec` of conftest.py). It runs on the
reference backend alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from quire.cache.codecs import CODECS, Codec, CodecInputs, CodecRow, load
from quire.cache.codecs.packing import from_half, to_half
from quire.cache.codecs.slots import RUN, SlottedPages
from quire.cache.ledger import PAGE_TOKENS

from .nuq_tables import random_tables


class ByteCodec(SlottedPages):
    """A byte a number, and a scale for every key and value vector.

    A page (P = 64 slots, D channels): key codes int8 [P, D], value codes, key scales float16 [P], value scales.
    """

    name = "byte"
    kernel_id = 255  # the last one: codecs to come take the next free one

    def __init__(self, head_dim: int) -> None:
        self.at_scales = 2 * PAGE_TOKENS * head_dim
        self.page_bytes = self.at_scales + 4 * PAGE_TOKENS
        self.head_dim = head_dim
        super().__init__([[(RUN, size) for size in (head_dim, head_dim, 2, 2)]])

    @classmethod
    def of(cls, inputs: CodecInputs) -> ByteCodec:
        return cls(inputs.head_dim)

    def encode(self, layer: int, head: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = torch.stack((k, v), 1).float()
        scales = to_half(x.abs().amax(-1) / 127)
        steps = scales.float()[..., None]
        codes = (x / torch.where(steps > 0, steps, 1.0)).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([part.flatten(1).view(torch.uint8) for part in (codes, scales)], 1)

    def decode(self, layer: int, head: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = pages.tensor_split((self.at_scales,), 1)
        steps = from_half(scales).view(-1, 2, PAGE_TOKENS, 1)
        k, v = (codes.contiguous().view(torch.int8).view(-1, 2, PAGE_TOKENS, self.head_dim) * steps).unbind(1)
        return k, v


TOY = CodecRow(
    name=ByteCodec.name,
    about="a byte a number and a scale a vector, without calibration",
    place="tests.codecs:ByteCodec",
    bits=8,
    head_dims=range(2, 257, 2),
)

ENCODING = tuple(name for name, row in CODECS.items() if row.place)
"""Names of the registry's codecs that encode."""

EVERY = (*ENCODING, TOY.name)


def row_of(name: str) -> CodecRow:
    """The row of a codec, TOY's too, whether it is in the registry or not."""
    return TOY if name == TOY.name else CODECS[name]


def documented_bits(name: str) -> float:
    """Bits a stored number with everything beside it, at a head size of 64: a column of the table of codecs in
    docs/reference/page-format.md.
    """
    page = Path(__file__).parents[1] / "docs/reference/page-format.md"
    rows = [line.strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("|")]
    for cells in rows:
        if name in (names := re.findall(r"`(\w+)`", cells[0])):
            return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cells[2])][names.index(name)]
    raise AssertionError(f"page-format.md has no row for {name}")


def options_of(name: str) -> dict[str, Any]:
    """Settings under which an engine runs with a codec: on the CPU backend, or on the reference if that has no case."""
    return {"cache.codec": name, "attention.backend": "reference" if name == TOY.name else "cpu"}


def build(
    name: str,
    shape: tuple[int, int, int],
    *,
    seed: int = 0,
    slots: tuple[int, ...] = (1,),
    key_bias: torch.Tensor | None = None,
) -> Codec:
    """A codec for (layers, kv heads, head size), with made-up tables of the width of its row where it needs some."""
    row, tables = row_of(name), None
    if row.is_calibrated:
        tables = random_tables(*shape, seed, key_bits=[row.bits], value_bits=[row.bits], slots=slots, reach=1.0)
    codec: Codec = load(row.place).of(CodecInputs(name, shape[2], tables, key_bias))
    return codec
