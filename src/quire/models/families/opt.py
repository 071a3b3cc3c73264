"""OPT: learned positions, layer norms with biases, a plain feed-forward part; the 350m size has norms after the sums.

It is here because the papers measure on it, not for speed.
"""

from __future__ import annotations

from typing import Literal, cast

from quire.errors import ModelError
from quire.models.families.config_reader import ConfigReader
from quire.models.families.family import Family
from quire.models.families.names import TensorNames
from quire.models.ffn.plain import PlainShape
from quire.models.mixers.attention import AttentionShape
from quire.models.norms import NormShape
from quire.models.shape import LayerShape, ModelShape, NormPlaces

_NAMES = TensorNames(
    layer={
        "attn_norm": "self_attn_layer_norm",
        "o": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "up": "fc1",
        "down": "fc2",
    },
    top={
        "embed": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "norm": "model.decoder.final_layer_norm",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
    },
    prefix="model.decoder.layers",
)


def _shape(read: ConfigReader) -> ModelShape:
    settings = read.settings
    activation = settings.text("activation_function", "relu")
    if activation not in ("relu", "gelu"):
        raise ModelError(f"activation {activation!r} is not supported for opt (only relu, gelu)")
    if not settings.flag("layer_norm_elementwise_affine", True):
        raise ModelError("OPT with layer_norm_elementwise_affine = false is not supported")
    bias = settings.flag("enable_bias", True)
    is_first = settings.flag("do_layer_norm_before", True)
    embed_size = settings.count("word_embed_proj_dim", read.hidden_size)
    heads = read.num_q_heads
    layer = LayerShape(
        mixer=AttentionShape(
            num_q_heads=heads,
            num_kv_heads=heads,
            head_dim=read.hidden_size // heads,
            rope=None,
            qkv_bias=bias,
            o_bias=bias,
        ),
        ffn=PlainShape(
            ffn_size=settings.count("ffn_dim"), activation=cast(Literal["relu", "gelu"], activation), bias=bias
        ),
        norms=NormPlaces(inputs=is_first, sums=not is_first),
    )
    return ModelShape(
        **read.base(),
        layers=(layer,) * read.num_layers,
        max_context=settings.count("max_position_embeddings"),
        norm=NormShape(1e-5, "layer", has_bias=True),
        tied_embeddings=settings.flag("tie_word_embeddings", True),
        embed_size=None if embed_size == read.hidden_size else embed_size,
        learned_positions=True,
        final_norm=is_first and not settings.flag("_remove_final_layer_norm"),
    )


FAMILY = Family("opt", _shape, _NAMES)
