"""Codebooks: the method's worked numbers, histograms compared with direct sums, codebooks compared with the optimum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.calibrate.codebooks import BINS, Histogram


def histogram(x: list[float], weight: list[float] | None = None) -> Histogram:
    """Of one channel over its own range."""
    points = torch.tensor(x)[:, None]
    weights = torch.ones_like(points) if weight is None else torch.tensor(weight)[:, None]
    return Histogram.of(points, [weights], points.amin(0), points.amax(0))[0]


def nearest_error(x: Tensor, weight: Tensor, codebook: Tensor) -> Tensor:
    """Of x [N] to the nearest of a codebook [n], summed directly."""
    return (weight.double() * (x.double()[:, None] - codebook).square().amin(1)).sum()


@pytest.mark.parametrize(
    ("x", "weight", "codebook"),
    [
        ([-1, -0.9, -0.1, 0, 0.1, 0.2, 0.9, 1], None, [-0.95, -0.05, 0.15, 0.95]),
        ([0, 1, 2, 10], None, [1, 10]),
        ([0, 1, 2, 10], [1, 1, 100, 1], [1.970588, 10]),
        ([0, 1, 2, 10], [1, 1, 1, 0.01], [0.5, 2.079208]),
        ([0, 1, 2, 10], [1, 100, 100, 1], [0.990099, 2, 10]),
    ],
)
def test_worked_numbers_of_weighted_k_means(x: list[float], weight: list[float] | None, codebook: list[float]) -> None:
    found = histogram(x, weight).codebooks(len(codebook))[0]
    torch.testing.assert_close(found, torch.tensor(codebook, dtype=torch.float64), atol=1e-6, rtol=0)


def test_worked_errors_of_uniform_and_non_uniform_codes() -> None:
    found = histogram([-1, -0.9, -0.1, 0, 0.1, 0.2, 0.9, 1])
    assert float(found.error(found.codebooks(4))) == pytest.approx(0.020, abs=1e-6)
    even = torch.linspace(-1, 1, 4, dtype=torch.float64)[None]
    assert float(found.error(even)) == pytest.approx(0.2578, abs=5e-5)
    assert float(histogram([0, 1, 2, 10]).error(torch.tensor([[1.0, 10.0]]).double())) == pytest.approx(2)


@pytest.mark.parametrize(
    ("x", "codebook", "scale", "offset"),
    [
        ([-1, -0.5, 0.5, 1], [-0.75, 0.75], 1.054093, 0.0),
        ([0, 0.2, 0.4, 1], [0.1, 0.9], 1.080123, 0.075963),
    ],
)
def test_worked_numbers_of_q_norm(x: list[float], codebook: list[float], scale: float, offset: float) -> None:
    centroids = torch.tensor([codebook], dtype=torch.float64)
    torch.testing.assert_close(histogram(x).q_norm(centroids), centroids * scale + offset, atol=2e-6, rtol=0)


def test_q_norm_of_one_centroid_or_a_constant_moves_the_mean_only() -> None:
    one = histogram([0, 1, 5]).q_norm(torch.tensor([[0.5]]).double())
    assert one.tolist() == [[2.0]]
    same = histogram([3, 3, 3]).q_norm(torch.tensor([[2.0, 3.0]]).double())
    assert same.tolist() == [[2.0, 3.0]]  # what is there reads 3 already
    assert same.isfinite().all()


def test_q_norm_restores_mean_and_deviation() -> None:
    x, weight = torch.randn(3000, 2) * torch.tensor([1.0, 30.0]) + 5, torch.rand(3000, 2)
    (found,) = Histogram.of(x, [weight], x.amin(0), x.amax(0))
    for size in (2, 4, 8):
        codebook = found.codebooks(size)
        moved = found.q_norm(codebook)
        for channel in range(2):
            code = (x[:, channel, None].double() - codebook[channel]).abs().argmin(1)
            stored, w = moved[channel][code], weight[:, channel].double()
            mean = (w * stored).sum() / w.sum()
            true = (w * x[:, channel]).sum() / w.sum()
            assert float(mean) == pytest.approx(float(true), abs=0.005 * float(x[:, channel].std()))
            deviation, wanted = ((w * (y - m) ** 2).sum() for y, m in ((stored, mean), (x[:, channel].double(), true)))
            assert float(deviation) == pytest.approx(float(wanted), rel=1e-2)


def test_histograms_are_direct_sums() -> None:
    x, weights = torch.randn(500, 3), [torch.rand(500, 3), torch.rand(500, 3)]
    low, high = torch.tensor([-1.0, -3, 0]), torch.tensor([1.0, 3, 0.5])
    found = Histogram.of(x, weights, low, high)
    inside = x.clamp(low, high).double()
    for histogram, weight in zip(found, weights, strict=True):
        for channel in range(3):
            edges = low[channel] + (high - low)[channel] / BINS * torch.tensor([100, 700])
            before = inside[:, channel, None] < edges  # [N, 2]
            for power, sums in enumerate((histogram.weight, histogram.first, histogram.second)):
                each = weight[:, channel].double() * inside[:, channel] ** power
                torch.testing.assert_close(sums[channel, -1], each.sum())
                torch.testing.assert_close(
                    sums[channel, [100, 700]], (each[:, None] * before).sum(0), atol=1e-3, rtol=0
                )
            assert float(histogram.weight[channel, 0]) == 0
    pooled = Histogram.of(x, weights[:1], low[:1].expand(3), high[:1].expand(3))[0].pooled()
    torch.testing.assert_close(pooled.weight[0, -1], weights[0].double().sum())
    assert len(pooled.weight) == 1


def test_errors_are_those_of_the_nearest_centroid() -> None:
    x, weight = torch.randn(400, 4), torch.rand(400, 4)
    (found,) = Histogram.of(x, [weight], x.amin(0), x.amax(0))
    codebook = (torch.rand(4, 8).double() * 4 - 2).sort(1).values
    expected = torch.stack([nearest_error(x[:, c], weight[:, c], codebook[c]) for c in range(4)])
    torch.testing.assert_close(found.error(codebook), expected, rtol=2e-3, atol=0)  # boundaries lie between bins


def best_error(x: Tensor, weight: Tensor, size: int) -> float:
    """Of the best codebook there is, by dynamic programming over x [N]."""
    x, order = x.double().sort()
    weight = weight.double()[order]
    zero = torch.zeros(1, dtype=torch.float64)
    w, wx, wxx = (torch.cat((zero, (weight * x**power).cumsum(0))) for power in range(3))
    cost = (wxx - wxx[:, None]) - (wx - wx[:, None]) ** 2 / (w - w[:, None]).clamp_min(1e-300)  # [first, end]
    cost = cost.masked_fill(torch.ones_like(cost).tril(-1).bool(), torch.inf)
    best = cost[0]
    for _ in range(size - 1):
        best = (best[:, None] + cost).amin(0)
    return float(best[-1])


@pytest.mark.parametrize("shape", ["normal", "two heaps", "tails", "weights"])
def test_books_are_nearly_the_best_there_are(shape: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1000, 3), torch.ones(1000, 3)
    if shape == "two heaps":
        x = x * 0.1 + torch.randint(0, 2, (1000, 3)) * 2
    elif shape == "tails":
        x = x * torch.rand(1000, 3).exp()
    elif shape == "weights":
        weight = torch.rand(1000, 3) ** 4 + 1e-3
    (found,) = Histogram.of(x, [weight], x.amin(0), x.amax(0))
    coarser = None
    for bits in range(5):
        coarser = found.codebooks(1 << bits, coarser)
        assert (coarser.diff(dim=1) >= 0).all(), "centroids rise"
        for channel in range(3):
            error = float(nearest_error(x[:, channel], weight[:, channel], coarser[channel]))
            assert error <= (1.01, 1.01, 1.02, 1.2, 1.5)[bits] * best_error(
                x[:, channel], weight[:, channel], 1 << bits
            )


def test_what_has_no_weight_does_no_harm() -> None:
    x = torch.cat((torch.zeros(50, 1), torch.ones(50, 1)))
    (none,) = Histogram.of(x, [torch.zeros(100, 1)], torch.tensor([0.0]), torch.tensor([1.0]))
    assert none.codebooks(4).isfinite().all() and float(none.error(none.codebooks(4))) == 0
    (constant,) = Histogram.of(torch.full((9, 1), 7.0), [torch.ones(9, 1)], torch.tensor([7.0]), torch.tensor([7.0]))
    codebook = constant.codebooks(4)
    assert codebook.isfinite().all() and float((codebook - 7).abs().min()) < 1e-6
    (two,) = Histogram.of(x, [torch.ones(100, 1)], torch.tensor([0.0]), torch.tensor([1.0]))
    assert float(two.error(two.codebooks(8))) == pytest.approx(0, abs=1e-9)
