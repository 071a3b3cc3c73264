"""Where the bits of a token slot lie in page images, and their way from one page to another: they are moved, never made
again. Knows places, not what the bits mean.

The bits of slot t lie in parts of three kinds. A part starts at a byte of the page and has a size:

    RUN          `size` bytes, the rows of all slots one after the other
    KEY_LINES    the lines of key codes of four pairs, `size` of them: in each, lanes 2 * (t % 16) and the next, every
                 fourth field from t / 16 on
    VALUE_LINES  the lines of value codes of sixteen columns, 2 * `size` of them: every other lane from t % 2 on, field
                 t / 2

Codes of lines have `size` bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quire.cache.codecs import Moves
from quire.cache.codecs.packing import LANE_BITS, LINE_BYTES
from quire.cache.ledger import PAGE_TOKENS, UNIT
from quire.kernels import runtime

RUN, KEY_LINES, VALUE_LINES = range(3)
"""Kinds in kernels/slots.cpp."""

Part = tuple[int, int, int]
"""Kind, first byte in the page, size."""

_QUARTER = 16
"""Slots of a page that have different lanes in lines of key codes."""

_WORD = 4
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SlottedPages:
    """Pages of a codec, in which every token slot has bits of its own: all that a page holds of a token.

    layouts  the parts of a page, for each way that pages are laid out
    which    int32 [L, H]: which of them a head's pages have; None where there is only one
    """

    def __init__(self, layouts: Sequence[Sequence[Part]], which: NDArray[np.int32] | None = None) -> None:
        assert which is not None or len(layouts) == 1, f"{len(layouts)} layouts, and nothing says whose"
        self.layouts = layouts
        self.which = which
        self._parts = np.array([part for parts in layouts for part in parts], np.int32)
        self._firsts = np.cumsum([0, *map(len, layouts)], dtype=np.int32)

    def move(self, arena: torch.Tensor, moves: Moves) -> None:
        """Overwrites slots of pages with other ones; see Codec."""
        if arena.device.type != "cpu":
            self.move_in_torch(arena, moves)
            return
        # Names keep the arrays alive until the call is done.
        given = self._layouts_of(moves), moves.pages, moves.slots
        arrays = (self._parts, self._firsts, *(np.ascontiguousarray(array, np.int32) for array in given))
        addresses = [array.ctypes.data for array in arrays]
        runtime.kernels().quire_move_slots(arena.data_ptr(), *addresses, len(moves.layers))

    def move_in_torch(self, arena: torch.Tensor, moves: Moves) -> None:
        """What `move` does, on any device."""
        which = self._layouts_of(moves)
        for layout in np.unique(which):
            pages, slots = (
                torch.from_numpy(array[:, which == layout].astype(np.int64)).to(arena.device)
                for array in (moves.pages, moves.slots)
            )
            runs: dict[int, list[int]] = {}  # by size
            for kind, start, size in self.layouts[layout]:
                if kind == RUN:
                    runs.setdefault(size, []).append(start)
                else:
                    _move_codes(arena.view(torch.int32), kind, pages * UNIT + start, slots, size)
            for size, starts in runs.items():
                _move_runs(arena, starts, size, pages * UNIT, slots)

    def _layouts_of(self, moves: Moves) -> NDArray[np.int32]:
        """The layout of each move's pages."""
        assert ((moves.slots >= 0) & (moves.slots < PAGE_TOKENS)).all(), "slots past a page"
        return np.zeros_like(moves.layers) if self.which is None else self.which[moves.layers, moves.heads]


def _move_runs(arena: torch.Tensor, starts: Sequence[int], size: int, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Moves rows of so many bytes in pages that begin at bytes int64 [2, m]."""
    unit = math.gcd(8, size, *starts)
    words = arena.view(_WORDS[unit])
    count = size // unit
    rows = words.as_strided((len(words) - count + 1, count), (1, 1))
    first = pages + size * slots
    fro, to = ((first[..., None] + torch.tensor(starts, device=arena.device)) // unit).flatten(1)
    rows.index_copy_(0, to, rows.index_select(0, fro))


def _move_codes(words: torch.Tensor, kind: int, starts: torch.Tensor, slots: torch.Tensor, width: int) -> None:
    """Moves codes of one part, which begins at bytes int64 [2, m]. Several slots have bits in one word. Bits that are
    replaced are known, so each move adds the difference to its word, in any order.
    """
    first, mask, per_line = starts // _WORD, (1 << width) - 1, LINE_BYTES // _WORD
    if kind == KEY_LINES:
        first, shift = first + slots % _QUARTER, width * (slots // _QUARTER)
        # Every fourth field, of two lanes.
        lane = sum(mask << 4 * width * i for i in range(LANE_BITS // (4 * width)))
        mask = lane << LANE_BITS | lane
        columns = per_line * torch.arange(width, device=slots.device)
    else:
        place = slots // 2 * width
        first, shift = first + per_line * (place // LANE_BITS), LANE_BITS * (slots % 2) + place % LANE_BITS
        columns = torch.arange(per_line, device=slots.device)
    places, shift = first[..., None] + columns, shift[..., None]
    codes, old = words[places].long() >> shift & mask
    words.index_add_(0, places[1].flatten(), (codes - old << shift[1]).to(torch.int32).flatten())
