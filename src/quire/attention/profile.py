"""What rows look at, by its definition: the numbers that retention decides by.

A row's attention to a column is exp(score - lse), with the log-sum-exp that its attention had anyway; so nothing of
size rows x columns outlives a block, and what blocks of rows and columns give is put together in any order.

Source: FastGen, arXiv 2310.01801, section 3, whose code was never released and whose text keeps the whole matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.scores import visible_scores
from quire.cache.ledger import PAGE_TOKENS

FAR_TOKENS = PAGE_TOKENS
"""Columns so far before a row count for `column_peaks`. Of a path that retention has packed the last sealed chunk
stands in its own row, and what comes before it is as far from all rows that follow."""


def probabilities(
    q: Tensor, k: Tensor, lse: Tensor, query_positions: Tensor, key_positions: Tensor, window: int | None = None
) -> Tensor:
    """Each row's attention to some columns, averaged over the query heads of a kv head, float32 [R, H, T].

    q                [R, H, G, D], rotated
    k                [H, T, D], rotated
    lse              float32 [R, H, G], of the row over all it sees, natural log; -inf for rows that do not count
    query_positions  [R]
    key_positions    [T] or [H, T]
    window           a row sees so many positions, itself the last; None: all up to its own
    """
    scores, _ = visible_scores(q, k, query_positions, key_positions, window)
    return _of_each_head(scores, lse).mean(2)


def _of_each_head(scores: Tensor, lse: Tensor) -> Tensor:
    # Scores of rows that do not count may be anything, NaN too.
    return torch.where((lse > -torch.inf)[..., None], torch.exp(scores - lse[..., None]), 0.0)


def column_sums(
    q: Tensor, k: Tensor, lse: Tensor, query_positions: Tensor, key_positions: Tensor, window: int | None = None
) -> Tensor:
    """The attention of all rows to each column, float32 [H, T]; see `probabilities`. A prompt's is the sum over its
    slices, and of a prefix that was found, over the rows of that.
    """
    return probabilities(q, k, lse, query_positions, key_positions, window).sum(0)


def column_peaks(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    near: Tensor,
    window: int | None = None,
) -> Tensor:
    """The largest attention that any query head of any row gives to each column at least `FAR_TOKENS` before it,
    float32 [H, T]; see `probabilities`. What a head looks at from nearby says nothing of what it will look back to.

    near  [T], where columns stand as far as that matters: what is far from all rows may stand anywhere there
    """
    scores, _ = visible_scores(q, k, query_positions, key_positions, window)
    is_far = query_positions[:, None] - near >= FAR_TOKENS
    return (_of_each_head(scores, lse) * is_far[:, None, None]).amax((0, 2))


def recovered(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    kept: Tensor,
    local: int,
    window: int | None = None,
) -> Tensor:
    """The attention of all rows to what a policy keeps of some columns, float32 [H]; summed over all columns and
    divided by the rows that count, it is the policy's recovery.

    kept   bool [H, T]: columns kept whichever row looks
    local  each row also keeps so many of the last tokens, itself among them
    """
    near = query_positions[:, None, None] - key_positions.expand(kept.shape) < local
    return (probabilities(q, k, lse, query_positions, key_positions, window) * (near | kept)).sum((0, 2))
