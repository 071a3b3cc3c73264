"""Tiny tokenizers built like those of model families: the same kind of vocabulary, pipeline and added tokens, with few
merges. A tokenizer of bytes without added tokens hides what depends on these.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.models.tokenizer import Tokenizer as QuireTokenizer
from quire.models.tokenizer import load_tokenizer

from .tiny_models import save_tiny

_TEXT = [
    'the name of the tool is "add" and its arguments are {"a": 1, "b": true}, 2024-01-02 said the parrot to the cat',
    "think: yes, no, Tom is a dog; Hm. éàü 日本 def call(function) -> None: return None\n\n",
] * 4

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Family(NamedTuple):
    """Names of special tokens, of other added tokens, the token that ends an answer, and a chat template."""

    special: tuple[str, ...]
    plain: tuple[str, ...]
    eos: str
    template: str
    build: Callable[[], Tokenizer]


def _byte_level(digits: str, *, normalizer: Any = None, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(_SPLIT % digits), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def _sentencepiece(*, prefix: bool) -> Tokenizer:
    """BPE over characters with bytes for all others, as SentencePiece writes it."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(_TEXT, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [word for word in state["vocab"] if word not in words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: place for place, word in enumerate(words)},
            merges=[tuple(pair) for pair in state["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


_TURNS = (
    "{% for m in messages %}{{ begins + m['role'] + middle + (m['content'] or '') + ends }}{% endfor %}"
    "{% if add_generation_prompt %}{{ begins + 'assistant' + middle }}{{ opens }}{% endif %}"
)


def _template(begins: str, middle: str, ends: str, *, opens: str = "''", knows: str = "") -> str:
    """A chat template. opens: what it writes before an answer, an expression. knows: what it writes for tools."""
    tools = f"{{% if tools %}}{{{{ {json.dumps(knows)} + (tools | tojson) }}}}{{% endif %}}" if knows else ""
    text = _TURNS.replace("opens", opens)
    for name, mark in (("begins", begins), ("middle", middle), ("ends", ends)):
        text = text.replace(name + " +", json.dumps(mark) + " +").replace("+ " + name, "+ " + json.dumps(mark))
    return tools + text


_THINKS = "('<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '')"
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>")
_CALLS = ("<tool_call>", "</tool_call>")

FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(
        _QWEN, _CALLS, "<|im_end|>", _template("<|im_start|>", "\n", "<|im_end|>\n", knows="<tool_call>"),
        lambda: _byte_level("", normalizer=normalizers.NFC()),
    ),
    "qwen3": Family(
        _QWEN, (*_CALLS, "<tool_response>", "</tool_response>", "<think>", "</think>"), "<|im_end|>",
        _template("<|im_start|>", "\n", "<|im_end|>\n", opens=_THINKS, knows="<tool_call>"),
        lambda: _byte_level("", normalizer=normalizers.NFC()),
    ),
    "deepseek": Family(
        ("<|begin▁of▁sentence|>", "<|end▁of▁sentence|>"), ("<think>", "</think>", "<|User|>", "<|Assistant|>"),
        "<|end▁of▁sentence|>", _template("<|User|>", "", "<|end▁of▁sentence|>", opens="'<think>\n'") + "{# </think> #}",
        lambda: _byte_level("{1,3}"),
    ),
    "llama3": Family(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        (), "<|eot_id|>",
        _template("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", knows="<|python_tag|>"),
        lambda: _byte_level("{1,3}", ignore_merges=True),
    ),
    "mistral": Family(
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[THINK]", "[/THINK]"), (), "</s>",
        _template("[INST]", " ", "[/INST]", knows="[TOOL_CALLS]") + "{# [/THINK] #}",
        lambda: _sentencepiece(prefix=True),
    ),
    "gemma": Family(
        ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<unused0>", "<h1>", "[multimodal]", "\n\n"),
        "<end_of_turn>", _template("<start_of_turn>", "\n", "<end_of_turn>\n"), lambda: _sentencepiece(prefix=False),
    ),
    "gpt-oss": Family(
        ("<|startoftext|>", "<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|end|>"), (),
        "<|return|>", _template("<|start|>", "<|message|>", "<|end|>"), lambda: _byte_level("{1,3}"),
    ),
}  # fmt: skip


CALLING: dict[str, Family] = {
    "mistral-args": Family(
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"), (), "</s>",
        _template("[INST]", " ", "[/INST]", knows="[TOOL_CALLS][ARGS]") + "{# [/THINK] #}",
        lambda: _byte_level("{1,3}"),
    ),
    "mistral-ids": Family(
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), (), "</s>",
        _template("[INST]", " ", "[/INST]", knows="[TOOL_CALLS][CALL_ID][ARGS]"), lambda: _byte_level("{1,3}"),
    ),
    "glm": Family(
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_CALLS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>"), "<|user|>",
        _template("<|", "|>", "", knows="<tool_call><arg_key>") + "{# <|observation|> </think> #}",
        lambda: _byte_level("{1,3}"),
    ),
    "glm4": Family(
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"), (), "<|user|>",
        _template("<|", "|>", "", knows="<|observation|>"), lambda: _byte_level("{1,3}"),
    ),
    "olmo": Family(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<functions>", "<function_calls>", "</function_calls>"),
        "<|im_end|>", _template("<|im_start|>", "\n", "<|im_end|>\n", knows="<function_calls>"),
        lambda: _byte_level(""),
    ),
    "functiongemma": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_function_call>", "<end_function_call>",
         "<escape>"),
        (), "<end_of_turn>", _template("<start_of_turn>", "\n", "<end_of_turn>\n", knows="<start_function_call>"),
        lambda: _sentencepiece(prefix=False),
    ),
    "gemma": FAMILIES["gemma"],
    "granite": Family(
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"), (), "<|end_of_text|>",
        _template("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n", knows="<|tool_call|>"),
        lambda: _byte_level(""),
    ),
    "phi": Family(
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|end|>", "<|tool|>", "<|/tool|>", "<|tool_call|>",
         "<|/tool_call|>"),
        (), "<|end|>",
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% if m.tools %}"
        "{{ '<|tool|>' + m.tools + '<|/tool|>' }}{% endif %}{{ '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        lambda: _byte_level("{1,3}"),
    ),
    "cohere": Family(
        ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>",
         "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        (), "<|END_OF_TURN_TOKEN|>",
        _template("<|", "|>", "<|END_OF_TURN_TOKEN|>", knows="<|START_ACTION|>") + "{# <|END_THINKING|> #}",
        lambda: _byte_level("{1,3}"),
    ),
}  # fmt: skip
"""Families by the name of their format of calls, with its marks as added tokens."""


def save_family(folder: Path, family: str | Family) -> Path:
    """Writes a family's tokenizer and chat template into a folder."""
    found = FAMILIES[family] if isinstance(family, str) else family
    tokenizer = found.build()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in found.special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in found.plain])
    if family == "llama3":
        bos = found.special[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": found.eos, "chat_template": found.template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def family_tokenizer(folder: Path, family: str | Family) -> QuireTokenizer:
    """The tokenizer of a family, written into a folder."""
    return load_tokenizer(save_family(folder, family))


def save_family_model(folder: Path, family: str) -> Path:
    """A tiny random Llama with a family's tokenizer."""
    tokenizer = family_tokenizer(folder, family)
    size, eos = tokenizer.vocab_size, tokenizer.eos_ids[0]
    changes = {"vocab_size": size, "bos_token_id": None, "eos_token_id": eos, "max_position_embeddings": 4096}
    return save_tiny(folder, tokenizer=False, **changes)
