"""The group codec by its definition: worked numbers, and independence of groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.codecs.group import GROUP_CHANNELS, GroupCodec
from quire.cache.ledger import PAGE_TOKENS
from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.engine.params import SamplingParams
from quire.errors import ConfigError
from quire.models.shape import ModelShape
from tests.effort import examples
from tests.engines import generate, make_engine
from tests.kernels.pages import DTYPES, KINDS, vectors
from tests.tiny_models import of_layers, tiny_shape


def stored(x: torch.Tensor) -> torch.Tensor:
    """Vectors [P, D] as they come back, as keys and as values."""
    codec = GroupCodec(x.shape[1])
    pages = codec.encode(0, 0, x[None], x[None])
    assert pages.shape == (1, codec.page_bytes) and codec.page_bytes % 128 == 0
    k, v = codec.decode(0, 0, pages)
    assert torch.equal(k, v)
    return k[0]


def codes_of(x: torch.Tensor) -> list[int]:
    """The codes of the first key of vectors [P, D]."""
    pages = GroupCodec(x.shape[1]).encode(0, 0, x[None], x[None])
    first = pages[0, : x.shape[1] // 2].tolist()
    return [byte & 15 for byte in first] + [byte >> 4 for byte in first]


def page_of(row: list[float]) -> torch.Tensor:
    return torch.tensor(row).expand(PAGE_TOKENS, -1)


def test_sixteen_equal_steps_are_exact() -> None:
    x = page_of([float(i) for i in range(16)])
    assert codes_of(x) == list(range(16))
    assert torch.equal(stored(x), x)


def test_the_worked_group() -> None:
    """(-1, 0, 0.5, 2) has codes 0, 5, 8, 15, which stand for -1, 0, 0.6, 2: a step of 0.2."""
    x = page_of([-1.0, 0.0, 0.5, 2.0])
    assert codes_of(x) == [0, 5, 8, 15]
    torch.testing.assert_close(stored(x)[0], torch.tensor([-1.0, 0.0, 0.6, 2.0]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("constant", [0.0, -0.0, 1.5, -1000.5, 6e4, 2.0**-24])
def test_a_constant_group_is_exact(constant: float) -> None:
    assert torch.equal(stored(page_of([constant] * 80)), page_of([constant] * 80))


@pytest.mark.parametrize(("dim", "groups"), [(64, 1), (66, 2), (80, 2), (128, 2), (130, 3), (16, 1), (512, 8)])
def test_groups_do_not_notice_each_other(dim: int, groups: int, seed: int) -> None:
    x = torch.randn(PAGE_TOKENS, dim, generator=torch.Generator().manual_seed(seed))
    assert GroupCodec(dim).page_bytes == PAGE_TOKENS * dim + groups * 512
    before = stored(x)
    for group in range(groups):
        mine = torch.arange(dim) // GROUP_CHANNELS == group
        changed = torch.where(mine, 1000 * x, x)
        after = stored(changed)
        assert torch.equal(after[:, ~mine], before[:, ~mine])
        relative = (after - changed)[:, mine].norm() / changed[:, mine].norm()
        assert relative < 0.12, "a group found no range of its own"


def test_tokens_do_not_notice_each_other(seed: int) -> None:
    x = torch.randn(PAGE_TOKENS, 64, generator=torch.Generator().manual_seed(seed))
    changed = x.clone()
    changed[7] *= 500
    assert torch.equal(stored(changed)[torch.arange(PAGE_TOKENS) != 7], stored(x)[torch.arange(PAGE_TOKENS) != 7])


@examples(150)
@given(
    dim=st.sampled_from([2, 16, 62, 64, 66, 80, 96, 128, 256, 512]),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
)
def test_no_number_is_off_by_more_than_half_a_step(dim, kind, dtype, seed) -> None:  # type: ignore[no-untyped-def]
    x = vectors(kind, (PAGE_TOKENS, dim), dtype, seed).float()
    error = (stored(x) - x).abs()
    for start in range(0, dim, GROUP_CHANNELS):
        part = x[:, start : start + GROUP_CHANNELS]
        low, high = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        # Low and step are float16: up to 65,504, and at least 2^-25 from the next one.
        largest = torch.maximum(low.abs(), high.abs())
        rounding = largest / 1024 + 2.0**-20 + (largest - 65504).clamp_min(0) + (high - low) / 1024
        assert (error[:, start : start + GROUP_CHANNELS] <= (high - low) / 30 + rounding).all()


@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e5, 1e30, 3e38])
def test_finite_numbers_never_give_nan(magnitude: float) -> None:
    x = magnitude * torch.randn(PAGE_TOKENS, 80).clamp(-1, 1)
    assert stored(x).isfinite().all()


def test_bits_of_a_number() -> None:
    assert {dim: GroupCodec(dim).page_bytes * 8 / (2 * PAGE_TOKENS * dim) for dim in (64, 128)} == {64: 4.5, 128: 4.5}


@pytest.mark.parametrize("dim", [15, 65, 514])
def test_head_sizes_it_cannot_store_are_refused(dim: int) -> None:
    shape = of_layers(tiny_shape("opt"), head_dim=dim)
    with pytest.raises(
        ConfigError, match=f"g4 stores heads whose size is a multiple of 2 up to 512, not {dim}; use cache.codec dense"
    ):
        resolve(EngineConfig.from_options({"cache.codec": "g4", "runtime.device": "cpu"}), shape)


PROMPT = [index * 37 % 256 for index in range(318)]


@pytest.mark.parametrize("of", [tiny_shape(), tiny_shape("opt", head_dim=16, hidden_size=64)], ids=["rotary", "opt"])
def test_an_engine_of_group_codes_answers_as_the_reference_does(of: ModelShape) -> None:
    """Without a calibration; twice, the second time from the cache. Sinks are for other codecs."""
    answers, params = [], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    for backend in ("cpu", "reference"):
        engine = make_engine(of, **{"cache.codec": "g4", "attention.backend": backend, "cache.sink_tokens": 5})
        manager = engine.scheduler.manager
        answers += [generate(engine, [PROMPT], params)[0], generate(engine, [PROMPT], params)[0]]
        assert manager.table.sealed_codec.name == "g4" and manager.table.sinks is None
        assert (
            manager.stats()["bytes_cached"]
            == 5 * manager.statistics.chunk_bytes
            == 5 * of.num_layers * of.num_kv_heads * (64 * of.head_dim + 512)
        )
    assert answers[1:] == answers[:1] * 3
    assert engine.namespace.codec == "g4"


def test_group_codes_take_less_than_a_third_of_the_cache() -> None:
    options = {"runtime.device": "cpu", "cache.memory": 64 << 20}
    found = [
        resolve(EngineConfig.from_options({**options, "cache.codec": codec}), tiny_shape(head_dim=64))[1]
        for codec in ("dense", "g4")
    ]
    assert found[1].bytes_per_token / found[0].bytes_per_token == pytest.approx(4.5 / 32)
