"""The definition of the attention statistics on which retention bases its decisions.

A row's attention to a column is exp(score - lse), with the log-sum-exp that attention computes anyway. So no matrix of
rows x columns outlives a block, and the results of blocks may be combined in any order.

Source: FastGen, arXiv 2310.01801, section 3. Its code was never released; its text keeps the whole matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.scores import visible_scores
from quire.attention.spec import PLAIN, Scoring
from quire.cache.ledger import PAGE_TOKENS

FAR_TOKENS = PAGE_TOKENS
"""Least distance between a row and a column that it counts for in `column_peaks`. In a path that retention has packed,
the last sealed chunk stays in a row of its own. All tokens before it are at least this far from the rows after it."""


def probabilities(
    q: Tensor, k: Tensor, lse: Tensor, query_positions: Tensor, key_positions: Tensor, scoring: Scoring = PLAIN
) -> Tensor:
    """Each row's attention to some columns, averaged over the query heads of a kv head, float32 [R, H, T].

    q                [R, H, G, D], rotated
    k                [H, T, D], rotated
    lse              float32 [R, H, G], over all tokens that the row sees, natural log; -inf for rows that do not count
    query_positions  [R]
    key_positions    [T] or [H, T]
    scoring          how the layer scores
    """
    scores, _ = visible_scores(q, k, query_positions, key_positions, scoring)
    return _of_each_head(scores, lse).mean(2)


def _of_each_head(scores: Tensor, lse: Tensor) -> Tensor:
    # Rows that do not count may have any score, even NaN.
    return torch.where((lse > -torch.inf)[..., None], torch.exp(scores - lse[..., None]), 0.0)


def column_sums(
    q: Tensor, k: Tensor, lse: Tensor, query_positions: Tensor, key_positions: Tensor, scoring: Scoring = PLAIN
) -> Tensor:
    """The attention of all rows to each column, float32 [H, T]; see `probabilities`.

    The sums of a prompt add up over its slices, and over the rows of a prefix that was found in the cache.
    """
    return probabilities(q, k, lse, query_positions, key_positions, scoring).sum(0)


def column_peaks(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    near: Tensor,
    scoring: Scoring = PLAIN,
) -> Tensor:
    """The largest attention that any query head of any row gives to each column at least `FAR_TOKENS` before it,
    float32 [H, T]; see `probabilities`. Attention to near tokens does not predict which old tokens a head will need.

    near  [T], positions of the columns; a column that is far from all rows may have any position that is far
    """
    scores, _ = visible_scores(q, k, query_positions, key_positions, scoring)
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
    scoring: Scoring = PLAIN,
) -> Tensor:
    """The attention of all rows to the columns that a policy keeps, float32 [H]. Summed over all columns and divided by
    the number of rows that count, this is the policy's recovery.

    kept   bool [H, T]: columns kept for every row
    local  number of last tokens that each row also keeps, its own included
    """
    near = query_positions[:, None, None] - key_positions.expand(kept.shape) < local
    return (probabilities(q, k, lse, query_positions, key_positions, scoring) * (near | kept)).sum((0, 2))
