"""OLMo 3: OLMo 2 with windows in three of four layers; only full layers are stretched by YaRN."""

from __future__ import annotations

from quire.models.families import olmo2
from quire.models.families.config_reader import FULL, SLIDING, ConfigReader
from quire.models.families.family import Family
from quire.models.rope import Rope
from quire.models.shape import ModelShape


def _ropes(read: ConfigReader) -> dict[str, Rope]:
    """The rotations of both kinds of layers. In older files the scaling belongs to full layers alone."""
    head_dim = read.head_dim()
    full = read.rope(head_dim, theta=5e5, of=FULL)
    if SLIDING in read.settings.table("rope_parameters").values:
        return {FULL: full, SLIDING: read.rope(head_dim, theta=5e5, of=SLIDING)}
    return {FULL: full, SLIDING: Rope(theta=full.theta, dim=head_dim)}


def _shape(read: ConfigReader) -> ModelShape:
    ropes = _ropes(read)
    window = read.settings.count("sliding_window", 4096)
    mixers = [
        read.attention(ropes[kind], window=window if kind == SLIDING else None, qk_norm="rows")
        for kind in read.layer_types(read.every(4))
    ]
    return read.model(mixers, norms=olmo2.NORMS)


FAMILY = Family("olmo3", _shape, olmo2.NAMES)
