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

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.retention.policies import Mask

BEFORE, AFTER = 2, 6
"""Neighbours of a token that get its peak for a score, on either side."""

LAST = 1.0
"""The score of each token of the last whole chunk: as much as attention can be."""

Peaks = NDArray[np.float32]


def scores_of(peaks: Peaks, positions: NDArray[np.int32], num_tokens: int) -> Peaks:
    """The scores of the tokens of each head, float32 [heads, slots].

    peaks      float32 [heads, slots]
    positions  int32 [heads, slots], in any order, below num_tokens; -1 in slots without a token, whose scores are 0
    """
    num_heads = len(peaks)
    heads = np.arange(num_heads)[:, None]
    held = positions >= 0
    # By position, with room at both ends; what a head does not have is looked at by nobody.
    row = num_tokens + BEFORE + AFTER
    by_position = np.zeros((num_heads, row), np.float32)
    at = np.where(held, positions + AFTER, row - 1)
    by_position[heads, at] = peaks
    by_position[:, num_tokens + AFTER :] = 0
    pooled = by_position.copy()
    for distance in range(1, AFTER + 1):
        np.maximum(pooled[:, distance:], by_position[:, :-distance], out=pooled[:, distance:])
    for distance in range(1, BEFORE + 1):
        np.maximum(pooled[:, :-distance], by_position[:, distance:], out=pooled[:, :-distance])
    return np.where(held, pooled[heads, at], np.float32(0))


def allocate(
    scores: Peaks,
    positions: NDArray[np.int32],
    special: Mask,
    num_tokens: int,
    page_bytes: NDArray[Any],
    page_tokens: int,
    most_bytes: float,
) -> Mask:
    """What heads keep of whole pages of tokens, bool [heads, slots].

    scores      float32 [heads, slots], not negative
    positions   int32 [heads, slots]; -1 in slots without a token. The last `page_tokens` below num_tokens are one page,
                of which all is kept or nothing
    special     bool [num_tokens]: the pages that hold them are always allocated, within the budget or not
    page_bytes  [heads], of a page and what stands beside it
    most_bytes  that all pages together may take
    Of equal tokens the first are kept. A head keeps as many tokens as its pages hold, if it has them.
    """
    num_heads, num_slots = positions.shape
    if not num_slots:
        return np.zeros(positions.shape, bool)
    held = positions >= 0
    is_last = held & (positions >= num_tokens - page_tokens)
    is_special = held & special[np.maximum(positions, 0)]
    # Sorting whole numbers made of score and position is all it takes; of floats, bits rise with values.
    ranked = np.where(is_special, np.float32(np.inf), scores).astype(np.float32)
    keys = np.ascontiguousarray(ranked).view(np.uint32).astype(np.uint64) << np.uint64(32)
    keys |= (np.uint32(0xFFFFFFFF) - positions.astype(np.uint32)).astype(np.uint64)
    keys = np.where(held & ~is_last, keys, np.uint64(0))
    num_pages = -(-num_slots // page_tokens)
    ordered = np.zeros((num_heads, num_pages * page_tokens), np.uint64)
    ordered[:, :num_slots] = np.sort(keys, 1)[:, ::-1]
    values = (ordered >> np.uint64(32)).astype(np.uint32).view(np.float32)
    gains = np.full((num_heads, num_pages + 1), -1.0)
    gains[:, 0] = np.where(is_last.any(1), LAST * page_tokens, -1.0)
    gains[(is_last & is_special).any(1), 0] = np.inf
    exists = ordered[:, ::page_tokens] > 0
    gains[:, 1:][exists] = values.reshape(num_heads, num_pages, page_tokens).sum(-1)[exists]
    taken = _best(gains, page_bytes, most_bytes)
    # So many of its best are kept of each head: as good as the last of these, or better.
    count = taken[:, 1:].sum(1) * page_tokens
    least = ordered[np.arange(num_heads), np.maximum(count, 1) - 1]
    kept = (keys >= least[:, None]) & (keys > 0) & (count > 0)[:, None]
    return np.asarray(kept | (is_last & taken[:, :1]))


def _best(gains: NDArray[np.float64], page_bytes: NDArray[Any], most_bytes: float) -> Mask:
    """Which pages are allocated, bool [heads, pages], the most gain for a byte first; below 0 is no page."""
    rate = np.where(gains < 0, -1.0, gains / page_bytes[:, None]).ravel()
    order = np.argsort(-rate, kind="stable")
    total = np.cumsum(np.broadcast_to(page_bytes[:, None], gains.shape).ravel()[order])
    found = np.zeros(gains.size, bool)
    found[order] = (rate[order] >= 0) & ((total <= most_bytes) | np.isinf(rate[order]))
    return found.reshape(gains.shape)
