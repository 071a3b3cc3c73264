"""Attention scores by definition, for the reference backend and for the profile of a prompt."""

from __future__ import annotations

import torch

from quire.attention.spec import PLAIN, Scoring


def visible_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    scoring: Scoring = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of rows for tokens, float32 [R, H, G, T], -inf where a row does not see the token; and which tokens
    each row sees, bool [R, H, T]. Arguments as of `reference.attend_dense`.
    """
    scores = torch.einsum("rhgd,htd->rhgt", q.float(), k.float()) * scoring.scale_of(q.shape[-1])
    if (cap := scoring.soft_cap) is not None:
        scores = torch.tanh(scores / cap) * cap
    distance = query_positions[:, None, None] - key_positions.expand(k.shape[0], k.shape[1])[None]
    visible = distance >= 0
    if scoring.window is not None:
        visible &= distance < scoring.window
    return scores.masked_fill(~visible[:, :, None, :], -torch.inf), visible
