"""Gemma 3: five windowed layers for each full one, each kind with its own rotation, and norms of q and k."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.families import gemma2
from quire.models.families.config_reader import FULL, SLIDING, ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import gguf_names
from quire.models.rope import Rope
from quire.models.shape import ModelShape


def _ropes(read: ConfigReader) -> dict[str, Rope]:
    """The rotations of both kinds of layers. Older files have the base of windowed layers apart."""
    head_dim = read.head_dim(256)
    full = read.rope(head_dim, theta=1e6, of=FULL)
    if SLIDING in read.settings.table("rope_parameters").values:
        return {FULL: full, SLIDING: read.rope(head_dim, theta=1e4, of=SLIDING)}
    return {FULL: full, SLIDING: Rope(theta=read.settings.number("rope_local_base_freq", 1e4), dim=head_dim)}


def _shape(read: ConfigReader) -> ModelShape:
    if read.settings.values.get("attn_logit_softcapping") is not None:
        raise ModelError("a soft cap of scores is not supported for Gemma 3 (attn_logit_softcapping)")
    window = read.settings.count("sliding_window", 4096)
    ropes = _ropes(read)
    mixers = [
        read.attention(
            ropes[kind],
            window=window if kind == SLIDING else None,
            scale=read.settings.number("query_pre_attn_scalar", 256) ** -0.5,
            qk_norm="heads",
        )
        for kind in read.layer_types(read.every(read.settings.count("sliding_window_pattern", 6)))
    ]
    return gemma2.gemma_model(read, mixers, gemma2.soft_cap(read, "final_logit_softcapping", None))


def _gguf_shape(read: GgufReader) -> ModelShape:
    full, windowed = read.rope(), read.rope(theta_key="rope.freq_base_swa", scaled=False)
    scale = gemma2.gguf_scale(read, 62)
    mixers = [
        read.attention(windowed if window else full, window=window, scale=scale, qk_norm="heads")
        for window in read.windows(6, default=0)
    ]
    return gemma2.gguf_model(read, mixers, read.settings.number("final_logit_softcapping", 0.0) or None)


FAMILY = Family("gemma3_text", _shape, gemma2.NAMES, gguf=GgufFamily("gemma3", _gguf_shape, gguf_names()))
MULTIMODAL = Family("gemma3", _shape, gemma2.NAMES, text_in="text_config")
