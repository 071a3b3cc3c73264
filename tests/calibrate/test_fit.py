"""From samples to tables: the choice of codebooks, their costs, and the allocation of bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.cache.codecs.nuq import NuqCodec, NuqTables, nuq_layout
from quire.calibrate import fit as fit_module
from quire.calibrate.bit_allocation import allocate_bits, allocate_evenly, page_step
from quire.calibrate.fit import KINDS, Codebook, LayerFit, fit_layer, padded, quantize_dequantize, uniform_tables
from quire.calibrate.samples import LayerSamples
from quire.calibrate.tables import make_tables
from quire.engine.calibration import check_tables

HEADS, CHANNELS, TOKENS = 2, 32, 512


def samples(tokens: int = TOKENS, seed: int = 0) -> LayerSamples:
    """Channels and heads that differ in size and in what an error costs, with a few costs that are huge."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw)

    size = (tokens, HEADS, CHANNELS)
    scale = torch.logspace(-1, 1, CHANNELS)
    keys = normal(*size) * scale + 3 * scale * torch.linspace(-1, 1, CHANNELS)
    values = normal(*size) * torch.tensor([1.0, 4.0])[:, None]
    costs = [(normal(*size) ** 2) * (1 + 300 * (torch.rand(tokens, 1, 1, generator=draw) > 0.98)) for _ in range(2)]
    return LayerSamples(keys, values, costs[0] / scale, costs[1])


@pytest.fixture(scope="module")
def fit() -> LayerFit:
    return fit_layer(samples(), 128, 1)


def test_costs_are_those_of_pages_on_tokens_that_were_held_out(fit: LayerFit) -> None:
    train, held_out = samples().split(TOKENS - 128)
    limit = 50 * train.key_cost.mean(0)
    for kind, bits in (("uniform", 2), ("own", 3), ("fisher", 5)):
        tables = uniform_tables(fit.key_codebooks[kind, bits], fit.key_weight, 1, fit.value_codebooks[kind, bits], 1)
        k, v = quantize_dequantize(tables, held_out.keys, held_out.values)
        codec = NuqCodec("trial", tables)
        for head in range(HEADS):  # as the codec's definition has it
            pages = codec.encode(
                0, head, held_out.keys[:, head].view(-1, 64, CHANNELS), held_out.values[:, head].view(-1, 64, CHANNELS)
            )
            keys, values = codec.decode(0, head, pages)
            assert torch.equal(k[:, head], keys.view(-1, CHANNELS)) and torch.equal(
                v[:, head], values.view(-1, CHANNELS)
            )
        cost = ((k - held_out.keys) ** 2 * torch.minimum(held_out.key_cost, limit)).sum(0).double()
        torch.testing.assert_close(fit.key_cost[kind][..., bits], cost)
        cost = ((v - held_out.values) ** 2 * torch.minimum(held_out.value_cost, 50 * train.value_cost.mean(0))).sum(
            (0, 2)
        )
        torch.testing.assert_close(fit.value_cost[kind][..., bits], cost.double())
    assert (fit.value_cost["own"][:, 0] == torch.inf).all()
    torch.testing.assert_close(fit.key_weight, torch.minimum(train.key_cost, limit).mean(0))


def test_each_bit_pays_and_books_beat_even_ones(fit: LayerFit) -> None:
    for kind in KINDS:
        first = 2 if kind == "uniform" else 0  # the ends of a range alone are worse than its middle
        keys, values = fit.key_cost[kind].sum((0, 1))[first:], fit.value_cost[kind].sum(0)[max(1, first) :]
        assert (keys.diff() < 0).all() and (values.diff() < 0).all(), kind
    for bits in (2, 3):
        assert float(fit.key_cost["own"][..., bits].sum()) < 0.9 * float(fit.key_cost["uniform"][..., bits].sum())


