"""Partial attention: the attention of query rows to a part of their tokens. Partials over all parts are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Partial:
    """Attention over a set of tokens.

    o    float32 [R, H, G, D], normalised over the set
    lse  float32 [R, H, G], natural log of the sum of exp(score); for a row that sees no token -inf, and its o is 0
    """

    o: torch.Tensor
    lse: torch.Tensor


def merge(parts: Sequence[Partial]) -> Partial:
    """The attention over the union of disjoint token sets. Commutative and associative, up to rounding.

    Weights are relative to the largest lse, so that scores of any size neither all overflow nor all underflow.

    Source: FlashInfer's recursive attention; ChunkAttention, arXiv 2402.15220, `attn_reduce` of Alg. 2. Ours differs:
    partials are normalised and carry one number, the lse, instead of a maximum and a sum.
    """
    lse = torch.stack([part.lse for part in parts])
    top = lse.amax(0)
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - torch.where(top == -torch.inf, 0.0, top)))
    total = weight.sum(0)
    o = (torch.stack([part.o for part in parts]) * weight[..., None]).sum(0) / torch.where(total == 0, 1.0, total)[
        ..., None
    ]
    return Partial(o, torch.where(total == 0, -torch.inf, top + torch.log(total)))
