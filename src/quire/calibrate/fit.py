"""Fits the codebooks of one layer to its samples, and measures the cost of every width on held-out samples.

It makes several kinds of codebooks. The measured cost decides which kind a tensor gets:

    uniform     evenly spaced over the range
    plain       k-means of all channels together, each normalised by its range
    fisher      the same, weighted with the cost of an error
    damped      the same, weights cut at 50 times their channel's mean; otherwise few tokens would decide
    own         damped, one codebook per key channel and one per head's values
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attention.nuq import NuqHeads
from quire.cache.codecs.nuq import BLOCK_PAIRS, CODEBOOK_SIZE, SLOT_BYTES, NuqCodec, NuqTables
from quire.cache.codecs.packing import MAX_BITS
from quire.cache.ledger import PAGE_TOKENS
from quire.calibrate.codebooks import Histogram
from quire.calibrate.samples import LayerSamples
from quire.kernels import runtime

KINDS = ("uniform", "plain", "fisher", "damped", "own")
POOLED = ("plain", "fisher", "damped")

DAMPING = 50.0
OUTSIDE = 0.002
"""Share of a key channel's samples outside its range."""

VALUE_REACH = 2.0
"""An element of a value up to this far beyond its fitted range counts unclipped."""

FIT_TOKENS = 2048
"""Number of tokens for fitting value codebooks."""


class Codebook(NamedTuple):
    """Rising centroids [..., 2^bits], and their decoded values: the same numbers, or others with Q-Norm."""

    centroids: Tensor
    stands_for: Tensor


@dataclass(frozen=True)
class LayerFit:
    """Codebooks of one layer and their costs, for H heads, D channels, widths 0 to 5 and one number of slots.

    key_codebooks    codebooks by kind and width: [H, D, 2^width]
    key_cost         costs by kind: float64 [H, D, 6], summed over the held-out tokens
    value_codebooks  codebooks by kind and width, from 1: [H, 2^width]
    value_cost       costs by kind: float64 [H, 6]; infinite at width 0
    key_weight       float32 [H, D]: mean cost of a squared error in a channel
    """

    key_codebooks: dict[tuple[str, int], Codebook]
    key_cost: dict[str, Tensor]
    value_codebooks: dict[tuple[str, int], Codebook]
    value_cost: dict[str, Tensor]
    key_weight: Tensor


def fit_layer(
    samples: LayerSamples, num_held_out: int, slots: int, *, kinds: Sequence[str] = KINDS, q_norm: bool = False
) -> LayerFit:
    """Fits codebooks to all but the last `num_held_out` tokens, and measures their cost on these.

    kinds   kinds of codebooks to make
    q_norm  whether decoded elements keep the mean and deviation of the original ones; see Histogram.q_norm
    """
    train, held_out = samples.split(len(samples.keys) - num_held_out)
    key_codebooks, key_weight = _key_codebooks(train, kinds, q_norm)
    value_codebooks = _value_codebooks(train, slots, kinds, q_norm)
    _, heads, channels = samples.keys.shape
    key_cost = {kind: torch.zeros(heads, channels, MAX_BITS + 1, dtype=torch.float64) for kind in kinds}
    value_cost = {kind: torch.full((heads, MAX_BITS + 1), torch.inf, dtype=torch.float64) for kind in kinds}
    key_price = damped(held_out.key_cost, train.key_cost)
    value_price = damped(held_out.value_cost, train.value_cost)
    for kind in kinds:
        for bits in range(MAX_BITS + 1):
            tables = uniform_tables(
                key_codebooks[kind, bits], key_weight, slots, value_codebooks[kind, max(bits, 1)], slots
            )
            k, v = quantize_dequantize(tables, held_out.keys, held_out.values)
            key_cost[kind][:, :, bits] = ((k - held_out.keys).square() * key_price).sum(0)
            if bits:
                value_cost[kind][:, bits] = ((v - held_out.values).square() * value_price).sum((0, 2))
    return LayerFit(key_codebooks, key_cost, value_codebooks, value_cost, key_weight)


def damped(cost: Tensor, seen: Tensor) -> Tensor:
    """Costs [T, H, D], cut at DAMPING times their channel's mean in `seen`."""
    return torch.minimum(cost, DAMPING * seen.mean(0))