def test_the_same_samples_give_the_same_codebooks(fit: LayerFit) -> None:
    again = fit_layer(samples(), 128, 1)
    for key, codebook in fit.key_codebooks.items():
        assert torch.equal(again.key_codebooks[key].centroids, codebook.centroids)
    for key, codebook in fit.value_codebooks.items():
        assert torch.equal(again.value_codebooks[key].centroids, codebook.centroids)


def test_few_kinds_are_the_same_as_among_many(fit: LayerFit) -> None:
    few = fit_layer(samples(), 128, 1, kinds=("own", "uniform"))
    assert set(few.key_cost) == {"own", "uniform"} and ("plain", 2) not in few.value_codebooks
    for kind in few.key_cost:
        assert torch.equal(few.key_cost[kind], fit.key_cost[kind])
        assert torch.equal(few.value_cost[kind], fit.value_cost[kind])


def test_fisher_books_of_keys_are_means_weighted_with_cost_times_range_squared() -> None:
    """Each centroid is the mean of what is nearest to it, and under no other weights is it that."""
    drawn = torch.Generator().manual_seed(3)
    keys = torch.randn(4000, 1, 8, generator=drawn) * torch.logspace(-1, 1, 8)
    keys[..., ::2] = keys[..., ::2].abs()  # other shapes in other ranges
    cost = torch.rand(4000, 1, 8, generator=drawn) * torch.logspace(3, 0, 8) * (keys / keys.std(0)).abs()
    train = LayerSamples(keys, torch.randn(4000, 1, 8, generator=drawn), cost, torch.ones(4000, 1, 8))
    codebooks, _ = fit_module._key_codebooks(train, ("fisher",), False)
    low, high = fit_module._inner_range(keys.flatten(1))
    middle, reach = (high + low) / 2, (high - low) / 2
    unit = (keys.flatten(1) - middle) / reach
    inside = unit.abs() <= 1
    for bits in (1, 2):
        codebook = (codebooks["fisher", bits].centroids[0, 0] - middle[0]) / reach[0]
        nearest = (unit[..., None] - codebook).abs().argmin(-1)

        def means(weight: torch.Tensor, nearest: torch.Tensor = nearest, bits: int = bits) -> torch.Tensor:
            cells = [(nearest == code) & inside for code in range(1 << bits)]
            return torch.stack([(weight * unit)[cell].sum() / weight[cell].sum() for cell in cells])

        fisher = train.key_cost.flatten(1)
        off = {
            name: float((means(weight) - codebook).abs().max())
            for name, weight in {"it": fisher * reach**2, "no range": fisher, "no cost": reach**2 + 0 * fisher}.items()
        }
        assert off["it"] < 0.01 < 0.03 < min(off["no range"], off["no cost"]), off


def test_value_codebooks_follow_the_tokens_whose_errors_cost_most() -> None:
    """Errors grow with a token's range, and cost what the Fisher information says."""
    drawn = torch.Generator().manual_seed(4)
    two_peaks = (torch.randint(0, 2, (600, 1, 64), generator=drawn) * 2 - 1) + 0.05 * torch.randn(
        600, 1, 64, generator=drawn
    )
    even = 100 * (2 * torch.rand(600, 1, 64, generator=drawn) - 1)
    ones = torch.ones(600, 1, 64)

    def codebook(values: torch.Tensor, cost: torch.Tensor, kind: str) -> torch.Tensor:
        train = LayerSamples(values, values, cost, cost)
        return fit_module._value_codebooks(train, 0, (kind,), False)[kind, 2].centroids[0]

    both, flat = torch.cat((two_peaks, even)), torch.cat((ones, ones))
    of_peaks, of_even = codebook(two_peaks, ones, "plain"), codebook(even, ones, "plain")
    assert (of_peaks - of_even).abs().max() > 0.1
    for kind in ("plain", "fisher", "own"):
        torch.testing.assert_close(codebook(both, flat, kind), of_even, atol=0.03, rtol=0)
    dear = torch.cat((1e8 * ones, ones))
    torch.testing.assert_close(codebook(both, dear, "fisher"), of_peaks, atol=0.03, rtol=0)
    torch.testing.assert_close(codebook(both, dear, "plain"), of_even, atol=0.03, rtol=0)


