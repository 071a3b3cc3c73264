"""The element-wise kernels and the one-row product on a GPU, in the sizes of real models, compared with torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed")

from quire.models.layers import TorchOps
from quire.models.quants import Blocks, plain
from quire.models.triton_ops import TritonOps

from ..kernels.harness import relative_rms
from ..packed_blocks import KINDS, random_blocks

pytestmark = pytest.mark.gpu

# `gated` is held to float32: in 16 bits TorchOps rounds once more on the way.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def random(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*size, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows", [1, 3, 64, 2000])
@pytest.mark.parametrize("width", [100, 576, 4096, 8192])
def test_norms_and_gated_are_torch_s(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype), random(width, dtype=dtype)
    assert relative_rms(TritonOps().norm(x, weight, 1e-5), TorchOps().norm(x, weight, 1e-5)) < TOLERANCE[dtype]
    expected_residual = residual.clone()
    expected = TorchOps().add_norm(x, expected_residual, weight, 1e-5)
    assert relative_rms(TritonOps().add_norm(x, residual, weight, 1e-5), expected) < TOLERANCE[dtype]
    assert torch.equal(residual, expected_residual)
    assert relative_rms(TritonOps().gated(x, "silu"), TorchOps().gated(x.float(), "silu")) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 70])
def test_norms_of_heads_read_strided_views(rows: int) -> None:
    heads = random(rows, 48, 128, dtype=torch.bfloat16)[:, 32:40]
    weight = random(128, dtype=torch.bfloat16)
    actual = TritonOps().norm(heads, weight, 1e-6)
    assert relative_rms(actual, TorchOps().norm(heads, weight, 1e-6)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("n, k", [(6144, 4096), (4096, 14336), (1000, 576), (33, 1544)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_one_row_product_is_torch_s(n: int, k: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight = random(1, k, dtype=dtype), random(n, k, dtype=dtype)
    bias = random(n, dtype=dtype) if has_bias else None
    expected = (x.double() @ weight.double().T + (0 if bias is None else bias.double())).to(dtype)
    assert relative_rms(TritonOps().linear([weight], bias, dtype)(x), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows", [1, 70])
def test_a_head_returns_sums_that_were_never_rounded(rows: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, 576, dtype=dtype), random(1000, 576, dtype=dtype)
    exact = x.double() @ weight.double().T
    for ops in (TritonOps(), TorchOps()):
        logits = ops.head(weight, dtype)(x)
        assert logits.dtype == torch.float32 and relative_rms(logits, exact) < 2e-6


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows", [1, 3, 20, 50, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_blocks_are_multiplied_and_looked_up_as_the_file_has_them(
    kind: str, rows: int, dtype: torch.dtype
) -> None:
    blocks = random_blocks(kind, 1000, 1536)
    held = Blocks(kind, blocks.raw.cuda(), blocks.inputs)
    # float16 ends at 65,504.
    x = random(rows, 1536, dtype=dtype) / 64
    bias = random(1000, dtype=dtype)
    exact = x.double() @ plain(blocks, torch.float32).cuda().double().T
    assert relative_rms(TritonOps().linear([held], bias, dtype)(x), exact + bias.double()) < TOLERANCE[dtype]
    embed, head = TritonOps().tied(held, dtype)
    assert relative_rms(head(x), exact) < 2e-6
    index = torch.randint(1000, (rows,))
    assert torch.equal(embed(index.cuda()).cpu(), plain(blocks, dtype)[index])
