"""Blocks of packed weights, decoded in plain torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quire.models.quants import block_bytes, dequantize, eight_bit_codes, group_codes, plain
from quire.models.weights import open_model
from tests.models.test_gguf_file import sized
from tests.tiny_models import crafted_blocks, write_gguf


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q6_K"])
def test_blocks_are_in_the_order_of_the_tensor(kind: str, tmp_path: Path) -> None:
    """Rows of q and k are permuted in llama files, one kind of 32 to a block and one of 256."""
    write_gguf(tmp_path / "model.gguf", sized("llama", kind), kind=kind)
    with open_model(tmp_path / "model.gguf") as checkpoint:
        for name in ("embed.weight", "layers.0.q.weight", "layers.1.k.weight", "layers.1.down.weight"):
            blocks = checkpoint.blocks(name)
            assert blocks is not None and blocks.kind == checkpoint.kind(name) == kind
            assert blocks.shape == checkpoint.shape.tensor_shapes[name]
            assert blocks.raw.shape[1] == block_bytes(kind, blocks.inputs)
            assert torch.equal(plain(blocks, torch.float32), checkpoint.tensor(name, torch.float32)), name
        assert checkpoint.blocks("layers.0.attn_norm.weight") is None
        assert checkpoint.kind("layers.0.attn_norm.weight") == "F32"


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_many_random_blocks_decode_alike(kind: str) -> None:
    import gguf

    blocks = crafted_blocks((64, 2560), kind)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(dequantize(torch.from_numpy(blocks.ravel()), kind, (64, 2560), torch.float32), expected)


@pytest.mark.parametrize("inputs", [64, 72, 130, 10])
def test_group_codes_are_within_half_of_their_step(inputs: int, seed: int) -> None:
    """Also in a last group that is shorter, for constant groups, and in rows of their own."""
    weight = torch.randn(5, inputs, generator=torch.Generator().manual_seed(seed))
    weight[1, : min(64, inputs)] = 0.25
    weight[2] = 0
    blocks = group_codes(weight)
    assert blocks.shape == (5, inputs) and blocks.raw.shape[1] == 36 * -(-inputs // 64)
    found = plain(blocks, torch.float32)
    for start in range(0, inputs, 64):
        part, got = weight[:, start : start + 64], found[:, start : start + 64]
        span = part.amax(1) - part.amin(1)
        # Half of a step, and what float16 takes off its ends.
        bound = span / 30 + 2**-10 * part.abs().amax(1)
        assert ((part - got).abs().amax(1) <= bound).all()
        assert torch.equal(got[2], part[2]) and got.isfinite().all()
    assert (found[1, : min(64, inputs)] == 0.25).all()
    alone = plain(group_codes(weight[3:4]), torch.float32)
    assert torch.equal(alone, found[3:4])


def test_eight_bit_codes_are_those_of_gguf_py(seed: int) -> None:
    import gguf

    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(seed))
    weight[1, :32] = 0
    blocks = eight_bit_codes(weight)
    assert blocks.kind == "Q8_0" and blocks.shape == (6, 96)
    scales = weight.unflatten(1, (3, 32)).abs().amax(2) / 127
    found = plain(blocks, torch.float32)
    # Half of a step, and what float16 takes off the scale.
    assert ((found - weight).abs() <= (scales * (0.5 + 127 * 2**-11)).repeat_interleave(32, 1)).all()
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0),
                                    gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    assert (found - torch.from_numpy(theirs)).abs().max() <= scales.max() * 1.01


def test_a_group_says_nothing_of_its_neighbours() -> None:
    """65 numbers are two groups: what is in the second changes nothing in the first."""
    weight = torch.linspace(-1, 2, 65)[None]
    other = weight.clone()
    other[0, 64] = 1000
    first, second = (plain(group_codes(each), torch.float32) for each in (weight, other))
    assert torch.equal(first[:, :64], second[:, :64]) and second[0, 64] == 1000
    assert plain(group_codes(torch.arange(16.0)[None]), torch.float32).tolist() == [list(range(16))]
    few = plain(group_codes(torch.tensor([[-1, 0, 0.5, 2.0]])), torch.float32)
    assert torch.allclose(few, torch.tensor([[-1, 0, 0.6, 2.0]]), atol=2e-3), "codes 0, 5, 8 and 15"
