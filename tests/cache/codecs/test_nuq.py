"""The non-uniform codec by its definition: its losses, and the method's worked numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.attention.reference import rotate
from quire.cache.codecs.nuq import NuqCodec, NuqTables, nuq_layout
from quire.cache.ledger import PAGE_TOKENS
from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.engine.calibration import check_tables
from quire.errors import ConfigError
from tests.effort import examples
from tests.kernels.pages import DTYPES, KINDS, vectors
from tests.nuq_tables import random_tables, tables_of, uniform_codebook
from tests.tiny_models import of_layers, tiny_shape

TWO_BITS = (-1.0, -1 / 3, 1 / 3, 1.0)
"""Uniform centroids over a range."""


def stored(codec: NuqCodec, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [P, D] as pages give them back."""
    keys, values = codec.decode(0, 0, codec.encode(0, 0, k[None], v[None]))
    return keys[0], values[0]


def stored_values(v: torch.Tensor, *, slots: int = 0, codebook: tuple[float, ...] = TWO_BITS) -> torch.Tensor:
    codec = NuqCodec("nuq2", tables_of(torch.zeros(v.shape[1], 2), codebook, value_slots=slots))
    return stored(codec, torch.zeros_like(v), v)[1]


def stored_keys(k: torch.Tensor, codebooks: torch.Tensor, *, slots: int = 0) -> torch.Tensor:
    return stored(NuqCodec("nuq2", tables_of(codebooks, key_slots=slots)), k, torch.zeros_like(k))[0]


