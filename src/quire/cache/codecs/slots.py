"""Where the bits of a token slot lie in page images, and their way from one page to another: they are moved, never made
again. Knows places, not what the bits mean.

The bits of slot t lie in parts of three kinds. A part starts at a byte of the page and has a size:

    RUN          `size` bytes, the rows of all slots one after the other
    KEY_LINE     one line of key codes, `size` bits a field: lanes 2 * (t % 16) and the next, every fourth field from
                 t / 16 on
    VALUE_LINES  the lines of value codes of sixteen columns, 2 * `size` of them: every other lane from t % 2 on, field
                 t / 2
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

RUN, KEY_LINE, VALUE_LINES = range(3)
"""Kinds in kernels/slots.cpp."""

Part = tuple[int, int, int]
"""Kind, first byte in the page, size."""

_QUARTER = 16
"""Slots of a page that have different lanes in a line of key codes."""

_WORD = 4
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SlotMap:
    """Where slots have their bits in the pages of one codec; all that a page holds of a token, and of no other.

    layouts  the parts of a page, for each way that pages are laid out
    of       int32 [L, H]: which of them a head's pages have; None where there is only one
    """

    def __init__(self, layouts: Sequence[Sequence[Part]], of: NDArray[np.int32] | None = None) -> None:
        assert of is not None or len(layouts) == 1, f"{len(layouts)} layouts, and nothing says whose"
        self.layouts = layouts
        self.of = of
        self._parts = np.array([part for parts in layouts for part in parts], np.int32)
        self._firsts = np.cumsum([0, *map(len, layouts)], dtype=np.int32)

    def move(self, arena: torch.Tensor, moves: Moves) -> None:
        """Copies slots between pages of an arena, uint8 [bytes], in place."""
        if not len(moves):
            return
        which = np.zeros(len(moves), np.int32) if self.of is None else self.of[moves.layers, moves.heads]
        places = (moves.from_pages, moves.from_slots, moves.to_pages, moves.to_slots)
        assert all(slots.min() >= 0 and slots.max() < PAGE_TOKENS for slots in places[1::2]), "slots past a page"
        if arena.device.type == "cpu":
            # Names keep the arrays alive until the call is done.
            which, *contiguous = (np.ascontiguousarray(array, np.int32) for array in (which, *places))
            runtime.kernels().quire_move_slots(
                arena.data_ptr(),
                self._parts.ctypes.data,
                self._firsts.ctypes.data,
                which.ctypes.data,
                *(array.ctypes.data for array in contiguous),
                len(moves),
            )
            return
        self.move_in_torch(arena, which, places)

    def move_in_torch(self, arena: torch.Tensor, which: NDArray[np.int32], places: Sequence[NDArray[np.int32]]) -> None:
        """What `move` does, on any device.

        which   int32 [m]: the layout of each move's pages
        places  ids of pages and slots that are read, and of those that are written, int32 [m] each
        """
        for layout in np.unique(which):
            chosen = [torch.from_numpy(array[which == layout].astype(np.int64)).to(arena.device) for array in places]
            source, target = (chosen[0] * UNIT, chosen[1]), (chosen[2] * UNIT, chosen[3])
            parts = self.layouts[int(layout)]
            for size in {size for kind, _, size in parts if kind == RUN}:
                starts = [start for kind, start, found in parts if (kind, found) == (RUN, size)]
                _move_runs(arena, starts, size, source, target)
            for kind, start, width in parts:
                if kind != RUN:
                    _move_codes(arena, kind, start, width, source, target)


_Slots = tuple[torch.Tensor, torch.Tensor]
"""First bytes of pages, and slots in them, int64 [m] each."""


def _move_runs(arena: torch.Tensor, starts: Sequence[int], size: int, source: _Slots, target: _Slots) -> None:
    unit = math.gcd(8, size, *starts)
    words = arena.view(_WORDS[unit])
    count = size // unit
    rows = words.as_strided((len(words) - count + 1, count), (1, 1))
    first = torch.tensor(starts, device=arena.device)
    to, fro = (
        ((pages[:, None] + first + size * slots[:, None]) // unit).flatten() for pages, slots in (target, source)
    )
    rows.index_copy_(0, to, rows.index_select(0, fro))


def _move_codes(arena: torch.Tensor, kind: int, start: int, width: int, source: _Slots, target: _Slots) -> None:
    """Several slots have bits in one word. Bits that are replaced are known, so each move adds the difference to its
    word, in any order.
    """
    words = arena.view(torch.int32)
    mask = _key_mask(width) if kind == KEY_LINE else (1 << width) - 1
    (fro, from_shift), (to, to_shift) = (_words_of(kind, start, width, slots) for slots in (source, target))
    code = words[fro].long() >> from_shift & mask
    old = words[to].long() >> to_shift & mask
    words.index_add_(0, to.flatten(), (code - old << to_shift).to(torch.int32).flatten())


def _words_of(kind: int, start: int, width: int, place: _Slots) -> tuple[torch.Tensor, torch.Tensor]:
    """Which words of the arena hold codes of slots, [m, words], and from which bit on, [m, 1]."""
    pages, slots = place
    first = (pages + start) // _WORD
    if kind == KEY_LINE:
        return (first + slots % _QUARTER)[:, None], (width * (slots // _QUARTER))[:, None]
    line, field = (slots // 2).div(LANE_BITS // width, rounding_mode="floor"), slots // 2 % (LANE_BITS // width)
    per_line = LINE_BYTES // _WORD
    columns = torch.arange(per_line, device=slots.device)
    return (first + per_line * line)[:, None] + columns, (LANE_BITS * (slots % 2) + width * field)[:, None]


def _key_mask(width: int) -> int:
    """The bits of one slot in its word of a line of key codes, if it is of the first quarter."""
    lane = sum(((1 << width) - 1) << 4 * width * i for i in range(LANE_BITS // (4 * width)))
    return lane << LANE_BITS | lane
