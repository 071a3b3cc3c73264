"""OLMo 2: norms after each part and none before, and norms over all heads of q and k."""

from __future__ import annotations

from quire.models.families.config_reader import ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import TensorNames, gguf_names
from quire.models.shape import ModelShape, NormPlaces

NAMES = TensorNames(layer={"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"})
NORMS = NormPlaces(inputs=False, outputs=True)


def _shape(read: ConfigReader) -> ModelShape:
    attention = read.attention(read.rope(read.head_dim()), qk_norm="rows")
    return read.model([attention] * read.num_layers, norms=NORMS)


def _gguf_shape(read: GgufReader) -> ModelShape:
    """Also of OLMo 3, which llama.cpp writes under the same name."""
    full = read.rope()
    key = "rope.freq_base_swa" if read.settings.values.get("rope.freq_base_swa") else "rope.freq_base"
    windowed = read.rope(theta_key=key, scaled=False)
    mixers = [
        read.attention(windowed if window else full, window=window, qk_norm="rows")
        for window in read.windows(4, default=0)
    ]
    return read.model(mixers, norms=NORMS)


FAMILY = Family("olmo2", _shape, NAMES, gguf=GgufFamily("olmo2", _gguf_shape, gguf_names()))
