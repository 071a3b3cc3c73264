"""The CPU kernels between matrix products, and the packed products, compared with plain torch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import runtime
from quire.models.cpu_ops import CpuOps
from quire.models.ffn.gated import GateActivation
from quire.models.layers import TorchOps
from tests.effort import combine

from .harness import relative_rms
from .pages import LEVELS, use_level

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A sixteen-bit result is within one rounding of another order of the same operations.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
GATES: list[GateActivation] = ["silu", "gelu-tanh"]
SIZES = [(1, 576), (3, 17), (32, 64), (65, 1536), (2, 1)]


def random(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_norms_equal_torch(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    assert relative_rms(CpuOps().norm(x, weight, 1e-5), TorchOps().norm(x, weight, 1e-5)) < TOLERANCE[dtype]
    ours, theirs = random(rows, width, dtype=dtype, seed=2), random(rows, width, dtype=dtype, seed=2)
    got, expected = CpuOps().add_norm(x, ours, weight, 1e-5), TorchOps().add_norm(x, theirs, weight, 1e-5)
    assert torch.equal(ours, theirs), "the residual sum itself is one rounding"
    assert relative_rms(got, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES[:-1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norms_equal_torch(rows: int, width: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight = random(rows, width, dtype=dtype) * 3 + 5, random(width, dtype=dtype, seed=1)
    bias = random(width, dtype=dtype, seed=2) if has_bias else None
    expected = TorchOps().layer_norm(x.double(), weight.double(), None if bias is None else bias.double(), 1e-5)
    assert relative_rms(CpuOps().layer_norm(x, weight, bias, 1e-5), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_heads_inside_a_wider_row(dtype: torch.dtype) -> None:
    fused = random(5, 12 * 16, dtype=dtype)
    heads = fused.view(5, 12, 16)[:, 3:7]
    weight = random(16, dtype=dtype, seed=1)
    got = CpuOps().norm(heads, weight, 1e-6)
    assert got.is_contiguous()
    assert relative_rms(got, TorchOps().norm(heads, weight, 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("activation", GATES)
def test_gated_equals_torch(rows: int, width: int, dtype: torch.dtype, activation: GateActivation) -> None:
    gate_up = random(rows, 2 * width, dtype=dtype) * 4
    expected = TorchOps().gated(gate_up.float(), activation)
    assert relative_rms(CpuOps().gated(gate_up, activation), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", GATES)
def test_gated_is_zero_and_finite_for_huge_gates(activation: GateActivation) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4, -1e30] * 4 + [2.0] * 32])
    assert (CpuOps().gated(torch.tensor([[-1e38] * 32 + [1.0] * 32]), activation) == 0).all()
    got = CpuOps().gated(gate_up, activation)
    torch.testing.assert_close(got, TorchOps().gated(gate_up.clone(), activation), atol=1e-7, rtol=1e-6)


@combine(dtype=DTYPES, rows=[1, 7, 33], biased=[False, True], level=LEVELS)
def test_packed_products_equal_torch(
    rows: int, dtype: torch.dtype, biased: bool, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    weight = random(97, 80, dtype=dtype)
    bias = random(97, dtype=dtype, seed=1) if biased else None
    x = random(rows, 80, dtype=dtype, seed=2)
    wide = None if bias is None else bias.float()
    expected = TorchOps().linear([weight.float()], wide, torch.float32)(x.float())
    assert relative_rms(CpuOps().linear([weight], bias, dtype)(x), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 2, 5, 11, 12, 13, 24, 25, 48, 49, 192, 193, 400])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 302), (97, 578), (33, 1540)])
def test_products_of_every_height_and_depth(
    rows: int, outputs: int, inputs: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Register blocks and what is left of them, one and several blocks of the summed index, one and several of rows."""
    use_level(level, monkeypatch)
    weight = random(outputs, inputs, dtype=torch.bfloat16)
    wider = random(rows, inputs + 6, dtype=torch.bfloat16, seed=2)
    x = wider[:, :inputs]
    got = CpuOps().linear([weight], None, torch.bfloat16)(x)
    assert relative_rms(got, x.float() @ weight.float().T) < TOLERANCE[torch.bfloat16]
    alone = CpuOps().linear([weight], None, torch.bfloat16)(x[rows // 2 : rows // 2 + 1])
    assert relative_rms(got[rows // 2 : rows // 2 + 1], alone) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outputs", [97, 96])
def test_a_head_returns_sums_that_were_never_rounded(
    outputs: int, dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    for rows, inputs in ((1, 302), (13, 1540), (200, 64), (3, 15)):
        weight, x = random(outputs, inputs, dtype=dtype), random(rows, inputs + 2, dtype=dtype, seed=2)[:, :inputs]
        exact = x.double() @ weight.double().T
        for ops in (CpuOps(), TorchOps()):
            embed, tied = ops.tied(weight, dtype)
            for head in (ops.head(weight, dtype), tied):
                logits = head(x)
                assert logits.dtype == torch.float32 and relative_rms(logits, exact) < 1e-6
            index = torch.tensor([outputs - 1, 0, 33])
            assert torch.equal(embed(index), weight[index])


@combine(
    dtype=DTYPES,
    rows=[1, 12, 13, 200],
    sizes=[(32, 302, False), (33, 64, True), (48, 1540, True)],
    activation=GATES,
    level=LEVELS,
)
def test_gated_products_equal_torch(
    rows: int,
    sizes: tuple[int, int, bool],
    dtype: torch.dtype,
    activation: GateActivation,
    level: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_level(level, monkeypatch)
    width, inputs, biased = sizes
    weight = random(2 * width, inputs, dtype=dtype) / inputs**0.5
    bias = random(2 * width, dtype=dtype, seed=1) if biased else None
    x = random(rows, inputs, dtype=dtype, seed=2)
    wide = None if bias is None else bias.float()
    exact = TorchOps().gated_linear([weight.float()], wide, torch.float32, activation)(x.float())
    got = CpuOps().gated_linear([weight], bias, dtype, activation)(x)
    assert got.shape == (rows, width)
    assert relative_rms(got, exact) < TOLERANCE[dtype]


@pytest.mark.alone
def test_one_thread_computes_what_two_do() -> None:
    gate_up = random(257, 1024, dtype=torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            runtime.set_num_threads(threads)
            results.append(CpuOps().gated(gate_up, "silu"))
    finally:
        runtime.set_num_threads(before)
    assert torch.equal(*results)


def test_the_kernels_run_on_torch_s_own_threads() -> None:
    assert None not in runtime._openmp()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    ops, x, weight = CpuOps(), torch.empty(0, 64, dtype=dtype), random(64, 64, dtype=dtype)
    embedding, head = ops.tied(weight, dtype)
    assert ops.norm(x, weight[0], 1e-6).shape == (0, 64)
    assert ops.gated(x, "silu").shape == (0, 32)
    assert head(x).shape == ops.linear([weight], None, dtype)(x).shape == (0, 64)
    assert embedding(torch.empty(0, dtype=torch.int64)).shape == (0, 64)
