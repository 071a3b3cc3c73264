"""OLMo 2: norms after each part and none before, and norms over all heads of q and k."""

from __future__ import annotations

from quire.models.families.config_reader import ConfigReader
from quire.models.families.family import Family
from quire.models.families.names import TensorNames
from quire.models.shape import ModelShape, NormPlaces

NAMES = TensorNames(layer={"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"})
NORMS = NormPlaces(inputs=False, outputs=True)


def _shape(read: ConfigReader) -> ModelShape:
    attention = read.attention(read.rope(read.head_dim()), qk_norm="rows")
    return read.model([attention] * read.num_layers, norms=NORMS)


FAMILY = Family("olmo2", _shape, NAMES)
