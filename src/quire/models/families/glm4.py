"""GLM-4 0414, dense: half of each head is rotated, in neighbouring pairs; norms on both sides of each part."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.families.config_reader import ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import TensorNames, gguf_names
from quire.models.shape import ModelShape, NormPlaces

_NAMES = TensorNames(
    layer={
        "attn_out_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    },
    fused={"mlp.gate_up_proj": ("gate", "up")},
    interleaved=True,
)


def _shape(read: ConfigReader) -> ModelShape:
    rope = read.rope(read.head_dim(128), share=0.5, partial=True)
    bias = read.settings.flag("attention_bias", True)
    attention = read.attention(rope, qkv_bias=bias, o_bias=False)
    return read.model([attention] * read.num_layers, norms=NormPlaces(outputs=True))


def _gguf_shape(read: GgufReader) -> ModelShape:
    for key in ("rope.dimension_sections", "nextn_predict_layers"):
        if read.settings.values.get(key):
            raise ModelError(f"{key} is not supported for glm4 in a GGUF")
    attention = read.attention(read.rope(partial=True))
    return read.model([attention] * read.num_layers, norms=NormPlaces(outputs=True))


_GGUF_NAMES = gguf_names(fused={"ffn_up": ("gate", "up")}, interleaved=True)
FAMILY = Family("glm4", _shape, _NAMES, gguf=GgufFamily("glm4", _gguf_shape, _GGUF_NAMES))
