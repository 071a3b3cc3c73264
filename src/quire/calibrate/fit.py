"""From the samples of one layer to its codebooks, and what every width of them costs on samples not used for them.

Several kinds of books are made; which one a tensor gets is decided by what it costs, not by what it is called:

    uniform     evenly spaced over the range
    plain       k-means of all channels together, each normalised by its range
    fisher      the same, weighted with what an error costs
    damped      weights cut off at 50 times their channel's mean: few tokens would decide otherwise
    own         damped, one book for each key channel, for each head's values
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quire.attention.nuq import NuqHeads
from quire.cache.codecs.nuq import BLOCK_PAIRS, NUM_BOOK, NuqCodec, NuqTables
from quire.cache.codecs.packing import MAX_BITS
from quire.cache.page import PAGE_TOKENS
from quire.calibrate.books import Histogram
from quire.calibrate.samples import LayerSamples
from quire.kernels import runtime

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("uniform", "plain", "fisher", "damped", "own")

DAMPING = 50.0
OUTSIDE = 0.002
"""Share of a key channel's samples that its range leaves out."""

VALUE_REACH = 2.0
"""How far beyond its fitted range an element of a value may lie and still count where it is."""

FIT_TOKENS = 2048
"""Tokens from which value books are made."""


@dataclass(frozen=True)
class LayerFit:
    """Books of one layer and their costs, of H heads and D channels and widths 0 to 5, for one number of slots.

    key_books    by kind and width: float32 [H, D, 2^width]
    key_cost     by kind: float64 [H, D, 6], summed over the held-out tokens
    value_books  by kind and width, from 1: float32 [H, 2^width]
    value_cost   by kind: float64 [H, 6]; infinite at width 0
    key_weight   float32 [H, D]: mean cost of a squared error in a channel
    """

    key_books: dict[str, list[Tensor]]
    key_cost: dict[str, Tensor]
    value_books: dict[tuple[str, int], Tensor]
    value_cost: dict[str, Tensor]
    key_weight: Tensor


def fit_layer(samples: LayerSamples, num_held_out: int, slots: int) -> LayerFit:
    """Makes all kinds of books from all but the last `num_held_out` tokens, and tries them on those."""
    train, held_out = samples.split(len(samples.keys) - num_held_out)
    key_books, key_weight = _key_books(train)
    value_books = _value_books(train, slots)
    _, heads, channels = samples.keys.shape
    key_cost = {kind: torch.zeros(heads, channels, MAX_BITS + 1, dtype=torch.float64) for kind in KINDS}
    value_cost = {kind: torch.full((heads, MAX_BITS + 1), torch.inf, dtype=torch.float64) for kind in KINDS}
    key_price = damped(held_out.key_cost, train.key_cost)
    value_price = damped(held_out.value_cost, train.value_cost)
    for kind in KINDS:
        for bits in range(MAX_BITS + 1):
            tables = even_tables(key_books[kind][bits], key_weight, slots, value_books[kind, max(bits, 1)], slots)
            k, v = as_stored(tables, held_out.keys, held_out.values)
            key_cost[kind][:, :, bits] = ((k - held_out.keys).square() * key_price).sum(0)
            if bits:
                value_cost[kind][:, bits] = ((v - held_out.values).square() * value_price).sum((0, 2))
    return LayerFit(key_books, key_cost, value_books, value_cost, key_weight)


def damped(cost: Tensor, seen: Tensor) -> Tensor:
    """Costs [T, H, D] cut off at a multiple of their channel's mean in `seen`."""
    return torch.minimum(cost, DAMPING * seen.mean(0))


def _key_books(train: LayerSamples) -> tuple[dict[str, list[Tensor]], Tensor]:
    keys = train.keys.flatten(1)
    cost, calm = train.key_cost.flatten(1), damped(train.key_cost, train.key_cost).flatten(1)
    low = torch.quantile(keys, OUTSIDE / 2, 0)
    high = torch.quantile(keys, 1 - OUTSIDE / 2, 0)
    middle, reach = (high + low) / 2, ((high - low) / 2).clamp_min(1e-30)
    unit = (keys - middle) / reach
    one = torch.ones_like(reach)
    weights = {"plain": torch.ones_like(keys), "fisher": cost * reach**2, "damped": calm * reach**2}
    books: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    shape = train.keys.shape[1:]

    def add(kind: str, book: Tensor) -> None:
        """A book [C or 1, n] in units of the ranges."""
        books[kind].append((book * reach[:, None] + middle[:, None]).float().view(*shape, -1))

    own = Histogram.of(keys, calm, low, high)
    coarser: dict[str, Tensor] = {}
    pooled = {kind: Histogram.of(unit, weight, -one, one).pooled() for kind, weight in weights.items()}
    for bits in range(MAX_BITS + 1):
        size = 1 << bits
        add("uniform", torch.linspace(-1, 1, size)[None] if bits else torch.zeros(1, 1))
        for kind, histogram in pooled.items():
            coarser[kind] = histogram.books(size, coarser.get(kind))
            add(kind, coarser[kind])
        coarser["own"] = own.books(size, coarser.get("own"))
        books["own"].append(coarser["own"].float().view(*shape, -1))
    return books, calm.mean(0).view(shape)


