"""A tiny random model, made without downloads: Llama's shape, one token per byte, and Qwen's added tokens for calls and
reasoning. Knows files of checkpoints and tokenizers, not quire.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

TOKENS = {name: 256 + place for place, name in enumerate((*SPECIAL, *PLAIN))}
"""Ids of the added tokens. Ids below are bytes."""

CONTEXT = 4096

TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call functions:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Write a call as <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif begins_thinking is defined %}<think>
{% endif %}
{%- endif %}"""
"""Like Qwen 3's. The variable `begins_thinking` lets the prompt begin the reasoning."""

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256 + len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": TOKENS["<|im_end|>"],
}


def save_tiny(folder: Path) -> Path:
    """Writes the model into a folder. Its bytes are the same each time, and its files are old: quire does not remember
    the hash of a file that has just changed.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    _save_weights(folder / "model.safetensors")
    _save_tokenizer(folder)
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    return folder


def save_similar(folder: Path, tiny: Path) -> Path:
    """The same model as one that was made to compare texts: with the files of sentence-transformers."""
    folder.mkdir(parents=True)
    for path in tiny.iterdir():
        os.link(path, folder / path.name)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": place, "name": str(place), "path": f"{place}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for place, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder


def _save_weights(path: Path) -> None:
    """Values that keep activations near one, from one seed."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, vocabulary = (int(str(_CONFIG[name])) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden // 2
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    for place in range(int(str(_CONFIG["num_hidden_layers"]))):
        shapes |= {f"model.layers.{place}.{name}.weight": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        scale = 0.3 if "embed" in name else 1.5 / shape[-1] ** 0.5
        weights[name] = torch.randn(shape, generator=generator) * scale
    norms = [
        f"model.layers.{place}.{name}" for place in range(2) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    for name in (*norms, "model.norm"):
        weights[f"{name}.weight"] = 1 + torch.randn((hidden,), generator=generator) * 0.1
    save_file(weights, path, metadata={"format": "pt"})


def _save_tokenizer(folder: Path) -> None:
    """One token per byte, without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + place) for place, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in PLAIN])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
