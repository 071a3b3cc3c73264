"""Which tokens each head keeps within a budget of bytes, as numbers. Knows peaks, sizes and positions; no pages, no
requests.

The peak of a token is the largest attention that any row gave to it from afar (`column_peaks` in
`attention/profile.py`). Its score is the largest peak among its neighbours and itself. The tokens of all heads are
ranked together, and heads get pages in the order of the scores in them. So a head that looks back at little has few
pages, without a threshold.

    score_j = max of peak_k,  j - 6 <= k <= j + 2          a head that finds a word then reads the words after it
    page i of a head = its i-th best 64 tokens;             pages are allocated by the sum of their scores, per byte

Pages that hold special tokens are always kept. Of the rest the last whole chunk comes first, because no row has looked
back at it yet.

Source: the ranking over heads is that of Ada-KV, arXiv 2407.11550; the pooled scores of the last rows are those of
SnapKV, arXiv 2404.14469. Unlike there, scores are the largest attention, not the mean, count only from afar, and pool
mostly tokens behind; pages are whole; and scores go on growing while decoding. FastGen's policies are in `policies`. A
chain whose threshold and shares are solved for the bytes loses more (docs/lab/2026-11.md).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Floats, Int32s

BEFORE, AFTER = 2, 6
"""A token's peak counts for the scores of this many neighbours before and after it."""

LAST = 1.0
"""The score of each token of the last whole chunk: the largest possible attention."""


def scores_of(peaks: Floats, positions: Int32s, num_tokens: int) -> Floats:
    """The scores of the tokens of each head, float32 [heads, slots].

    peaks      float32 [heads, slots]
    positions  int32 [heads, slots], in any order, below num_tokens; -1 in slots without a token, whose scores are 0
    """
    heads, held = np.arange(len(peaks))[:, None], positions >= 0
    # By position, with room at both ends. Slots without a token write a 0 into the room before the first position.
    by_position = np.zeros((len(peaks), AFTER + num_tokens + BEFORE), np.float32)
    by_position[heads, positions + AFTER] = np.where(held, peaks, 0)
    windows = (by_position[:, shift : shift + num_tokens] for shift in range(BEFORE + AFTER + 1))
    pooled = functools.reduce(np.maximum, windows)
    return np.where(held, pooled[heads, positions], np.float32(0))


def allocate(
    scores: Floats, positions: Int32s, special: Bools, page_bytes: NDArray[Any], page_tokens: int, most_bytes: float
) -> Bools:
    """The tokens that heads keep in whole pages, bool [heads, slots]. A head fills its pages if it has the tokens. The
    first of equal tokens are kept.

    scores      float32 [heads, slots], not negative
    positions   int32 [heads, slots]; -1 in slots without a token. The last `page_tokens` positions of the sequence are
                one page, which is kept or dropped as a whole
    special     bool [tokens of the sequence]: pages that hold these tokens are always allocated, even beyond the budget
    page_bytes  [heads], bytes of a page with its sums and positions
    most_bytes  most bytes of all pages together
    """
    if not positions.size:
        return np.zeros(positions.shape, bool)
    held = positions >= 0
    is_last = held & (positions >= len(special) - page_tokens)
    is_special = held & special[positions]
    # One sort ranks by score, then position: the bits of floats that are not negative rise with their values.
    ranked = np.where(is_special, np.float32(np.inf), scores).view(np.uint32).astype(np.uint64) << 32
    keys = np.where(held & ~is_last, ranked | ~positions.astype(np.uint32), 0)
    ordered = np.pad(np.sort(keys, 1)[:, ::-1], ((0, 0), (0, -keys.shape[1] % page_tokens)))
    pages = ordered.reshape(len(keys), -1, page_tokens)
    values = (pages >> 32).astype(np.uint32).view(np.float32).sum(-1)
    last = np.where((is_last & is_special).any(1), np.inf, np.where(is_last.any(1), LAST * page_tokens, -1))
    # Pages are allocated by gain per byte, the most first. A negative gain means no page.
    gains = np.column_stack((last, np.where(pages[..., 0] > 0, values, -1)))
    rate = (gains / page_bytes[:, None]).ravel()
    order = np.argsort(-rate, kind="stable")
    total = np.cumsum(np.repeat(page_bytes, gains.shape[1])[order])
    chosen = np.zeros(gains.shape, bool)
    chosen.flat[order] = (rate[order] >= 0) & ((total <= most_bytes) | np.isinf(rate[order]))
    # A head keeps the tokens that rank at least as high as the last one in its pages.
    count = chosen[:, 1:].sum(1) * page_tokens
    least = ordered[np.arange(len(keys)), count - 1]
    kept = (keys >= least[:, None]) & (keys > 0) & (count > 0)[:, None]
    return np.asarray(kept | (is_last & chosen[:, :1]))
