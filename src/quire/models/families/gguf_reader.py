"""Reads what families have in common from the metadata of a GGUF file."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire.errors import ModelError
from quire.models.ffn.gated import GateActivation, GatedShape
from quire.models.mixers.attention import AttentionShape
from quire.models.norms import NormShape
from quire.models.rope import MAX_LAYERS, Rope
from quire.models.settings import CheckedSettings
from quire.models.shape import USUAL_NORMS, LayerShape, ModelShape, NormPlaces

log = logging.getLogger("quire")


class GgufReader:
    """The metadata of a file, and what families usually make of them.

    tensors     names of the tensors in the file
    vocab_size  rows of the embedding
    factors     contents of tensors with frequency factors, by their names without `.weight`
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        tensors: Collection[str],
        vocab_size: int,
        factors: Mapping[str, tuple[float, ...]],
    ) -> None:
        self.architecture = str(metadata.get("general.architecture"))
        self.metadata, self.tensors, self.vocab_size, self.factors = metadata, tensors, vocab_size, factors
        prefixes = (f"{self.architecture}.", "tokenizer.ggml.")
        self.settings, self._vocabulary = (
            CheckedSettings(_alike(metadata, prefixes[0])).under(prefix) for prefix in prefixes
        )
        if experts := self.settings.count("expert_count", 0, least=0):
            raise ModelError(f"mixtures of experts are not supported ({experts} experts)")
        self.num_layers = self.settings.count("block_count", most=MAX_LAYERS)
        self.num_q_heads = self.settings.count("attention.head_count")
        self.hidden_size = self.settings.count("embedding_length")

    @property
    def head_dim(self) -> int:
        """Channels of a head. Raises ModelError if keys and values differ."""
        head_dim = self.settings.count("attention.key_length", self.hidden_size // self.num_q_heads)
        if self.settings.count("attention.value_length", head_dim) != head_dim:
            raise ModelError("keys and values of different head size are not supported")
        return head_dim

    def has(self, part: str) -> bool:
        """Whether the first layer has a tensor of this name."""
        return f"blk.0.{part}" in self.tensors

    def attention(self, rope: Rope | None, **fields: Any) -> AttentionShape:
        """The attention of a layer. Biases, which the metadata lack, follow from the tensors' names.

        fields  those of AttentionShape that are not the usual ones
        """
        usual: dict[str, Any] = {
            "num_q_heads": self.num_q_heads,
            "num_kv_heads": self.settings.count("attention.head_count_kv", self.num_q_heads),
            "head_dim": self.head_dim,
            "rope": rope,
            "qkv_bias": self.has("attn_q.bias") or self.has("attn_qkv.bias"),
            "o_bias": self.has("attn_output.bias"),
        }
        return AttentionShape(**usual | fields)

    def gated(self, activation: GateActivation = "silu") -> GatedShape:
        """The feed-forward part of a layer."""
        ffn_size = self.settings.count("feed_forward_length")
        return GatedShape(ffn_size=ffn_size, activation=activation, bias=self.has("ffn_up.bias"))

    def model(
        self,
        mixers: Sequence[AttentionShape],
        *,
        ffn: GatedShape | None = None,
        norms: NormPlaces = USUAL_NORMS,
        residual_scale: float = 1.0,
        **fields: Any,
    ) -> ModelShape:
        """The model of one attention for each layer, with the same feed-forward part and norms in all.

        fields  of ModelShape
        """
        ffn = ffn or self.gated()
        eos = [each for key in ("eos_token_id", "eot_token_id") for each in self._ids(key)]
        usual: dict[str, Any] = {
            "architecture": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "layers": tuple(
                LayerShape(mixer=mixer, ffn=ffn, norms=norms, residual_scale=residual_scale) for mixer in mixers
            ),
            "max_context": self.settings.count("context_length"),
            "norm": NormShape(self.settings.number("attention.layer_norm_rms_epsilon", 1e-6, least=0)),
            "tied_embeddings": "output.weight" not in self.tensors,
            "bos_token_id": next(iter(self._ids("bos_token_id")), None),
            "eos_token_ids": tuple(dict.fromkeys(eos)),
        }
        return ModelShape(**usual | fields)

    def window(self) -> int | None:
        """The window of windowed layers; None: the file has none."""
        return self.settings.count("attention.sliding_window", 0, least=0) or None

    def windows(self, period: int, default: int | None = None) -> list[int | None]:
        """The window of each layer; None: it sees all tokens.

        period   every `period`-th layer sees all tokens, where the file does not say which
        default  the window for files without this key; 0: none, None: it must be there
        """
        key = "attention.sliding_window_pattern"
        window = self.settings.count("attention.sliding_window", default, least=0) or None
        has_window = self.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(has_window, tuple):
            period = self.settings.count(key, period, least=0)
            has_window = [period == 0 or (index + 1) % period != 0 for index in range(self.num_layers)]
        if len(has_window) != self.num_layers or not set(has_window) <= {False, True}:
            raise ModelError(f"setting {self.architecture}.{key} needs true or false for each of its layers")
        return [window if each else None for each in has_window]

    def rope(self, *, theta_key: str = "rope.freq_base", scaled: bool = True, partial: bool = False) -> Rope:
        """The rotation, read as in llama.cpp: type none scales nothing, and scaling without a type is linear.

        scaled   whether the file's scaling belongs to this rotation
        partial  whether the family may rotate some channels only
        """
        settings, head_dim = self.settings, self.head_dim
        rotated = settings.count("rope.dimension_count", head_dim)
        if rotated != head_dim and not partial:
            raise ModelError(f"rope rotates {rotated} of {head_dim} channels; only whole heads are supported")
        theta = settings.number(theta_key, 10000.0)
        fields: dict[str, Any] = {"theta": theta, "dim": head_dim, "rotated": 0 if rotated == head_dim else rotated}
        return Rope(**fields, **(self._scaling() if scaled else {}))

    def original_context(self) -> int:
        """Positions of the pre-training, before stretching."""
        return self.settings.count("rope.scaling.original_context_length", self.settings.count("context_length"))

    def _scaling(self) -> dict[str, Any]:
        """The fields of Rope that belong to a scaling."""
        settings, kind = self.settings, self.settings.text("rope.scaling.type", "linear")
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise ModelError(f"rope scaling {kind!r} is not supported in a GGUF (only none, linear, yarn, longrope)")
        # Files of 2023 name the factor scale_linear, and a factor of 0 means none.
        factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 0.0)) or 1.0
        factor = 1.0 if kind == "none" else factor
        strength = settings.number("rope.scaling.attn_factor", 1.0)
        long, short = (self.factors.get(f"rope_factors_{name}", ()) for name in ("long", "short"))
        stretched = f"a {kind} factor of {factor:g}"
        if long or short or kind == "longrope":
            if not (long and short):
                raise ModelError("longrope needs both rope_factors_long.weight and rope_factors_short.weight")
            if factor != 1.0 or "rope_freqs" in self.factors:
                other = "rope_freqs.weight" if factor == 1.0 else stretched
                raise ModelError(f"rope is scaled both by rope_factors_long.weight and by {other}")
            of_kind = {"factors": short, "long_factors": long, "original_context": self.original_context()}
            return {"kind": "longrope", **of_kind, "magnitude": strength}
        if strength != 1.0 and kind != "yarn":
            raise ModelError(f"rope.scaling.attn_factor {strength:g} is not supported")
        factors = self.factors.get("rope_freqs", ())
        if factor == 1.0 and strength == 1.0:
            return {"kind": "factors", "factors": factors} if factors else {}
        if factors:
            raise ModelError(f"rope is scaled both by rope_freqs.weight and by {stretched}; only one is supported")
        return self._yarn(factor, strength) if kind == "yarn" else {"kind": "linear", "factor": factor}

    def _yarn(self, factor: float, strength: float) -> dict[str, Any]:
        """The fields of Rope of YaRN. strength: an additional factor of its magnitude."""
        settings = self.settings
        if (kept := settings.number("rope.scaling.yarn_ext_factor", 1.0)) != 1.0:
            raise ModelError(f"rope.scaling.yarn_ext_factor {kept:g} is not supported")
        growth = 0.1 * math.log(factor) if factor > 1 else 0.0
        usual = (1 + growth) / (1 + growth * settings.number("rope.scaling.yarn_log_multiplier", 0.0))
        return {
            "kind": "yarn",
            "factor": factor,
            "beta_fast": settings.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": settings.number("rope.scaling.yarn_beta_slow", 1.0),
            "original_context": self.original_context(),
            "magnitude": strength * settings.number("rope.scaling.yarn_attn_factor", usual),
        }

    def _ids(self, key: str) -> list[int]:
        """Token ids in the vocabulary. Warns about others and leaves them out, as llama.cpp does."""
        ids = self._vocabulary.ids(key)
        for token_id in ids:
            if token_id >= self.vocab_size:
                effect = "; it ends no answer" if key != "bos_token_id" else ""
                log.warning(
                    "tokenizer.ggml.%s is %d, outside the vocabulary of %d tokens%s",
                    key,
                    token_id,
                    self.vocab_size,
                    effect,
                )
        return [token_id for token_id in ids if token_id < self.vocab_size]


def _alike(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The metadata with one number in place of a list that has the same number for every layer, as some converters
    write `attention.head_count_kv`.
    """
    num_layers = metadata.get(f"{prefix}block_count")
    return {
        key: value[0]
        if key.startswith(prefix) and isinstance(value, tuple) and len(value) == num_layers and len(set(value)) == 1
        else value
        for key, value in metadata.items()
    }
