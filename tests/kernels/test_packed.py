"""Products with packed blocks, compared with the numbers that models.quants decodes from the blocks."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import runtime
from quire.kernels.memory import HugePageAllocator
from quire.models.cpu_ops import CpuOps
from quire.models.cpu_panels import KINDS as PANEL_KINDS
from quire.models.cpu_panels import Panels
from quire.models.layers import GatedLinear, TorchOps
from quire.models.quants import BLOCK_KINDS, Blocks, Weight, loaded_row_bytes, plain
from tests.effort import combine
from tests.packed_blocks import KINDS, random_blocks

from .pages import LEVELS, use_level

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

ROUNDED = {torch.float32: 2.0**-29, torch.bfloat16: 2.0**-15, torch.float16: 2.0**-15}
"""What a row's number may lose, of the largest of its 32 neighbours."""


def random(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) / 8).to(dtype)


def numbers(parts: list[Weight]) -> torch.Tensor:
    return torch.cat([plain(part, torch.float32) if isinstance(part, Blocks) else part.float() for part in parts])


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact.double()).abs().max() / exact.double().abs().max()).item()


def assert_sums(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Each sum is off by what the roundings of its row, and float32, explain."""
    wide, by = x.double(), weight.double()
    largest = torch.nn.functional.pad(wide.abs(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)).amax(2)
    largest = largest.repeat_interleave(32, 1)[:, : x.shape[1]]
    bound = (ROUNDED[x.dtype] * largest + 2.0**-22 * wide.abs()) @ by.abs().T
    assert ((got.double() - wide @ by.T).abs() <= bound).all()


def test_every_type_that_is_decoded_is_multiplied() -> None:
    assert set(KINDS) == PANEL_KINDS == BLOCK_KINDS


@combine(
    kind=KINDS,
    dtype=DTYPES,
    level=LEVELS,
    rows=[1, 2, 3, 4, 5, 13, 40, 50, 97, 193, 200],
    size=[(70, 512), (33, 1280)],
)
def test_products_are_those_of_the_file_s_numbers(
    kind: str, size: tuple[int, int], rows: int, dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits in float32, so that nothing hides behind a rounding; the same sums in 16 bits are rounded once."""
    use_level(level, monkeypatch)
    blocks = random_blocks(kind, *size)
    x = random(rows, size[1] + 2, dtype=dtype, seed=1)[:, : size[1]]
    head = CpuOps().head(blocks, dtype)(x)
    assert head.dtype == torch.float32
    assert_sums(head, x, plain(blocks, torch.float32))
    product = CpuOps().linear([blocks], None, dtype)(x)
    assert torch.equal(product, head.to(dtype))


@combine(kind=KINDS, dtype=DTYPES, level=LEVELS)
def test_whole_numbers_are_multiplied_without_an_error(
    kind: str, dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of 1, whole minima, rows of whole numbers: every sum is a number of float32, in whatever order."""
    use_level(level, monkeypatch)
    blocks = random_blocks(kind, 45, 512, halves=(1.0, 2.0))
    x = torch.randint(-8, 9, (23, 512), generator=torch.Generator().manual_seed(3)).to(dtype)
    exact = x.double() @ plain(blocks, torch.float32).double().T
    for rows in (1, 2, 3, 4, 23):
        assert torch.equal(CpuOps().head(blocks, dtype)(x[:rows]).double(), exact[:rows])


@combine(kind=KINDS, dtype=DTYPES, level=LEVELS)
def test_rows_of_an_embedding_are_decoded_to_the_bit(
    kind: str, dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    blocks = random_blocks(kind, 131, 256)
    tokens = torch.tensor([0, 130, 31, 32, 64] * 9)
    embed, _ = CpuOps().tied(blocks, dtype)
    for rows in (embed(tokens), CpuOps().embedding(blocks, dtype)(tokens), TorchOps().embedding(blocks, dtype)(tokens)):
        assert torch.equal(rows, plain(blocks, dtype)[tokens])


@combine(dtype=DTYPES, rows=[1, 5, 40], level=LEVELS)
def test_types_mix_in_one_product(dtype: torch.dtype, rows: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As q, k and v of a file that spends more on v; beside a matrix of the model's own numbers, too."""
    use_level(level, monkeypatch)
    parts: list[Weight] = [
        random_blocks("Q4_K", 70, 512), random_blocks("Q6_K", 31, 512, 1), random(20, 512, dtype=dtype),
        random_blocks("Q8_0", 32, 512, 2),
    ]  # fmt: skip
    bias, x = random(153, dtype=dtype), random(rows, 512, dtype=dtype, seed=4)
    exact = x.double() @ numbers(parts).double().T + bias.double()
    for ops in (CpuOps(), TorchOps()):
        got = ops.linear(parts, bias, dtype)(x)
        assert error(got, exact) < {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]


@combine(kind=KINDS, dtype=DTYPES, rows=[1, 5, 40], width=[32, 33, 48], level=LEVELS)
def test_gated_products_are_those_of_the_file_s_numbers(
    kind: str, width: int, rows: int, dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    blocks, bias = random_blocks(kind, 2 * width, 256), random(2 * width, dtype=dtype)
    x = random(rows, 256, dtype=dtype, seed=2) / 64
    exact = TorchOps().gated_linear([plain(blocks, torch.float32)], bias.float(), torch.float32, "gelu-tanh")(x.float())
    got = CpuOps().gated_linear([blocks], bias, dtype, "gelu-tanh")
    assert isinstance(got, Panels)
    assert error(got(x), exact) < {torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]


def test_gates_of_another_type_than_what_they_let_through_gate_in_a_pass_of_their_own() -> None:
    parts: list[Weight] = [random_blocks("Q4_K", 33, 256), random_blocks("Q6_K", 33, 256, 1)]
    x = random(5, 256, dtype=torch.bfloat16)
    exact = TorchOps().gated_linear([numbers(parts)], None, torch.float32, "silu")(x.float())
    got = CpuOps().gated_linear(parts, None, torch.bfloat16, "silu")
    assert isinstance(got, GatedLinear) and error(got(x), exact) < 2e-2


@pytest.mark.parametrize("inputs", [64, 72, 65, 10])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_last_group_may_be_short(inputs: int, dtype: torch.dtype) -> None:
    blocks, x = random_blocks("G4", 40, inputs), random(7, inputs, dtype=dtype)
    for rows in (1, 7):
        assert_sums(CpuOps().head(blocks, dtype)(x[:rows]), x[:rows], plain(blocks, torch.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 9])
def test_a_row_that_is_not_finite_stays_so_and_alone(kind: str, dtype: torch.dtype, rows: int) -> None:
    blocks = random_blocks(kind, 40, 512)
    clean = random(rows, 512, dtype=dtype)
    expected = CpuOps().head(blocks, dtype)(clean)
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = clean.clone()
        x[1, 300] = bad
        got = CpuOps().head(blocks, dtype)(x)
        assert not got[1].isfinite().any()
        assert torch.equal(got[0], expected[0]) and torch.equal(got[2:], expected[2:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiny_and_huge_rows_and_nothing_at_all(dtype: torch.dtype) -> None:
    blocks = random_blocks("Q5_K", 40, 512)
    weight = plain(blocks, torch.float32)
    scales = [1e-7, 1e3] if dtype == torch.float16 else [1e-25, 1e20]
    for scale in scales:
        x = (random(3, 512, dtype=torch.float32).double() * scale).to(dtype)
        assert_sums(CpuOps().head(blocks, dtype)(x), x, weight)
    assert (CpuOps().head(blocks, dtype)(torch.zeros(2, 512, dtype=dtype)) == 0).all()
    assert CpuOps().head(blocks, dtype)(torch.empty(0, 512, dtype=dtype)).shape == (0, 40)
    assert CpuOps().embedding(blocks, dtype)(torch.empty(0, dtype=torch.int64)).shape == (0, 512)


def test_one_huge_input_costs_its_neighbours_less_than_its_own_rounding() -> None:
    """2^14 times the others of its 32."""
    blocks = random_blocks("Q4_1", 64, 64)
    weight = plain(blocks, torch.float32)
    x = random(1, 64, dtype=torch.bfloat16)
    x[0, 5] = 2048
    got = CpuOps().head(blocks, torch.bfloat16)(x)
    assert_sums(got, x, weight)
    lost = (got.double() - x.double() @ weight.double().T).abs()
    assert lost.mean() < (2.0**-9 * 2048 * weight[:, 5].abs()).mean() / 4


@pytest.mark.alone
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_any_number_of_threads_finds_the_same_bits(rows: int) -> None:
    blocks, x = random_blocks("Q6_K", 130, 512), random(rows, 512, dtype=torch.bfloat16)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            runtime.set_num_threads(threads)
            found.append(CpuOps().linear([blocks], None, torch.bfloat16)(x))
    finally:
        runtime.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_panels_take_the_bytes_that_are_announced() -> None:
    """Those of the file, but that six bits take a byte: 3 % more at most."""
    for kind in KINDS:
        blocks = random_blocks(kind, 320, 512)
        product = Panels([blocks], None, torch.bfloat16, HugePageAllocator())
        (panels,) = product._panels
        assert blocks.raw.numel() <= len(panels) == 320 * loaded_row_bytes(kind, 512) <= 1.03 * blocks.raw.numel()