def page_of(rows: list[list[float]], dim: int = 16) -> torch.Tensor:
    """Vectors [P, dim] that hold these again and again, in both directions."""
    few = torch.tensor(rows)
    wide = few.repeat(1, -(-dim // few.shape[1]))[:, :dim]
    return wide.repeat(-(-PAGE_TOKENS // len(few)), 1)[:PAGE_TOKENS]


@examples(100)
@given(
    dim=st.sampled_from([16, 48, 64, 80]),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    slots=st.integers(0, 2),
    seed=st.integers(0, 2**20),
)
def test_every_number_becomes_the_nearest_centroid_or_lies_in_a_slot(dim, kind, dtype, slots, seed) -> None:  # type: ignore[no-untyped-def]
    tables = random_tables(1, 1, dim, seed, key_bits=[3], slots=[slots])
    codec = NuqCodec("nuq3", tables)
    k, v = (vectors(kind, (PAGE_TOKENS, dim), dtype, seed + i) for i in (0, 1))
    keys, values = stored(codec, k, v)
    assert keys.isfinite().all() and values.isfinite().all()
    distance = (k.float()[..., None] - tables.key_books[0, 0, :, :8]).abs().amin(-1)
    error = (keys - k.float()).abs()
    assert (error <= distance * (1 + 1e-6) + k.float().abs() * 1e-6 + 1e-7).all(), "not the nearest centroid"
    # A slot holds what is missing as a float16, up to its largest number: the costliest are as good as exact.
    weight = tables.key_weight[0, 0]
    cost = (distance.square() * weight).sort(dim=-1, descending=True).values
    rounding = distance / 1024 + (distance - 65504).clamp_min(0) + k.float().abs() * 1e-6 + 1e-7
    left = cost[:, slots:].sum(-1) * (1 + 1e-4) + slots * (rounding.square() * weight).amax(-1)
    assert ((error.square() * weight).sum(-1) <= left).all(), "a slot was not given to the costliest channel"


@pytest.mark.parametrize("slots", [0, 1, 2])
@pytest.mark.parametrize("constant", [0.0, -0.0, 1.5, -37.25, 3e4, 2.0**-20])
def test_a_constant_value_is_exact_for_any_codebook(constant: float, slots: int) -> None:
    tables = random_tables(1, 1, 16, 1, slots=[slots])
    v = torch.full((PAGE_TOKENS, 16), constant)
    page = NuqCodec("nuq3", tables).encode(0, 0, v[None], v[None])
    assert torch.equal(NuqCodec("nuq3", tables).decode(0, 0, page)[1][0], v)


def test_a_constant_of_more_digits_is_as_exact_as_its_offset() -> None:
    """The offset is a float16: a bfloat16 constant is exact, one of more digits to half a step of it."""
    constants = torch.linspace(-3, 3, PAGE_TOKENS)[:, None].expand(-1, 32)
    assert torch.equal(stored_values(constants.bfloat16()), constants.bfloat16().float())
    assert (stored_values(constants) == constants.half().float()).all()


@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e5, 1e18, 1e30])
@pytest.mark.parametrize("slots", [0, 1, 2])
def test_finite_numbers_never_give_nan(magnitude: float, slots: int, seed: int) -> None:
    codec = NuqCodec("nuq3", random_tables(1, 1, 32, seed, slots=[slots]))
    k, v = magnitude * torch.randn(2, PAGE_TOKENS, 32)
    assert all(part.isfinite().all() for part in stored(codec, k, v))


def test_rotated_keys_cost_a_hundred_times_the_error() -> None:
    """A channel at 10 +- 0.1 whose partner is 0: before rotation it has a half-range of 0.1, after it one of 10."""
    positions = torch.arange(PAGE_TOKENS)
    k = torch.zeros(PAGE_TOKENS, 16)
    k[:, 0] = 10 + 0.1 * torch.linspace(-1, 1, PAGE_TOKENS)[torch.randperm(PAGE_TOKENS)]
    cos, sin = torch.outer(positions, torch.ones(8)).cos(), torch.outer(positions, torch.ones(8)).sin()
    rotated = rotate(k[:, None], (cos, sin), positions)[:, 0]
    errors = []
    for keys in (k, rotated):
        codebooks = uniform_codebook(keys.amin(0), keys.amax(0), 3)
        errors.append((stored_keys(keys, codebooks) - keys).square().mean().sqrt().item())
    assert (rotated[:, 0].amax() - rotated[:, 0].amin()) / 2 == pytest.approx(10, rel=0.02)
    # Both channels of the pair have the error then.
    assert 60 < errors[1] / errors[0] < 200


def test_keys_have_a_range_for_each_channel_and_not_for_each_token() -> None:
    k = page_of([[10, 0.1, 0.3], [11, 0.2, 0.1], [12, 0.3, 0.2], [13, 0.4, 0.0]], 48)
    codebooks = uniform_codebook(k.amin(0), k.amax(0), 2)
    assert (stored_keys(k, codebooks) - k).abs().max() < 1e-7
    # Two bits over a token's own range leave nothing of the two small channels: one centroid for both. Values are
    # stored so, and fitted to their codes: each is off by half their difference, at most 0.2; unfitted, 0.4.
    per_token = stored_values(k)
    small = per_token[:4].view(4, 16, 3)[..., 1:]
    assert (small == small[..., :1]).all()
    assert (per_token - k).abs()[3].max() == pytest.approx(0.2, abs=5e-3)


def test_an_outlier_is_taken_out_before_the_range_is_found() -> None:
    """(0.1, -0.2, 8, 0.3) with two uniform bits: without the 8 the range is -0.2 to 0.3, and codes are 2, 0 and 3."""
    v = page_of([[0.1, -0.2, 0.3] * 5 + [8.0]])
    page = NuqCodec("nuq2", tables_of(torch.zeros(16, 2), TWO_BITS, value_slots=1))
    image = page.encode(0, 0, torch.zeros_like(v)[None], v[None])
    head = page.heads[0][0]
    codes = head.value_lines.unpack(image[:, head.layout.values : head.layout.ranges])[0]
    assert codes[:16].tolist() == [2, 0, 3] * 5 + [3], "the outlier has the top code, and what is missing in its slot"
    values = page.decode(0, 0, image)[1][0]
    assert values[0, 15] == pytest.approx(8.0, abs=4e-3)
    # Decoded over the range itself this would be (0.1333, -0.2, 0.3); fitted to its codes it is nearer on the whole.
    worked = torch.tensor([0.1333, -0.2, 0.3] * 5)
    assert (values[0, :15] - v[0, :15]).square().sum() < (worked - v[0, :15]).square().sum()
    # Left in, it takes all but the lowest code for itself: three numbers become one.
    without = stored_values(v)
    assert without[0, :15].unique().numel() == 1
    assert (without[0, :15] - v[0, :15]).abs().max() > 0.2


def test_slots_take_the_costliest_first_and_what_is_left_stays_clipped() -> None:
    k = torch.zeros(PAGE_TOKENS, 16)
    k[:, 3], k[:, 7], k[:, 11] = 50.0, -90.0, 70.0
    weight = torch.ones(1, 1, 16)
    weight[..., 7] = 0.01
    tables = dataclasses.replace(tables_of(uniform_codebook(-torch.ones(16), torch.ones(16), 2)), key_weight=weight)
    errors = []
    for slots in (0, 1, 2):
        codec = NuqCodec("nuq2", dataclasses.replace(tables, key_slots=torch.tensor([[slots]], dtype=torch.uint8)))
        errors.append((stored(codec, k, k)[0] - k).abs()[0])
    assert [errors[0][channel].item() for channel in (3, 7, 11)] == [49, 89, 69]
    assert (errors[1][11], errors[1][3], errors[1][7]) == (0, 49, 89)
    assert (errors[2][11], errors[2][3], errors[2][7]) == (0, 0, 89), "a cheap channel waits, however far off it is"


@pytest.mark.parametrize("factor", [128.0, 100.0])
def test_values_find_their_range_and_keys_clip_to_theirs(factor: float, seed: int) -> None:
    x = torch.randn(PAGE_TOKENS, 64, generator=torch.Generator().manual_seed(seed))
    codebooks = uniform_codebook(x.amin(0), x.amax(0), 3)

    def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
        return ((found - wanted).square().mean() / wanted.square().mean()).sqrt().item()

    for slots in (0, 1, 2):
        plain = relative(stored_values(x, slots=slots), x)
        assert relative(stored_values(factor * x, slots=slots), factor * x) == pytest.approx(plain, rel=2e-3)
    half = (codebooks[:, 1] - codebooks[:, 0]) / 2
    errors = (stored_keys(x, codebooks) - x).abs()
    assert (errors <= half + 2**-8 * x.abs()).all(), "nearer than half of a level, and a rounding to bfloat16"
    assert errors.max() > 0.9 * half.min(), "no better than that either"
    assert relative(stored_keys(factor * x, codebooks), factor * x) > 0.9, "what was not calibrated for is clipped"


def test_a_page_says_nothing_of_where_it_is() -> None:
    """Equal keys and values give equal bytes, alone or among others."""
    codec = NuqCodec("nuq3", random_tables(1, 1, 64, 5))
    k, v = torch.randn(2, 3, PAGE_TOKENS, 64)
    together = codec.encode(0, 0, k, v)
    assert torch.equal(together, torch.cat([codec.encode(0, 0, k[i : i + 1], v[i : i + 1]) for i in range(3)]))


def test_sizes_of_pages() -> None:
    """Key lines, slots, value lines, ranges: bits per number at head sizes 64 and 128, as the pool counts them."""
    assert nuq_layout(64, 8 * 3, 1, 3, 1).end == 24 * 64 + 192 + 24 * 64 + 256 + 192
    found = {
        (dim, bits): NuqCodec.nominal_page_bytes(dim, bits, 1) * 8 / (2 * PAGE_TOKENS * dim)
        for dim in (64, 128)
        for bits in (4, 3, 2)
    }
    assert found == {
        (64, 4): 4.625, (64, 3): 3.625, (64, 2): 2.625, (128, 4): 4.3125, (128, 3): 3.3125, (128, 2): 2.3125,
    }  # fmt: skip
    codec = NuqCodec("nuq3", random_tables(3, 2, 80, 0))
    assert (codec.page_bytes % 128 == 0).all() and codec.page_bytes.dtype == np.int32


@pytest.mark.parametrize(("dim", "nearest"), [(8, "g4"), (24, "g4"), (72, "g4"), (272, "g4")])
def test_head_sizes_it_cannot_store_are_refused(dim: int, nearest: str) -> None:
    shape = of_layers(tiny_shape("opt"), head_dim=dim)
    with pytest.raises(ConfigError, match=f"multiple of 16 up to 256, not {dim}; use cache.codec {nearest}"):
        resolve(EngineConfig.from_options({"cache.codec": "nuq3", "runtime.device": "cpu"}), shape)


def broken(tables: NuqTables, name: str) -> NuqTables:
    changed = getattr(tables, name).clone()
    if name == "key_order":
        changed[..., 0] = changed[..., 1]
    elif name in ("key_edges", "value_edges"):
        changed[..., 0] = torch.inf
    else:
        changed.view(-1)[0] = torch.nan if changed.is_floating_point() else 6
    return dataclasses.replace(tables, **{name: changed})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(NuqTables)])
def test_unsound_tables_are_refused(field: str) -> None:
    with pytest.raises(
        ConfigError, match=f"the calibration's {field} has values out of range; run quire calibrate again"
    ):
        check_tables(broken(random_tables(2, 2, 32, 0), field), 2, 2, 32)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(NuqTables)])
def test_tables_of_another_shape_are_refused(field: str) -> None:
    tables = random_tables(2, 2, 32, 0)
    other = dataclasses.replace(tables, **{field: getattr(tables, field)[:1]})
    with pytest.raises(ConfigError, match=f"the calibration's {field} is .* needs"):
        check_tables(other, 2, 2, 32)