def _key_codebooks(
    train: LayerSamples, kinds: Sequence[str], q_norm: bool
) -> tuple[dict[tuple[str, int], Codebook], Tensor]:
    """Fits key codebooks in units of the channels' ranges, where a squared error costs range^2 as much. Also returns
    the weights of channels.
    """
    shape = train.keys.shape[1:]
    low, high = _inner_range(train.keys.flatten(1))
    middle, reach = ((high + low) / 2), ((high - low) / 2).clamp_min(1e-30)
    unit = (train.keys.flatten(1) - middle) / reach
    one = torch.ones_like(reach)
    calm = damped(train.key_cost, train.key_cost)
    weights = [torch.ones_like(unit), train.key_cost.flatten(1) * reach**2, calm.flatten(1) * reach**2]
    if q_norm:
        weights.append((unit.abs() <= 1).float())
    plain, fisher, own, *inliers = Histogram.of(unit, weights, -one, one)
    pools = Histogram.joined([each.pooled() for each in (plain, fisher, own)])
    codebooks: dict[tuple[str, int], Codebook] = {}

    def add(kind: str, bits: int, codebook: Tensor) -> None:
        """A codebook [C or 1, n] in units of the ranges."""
        if kind not in kinds:
            return
        moved = codebook
        if q_norm:
            moved = (inliers[0] if len(codebook) > 1 else inliers[0].pooled()).q_norm(codebook)
        codebooks[kind, bits] = Codebook(
            *((each * reach[:, None] + middle[:, None]).float().view(*shape, -1) for each in (codebook, moved))
        )

    coarser_pools = coarser_own = None
    for bits in range(MAX_BITS + 1):
        size = 1 << bits
        add("uniform", bits, _even_codebook(size)[None])
        coarser_pools = pools.codebooks(size, coarser_pools)
        for kind, codebook in zip(POOLED, coarser_pools, strict=True):
            add(kind, bits, codebook[None])
        if "own" in kinds:
            coarser_own = own.codebooks(size, coarser_own)
            add("own", bits, coarser_own)
    return codebooks, calm.mean(0)


def _inner_range(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The quantiles of each channel of [T, C] beyond which the share OUTSIDE of its samples lies, as torch.quantile."""
    keys = keys.T.contiguous()
    rank = OUTSIDE / 2 * (keys.shape[1] - 1)
    part = rank - int(rank)
    ends = []
    for largest in (False, True):
        outer = keys.topk(min(int(rank) + 2, keys.shape[1]), 1, largest=largest).values
        ends.append(outer[:, -2:-1].lerp(outer[:, -1:], part)[:, 0])
    return ends[0], ends[1]


def _even_codebook(size: int) -> Tensor:
    return torch.linspace(-1, 1, size, dtype=torch.float64) if size > 1 else torch.zeros(1, dtype=torch.float64)


def _value_codebooks(
    train: LayerSamples, slots: int, kinds: Sequence[str], q_norm: bool
) -> dict[tuple[str, int], Codebook]:
    """Fits value codebooks. A codebook is in units of fitted ranges, and the ranges depend on the codebook. So the fit
    alternates: ranges for an even codebook, a codebook for these ranges, ranges for that codebook, and so on.
    """
    heads = train.values.shape[1]
    step = max(1, len(train.values) // FIT_TOKENS)
    values, cost = train.values[::step], train.value_cost[::step]
    calm = damped(cost, train.value_cost)
    low, high = -torch.full((heads,), VALUE_REACH), torch.full((heads,), VALUE_REACH)
    codebooks: dict[tuple[str, int], Codebook] = {}
    coarser_plain = coarser = None
    for bits in range(1, MAX_BITS + 1):
        size = 1 << bits
        even = _even_codebook(size)[None]
        s, z, inner = _ranges(even, values, slots)
        unit, weight = _in_units(values, s, z), _by_head(inner * s[..., None] ** 2)
        (plain,) = Histogram.of(unit, [weight], low, high)
        coarser_plain = plain.pooled().codebooks(size, coarser_plain)
        s, z, inner = _ranges(coarser_plain, values, slots)
        unit, weight = _in_units(values, s, z), _by_head(inner * s[..., None] ** 2)
        weights = [weight, weight * _by_head(cost), weight * _by_head(calm)]
        if q_norm:
            weights.append(_by_head(inner) * (unit.abs() <= VALUE_REACH))
        plain, fisher, own, *inliers = Histogram.of(unit, weights, low, high)
        coarser = Histogram.joined([*(each.pooled() for each in (plain, fisher, own)), own]).codebooks(size, coarser)
        coarser_plain = coarser[:1]
        made = {"uniform": even, "own": coarser[len(POOLED) :]}
        made |= {kind: coarser[index : index + 1] for index, kind in enumerate(POOLED)}
        for kind in kinds:
            codebook = moved = made[kind]
            if q_norm:
                moved = (inliers[0] if len(codebook) > 1 else inliers[0].pooled()).q_norm(codebook)
            codebooks[kind, bits] = Codebook(
                *(each.float().expand(heads, -1).contiguous() for each in (codebook, moved))
            )
    return codebooks


def _in_units(values: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """Values [T, H, D] in units of their ranges [T, H], as [T * D, H]."""
    return _by_head((values - z[..., None]) / s[..., None].clamp_min(1e-30))


def _by_head(x: Tensor) -> Tensor:
    """[T, H, D] as [T * D, H]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])


