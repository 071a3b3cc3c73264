"""Codebooks: weighted one-dimensional k-means on histograms, for many channels and all widths at once.

    centroids minimise  sum_i w_i (x_i - nearest(x_i))^2

A histogram stores the weight and the weighted sum of each bin. A round of Lloyd's algorithm is then a few lookups in
running sums, for any number of elements. Boundaries fall between bins; centroids are exact means.

Source: KVQuant, arXiv 2401.18079, equation 7, and Q-Norm of its third version. The factor s^2 of the equation is needed
because keys are in their own units, not in units of their range. Ours differs: histograms in place of points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 1024
ROUNDS = 40
"""Maximum number of rounds of Lloyd's algorithm; it has converged by then."""


@dataclass(frozen=True)
class Histogram:
    """Weighted histograms of C channels over their own ranges, as running sums, float64 [C, bins + 1] each.

    low, width  start of each channel's range, and width of one of its bins, float64 [C, 1]
    """

    weight: Tensor
    first: Tensor
    second: Tensor
    low: Tensor
    width: Tensor

    @classmethod
    def of(cls, x: Tensor, weights: Sequence[Tensor], low: Tensor, high: Tensor) -> list[Histogram]:
        """The histograms of x [N, C] over [low, high], [C] each, for each of the weights [N, C]. Elements outside the
        range count in its first or last bin.
        """
        channels = x.shape[1]
        low, high = low.double(), torch.maximum(high, low + 1e-12 * (1 + low.abs())).double()
        width = (high - low) / BINS
        x = x.double().clamp(low, high)
        index = (((x - low) / width).long().clamp_(0, BINS - 1) + torch.arange(channels) * BINS).flatten()

        def running(sums: Tensor) -> Tensor:
            bins = torch.bincount(index, sums.flatten(), channels * BINS).view(channels, BINS)
            return torch.nn.functional.pad(bins.cumsum(1), (1, 0))

        found = []
        for weight in weights:
            weight = weight.double()
            weighted = weight * x
            parts = running(weight), running(weighted), running(weighted * x)
            found.append(cls(*parts, low[:, None], width[:, None]))
        return found

    def pooled(self) -> Histogram:
        """All channels pooled into one. They must have the same range."""
        weight, first, second = (part.sum(0, keepdim=True) for part in (self.weight, self.first, self.second))
        return Histogram(weight, first, second, self.low[:1], self.width[:1])

    @staticmethod
    def joined(parts: Sequence[Histogram]) -> Histogram:
        """Concatenates the channels of several histograms."""
        names = Histogram.__dataclass_fields__
        return Histogram(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def codebooks(self, size: int, coarser: Tensor | None = None) -> Tensor:
        """The best centroids of each channel from several initialisations, float64 [C, size], rising.

        coarser  centroids [C, size / 2]: splitting each in two is another initialisation
        """
        starts = [self.spread(size, share) for share in (1.0, 1 / 3, 0.0)]
        if coarser is None and size % 2 == 0:
            coarser = self.codebooks(size // 2)
        if coarser is not None:
            starts.append(self._split(coarser))
        found = self._settle(torch.stack(starts))
        return found[self.error(found).argmin(0), torch.arange(len(self.weight))]

    def _settle(self, codebooks: Tensor) -> Tensor:
        """Runs Lloyd's algorithm from each of several codebooks, [S, C, n]."""
        at = None
        for _ in range(ROUNDS):
            before, at = at, self._boundaries(codebooks)
            if before is not None and torch.equal(before, at):
                break
            weight, first = self._cells(at, self.weight), self._cells(at, self.first)
            codebooks = torch.where(weight > 0, first / weight.clamp_min(1e-300), codebooks).sort(-1).values
        return codebooks

    def _split(self, codebook: Tensor) -> Tensor:
        """The means of the elements below and above each centroid in its cell."""
        at = self._boundaries(codebook)
        inside = ((codebook - self.low) / self.width).round().long().clamp(0, BINS)
        inside = torch.minimum(torch.maximum(inside, at[:, :-1]), at[:, 1:])
        halves = torch.cat((torch.stack((at[:, :-1], inside), 2).flatten(1), at[:, -1:]), 1)
        weight, first = self._cells(halves, self.weight), self._cells(halves, self.first)
        return (
            torch.where(weight > 0, first / weight.clamp_min(1e-300), codebook.repeat_interleave(2, 1)).sort(1).values
        )

    def spread(self, size: int, share: float) -> Tensor:
        """Centroids that divide the weight equally, with each bin's weight raised to the power `share`: 1 divides by
        weight, 0 evenly; values between them suit a smooth density.
        """
        bins = self.weight.diff(dim=1)
        bins = (bins + 1e-9 * bins.mean(1, keepdim=True) + 1e-300) ** share
        running = bins.cumsum(1)
        wanted = (torch.arange(size, dtype=torch.float64) + 0.5) / size * running[:, -1:]
        index = torch.searchsorted(running, wanted.contiguous()).clamp_max(BINS - 1)
        return self.low + (index + 0.5) * self.width

    def error(self, codebook: Tensor) -> Tensor:
        """The weighted squared error of rising centroids [..., C, n], float64 [..., C]."""
        at = self._boundaries(codebook)
        weight, first, second = (self._cells(at, part) for part in (self.weight, self.first, self.second))
        return (second - 2 * codebook * first + codebook * codebook * weight).clamp_min(0).sum(-1)

    def q_norm(self, codebook: Tensor) -> Tensor:
        """Moves rising centroids [C, n] so that the decoded elements have the mean and deviation of the original ones.
        The unmoved centroids still decide which element belongs to which cell.
        """
        weight = self._cells(self._boundaries(codebook), self.weight)
        total = self.weight[:, -1:].clamp_min(1e-300)
        mean = self.first[:, -1:] / total
        variance = (self.second[:, -1:] / total - mean * mean).clamp_min(0)
        found_mean = (weight * codebook).sum(1, keepdim=True) / total
        found_variance = (weight * (codebook - found_mean) ** 2).sum(1, keepdim=True) / total
        # One centroid, or a constant channel, has no deviation to restore.
        flat = (found_variance <= 1e-12 * found_mean**2) | (variance <= 1e-12 * mean**2)
        scale = torch.where(flat, 1.0, (variance / found_variance.clamp_min(1e-300)).sqrt())
        return (codebook - found_mean) * scale + mean

    def _boundaries(self, codebook: Tensor) -> Tensor:
        """Index of the first bin of each centroid, and the end, int64 [..., C, n + 1]."""
        middles = (codebook[..., 1:] + codebook[..., :-1]) / 2
        inner = ((middles - self.low) / self.width).round_().long().clamp_(0, BINS)
        return torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=BINS)

    def _cells(self, at: Tensor, sums: Tensor) -> Tensor:
        """The sums between neighbouring boundaries [..., C, n + 1]."""
        return sums.expand(*at.shape[:-2], *sums.shape).gather(-1, at).diff(dim=-1)
