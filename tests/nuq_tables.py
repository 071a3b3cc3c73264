"""Made-up tables for the non-uniform codecs, for tests that do not depend on calibration."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.cache.codecs.nuq import BLOCK_PAIRS, CODEBOOK_SIZE, MAX_SLOTS, NuqTables


def random_tables(
    num_layers: int,
    num_heads: int,
    head_dim: int,
    seed: int,
    *,
    key_bits: Sequence[int] = (0, 1, 2, 3, 4, 5),
    value_bits: Sequence[int] = (1, 2, 3, 4, 5),
    slots: Sequence[int] = tuple(range(MAX_SLOTS + 1)),
    reach: float = 2.0,
) -> NuqTables:
    """Every block, head and layer draws its widths and slots from those given; codebooks reach about as far as normal
    numbers do, and what lies past a codebook's width is garbage that nobody may look up.
    """
    generator = torch.Generator().manual_seed(seed)

    def choose(options: Sequence[int], *shape: int) -> torch.Tensor:
        drawn = torch.randint(len(options), shape, generator=generator)
        return torch.tensor(list(options), dtype=torch.uint8)[drawn]

    def codebooks(widths: torch.Tensor, reach: float) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = reach * torch.randn(*widths.shape, CODEBOOK_SIZE, generator=generator)
        past = torch.arange(CODEBOOK_SIZE) >= (1 << widths.long())[..., None]
        found = drawn.bfloat16().float().masked_fill(past, torch.inf).sort(-1).values
        edges = (found[..., 1:] + found[..., :-1]) / 2
        return found.masked_fill(past, 1e6), edges.masked_fill(past[..., 1:], torch.inf)

    lead, half = (num_layers, num_heads), head_dim // 2
    order = torch.rand(*lead, half, generator=generator).argsort(-1)
    bits = choose(key_bits, *lead, half // BLOCK_PAIRS)
    of_pair = torch.zeros(*lead, half, dtype=torch.uint8)
    of_pair.scatter_(-1, order, bits.repeat_interleave(BLOCK_PAIRS, -1))
    key_books, key_edges = codebooks(torch.cat((of_pair, of_pair), -1), reach)
    of_values = choose(value_bits, *lead)
    value_books, value_edges = codebooks(of_values, 0.6)
    return NuqTables(
        key_order=order.to(torch.uint8),
        key_bits=bits,
        key_edges=key_edges,
        key_books=key_books,
        key_weight=torch.rand(*lead, head_dim, generator=generator) + 0.1,
        key_slots=choose(slots, *lead),
        value_bits=of_values,
        value_edges=value_edges,
        value_books=value_books,
        value_slots=choose(slots, *lead),
    )


def tables_of(
    key_books: torch.Tensor,
    value_codebook: Sequence[float] = (-1.0, -1 / 3, 1 / 3, 1.0),
    *,
    key_slots: int = 0,
    value_slots: int = 0,
) -> NuqTables:
    """Those of one head of one layer, pairs in order: a codebook [D, 2^b] in rising order for each key channel, one for
    values; an edge lies halfway between two centroids.
    """
    head_dim, count = key_books.shape

    def padded(codebooks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        edges = torch.full((*codebooks.shape[:-1], CODEBOOK_SIZE - 1), torch.inf)
        edges[..., : codebooks.shape[-1] - 1] = (codebooks[..., 1:] + codebooks[..., :-1]) / 2
        past = torch.zeros(*codebooks.shape[:-1], CODEBOOK_SIZE - codebooks.shape[-1])
        return torch.cat((codebooks, past), -1)[None, None], edges[None, None]

    codebooks, edges = padded(key_books.float())
    value_books, value_edges = padded(torch.tensor(list(value_codebook)))
    bits = count.bit_length() - 1
    return NuqTables(
        key_order=torch.arange(head_dim // 2, dtype=torch.uint8)[None, None],
        key_bits=torch.full((1, 1, head_dim // (2 * BLOCK_PAIRS)), bits, dtype=torch.uint8),
        key_edges=edges,
        key_books=codebooks,
        key_weight=torch.ones(1, 1, head_dim),
        key_slots=torch.tensor([[key_slots]], dtype=torch.uint8),
        value_bits=torch.tensor([[len(value_codebook).bit_length() - 1]], dtype=torch.uint8),
        value_edges=value_edges,
        value_books=value_books,
        value_slots=torch.tensor([[value_slots]], dtype=torch.uint8),
    )


def uniform_codebook(low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """Evenly spaced centroids [..., 2^bits], the ends at low and high [...]."""
    return low[..., None] + (high - low)[..., None] * torch.linspace(0, 1, 1 << bits)
