"""Builds the `tokenizers` pipeline of a model from tokenizer.json, from vocab.json + merges.txt, or from inside a GGUF.

A GGUF carries tokens and merges but not the pre-tokenizer, only its name; a wrong one changes token ids without any
error, so an unknown name is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quire.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

# The splitting rules of Llama 3 and Qwen 2, which differ in how many digits stay together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Values of tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _regex_split(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(_SPLIT.replace("{DIGITS}", digits)), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_llama3, _qwen2 = _regex_split("{1,3}"), _regex_split("")

_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
}


def from_file(path: Path) -> Tokenizer:
    """A tokenizer.json; its truncation and padding are switched off."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any malformed file
        raise ModelError(f"{path}: not a tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def from_merges(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE of vocab.json and merges.txt, the form OPT, GPT-2 and early Qwen2 checkpoints come in.

    config  contents of tokenizer_config.json
    """
    try:
        vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: vocab.json or merges.txt cannot be read ({error})") from None
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    tokenizer = _byte_level(vocab, merges, folder)
    if str(config.get("tokenizer_class", "")).startswith("Qwen2"):
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _qwen2()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=bool(config.get("add_prefix_space", False)), use_regex=True
        )
    added = config.get("added_tokens_decoder") or {}
    special = [
        AddedToken(item["content"], special=True, normalized=False) for item in added.values() if item.get("special")
    ]
    plain = [
        AddedToken(item["content"], special=False, normalized=False)
        for item in added.values()
        if not item.get("special")
    ]
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        text = token_text(config.get(key))
        if text is not None and text in vocab:
            special.append(AddedToken(text, special=True, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    bos = token_text(config.get("bos_token"))
    if bos is not None and config.get("add_bos_token", config.get("tokenizer_class") == "OPTTokenizer"):
        _wrap(tokenizer, bos, None)
    return tokenizer


def from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer a GGUF describes: byte-level BPE (`gpt2`) or SentencePiece BPE with scores (`llama`)."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] | None = metadata.get("tokenizer.ggml.tokens")
    if kind is None or not tokens:
        raise ModelError(f"{path}: holds no vocabulary; name a tokenizer.json with model.tokenizer")
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{path}: {len(types)} token types for {len(tokens)} tokens")
    if kind == "gpt2":
        tokenizer = _gguf_byte_level(metadata, tokens, path)
        add_bos = False
    elif kind == "llama":
        tokenizer = _gguf_sentencepiece(metadata, tokens, types, path)
        add_bos = True
    else:
        raise ModelError(
            f"{path}: tokenizer.ggml.model {kind!r} is not supported (only gpt2, llama); set model.tokenizer"
        )
    special = [
        AddedToken(text, special=True, normalized=False)
        for text, type_ in zip(tokens, types, strict=True)
        if type_ == _CONTROL
    ]
    plain = [
        AddedToken(text, special=False, normalized=False)
        for text, type_ in zip(tokens, types, strict=True)
        if type_ == _USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    bos = eos = None
    if metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        bos = gguf_token(metadata, "bos")
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        eos = gguf_token(metadata, "eos")
    _wrap(tokenizer, bos, eos)
    return tokenizer


def gguf_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """Text of the bos, eos, unknown or padding token of a GGUF."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    return tokens[token_id] if isinstance(token_id, int) and token_id < len(tokens) else None


def token_text(entry: Any) -> str | None:
    """A special token in tokenizer_config.json: a string, or an object with its content."""
    return entry.get("content") if isinstance(entry, dict) else entry


def _byte_level(
    vocab: dict[str, int], merges: list[tuple[str, ...]], source: Path, ignore_merges: bool = False
) -> Tokenizer:
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)  # type: ignore[arg-type]  # pairs, checked there
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{source}: vocabulary and merges do not fit ({error})") from None
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gguf_byte_level(metadata: Mapping[str, Any], tokens: list[str], path: Path) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(
            f"{path}: pre-tokenizer {name!r} is not known (only {known}); name a tokenizer.json with model.tokenizer"
        )
    merges = [tuple(line.split(" ")) for line in metadata.get("tokenizer.ggml.merges", ())]
    build = _PRE_TOKENIZERS[name]
    # Llama 3 takes a whole word that is in the vocabulary even where no merges lead to it.
    tokenizer = _byte_level(
        {text: index for index, text in enumerate(tokens)}, merges, path, ignore_merges=build is _llama3
    )
    tokenizer.pre_tokenizer = build()
    if build is _qwen2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _gguf_sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], path: Path) -> Tokenizer:
    """SentencePiece joins the adjacent pair whose union scores best: BPE, merges ordered by the score of the union."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{path}: a llama vocabulary needs one score per token")
    joinable = {
        text: score
        for text, score, type_ in zip(tokens, scores, types, strict=True)
        if type_ not in (_CONTROL, _USER_DEFINED, _BYTE)
    }
    ranked: list[tuple[float, int, str, str]] = []
    for order, (text, score) in enumerate(joinable.items()):
        for cut in range(1, len(text)):
            if text[:cut] in joinable and text[cut:] in joinable:
                ranked.append((-score, order, text[:cut], text[cut:]))
    ranked.sort(key=lambda item: item[:2])
    model = models.BPE(
        vocab={text: index for index, text in enumerate(tokens)},
        merges=[(left, right) for _, _, left, right in ranked],
        unk_token=gguf_token(metadata, "unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = [normalizers.Replace(" ", "▁")]
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _wrap(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Have `encode` put bos before and eos after each text."""
    ends = [(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text is not None]
    if ends:
        template = " ".join([*([bos] if bos else []), "$A", *([eos] if eos else [])])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=f"{template} $B", special_tokens=ends
        )
