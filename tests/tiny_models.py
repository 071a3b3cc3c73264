"""Tiny models of every family, made on the spot without downloads or stored files.

`save_tiny` writes a folder through `transformers` itself, so that names and settings are the field's.
`RandomWeights` is a checkpoint in memory, for tests that need a model without files. `write_gguf` writes GGUF files
in any quantization.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.models.families.names import gguf_names
from quire.models.ffn.gated import GatedShape
from quire.models.ffn.plain import PlainShape
from quire.models.mixers.attention import AttentionShape
from quire.models.norms import NormShape
from quire.models.rope import Rope
from quire.models.shape import LayerShape, ModelShape, NormPlaces
from quire.models.weights import Checkpoint

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm", "opt", "opt-350m")

OF_KINDS = (
    "gemma2",
    "gemma3_text",
    "ministral3",
    "phi3",
    "phi4-mini",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "cohere2",
    "glm4",
)
"""Families whose layers are of several kinds, or not of the usual one."""

BOS, EOS = "<|bos|>", "<|eos|>"
BYTE_VOCAB = 258
"""Ids of `byte_tokenizer`: 256 bytes, bos, eos."""

CHATML = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

_GATED: dict[str, Any] = {
    "vocab_size": BYTE_VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": False,
}
_OPT: dict[str, Any] = {
    "vocab_size": BYTE_VOCAB,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 48,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "dropout": 0.0,
}
_WINDOWED = _GATED | {"sliding_window": 16, "num_hidden_layers": 4, "head_dim": 16}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * pair for pair in range(8)],
    "long_factor": [1.5 + 0.5 * pair for pair in range(8)],
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2",
        _WINDOWED | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "tie_word_embeddings": True},
    ),
    "gemma3_text": (
        "Gemma3Text",
        _WINDOWED
        | {
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        },
    ),
    "ministral3": (
        "Ministral3",
        _GATED
        | {
            "head_dim": 16,
            "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "phi3": (
        "Phi3",
        _GATED
        | {"hidden_size": 64, "original_max_position_embeddings": 32, "rope_parameters": _LONGROPE, "pad_token_id": 0},
    ),
    "phi4-mini": (
        "Phi3",
        _GATED
        | {
            "hidden_size": 64,
            "sliding_window": 24,
            "original_max_position_embeddings": 32,
            "rope_parameters": _LONGROPE
            | {"short_factor": [1.0] * 6, "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "partial_rotary_factor": 0.75},
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3", _GATED | {"num_hidden_layers": 4, "pad_token_id": 0, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", _GATED),
    "olmo3": (
        "Olmo3",
        _WINDOWED
        | {
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            }
        },
    ),
    "granite": (
        "Granite",
        _GATED
        | {"embedding_multiplier": 3.0, "logits_scaling": 1.7, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
    ),
    "cohere2": ("Cohere2", _WINDOWED | {"logit_scale": 0.6, "tie_word_embeddings": True}),
    "glm4": (
        "Glm4",
        _GATED
        | {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "pad_token_id": 0,
        },
    ),
    "llama": ("Llama", _GATED),
    "smollm": ("Llama", _GATED | {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral": ("Mistral", _GATED | {"sliding_window": 16}),
    "qwen2": ("Qwen2", _GATED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _GATED | {"head_dim": 16}),
    "opt": ("OPT", _OPT),
    "opt-350m": ("OPT", _OPT | {"word_embed_proj_dim": 24, "do_layer_norm_before": False}),
}


def save_tiny(folder: Path, family: str = "llama", seed: int = 0, tokenizer: bool = True, **changes: Any) -> Path:
    """Write a random model of a family as `transformers` saves it, float32 safetensors; changes go into its config."""
    import transformers

    name, settings = _SETTINGS[family]
    config = getattr(transformers, f"{name}Config")(**(settings | changes))
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            tensor.copy_(_random(tensor_name, tuple(tensor.shape), generator))
    model.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    return folder


def save_tiny_multimodal(folder: Path, family: str) -> Path:
    """Write a random model of several parts as `transformers` saves it: gemma3, mistral3, or mistral3-TEXT. TEXT is the
    family of the text model.
    """
    import transformers

    family, _, text = family.partition("-")
    name, settings = _SETTINGS[{"gemma3": "gemma3_text", "mistral3": text or "mistral"}[family]]
    text_config = getattr(transformers, f"{name}Config")(**settings)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    if family == "gemma3":
        config: Any = transformers.Gemma3Config(text_config=text_config, vision_config={**vision, "patch_size": 14})
        model: Any = transformers.Gemma3ForConditionalGeneration(config)
    else:
        vision_config = {**vision, "model_type": "pixtral", "patch_size": 14, "head_dim": 16}
        config = transformers.Mistral3Config(text_config=text_config, vision_config=vision_config)
        model = transformers.Mistral3ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            tensor.copy_(_random(tensor_name, tuple(tensor.shape), generator))
    model.eval().save_pretrained(folder)
    return folder


def save_broken(folder: Path) -> Path:
    """A tiny model whose logits are NaN, in a folder."""
    from safetensors.torch import load_file, save_file

    file = save_tiny(folder) / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    return folder


_LAYER_FIELDS = ("num_q_heads", "num_kv_heads", "head_dim", "qkv_bias", "o_bias", "qk_norm", "rope")


def tiny_shape(family: str = "llama", **changes: Any) -> ModelShape:
    """The shape of the same models without `transformers` or files. Changes are fields of ModelShape, or, for all
    layers, of AttentionShape and of the feed-forward part; and num_layers, norm_eps, sliding_window and `sums` of
    NormPlaces.
    """
    usual: dict[str, Any] = {
        "architecture": family,
        "vocab_size": BYTE_VOCAB,
        "hidden_size": 48,
        "num_layers": 2,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "ffn_size": 80,
        "max_context": 512,
        "norm_eps": 1e-6,
        "dtype": "float32",
        "bos_token_id": 256,
        "eos_token_ids": (257,),
        "sliding_window": None,
        "bias": False,
    }
    special: dict[str, dict[str, Any]] = {
        "llama": {},
        "smollm": {
            "architecture": "llama",
            "num_q_heads": 3,
            "num_kv_heads": 1,
            "head_dim": 16,
            "tied_embeddings": True,
        },
        "mistral": {"sliding_window": 16},
        "qwen2": {"qkv_bias": True, "tied_embeddings": True},
        "qwen3": {"qk_norm": "heads", "head_dim": 16},
        "opt": {
            "rope": None,
            "num_kv_heads": 4,
            "norm_eps": 1e-5,
            "qkv_bias": True,
            "o_bias": True,
            "bias": True,
            "learned_positions": True,
            "tied_embeddings": True,
        },
    }
    fields = usual | special[family] | changes
    fields.setdefault("rope", Rope(theta=10000.0, dim=fields["head_dim"]))
    of_ffn = {"ffn_size": fields.pop("ffn_size"), "bias": fields.pop("bias")}
    of_mixer = {name: fields.pop(name) for name in _LAYER_FIELDS if name in fields}
    mixer = AttentionShape(window=fields.pop("sliding_window"), **of_mixer)
    norms = NormPlaces(inputs=not fields.get("sums"), sums=fields.pop("sums", False))
    layer = LayerShape(mixer=mixer, norms=norms, ffn=PlainShape(**of_ffn) if family == "opt" else GatedShape(**of_ffn))
    eps, num_layers = fields.pop("norm_eps"), fields.pop("num_layers")
    norm = NormShape(eps, "layer", has_bias=True) if family == "opt" else NormShape(eps)
    return ModelShape(layers=(layer,) * num_layers, norm=norm, **fields)


def of_layers(shape: ModelShape, **changes: Any) -> ModelShape:
    """A shape whose layers have another attention. Changes are fields of AttentionShape."""
    layers = tuple(replace(layer, mixer=replace(layer.mixer, **changes)) for layer in shape.layers)
    return replace(shape, layers=layers)


class RandomWeights(Checkpoint):
    """A checkpoint in memory: each tensor is drawn from its name and the seed when it is asked for, and not kept."""

    def __init__(self, shape: ModelShape, seed: int = 0, device: str = "cpu") -> None:
        self.shape = shape
        self._seed = seed
        self._device = device

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator(self._device)
        generator.manual_seed(self._seed * 1_000_003 + sum((i + 1) * ord(char) for i, char in enumerate(name)))
        return _random(name, self.shape.tensor_shapes[name], generator).to(dtype or torch.float32)

    def close(self) -> None:
        pass


class BiasedKeys(RandomWeights):
    """Qwen2's keys: in each head a few slow channels are huge constants, which come from the projection's bias."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        found = super().tensor(name)
        if name.endswith(".k.bias"):
            channels = found.view(self.shape.num_kv_heads, 2, -1)
            channels[:, 0, -1] += 130
            channels[:, 1, -1] -= 90
            channels[::2, 0, -2] += 60
        return found.to(dtype or torch.float32)


