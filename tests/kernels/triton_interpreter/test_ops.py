"""The element-wise kernels and the one-row product, compared with the plainest implementation."""

from __future__ import annotations

import pytest
import torch

from quire.models.ffn.gated import GateActivation
from quire.models.layers import TorchOps
from quire.models.triton_ops import TritonOps

from ..harness import relative_rms

# `gated` is held to float32: in 16 bits TorchOps rounds once more on the way.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
DTYPES = list(TOLERANCE)


def random(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*size).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(1, 576), (3, 100), (33, 16), (2, 5000)])
def test_norms_are_torch_s(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype), random(width, dtype=dtype)
    assert relative_rms(TritonOps().norm(x, weight, 1e-5), TorchOps().norm(x, weight, 1e-5)) < TOLERANCE[dtype]
    expected_residual = residual.clone()
    expected = TorchOps().add_norm(x, expected_residual, weight, 1e-5)
    assert relative_rms(TritonOps().add_norm(x, residual, weight, 1e-5), expected) < TOLERANCE[dtype]
    assert relative_rms(residual, expected_residual) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_heads_read_strided_views(dtype: torch.dtype) -> None:
    heads = random(5, 9, 16, dtype=dtype)[:, 3:7]
    weight = random(16, dtype=dtype)
    actual = TritonOps().norm(heads, weight, 1e-6)
    assert actual.is_contiguous() and actual.shape == heads.shape
    assert relative_rms(actual, TorchOps().norm(heads, weight, 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width, activation", [(1, 80, "silu"), (3, 1500, "silu"), (3, 80, "gelu-tanh")])
def test_gated_is_torch_s(rows: int, width: int, activation: GateActivation, dtype: torch.dtype) -> None:
    gate_up = 3 * random(rows, 2 * width, dtype=dtype)
    assert (
        relative_rms(TritonOps().gated(gate_up, activation), TorchOps().gated(gate_up.float(), activation))
        < TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("n, k, has_bias", [(33, 1544, True), (8, 64, False)])
def test_linear_is_torch_s_with_its_own_kernel_for_one_row(
    rows: int, n: int, k: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x, weight = random(rows, k, dtype=dtype), random(n, k, dtype=dtype)
    bias = random(n, dtype=dtype) if has_bias else None
    actual, expected = (ops.linear([weight], bias, dtype)(x) for ops in (TritonOps(), TorchOps()))
    assert relative_rms(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_head_returns_sums_that_were_never_rounded(rows: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, 64, dtype=dtype), random(33, 64, dtype=dtype)
    exact = x.double() @ weight.double().T
    embed, tied = TritonOps().tied(weight, dtype)
    for head in (TritonOps().head(weight, dtype), tied):
        logits = head(x)
        assert logits.dtype == torch.float32 and relative_rms(logits, exact) < 1e-6
    assert torch.equal(embed(torch.tensor([5])), weight[5:6])
