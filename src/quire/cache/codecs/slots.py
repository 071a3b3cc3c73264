"""Where the bits of a token slot lie in page images, and their way from one page to another: they are moved, never made
again. Knows places, not what the bits mean.

A page is parts of three kinds, one behind the other, then padding. A part has a size and some bits of every slot t:

    RUN          `size` bytes, the rows of all slots one after the other
    KEY_LINES    the lines of key codes of four pairs, `size` of them: in each, lanes 2 * (t % 16) and the next, every
                 fourth field from t / 16 on
    VALUE_LINES  the lines of value codes of sixteen columns, 2 * `size` of them: every other lane from t % 2 on, field
                 t / 2

Codes of lines have `size` bits. Only nuq has lines: for a codec whose slots are rows of whole bytes RUN is enough.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from quire.cache.arrays import Int32s
from quire.cache.codecs import SlotMoves
from quire.cache.codecs.packing import LANE_BITS, LINE_BYTES
from quire.cache.ledger import PAGE_TOKENS, UNIT
from quire.kernels import runtime

RUN, KEY_LINES, VALUE_LINES = range(3)
"""Kinds in kernels/slots.cpp."""

PagePart = tuple[int, int]
"""Kind and size."""

_BYTES = PAGE_TOKENS, LINE_BYTES, 2 * LINE_BYTES
"""Bytes of a part of size 1, by kind."""

_QUARTER = 16
"""Slots of a page that have different lanes in lines of key codes."""

_KEY_MASKS = {1: 0x11111111, 2: 0x03030303, 4: 0x000F000F}
"""By width, every fourth field of two lanes."""

_WORD = 4
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SlottedPages:
    """Pages of a codec, in which every token slot has bits of its own: all that a page holds of a token.

    layouts  the parts of a page in their order, for each way that pages are laid out
    which    int32 [L, H]: which of them a head's pages have; None where there is only one
    """

    def __init__(self, layouts: Sequence[Sequence[PagePart]], which: Int32s | None = None) -> None:
        assert which is not None or len(layouts) == 1, f"{len(layouts)} layouts, and nothing says whose"
        self.layouts = layouts
        self.which = which
        self._parts = np.array([part for parts in layouts for part in parts], np.int32)
        self._firsts = np.cumsum([0, *map(len, layouts)], dtype=np.int32)

    def move(self, arena: torch.Tensor, moves: SlotMoves) -> None:
        """Overwrites slots of pages with other ones; see Codec."""
        if arena.device.type != "cpu":
            self.move_in_torch(arena, moves)
            return
        given = self._parts, self._firsts, self._layouts_of(moves), moves.pages, moves.slots
        arrays = [np.ascontiguousarray(array, np.int32) for array in given]  # alive until the call is done
        runtime.kernels().quire_move_slots(
            arena.data_ptr(), *(array.ctypes.data for array in arrays), len(moves.layers)
        )

    def move_in_torch(self, arena: torch.Tensor, moves: SlotMoves) -> None:
        """What `move` does, on any device."""
        which = self._layouts_of(moves)
        for layout in np.unique(which):
            pages, slots = (
                torch.from_numpy(array[:, which == layout].astype(np.int64)).to(arena.device)[..., None]
                for array in (moves.pages, moves.slots)
            )
            offsets: dict[PagePart, list[int]] = defaultdict(list)  # of alike parts
            start = 0
            for kind, size in self.layouts[layout]:
                offsets[kind, size].append(start)
                start += _BYTES[kind] * size
            for (kind, size), alike in offsets.items():
                first = pages * UNIT + torch.tensor(alike, device=arena.device)
                if kind == RUN:
                    _move_rows(arena, size, first + size * slots)
                else:
                    _move_codes(arena.view(torch.int32), kind, size, first // _WORD, slots)

    def _layouts_of(self, moves: SlotMoves) -> Int32s:
        """The layout of each move's pages."""
        assert ((moves.slots >= 0) & (moves.slots < PAGE_TOKENS)).all(), "slots past a page"
        return np.zeros_like(moves.layers) if self.which is None else self.which[moves.layers, moves.heads]


def _move_rows(arena: torch.Tensor, size: int, first: torch.Tensor) -> None:
    """Moves rows of `size` bytes that begin at bytes int64 [2, ...]."""
    unit = math.gcd(8, size)
    words = arena.view(_WORDS[unit])
    count = size // unit
    rows = words.as_strided((len(words) - count + 1, count), (1, 1))
    fro, to = (first // unit).flatten(1)
    rows.index_copy_(0, to, rows.index_select(0, fro))


def _move_codes(words: torch.Tensor, kind: int, width: int, first: torch.Tensor, slots: torch.Tensor) -> None:
    """Moves the codes of slots [2, m, 1] in alike parts, which begin at words int64 [2, m, parts]. Several slots have
    bits in one word. Bits that are replaced are known, so each move adds the difference to its word, in any order.
    """
    per_line = LINE_BYTES // _WORD
    if kind == KEY_LINES:
        mask, columns = _KEY_MASKS[width], range(0, width * per_line, per_line)
        first, shift = first + slots % _QUARTER, width * (slots // _QUARTER)
    else:
        mask, columns = (1 << width) - 1, range(per_line)
        place = slots // 2 * width
        first, shift = first + per_line * (place // LANE_BITS), LANE_BITS * (slots % 2) + place % LANE_BITS
    places, shift = first[..., None] + torch.tensor(columns, device=slots.device), shift[..., None]
    codes, old = words[places].long() >> shift & mask
    words.index_add_(0, places[1].flatten(), (codes - old << shift[1]).to(torch.int32).flatten())
