"""The layers of a model as the Triton backend launches them: kinds of layers, each with its tiles and launches, and the
constants with which kernels are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
from torch import Tensor

from quire.attention.encoded import EncodedTables, encoded_tables
from quire.attention.kernels.launch import Launches, encoded_launches, launches
from quire.attention.kernels.layout import Tiles
from quire.attention.spec import AttentionLayer, AttentionSpec
from quire.cache.ledger import PAGE_TOKENS, UNIT

PIECES_PER_PROCESSOR = 2
"""Pieces for every multiprocessor, which has room for one at a time (`seeded`: for more). With one each, the longest
piece determines the time: on an H200 long contexts take 1.3 to 1.4 times as long, and only a single short one (8,192
tokens) gains an eighth."""

MIN_SAVED_BYTES = 8 << 20
"""Bytes of reads that sharing must save in a decode step. If it saves fewer, rows share nothing. A guess, not measured:
two microseconds of an H200's memory bandwidth, for a second launch in a graph."""

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that read a step in the same pieces, with the same launches.

    num_kv_heads  H
    group_size    G
    head_dim      D
    window        see Scoring
    launches      of their kernels
    tiles         of their pieces
    """

    num_kv_heads: int
    group_size: int
    head_dim: int
    window: int | None
    launches: Launches
    tiles: Tiles


@dataclass(frozen=True, slots=True)
class LaunchedLayer:
    """A layer as its kernels get it.

    layer      its numbers
    kind       index of its kind
    page       compile-time constants of the page layout
    scores     the same of scores
    codes      the same of encoded pages
    cos, sin   f32 [positions, D / 2]; None: it does not rotate
    turns      f32 [2, D / 2, P], cosines and sines of the first P positions: they rotate the keys of an encoded page by
               slot. None: the layer does not rotate, or no page is encoded
    """

    layer: AttentionLayer
    kind: int
    page: dict[str, int]
    scores: dict[str, float]
    codes: dict[str, int]
    cos: Tensor | None
    sin: Tensor | None
    turns: Tensor | None

    @property
    def page_bytes(self) -> int:
        """Bytes of a dense page."""
        return self.page["PAGE"] * UNIT


class Layers:
    """All layers of a model as the backend launches them.

    kinds    the kinds of layers; the first one is that of the first layer
    all      the layers, in the model's order
    runs     first layer and number of layers of neighbours that are alike and whose lanes follow each other, in order
    tables   the tables of the sealed codec; None if no page is encoded
    """

    def __init__(self, spec: AttentionSpec, processors: int, on_gpu: bool) -> None:
        table = spec.table
        self.tables = None
        if table.encodes:
            self.tables = encoded_tables(table.sealed_codec, spec.layers[0].head_dim, table.arena.device)
        sizes = {layer.head_dim for layer in spec.layers}
        assert table.sinks is None or len(sizes) == 1, "exact tokens need layers with equal head sizes"
        names = [(each.num_kv_heads, each.group_size, each.head_dim, each.scoring.window) for each in spec.layers]
        self.kinds = [_kind(spec, names, name, self.tables, processors, on_gpu) for name in dict.fromkeys(names)]
        order = list(dict.fromkeys(names))
        turns = [_turns(angles) if table.encodes else None for angles in spec.rotations]
        self.all = tuple(
            self._launched(spec, layer, order.index(name), turns)
            for layer, name in zip(spec.layers, names, strict=True)
        )
        self.runs = alike_runs(spec.layers)

    @property
    def most_heads(self) -> int:
        """Most query heads of a layer."""
        return max(each.layer.num_heads for each in self.all)

    @property
    def widest(self) -> int:
        """Most numbers of a row's queries in a layer."""
        return max(each.layer.num_heads * each.layer.head_dim for each in self.all)

    @property
    def staged_bytes(self) -> int:
        """Most bytes of a dense chunk in a layer."""
        return max(each.layer.num_kv_heads * each.page_bytes for each in self.all)

    def _launched(
        self, spec: AttentionSpec, layer: AttentionLayer, kind: int, turns: Sequence[Tensor | None]
    ) -> LaunchedLayer:
        head_dim, scoring, tables, sinks = layer.head_dim, layer.scoring, self.tables, spec.table.sinks
        page = {
            "LANES": spec.num_lanes, "H": layer.num_kv_heads, "D": head_dim, "P": PAGE_TOKENS,
            "DP": triton.next_power_of_2(head_dim), "UNIT": UNIT // spec.dtype.itemsize,
            "PAGE": triton.cdiv(2 * PAGE_TOKENS * head_dim * spec.dtype.itemsize, UNIT),
        }  # fmt: skip
        scores = {
            "SCALE": scoring.scale_of(head_dim) * _LOG2_E, "WINDOW": scoring.window or 0,
            "SOFT_CAP": (scoring.soft_cap or 0.0) * _LOG2_E,
        }  # fmt: skip
        codes = dict.fromkeys(
            ("HP", "SINKS", "KIND", "KEY_PARTS", "VALUE_PARTS", "MOST_KEY_SLOTS", "MOST_VALUE_SLOTS"), 0
        )
        if tables is not None:
            codes = {
                "HP": max(16, triton.next_power_of_2(head_dim // 2)),
                "SINKS": 0 if sinks is None else sinks.num_tokens, "KIND": tables.kernel_id,
                "KEY_PARTS": tables.key_parts, "VALUE_PARTS": tables.value_parts,
                "MOST_KEY_SLOTS": tables.key_slots, "MOST_VALUE_SLOTS": tables.value_slots,
            }  # fmt: skip
            assert tables.read_keys is None or tables.pairs_padded == codes["HP"], "a table of another head size"
        cos, sin, turn = None, None, None
        if layer.rotation is not None:
            (cos, sin), turn = spec.rotations[layer.rotation], turns[layer.rotation]
            assert cos.shape[1] * 2 == head_dim, f"angles of {cos.shape[1]} pairs for heads of {head_dim}"
        return LaunchedLayer(layer, kind, page, scores, codes, cos, sin, turn)


def alike_runs(layers: Sequence[AttentionLayer]) -> list[tuple[int, int]]:
    """First layer and number of layers of neighbours that are alike and whose lanes follow each other, in order."""
    runs: list[tuple[int, int]] = []
    for index, layer in enumerate(layers):
        before = layers[index - 1] if index else None
        if before is not None and layer == replace(before, first_lane=before.first_lane + before.num_kv_heads):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((index, 1))
    return runs


def _kind(
    spec: AttentionSpec,
    names: Sequence[tuple[int, int, int, int | None]],
    name: tuple[int, int, int, int | None],
    tables: EncodedTables | None,
    processors: int,
    on_gpu: bool,
) -> LayerKind:
    num_kv_heads, group_size, head_dim, _ = name
    if tables is None:
        found = launches(spec.dtype, group_size, head_dim)
    else:
        found = encoded_launches(spec.dtype, group_size, head_dim, tables.read_values is not None)
    short, tall = found.short, found.tall
    # Tiles decoded in registers leave room for eight warps on a multiprocessor.
    at_once = PIECES_PER_PROCESSOR if tables is None else max(1, 8 // short.warps)
    page_bytes = np.asarray(spec.table.page_sizes(spec.table.sealed_codec)).reshape(-1)
    lanes = [
        np.arange(layer.first_lane, layer.first_lane + num_kv_heads)
        for layer, other in zip(spec.layers, names, strict=True)
        if other == name
    ]
    chunk_bytes = int(page_bytes[np.concatenate(lanes)].sum())
    tiles = Tiles(
        group_size,
        num_kv_heads,
        short.rows,
        tall.rows if tables is None else min(tall.rows, PAGE_TOKENS * group_size),
        processors * at_once,
        processors,
        MIN_SAVED_BYTES * len(lanes) // chunk_bytes if on_gpu else 0,
    )
    return LayerKind(*name, found, tiles)


def _turns(angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, _ = angles
    turns = torch.zeros(2, cos.shape[1], PAGE_TOKENS, device=cos.device)
    # If the context is shorter than a page, the last slots have no angle. They are never filled.
    for turn, part in zip(turns, angles, strict=True):
        turn[:, : len(part)] = part[:PAGE_TOKENS].T
    return turns
