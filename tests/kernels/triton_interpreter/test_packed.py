"""Products with packed blocks compared with the same weights in float32; rows of them are equal to the bit."""

from __future__ import annotations

import pytest
import torch

from quire.models.quants import FORMATS, GROUP_CODES, Weight, plain
from quire.models.triton_ops import TritonOps
from quire.models.triton_packed import PackedMatrix

from ...packed_blocks import KINDS, random_blocks

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest error over the largest output: of sums in float32, of one rounding of the output."""

INPUTS = {GROUP_CODES: 72, "Q8_0": 544}
"""Half a group of the last; units that fill no tile. 512 of other types."""


def expected(x: torch.Tensor, parts: list[Weight], bias: torch.Tensor | None = None) -> torch.Tensor:
    wide = [part.double() if isinstance(part, torch.Tensor) else plain(part, torch.float32).double() for part in parts]
    return x.double() @ torch.cat(wide).T + (0 if bias is None else bias.double())


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    assert actual.shape == exact.shape and not actual.isnan().any()
    return ((actual.double() - exact).abs().max() / exact.abs().max()).item()


def test_every_type_has_a_format() -> None:
    assert TritonOps.kinds == FORMATS.keys() == set(KINDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_file_s_weights(kind: str, rows: int, dtype: torch.dtype) -> None:
    blocks = random_blocks(kind, 70, INPUTS.get(kind, 512))
    x = torch.randn(rows, blocks.inputs).to(dtype)
    actual = TritonOps().linear([blocks], None, dtype)(x)
    assert actual.dtype == dtype and error(actual, expected(x, [blocks])) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_file_s_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    blocks = random_blocks(kind, 70, INPUTS.get(kind, 512))
    index = torch.tensor([69, 0, 5, 5, 18])
    embed, head = TritonOps().tied(blocks, dtype)
    rows = plain(blocks, dtype)[index]
    assert torch.equal(embed(index), rows)
    assert torch.equal(TritonOps().embedding(blocks, dtype)(index), rows)
    assert embed(index[:0]).shape == (0, blocks.inputs)
    x = torch.randn(1, blocks.inputs).to(dtype)
    logits = head(x)
    assert logits.dtype == torch.float32 and error(logits, expected(x, [blocks])) < 2e-6


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_parts_of_several_types_are_one_product_with_a_bias(rows: int) -> None:
    parts = [
        random_blocks("Q4_K", 35, 256), random_blocks("Q6_K", 18, 256), torch.randn(7, 256),
        random_blocks(GROUP_CODES, 33, 256),
    ]  # fmt: skip
    bias = torch.randn(93)
    # Rows of a wider tensor, as a view of queries is.
    x = torch.randn(rows, 300)[:, :256]
    actual = TritonOps().linear(parts, bias, torch.float32)(x)
    assert actual.shape == (rows, 93)
    if rows:
        assert error(actual, expected(x, parts, bias)) < 2e-6


@pytest.mark.parametrize("rows", [1, 2])
def test_a_head_returns_sums_that_were_never_rounded(rows: int) -> None:
    blocks = random_blocks("Q6_K", 70, 256)
    x = torch.randn(rows, 256).bfloat16()
    logits = TritonOps().head(blocks, torch.bfloat16)(x)
    assert logits.dtype == torch.float32 and error(logits, expected(x, [blocks])) < 2e-6


@pytest.mark.parametrize("rows", [1, 2])
def test_products_are_gated(rows: int) -> None:
    parts: list[Weight] = [random_blocks("Q4_K", 40, 256), random_blocks("Q5_0", 40, 256)]
    x = 1e-4 * torch.randn(rows, 256)
    gate, up = expected(x, parts).chunk(2, 1)
    exact = torch.nn.functional.silu(gate) * up
    assert error(TritonOps().gated_linear(parts, None, torch.float32, "silu")(x), exact) < 4e-6


@pytest.mark.parametrize("kind", KINDS)
def test_planes_are_hardly_larger_than_the_blocks(kind: str) -> None:
    blocks = random_blocks(kind, 64, 512)
    packed = PackedMatrix(blocks)
    per_weight = (each / (64 * 512) for each in (packed.num_bytes, blocks.raw.nbytes))
    print("\n{}: {:.4f} bytes a weight, {:.4f} in blocks".format(kind, *per_weight))
    assert packed.num_bytes <= 1.04 * blocks.raw.nbytes