def test_own_books_follow_their_channels(fit: LayerFit) -> None:
    scale = samples().keys.std(0)
    spread = fit.key_codebooks["own", 4].centroids
    assert ((spread[..., -1] - spread[..., 0]) / scale).min() > 2
    values = fit.value_codebooks["own", 3].centroids
    assert not torch.equal(values[0], values[1])
    assert torch.equal(fit.value_codebooks["plain", 3].centroids[0], fit.value_codebooks["plain", 3].centroids[1])


@pytest.mark.parametrize("kind", KINDS)
def test_q_norm_moves_what_codes_stand_for_and_not_the_codes(kind: str, fit: LayerFit) -> None:
    normed = fit_layer(samples(), 128, 0, kinds=(kind,), q_norm=True)
    train, _ = samples().split(TOKENS - 128)
    plain, moved = fit.key_codebooks[kind, 2], normed.key_codebooks[kind, 2]
    assert torch.equal(plain.centroids, plain.stands_for) and torch.equal(plain.centroids, moved.centroids)
    assert not torch.equal(moved.centroids, moved.stands_for)
    edges, codebooks = padded(moved)
    assert torch.equal(edges, padded(plain)[0]) and torch.equal(codebooks[..., :4], moved.stands_for)
    before, after = (
        quantize_dequantize(
            uniform_tables(codebook, fit.key_weight, 0, fit.value_codebooks[kind, 2], 0), train.keys, train.values
        )[0]
        for codebook in (plain, moved)
    )
    pooled = (train.keys - train.keys.mean(0)).std(0)
    found = [float((((each - each.mean(0)).std(0) / pooled).log().mean()).exp()) for each in (before, after)]
    if kind != "uniform":  # k-means loses deviation, an even codebook adds it
        assert found[0] < 0.97
    assert abs(found[1] - 1) < min(0.03, abs(found[0] - 1))


def costs(layers: int = 4, seed: int = 0, channels: int = 64, heads: int = 3) -> tuple[Tensor, Tensor]:
    """Of layers whose channels and heads differ by orders of magnitude; a bit quarters a cost."""
    draw = torch.Generator().manual_seed(seed)
    falling = 4.0 ** -torch.arange(6, dtype=torch.float64)

    def spread(*size: int) -> Tensor:
        return (torch.randn(*size, generator=draw) * 2).exp().double()

    keys = spread(layers, 1, 1, 1) * spread(layers, heads, channels, 1) * falling
    values = channels * spread(layers, heads, 1) * falling
    values[..., 0] = torch.inf
    return keys, values


