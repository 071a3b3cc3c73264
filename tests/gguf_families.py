"""Writes models of `transformers` as GGUF files with the names, settings and orders of llama.cpp's converter.

Source: llama.cpp, conversion/*.py, of July 2026. Only what it writes of the families here is here, in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tiny_models import add_setting

_USUAL = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_BOTH_SIDES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_GLM = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
}
_NAMES = {"gemma2": _BOTH_SIDES, "gemma3": _BOTH_SIDES, "olmo2": _BOTH_SIDES, "phi3": _FUSED, "glm4": _GLM}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ARCHITECTURES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
}
_PERMUTED = ("llama", "mistral3", "smollm3", "granite")
"""Rows of q and k are reordered from pairs of halves to pairs of neighbours."""


def convert(folder: Path, path: Path, **extra: Any) -> Path:
    """Write a model folder as a GGUF file. extra: settings without the architecture's name; None leaves one out."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    name = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, name)
    # The converter's names of settings have dots, a keyword has none.
    changes = {key.replace("__", "."): value for key, value in extra.items()}
    for key, value in (_settings(config, name) | changes).items():
        if value is not None:
            add_setting(writer, f"{name}.{key}", value)
    for stored, values in _tensors(load_file(folder / "model.safetensors"), config, name).items():
        writer.add_tensor(stored, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(stored: dict[str, Tensor], config: dict[str, Any], name: str) -> dict[str, Tensor]:
    """The tensors by the converter's names."""
    found = {}
    for place, values in stored.items():
        part, kind = place.rsplit(".", 1)
        if kind == "weight" and part.endswith("norm") and name.startswith("gemma"):
            values = values + 1
        if name in _PERMUTED and part.endswith(("q_proj", "k_proj")):
            key = "num_attention_heads" if part.endswith("q_proj") else "num_key_value_heads"
            values = values.view(config[key], 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        if part in _TOP:
            found[f"{_TOP[part]}.{kind}"] = values.contiguous()
            continue
        index, rest = part.removeprefix("model.layers.").split(".", 1)
        own = (_USUAL | _NAMES.get(name, {}))[rest]
        found[f"blk.{index}.{own}.{kind}"] = values.contiguous()
    rope = config.get("rope_parameters") or {}
    for length in ("long", "short"):
        if factors := rope.get(f"{length}_factor"):
            found[f"rope_factors_{length}.weight"] = torch.tensor(factors)
    return found


def _settings(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings by the converter's names, without the architecture's."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    found: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        # The converter leaves it out for Gemma 2, whose base is always the default.
        "rope.freq_base": None if name == "gemma2" else full.get("rope_theta"),
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
    }
    if full.get("rope_type") in ("yarn", "linear"):
        found |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": full["factor"]}
    if full.get("rope_type") == "yarn":
        found["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        found["rope.scaling.yarn_attn_factor"] = full.get("attention_factor")
        found["rope.scaling.yarn_beta_fast"] = full.get("beta_fast")
        found["rope.scaling.yarn_beta_slow"] = full.get("beta_slow")
    return found | _own_settings(config, name, head_dim, rope)


def _own_settings(config: dict[str, Any], name: str, head_dim: int, rope: dict[str, Any]) -> dict[str, Any]:
    """The settings of one family."""
    window = config.get("sliding_window")
    match name:
        case "gemma2":
            return {
                "attn_logit_softcapping": config["attn_logit_softcapping"],
                "final_logit_softcapping": config["final_logit_softcapping"],
                "attention.sliding_window": window,
            }
        case "gemma3":
            return {
                "final_logit_softcapping": config.get("final_logit_softcapping"),
                "attention.sliding_window": window,
            }
        case "mistral3":
            return {
                "rope.dimension_count": head_dim,
                "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
                "attention.temperature_scale": rope["llama_4_scaling_beta"],
            }
        case "phi3":
            original = config["original_max_position_embeddings"]
            stretch = config["max_position_embeddings"] / original
            strength = (1 + torch.tensor(stretch).log() / torch.tensor(original).log()).sqrt().item()
            return {
                "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
                "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
                "rope.scaling.original_context_length": original,
                "rope.scaling.attn_factor": strength if rope.get("long_factor") and stretch > 1 else None,
                "attention.sliding_window": window or 0,
            }
        case "smollm3" | "llama":
            return {"rope.dimension_count": head_dim}
        case "olmo2":
            kinds = [kind == "sliding_attention" for kind in config.get("layer_types") or ()]
            pattern = {"attention.sliding_window_pattern": kinds} if kinds else {}
            return {} if window is None else {"attention.sliding_window": window} | pattern
        case "granite":
            return {
                "rope.dimension_count": head_dim,
                "attention.scale": config["attention_multiplier"],
                "embedding_scale": config["embedding_multiplier"],
                "residual_scale": config["residual_multiplier"],
                "logit_scale": config["logits_scaling"],
            }
        case "cohere2":
            return {
                "logit_scale": config["logit_scale"],
                "attention.sliding_window": window,
                "rope.dimension_count": head_dim,
                "rope.scaling.type": "none",
            }
        case "glm4":
            return {"rope.dimension_count": int(head_dim * rope["partial_rotary_factor"])}
    return {}
