"""Makes the tables of a codec from the fits of all layers: chooses kinds of codebooks and bit widths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.cache.codecs.nuq import BLOCK_PAIRS, NuqTables
from quire.calibrate.bit_allocation import BitAllocation, allocate_bits, allocate_evenly
from quire.calibrate.fit import KINDS, Codebook, LayerFit, padded


def make_tables(
    fits: Sequence[LayerFit], bits: int, slots: int, *, kinds: Sequence[str] = KINDS, spends: bool = True
) -> tuple[NuqTables, dict[str, Any]]:
    """Returns the tables of one codec, and a report of the choices.

    bits    average bits of keys and values
    slots   slots of every key and value vector, as in the fits
    kinds   kinds of codebooks to choose from
    spends  whether widths vary by channel and head; otherwise all are the same
    """
    key_kinds = [min(kinds, key=lambda kind: float(fit.key_cost[kind][..., bits].sum())) for fit in fits]
    value_kinds = [min(kinds, key=lambda kind: float(fit.value_cost[kind][..., bits].sum())) for fit in fits]
    key_cost = torch.stack([fit.key_cost[kind] for fit, kind in zip(fits, key_kinds, strict=True)])
    value_cost = torch.stack([fit.value_cost[kind] for fit, kind in zip(fits, value_kinds, strict=True)])
    plain = allocate_evenly(key_cost, value_cost, bits, slots)
    chosen = allocate_bits(key_cost, value_cost, bits, slots) if spends else plain
    tables = [
        _layer_tables(fit, key_kind, value_kind, chosen, layer, slots)
        for layer, (fit, key_kind, value_kind) in enumerate(zip(fits, key_kinds, value_kinds, strict=True))
    ]
    names = NuqTables.__dataclass_fields__
    whole = NuqTables(**{name: torch.stack([each[name] for each in tables]) for name in names})
    return whole, _report(kinds, fits, bits, key_kinds, value_kinds, chosen, plain)


def _layer_tables(
    fit: LayerFit, key_kind: str, value_kind: str, chosen: BitAllocation, layer: int, slots: int
) -> dict[str, Tensor]:
    order, block_bits = chosen.key_order[layer], chosen.key_bits[layer]  # [H, D / 2], [H, D / 8]
    heads = len(order)
    ordered = block_bits.repeat_interleave(BLOCK_PAIRS, 1)
    of_pair = torch.empty_like(ordered).scatter_(1, order, ordered)
    widths = torch.cat((of_pair, of_pair), 1)  # [H, D]
    key_edges, key_codebooks = padded(fit.key_codebooks[key_kind, 0])
    for bits in widths.unique().tolist():
        edges, codebooks = padded(fit.key_codebooks[key_kind, bits])
        where = widths == bits
        key_edges[where], key_codebooks[where] = edges[where], codebooks[where]
    value = [
        padded(Codebook(*(part[head] for part in fit.value_codebooks[value_kind, bits])))
        for head, bits in enumerate(chosen.value_bits[layer].tolist())
    ]
    return {
        "key_order": order.to(torch.uint8),
        "key_bits": block_bits.to(torch.uint8),
        "key_edges": key_edges,
        "key_books": key_codebooks,
        "key_weight": fit.key_weight,
        "key_slots": torch.full((heads,), slots, dtype=torch.uint8),
        "value_bits": chosen.value_bits[layer].to(torch.uint8),
        "value_edges": torch.stack([edges for edges, _ in value]),
        "value_books": torch.stack([codebooks for _, codebooks in value]),
        "value_slots": torch.full((heads,), slots, dtype=torch.uint8),
    }


def _report(
    kinds: Sequence[str],
    fits: Sequence[LayerFit],
    bits: int,
    key_kinds: Sequence[str],
    value_kinds: Sequence[str],
    chosen: BitAllocation,
    plain: BitAllocation,
) -> dict[str, Any]:
    channels = chosen.key_order.shape[-1] * 2

    def costs(cost_of: Any) -> dict[str, float]:
        return {kind: sum(float(cost_of(fit, kind)) for fit in fits) for kind in kinds}

    def shares(values: Tensor) -> dict[str, int]:
        found, counts = values.unique(return_counts=True)
        return {str(value): count for value, count in zip(found.tolist(), counts.tolist(), strict=True)}

    return {
        "bits_per_element": float(chosen.page_bytes.double().mean()) * 8 / (2 * 64 * channels),
        "key_books": {kind: key_kinds.count(kind) for kind in kinds},
        "value_books": {kind: value_kinds.count(kind) for kind in kinds},
        "layers": [
            {
                "keys": key_kinds[layer],
                "values": value_kinds[layer],
                "key_bits": chosen.key_bits[layer].double().mean(-1).tolist(),
                "value_bits": chosen.value_bits[layer].tolist(),
                "page_bytes": chosen.page_bytes[layer].tolist(),
            }
            for layer in range(len(fits))
        ],
        "key_widths": shares(chosen.key_bits),
        "value_widths": shares(chosen.value_bits),
        "page_sizes": shares(chosen.page_bytes),
        "held_out_cost": {"chosen": chosen.cost, "same bits everywhere": plain.cost},
        "key_cost_of_books": costs(lambda fit, kind: fit.key_cost[kind][..., bits].sum()),
        "value_cost_of_books": costs(lambda fit, kind: fit.value_cost[kind][..., bits].sum()),
    }