def biased_shape(**changes: Any) -> ModelShape:
    """A shape for BiasedKeys: its slowest channels hardly turn, as a real model's with so large biases."""
    head_dim = changes.get("head_dim", 16)
    return tiny_shape("qwen2", **{"head_dim": head_dim, "rope": Rope(theta=1e8, dim=head_dim), **changes})


def _random(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values that keep activations near one, and make no norm or bias trivial."""
    noise = torch.randn(size, generator=generator, device=generator.device)
    if name.endswith("bias"):
        return noise * 0.1
    if len(size) == 1:
        return 1 + noise * 0.1
    return noise * 0.3 if "embed" in name or "positions" in name else noise / size[-1] ** 0.5


def byte_tokenizer(special: Sequence[str] = (BOS, EOS)) -> Any:
    """One token per byte (ids 0..255), then bos and eos: every text has ids, every id list has a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + order) for order, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab={letter[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Put `byte_tokenizer` and a chat template into a model folder."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_gguf(
    path: Path,
    shape: ModelShape,
    weights: Checkpoint | None = None,
    kind: str | Mapping[str, str] = "F32",
    extra: Mapping[str, Any] | None = None,
    split_tensors: int = 0,
    small_first: bool = False,
) -> dict[str, Tensor]:
    """Write a GGUF as llama.cpp's converter would, matrices in `kind`, vectors in F32.

    kind     one for all matrices, or by the last name of each ("q", "embed", ...), "" for others
    extra    further metadata (strings, numbers, lists), overriding the model's own
    split_tensors  most tensors of a file: the parts of `model.gguf` are `model-00001-of-00003.gguf` and so on
    small_first    whether the first part has metadata alone
    returns  canonical name -> float32 tensor, as gguf-py decodes what was written
    """
    import gguf

    weights = weights or RandomWeights(shape)
    kinds = {"": kind} if isinstance(kind, str) else kind
    writer = gguf.GGUFWriter(path, shape.architecture, split_max_tensors=split_tensors, small_first_shard=small_first)
    for key, value in (_gguf_settings(shape) | dict(extra or {})).items():
        add_setting(writer, key, value)
    expected = {}
    for name in shape.tensor_shapes:
        values = weights.tensor(name, torch.float32)
        if shape.architecture == "llama" and name.split(".")[-2] in ("q", "k"):
            heads = shape.num_q_heads if name.split(".")[-2] == "q" else shape.num_kv_heads
            # What the converter does for rotation of neighbouring channels.
            values = values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        if values.ndim == 1:
            writer.add_tensor(gguf_names().stored(name).name, values.numpy())
            expected[name] = weights.tensor(name, torch.float32)
            continue
        part = name.split(".")[-2]
        quantization = gguf.GGMLQuantizationType[kinds.get(part, kinds[""])]
        stored = (
            crafted_blocks(values.shape, quantization.name)
            if quantization.name in _CRAFTED
            else gguf.quants.quantize(values.numpy(), quantization)
        )
        writer.add_tensor(gguf_names().stored(name).name, stored, raw_dtype=quantization)
        decoded = torch.from_numpy(np.array(gguf.quants.dequantize(stored, quantization))).reshape(values.shape)
        if shape.architecture == "llama" and name.split(".")[-2] in ("q", "k"):
            decoded = decoded.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        expected[name] = decoded
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


_CRAFTED = {"Q2_K": (84, (80, 82)), "Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}
"""Bytes of a block, and where its halves are."""


def crafted_blocks(size: tuple[int, ...], kind: str) -> np.ndarray:
    """Random bytes that are valid K-quant blocks: gguf-py cannot quantize these formats, but any bytes decode.

    size     (rows, columns) of the matrix, columns a multiple of 256
    returns  uint8 [rows, bytes per row]
    """
    block_bytes, halves = _CRAFTED[kind]
    rng = np.random.default_rng(size[0] * 7919 + size[1])
    blocks = rng.integers(0, 256, (size[0] * size[1] // 256, block_bytes), dtype=np.uint8)
    for byte in halves:
        scale = rng.uniform(1e-4, 1e-3, (len(blocks), 1)).astype(np.float16)
        blocks[:, byte : byte + 2] = scale.view(np.uint8)
    return blocks.reshape(size[0], -1)


def _gguf_settings(shape: ModelShape) -> dict[str, Any]:
    prefix = shape.architecture
    settings: dict[str, Any] = {
        f"{prefix}.block_count": shape.num_layers,
        f"{prefix}.context_length": shape.max_context,
        f"{prefix}.embedding_length": shape.hidden_size,
        f"{prefix}.feed_forward_length": shape.ffn_size,
        f"{prefix}.attention.head_count": shape.num_q_heads,
        f"{prefix}.attention.head_count_kv": shape.num_kv_heads,
        f"{prefix}.attention.layer_norm_rms_epsilon": shape.norm.eps,
        f"{prefix}.attention.key_length": shape.head_dim,
        f"{prefix}.attention.value_length": shape.head_dim,
    }
    if shape.first.rope is not None:
        settings[f"{prefix}.rope.freq_base"] = shape.first.rope.theta
        settings[f"{prefix}.rope.dimension_count"] = shape.first.rope.dim
    return settings


def add_setting(writer: Any, key: str, value: Any) -> None:
    """Add a setting to a GGUF file, of the type of its value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
