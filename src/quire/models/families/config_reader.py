"""Reads what families have in common from config.json, of any transformers version."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ModelError
from quire.models.ffn.gated import GateActivation, GatedShape
from quire.models.mixers.attention import AttentionShape
from quire.models.norms import NormShape
from quire.models.rope import MAX_LAYERS, Rope
from quire.models.settings import CheckedSettings
from quire.models.shape import ITEM_BYTES, USUAL_NORMS, LayerShape, ModelShape, NormPlaces

_GATES: dict[str, GateActivation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
}
SLIDING, FULL = "sliding_attention", "full_attention"


class ConfigReader:
    """The settings of a config.json, and what families usually make of them.

    settings  those of the text model
    outer     those of the whole file, where the text model is one part of several
    """

    def __init__(self, settings: CheckedSettings, generation: Mapping[str, Any], outer: CheckedSettings) -> None:
        self.settings = settings
        self.outer = outer
        self._generation = CheckedSettings(generation, "generation_config.json")
        self.family = settings.text("model_type", "")
        self.num_layers = settings.count("num_hidden_layers", most=MAX_LAYERS)
        self.num_q_heads = settings.count("num_attention_heads")
        self.hidden_size = settings.count("hidden_size")

    def head_dim(self, default: int | None = None) -> int:
        """Channels of a head. default: for files without this setting; None: the hidden size divided by the heads."""
        return self.settings.count("head_dim", default or self.hidden_size // self.num_q_heads)

    def attention(self, rope: Rope | None, **fields: Any) -> AttentionShape:
        """The attention of a layer. fields: those of AttentionShape that are not the usual ones."""
        bias = self.settings.flag("attention_bias")
        usual: dict[str, Any] = {
            "num_q_heads": self.num_q_heads,
            "num_kv_heads": self.settings.count("num_key_value_heads", self.num_q_heads),
            "head_dim": self.head_dim() if rope is None else rope.dim,
            "rope": rope,
            "qkv_bias": bias,
            "o_bias": bias,
        }
        return AttentionShape(**usual | fields)

    def gated(self, key: str = "hidden_act", *, bias: bool = False) -> GatedShape:
        """The feed-forward part of a layer. key: the setting with its activation."""
        name = self.settings.text(key, "silu")
        if name not in _GATES:
            raise ModelError(f"activation {name!r} is not supported for {self.family} (only {', '.join(_GATES)})")
        return GatedShape(ffn_size=self.settings.count("intermediate_size"), activation=_GATES[name], bias=bias)

    def model(
        self,
        mixers: Sequence[AttentionShape],
        *,
        ffn: GatedShape | None = None,
        norms: NormPlaces = USUAL_NORMS,
        tied: bool = False,
        residual_scale: float = 1.0,
        **fields: Any,
    ) -> ModelShape:
        """The model of one attention for each layer, with the same feed-forward part and norms in all.

        tied    whether embedding and head are tied where the file does not say it
        fields  of ModelShape
        """
        ffn = ffn or self.gated()
        usual: dict[str, Any] = {
            "layers": tuple(
                LayerShape(mixer=mixer, ffn=ffn, norms=norms, residual_scale=residual_scale) for mixer in mixers
            ),
            "max_context": self.max_context(mixers),
            "norm": NormShape(self.settings.number("rms_norm_eps", 1e-6, least=0)),
            "tied_embeddings": self._is_tied(tied),
        }
        return ModelShape(**self.base() | usual | fields)

    def base(self) -> dict[str, Any]:
        """The fields of ModelShape that all families read alike."""
        settings = self.settings
        eos = self._generation.ids("eos_token_id")
        dtype = str(self._of_either("dtype") or self._of_either("torch_dtype") or "float32").removeprefix("torch.")
        return {
            "architecture": self.family,
            "vocab_size": settings.count("vocab_size"),
            "hidden_size": self.hidden_size,
            "dtype": dtype if dtype in ITEM_BYTES else "float32",  # that of the saved weights, if it is supported
            "bos_token_id": next(iter(settings.ids("bos_token_id") or self.outer.ids("bos_token_id")), None),
            "eos_token_ids": tuple(
                dict.fromkeys((*eos, *(settings.ids("eos_token_id") or self.outer.ids("eos_token_id"))))
            ),
        }

    def _is_tied(self, default: bool) -> bool:
        """Whether embedding and head are tied. In a file of several parts, what it says of the whole holds."""
        key = "tie_word_embeddings"
        if self.outer is self.settings:
            return self.settings.flag(key, default)
        return self.outer.flag(key, self.settings.flag(key, True))

    def _of_either(self, key: str) -> Any:
        return self.settings.values.get(key) or self.outer.values.get(key)

    def max_context(self, mixers: Sequence[AttentionShape]) -> int:
        """Positions that the model serves."""
        trained = self.settings.count("max_position_embeddings")
        # A file whose context is stretched by a factor may have the trained length, or the stretched one.
        stretched = [
            int((trained if rope.kind == "linear" else rope.original_context) * rope.factor)
            for mixer in mixers
            if (rope := mixer.rope) is not None and rope.kind in ("linear", "yarn") and mixer.window is None
        ]
        return max(trained, *stretched, 0)

    def layer_types(self, default: Sequence[str]) -> Sequence[str]:
        """The kind of attention of each layer, SLIDING or FULL."""
        kinds = self.settings.texts("layer_types") or default
        if len(kinds) != self.num_layers:
            raise ModelError(f"layer_types has {len(kinds)} entries for {self.num_layers} layers")
        if wrong := set(kinds) - {SLIDING, FULL}:
            raise ModelError(f"layers of the kind {sorted(wrong)[0]!r} are not supported for {self.family}")
        return kinds

    def every(self, period: int) -> list[str]:
        """Kinds of layers of which every `period`-th one sees all tokens."""
        return [SLIDING if (index + 1) % period else FULL for index in range(self.num_layers)]

    def rope(
        self, head_dim: int, *, theta: float = 10000.0, of: str = "", share: float | None = None, partial: bool = False
    ) -> Rope:
        """The rotation. `rope_parameters` is the newer form of `rope_scaling`.

        of       the kind of layer, where kinds have their own settings
        theta    for files without this setting
        share    of the channels, for files without this setting
        partial  whether the family may rotate some channels only
        """
        newer, older = self.settings.table("rope_parameters"), self.settings.table("rope_scaling")
        if of and newer.values:
            newer = newer.table(of) if of in newer.values else newer
        scaling = newer if newer.values else older
        merged = CheckedSettings({**self.settings.values, **scaling.values}, "config.json")
        kind = scaling.text("rope_type", "") or scaling.text("type", "") or "default"
        kind = {"su": "longrope"}.get(kind, kind)
        found = merged.number("partial_rotary_factor", 1.0 if share is None else share)
        if found != 1.0 and not partial:
            raise ModelError(f"partial_rotary_factor {found:g} is not supported for {self.family}")
        rotated = int(head_dim * found)
        return Rope(
            theta=merged.number("rope_theta", theta),
            dim=head_dim,
            rotated=0 if rotated == head_dim else rotated,
            kind=kind,
            **self._scaling(kind, merged),
        )

    def _scaling(self, kind: str, merged: CheckedSettings) -> dict[str, Any]:
        """The fields of Rope that belong to a kind of scaling."""
        trained = self.settings.count("max_position_embeddings")
        original = merged.count("original_max_position_embeddings", trained)
        match kind:
            case "linear":
                return {"factor": merged.number("factor")}
            case "dynamic":
                return {"factor": merged.number("factor"), "original_context": trained}
            case "llama3":
                fields = {name: merged.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
                return {**fields, "original_context": original}
            case "yarn":
                factor = merged.number("factor", trained / original)
                return {
                    "factor": factor,
                    "beta_fast": merged.number("beta_fast", 32.0),
                    "beta_slow": merged.number("beta_slow", 1.0),
                    "truncates": merged.flag("truncate", True),
                    "original_context": original,
                    "magnitude": _yarn_magnitude(merged, factor),
                }
            case "longrope":
                factor = merged.number("factor", trained / original)
                usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
                return {
                    "factors": tuple(map(float, merged.numbers("short_factor"))),
                    "long_factors": tuple(map(float, merged.numbers("long_factor"))),
                    "original_context": original,
                    "magnitude": merged.number("attention_factor", usual),
                }
        return {}


def _yarn_magnitude(merged: CheckedSettings, factor: float) -> float:
    """The magnitude of rotated queries and keys. Source: YaRN, section 3.4, with DeepSeek's two factors of it."""

    def of(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0

    shares = merged.number("mscale", 0.0), merged.number("mscale_all_dim", 0.0)
    usual = of(shares[0]) / of(shares[1]) if all(shares) else of(1.0)
    return merged.number("attention_factor", usual)