def _value_books(train: LayerSamples, slots: int) -> dict[tuple[str, int], Tensor]:
    """Value books live in the units of fitted ranges, and these depend on the book: first ranges that are fitted to an
    even book, then a book for them, ranges for that, and so on.
    """
    heads, channels = train.values.shape[1:]
    step = max(1, len(train.values) // FIT_TOKENS)
    values, cost = train.values[::step], train.value_cost[::step]
    calm = damped(cost, train.value_cost)
    prices = {"plain": torch.ones_like(cost), "fisher": cost, "damped": calm, "own": calm}
    keys, no_keys = torch.zeros_like(values), torch.zeros(heads, channels, 1)
    low, high = -torch.full((heads,), VALUE_REACH), torch.full((heads,), VALUE_REACH)
    books: dict[tuple[str, int], Tensor] = {}
    coarser: dict[str, Tensor] = {}
    for bits in range(1, MAX_BITS + 1):
        size = 1 << bits
        book = torch.linspace(-1, 1, size).expand(heads, -1).contiguous()
        books["uniform", bits] = book
        for _ in range(2):
            tables = even_tables(no_keys, torch.ones(heads, channels), 0, book, slots)
            s, z, inner = _ranges(tables, keys, values)
            unit = _by_head((values - z[..., None]) / s[..., None].clamp_min(1e-30))
            weight = inner * s[..., None] ** 2
            plain = Histogram.of(unit, _by_head(weight), low, high).pooled()
            book = plain.books(size, coarser.get("plain")).float().expand(heads, -1)
        for kind, price in prices.items():
            histogram = Histogram.of(unit, _by_head(weight * price), low, high)
            if kind != "own":
                histogram = histogram.pooled()
            coarser[kind] = histogram.books(size, coarser.get(kind))
            books[kind, bits] = coarser[kind].float().expand(heads, -1).contiguous()
    return books


def _by_head(x: Tensor) -> Tensor:
    """[T, H, D] as [T * D, H]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])


def _ranges(tables: NuqTables, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The s and z [T, H] that values are stored with, and which elements are not in a slot, [T, H, D]."""
    codec, heads = NuqCodec("trial", tables), values.shape[1]
    pages = _encoded(codec, keys, values)
    count = len(values)
    s, z = torch.empty(count, heads), torch.empty(count, heads)
    inner = torch.ones_like(values)
    for head, images in enumerate(pages):
        layout = codec.layouts[0][head]
        ranges = images[:, layout.ranges : layout.value_slots].contiguous().view(torch.float16).float()
        s[:, head] = ranges[:, :PAGE_TOKENS].reshape(-1)[:count]
        z[:, head] = ranges[:, PAGE_TOKENS:].reshape(-1)[:count]
        for start in range(layout.value_slots, layout.end, 3 * PAGE_TOKENS):
            channel = images[:, start : start + PAGE_TOKENS].reshape(-1)[:count].long()
            inner[torch.arange(count), head, channel] = 0
    return s, z, inner


def even_tables(
    key_book: Tensor, key_weight: Tensor, key_slots: int, value_book: Tensor, value_slots: int
) -> NuqTables:
    """Tables of one layer in which all heads and channels have the same width.

    key_book    [H, D, 2^bits]
    value_book  [H, 2^bits]
    """
    heads, channels, size = key_book.shape
    edges, books = padded(key_book)
    value_edges, value_books = padded(value_book)

    def number(value: int, *size: int) -> Tensor:
        return torch.full((1, heads, *size), value, dtype=torch.uint8)

    return NuqTables(
        torch.arange(channels // 2, dtype=torch.uint8).expand(1, heads, -1).contiguous(),
        number(size.bit_length() - 1, channels // (2 * BLOCK_PAIRS)),
        edges[None],
        books[None],
        key_weight[None].contiguous(),
        number(key_slots),
        number(value_book.shape[-1].bit_length() - 1),
        value_edges[None],
        value_books[None],
        number(value_slots),
    )


def padded(book: Tensor) -> tuple[Tensor, Tensor]:
    """Rising centroids [..., n] as a codec's tables have them: edges [..., 31] and books [..., 32]."""
    book = book.float()
    *lead, size = book.shape
    edges = torch.full((*lead, NUM_BOOK - 1), torch.inf)
    edges[..., : size - 1] = (book[..., 1:] + book[..., :-1]) * 0.5
    return edges, torch.cat((book, book[..., -1:].expand(*lead, NUM_BOOK - size)), -1)


def as_stored(tables: NuqTables, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [T, H, D] as pages made with the tables of one layer give them back."""
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
    """The page images of each head of one layer, uint8 [pages, page_bytes]; the last page is filled up with zeros."""
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
