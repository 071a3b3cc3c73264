"""The layers of a model as a backend of attention gets them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire.attention.spec import Angles, AttentionLayer, Scoring

if TYPE_CHECKING:
    from quire.models.mixers.attention import AttentionShape
    from quire.models.shape import ModelShape


def attention_layers(
    shape: ModelShape, max_context: int, device: torch.device | str = "cpu"
) -> tuple[tuple[AttentionLayer, ...], tuple[Angles, ...]]:
    """The layers, and the angles that they name."""
    rotations = []
    for rope in shape.ropes:
        cos, sin = (torch.from_numpy(part).to(device) for part in rope.tables(max_context))
        rotations.append((cos, sin))
    layers, first_lane = [], 0
    for layer in shape.layers:
        mixer = layer.mixer
        layers.append(
            AttentionLayer(
                first_lane,
                mixer.num_kv_heads,
                mixer.num_q_heads // mixer.num_kv_heads,
                mixer.head_dim,
                None if mixer.rope is None else shape.ropes.index(mixer.rope),
                scoring_of(mixer, max_context),
            )
        )
        first_lane += mixer.num_kv_heads
    return tuple(layers), tuple(rotations)


def scoring_of(mixer: AttentionShape, max_context: int) -> Scoring:
    """How a layer scores. A window that is at least as long as the context has no effect."""
    window = mixer.window if (mixer.window or 0) < max_context else None
    return Scoring(window, mixer.score_scale, mixer.soft_cap)