@pytest.mark.parametrize("slots", [0, 1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("channels", [32, 64, 128])
def test_bits_are_spent_within_the_budget_and_better_than_evenly(channels: int, bits: int, slots: int) -> None:
    keys, values = costs(channels=channels)
    chosen, plain = allocate_bits(keys, values, bits, slots), allocate_evenly(keys, values, bits, slots)
    assert (plain.page_bytes == NuqCodec.nominal_page_bytes(channels, bits, slots)).all()
    assert int(chosen.page_bytes.sum()) <= int(plain.page_bytes.sum())
    assert int(chosen.page_bytes.sum()) > 0.97 * int(plain.page_bytes.sum()), "bytes are left over"
    assert (chosen.page_bytes % page_step(channels) == 0).all()
    assert chosen.cost < 0.7 * plain.cost
    assert int(chosen.key_bits.min()) >= max(1, bits - 1) and int(chosen.value_bits.min()) >= max(2, bits - 1)
    assert len(chosen.key_bits.unique()) > 1
    pairs = keys[..., 2].unflatten(2, (2, -1)).sum(2).gather(2, chosen.key_order)
    assert (pairs.diff(dim=-1) <= 0).all(), "the costliest pairs come first"
    total = 0.0
    for index in torch.cartesian_prod(torch.arange(4), torch.arange(3)):
        at = tuple(index.tolist())
        widths, value_width = chosen.key_bits[at], int(chosen.value_bits[at])
        layout = nuq_layout(channels, int(widths.sum()), slots, value_width, slots)
        assert layout.page_bytes == int(chosen.page_bytes[at])
        for place, pair in enumerate(chosen.key_order[at].tolist()):
            total += float(keys[at][[pair, pair + channels // 2], int(widths[place // 4])].sum())
        total += float(values[at][value_width])
    assert chosen.cost == pytest.approx(total)


def test_equal_costs_are_spent_evenly() -> None:
    falling = 4.0 ** -torch.arange(6, dtype=torch.float64)
    keys, values = falling.expand(2, 2, 64, 6), (64 * falling).expand(2, 2, 6).clone()
    values[..., 0] = torch.inf
    chosen = allocate_bits(keys, values, 3, 1)
    assert (chosen.value_bits == 3).all() and (chosen.key_bits == 3).all()
    assert chosen.cost == allocate_evenly(keys, values, 3, 1).cost


def test_tables_take_the_kind_that_costs_least_and_the_bits_that_were_spent() -> None:
    fits = [fit_layer(samples(seed=seed), 128, 1) for seed in range(2)]
    tables, report = make_tables(fits, 3, 1)
    codec = NuqCodec("nuq3", tables)
    for layer, (fit, said) in enumerate(zip(fits, report["layers"], strict=True)):
        cost = {kind: float(fit.key_cost[kind][..., 3].sum()) for kind in KINDS}
        assert said["keys"] == min(cost, key=lambda kind: cost[kind])
        assert said["page_bytes"] == codec.page_bytes[layer].tolist()
        for head in range(HEADS):
            order, widths = tables.key_order[layer, head].tolist(), tables.key_bits[layer, head].tolist()
            for place, pair in enumerate(order):
                codebook = fit.key_codebooks[said["keys"], widths[place // 4]].centroids
                for channel in (pair, pair + CHANNELS // 2):
                    found = tables.key_books[layer, head, channel]
                    assert torch.equal(found[: codebook.shape[-1]], codebook[head, channel])
            width = int(tables.value_bits[layer, head])
            assert torch.equal(
                tables.value_books[layer, head, : 1 << width],
                fit.value_codebooks[said["values"], width].centroids[head],
            )
    assert report["held_out_cost"]["chosen"] < report["held_out_cost"]["same bits everywhere"]
    assert sum(report["key_books"].values()) == len(fits)
    mean = float(codec.page_bytes.mean())
    assert mean <= NuqCodec.nominal_page_bytes(CHANNELS, 3, 1)
    assert report["bits_per_element"] == pytest.approx(mean * 8 / (2 * 64 * CHANNELS))

    tables, report = make_tables(fits, 3, 1, kinds=("uniform",), spends=False)
    assert (tables.key_bits == 3).all() and (tables.value_bits == 3).all()
    assert (
        report["key_books"] == {"uniform": 2}
        and report["held_out_cost"]["chosen"] == report["held_out_cost"]["same bits everywhere"]
    )


def test_tables_of_one_width_are_what_pages_need() -> None:
    keys, values = torch.randn(2, 32, 8).sort(-1).values, torch.randn(2, 4).sort(-1).values
    tables = uniform_tables(Codebook(keys, keys), torch.ones(2, 32), 2, Codebook(values, values), 0)
    assert isinstance(tables, NuqTables)
    check_tables(tables, 1, 2, 32)
    assert (tables.key_bits == 3).all() and (tables.value_bits == 2).all()
    torch.testing.assert_close(tables.key_edges[0, ..., :7], (keys[..., 1:] + keys[..., :-1]) / 2)
    assert (tables.key_edges[0, ..., 7:] == torch.inf).all()