def _ranges(codebook: Tensor, values: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """The s and z [T, H] of values stored with a codebook [1, n], and which elements are in no slot, [T, H, D]."""
    count, heads, channels = values.shape
    no_key = torch.zeros(heads, channels, 1)
    shared = codebook.float().expand(heads, -1).contiguous()
    tables = uniform_tables(Codebook(no_key, no_key), torch.ones(heads, channels), 0, Codebook(shared, shared), slots)
    codec = NuqCodec("trial", tables)
    s, z = torch.empty(count, heads), torch.empty(count, heads)
    inner = torch.ones_like(values)
    for head, images in enumerate(_encoded(codec, torch.zeros_like(values), values)):
        layout = codec.heads[0][head].layout
        ranges = images[:, layout.ranges : layout.value_slots].contiguous().view(torch.float16).float()
        s[:, head] = ranges[:, :PAGE_TOKENS].reshape(-1)[:count]
        z[:, head] = ranges[:, PAGE_TOKENS:].reshape(-1)[:count]
        for start in range(layout.value_slots, layout.end, SLOT_BYTES):
            channel = images[:, start : start + PAGE_TOKENS].reshape(-1)[:count].long()
            inner[torch.arange(count), head, channel] = 0
    return s, z, inner


def uniform_tables(
    key_codebook: Codebook, key_weight: Tensor, key_slots: int, value_codebook: Codebook, value_slots: int
) -> NuqTables:
    """Tables of one layer with the same width for all heads and channels.

    key_codebook    [H, D, 2^bits]
    value_codebook  [H, 2^bits]
    """
    heads, channels, size = key_codebook.centroids.shape
    edges, codebooks = padded(key_codebook)
    value_edges, value_codebooks = padded(value_codebook)

    def number(value: int, *size: int) -> Tensor:
        return torch.full((1, heads, *size), value, dtype=torch.uint8)

    return NuqTables(
        torch.arange(channels // 2, dtype=torch.uint8).expand(1, heads, -1).contiguous(),
        number(size.bit_length() - 1, channels // (2 * BLOCK_PAIRS)),
        edges[None],
        codebooks[None],
        key_weight[None].contiguous(),
        number(key_slots),
        number(value_codebook.centroids.shape[-1].bit_length() - 1),
        value_edges[None],
        value_codebooks[None],
        number(value_slots),
    )


def padded(codebook: Codebook) -> tuple[Tensor, Tensor]:
    """A codebook in the form of a codec's tables: edges [..., 31] between the centroids, and decoded values
    [..., 32].
    """
    centroids, stands_for = (part.float() for part in codebook)
    *lead, size = centroids.shape
    edges = torch.full((*lead, CODEBOOK_SIZE - 1), torch.inf)
    edges[..., : size - 1] = (centroids[..., 1:] + centroids[..., :-1]) * 0.5
    return edges, torch.cat((stands_for, stands_for[..., -1:].expand(*lead, CODEBOOK_SIZE - size)), -1)


def quantize_dequantize(tables: NuqTables, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Encodes keys and values [T, H, D] with the tables of one layer and decodes them again."""
    codec = NuqCodec("trial", tables)
    heads, count = NuqHeads(codec), len(keys)
    found_k, found_v = [], []
    for head, images in enumerate(_encoded(codec, keys, values)):
        size = (len(images) * PAGE_TOKENS, codec.head_dim)
        k, v = torch.empty(size), torch.empty(size)
        runtime.kernels().quire_nuq_decode(
            heads.at(0, head), codec.head_dim, images.data_ptr(), len(images), k.data_ptr(), v.data_ptr()
        )
        found_k.append(k[:count])
        found_v.append(v[:count])
    return torch.stack(found_k, 1), torch.stack(found_v, 1)


def _encoded(codec: NuqCodec, keys: Tensor, values: Tensor) -> list[Tensor]:
    """The page images of each head of one layer, uint8 [pages, page_bytes]; the last page is padded with zeros."""
    heads = NuqHeads(codec)
    count = len(keys)
    missing = -count % PAGE_TOKENS
    found = []
    for head in range(keys.shape[1]):
        k, v = (torch.nn.functional.pad(part[:, head], (0, 0, 0, missing)).contiguous() for part in (keys, values))
        images = torch.empty((count + missing) // PAGE_TOKENS, int(codec.page_bytes[0, head]), dtype=torch.uint8)
        runtime.kernels().quire_nuq_encode(
            heads.at(0, head),
            codec.head_dim,
            runtime.DTYPE_IDS[torch.float32],
            k.data_ptr(),
            v.data_ptr(),
            len(images),
            images.data_ptr(),
        )
        found.append(images)
    return found
