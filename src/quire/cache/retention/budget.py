"""Which tokens each head keeps within a budget of bytes, as numbers. Knows peaks, sizes and positions; no pages, no
requests.

The score of a token is the largest attention that any of the rows gave from afar to it or to one just beside it
(`attention/profile.py`, `column_peaks`). The tokens of all heads are ranked together, and heads get pages in the order
of the scores in them. So a head that looks back at little has few pages, without a threshold that would say which.

    score_j = max of peak_k,  j - 6 <= k <= j + 2          a head that finds a word goes on to what follows it
    page i of a head = its i-th best 64 tokens;             pages are allocated by the sum of their scores, per byte

Pages that hold special tokens are always kept, and of the rest first the last whole chunk: nothing is known yet of who
will look back at it.

Source: the ranking over heads is that of Ada-KV, arXiv 2407.11550, the pooled scores of last rows those of SnapKV,
arXiv 2404.14469. Unlike there: the largest attention in place of the mean, only from afar, neighbours mostly behind;
whole pages; and the scores go on growing while decoding. FastGen's policies are in `policies`: a chain whose threshold
and shares are solved for the bytes loses more (docs/log.md).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Floats, Int32s

BEFORE, AFTER = 2, 6
"""Neighbours of a token that get its peak for a score, on either side."""

LAST = 1.0
"""The score of each token of the last whole chunk: as much as attention can be."""


def scores_of(peaks: Floats, positions: Int32s, num_tokens: int) -> Floats:
    """The scores of the tokens of each head, float32 [heads, slots].

    peaks      float32 [heads, slots]
    positions  int32 [heads, slots], in any order, below num_tokens; -1 in slots without a token, whose scores are 0
    """
    heads, held = np.arange(len(peaks))[:, None], positions >= 0
    # By position, with room at both ends. A slot without a token has none of the row but what is before it.
    by_position = np.zeros((len(peaks), AFTER + num_tokens + BEFORE), np.float32)
    by_position[heads, positions + AFTER] = np.where(held, peaks, 0)
    windows = (by_position[:, shift : shift + num_tokens] for shift in range(BEFORE + AFTER + 1))
    pooled = functools.reduce(np.maximum, windows)
    return np.where(held, pooled[heads, positions], np.float32(0))


def allocate(
    scores: Floats,
    positions: Int32s,
    special: Bools,
    num_tokens: int,
    page_bytes: NDArray[Any],
    page_tokens: int,
    most_bytes: float,
) -> Bools:
    """What heads keep of whole pages of tokens, bool [heads, slots].

    scores      float32 [heads, slots], not negative
    positions   int32 [heads, slots]; -1 in slots without a token. The last `page_tokens` below num_tokens are one page,
                of which all is kept or nothing
    special     bool [num_tokens]: the pages that hold them are always allocated, within the budget or not
    page_bytes  [heads], of a page and what stands beside it
    most_bytes  that all pages together may take
    Of equal tokens the first are kept. A head keeps as many tokens as its pages hold, if it has them.
    """
    if not positions.size:
        return np.zeros(positions.shape, bool)
    held = positions >= 0
    is_last = held & (positions >= num_tokens - page_tokens)
    is_special = held & special[positions]
    # Whole numbers made of score and position sort by both: of floats that are not negative, bits rise with values.
    ranked = np.where(is_special, np.float32(np.inf), scores).view(np.uint32).astype(np.uint64) << 32
    keys = np.where(held & ~is_last, ranked | ~positions.astype(np.uint32), 0)
    ordered = np.pad(np.sort(keys, 1)[:, ::-1], ((0, 0), (0, -keys.shape[1] % page_tokens)))
    pages = ordered.reshape(len(keys), -1, page_tokens)
    values = (pages >> 32).astype(np.uint32).view(np.float32).sum(-1)
    last = np.where((is_last & is_special).any(1), np.inf, np.where(is_last.any(1), LAST * page_tokens, -1))
    taken = _best(np.column_stack((last, np.where(pages[..., 0] > 0, values, -1))), page_bytes, most_bytes)
    # A head keeps the tokens that are as good as the last one of its pages, or better.
    count = taken[:, 1:].sum(1) * page_tokens
    least = ordered[np.arange(len(keys)), count - 1]
    kept = (keys >= least[:, None]) & (keys > 0) & (count > 0)[:, None]
    return np.asarray(kept | (is_last & taken[:, :1]))


def _best(gains: NDArray[np.float64], page_bytes: NDArray[Any], most_bytes: float) -> Bools:
    """Which pages are allocated, bool [heads, pages], the most gain for a byte first; below 0 is no page."""
    rate = (gains / page_bytes[:, None]).ravel()
    order = np.argsort(-rate, kind="stable")
    total = np.cumsum(np.repeat(page_bytes, gains.shape[1])[order])
    taken = np.zeros(gains.size, bool)
    taken[order] = (rate[order] >= 0) & ((total <= most_bytes) | np.isinf(rate[order]))
    return taken.reshape(gains.shape)
