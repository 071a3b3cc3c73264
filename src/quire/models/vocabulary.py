"""Builds the `tokenizers` pipeline of a model from tokenizer.json, from vocab.json + merges.txt, or from inside a GGUF.

A GGUF has tokens and merges, but only the name of the pre-tokenizer. A wrong pre-tokenizer changes token ids without
any error, so an unknown name is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quire.errors import ModelError
from quire.models.settings import CheckedSettings
from quire.safe_io import check_regular, parse_json, read_text

# The splitting rules of Llama 3 and Qwen 2. They differ in the number of digits per piece.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Values of tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6


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
    """Loads a tokenizer.json and switches off its truncation and padding."""
    try:
        check_regular(path)
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any malformed file
        raise ModelError(f"{path}: not a tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def from_merges(folder: Path, config: CheckedSettings) -> Tokenizer:
    """The byte-level BPE of vocab.json and merges.txt, as in OPT, GPT-2 and early Qwen2 checkpoints.

    config  contents of tokenizer_config.json
    """
    try:
        vocab = parse_json(read_text(folder / "vocab.json"))
        lines = read_text(folder / "merges.txt").split("\n")
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: vocab.json or merges.txt cannot be read ({error})") from None
    if not isinstance(vocab, dict):
        raise ModelError(f"{folder}: vocab.json is not a JSON object")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    tokenizer = _byte_level(vocab, merges, folder)
    kind = config.text("tokenizer_class", "")
    if kind.startswith("Qwen2"):
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _qwen2()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=config.flag("add_prefix_space"), use_regex=True
        )
    added = config.table("added_tokens_decoder")
    tokens = [(item.text("content"), item.flag("special")) for item in map(added.table, added.values)]
    roles = [token_text(config, key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")]
    special = [text for text, is_special in tokens if is_special]
    special += [text for text in roles if text is not None and text in vocab]
    _add(tokenizer, special, [text for text, is_special in tokens if not is_special])
    if roles[0] is not None and config.flag("add_bos_token", kind == "OPTTokenizer"):
        _wrap(tokenizer, roles[0], None, folder)
    return tokenizer


def from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer a GGUF describes: byte-level BPE (`gpt2`) or SentencePiece BPE with scores (`llama`)."""
    settings = gguf_vocabulary(metadata, path)
    kind, tokens = settings.text("model", ""), settings.texts("tokens")
    if not kind or not tokens:
        raise ModelError(f"{path}: has no vocabulary; name a tokenizer.json with model.tokenizer")
    types = settings.numbers("token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{path}: {len(types)} token types for {len(tokens)} tokens")
    if kind == "gpt2":
        tokenizer = _gguf_byte_level(settings, tokens, path)
        add_bos = False
    elif kind == "llama":
        tokenizer = _gguf_sentencepiece(settings, tokens, types, path)
        add_bos = True
    else:
        raise ModelError(
            f"{path}: tokenizer.ggml.model {kind!r} is not supported (only gpt2, llama); set model.tokenizer"
        )
    special, plain = (
        [text for text, type_ in zip(tokens, types, strict=True) if type_ in wanted]
        for wanted in ((_UNKNOWN, _CONTROL), (_USER_DEFINED,))
    )
    _add(tokenizer, special, plain)
    bos = gguf_token(settings, "bos") if settings.flag("add_bos_token", add_bos) else None
    eos = gguf_token(settings, "eos") if settings.flag("add_eos_token") else None
    _wrap(tokenizer, bos, eos, path)
    return tokenizer


def gguf_vocabulary(metadata: Mapping[str, Any], path: Path) -> CheckedSettings:
    """The vocabulary settings of a GGUF, under `tokenizer.ggml.`."""
    return CheckedSettings(metadata, str(path)).under("tokenizer.ggml.")


def gguf_token(settings: CheckedSettings, name: str) -> str | None:
    """Text of the bos, eos, unknown or padding token of a GGUF; None for an id that is not in the vocabulary."""
    token_id = next(iter(settings.ids(f"{name}_token_id")), None)
    tokens = settings.texts("tokens")
    return tokens[token_id] if token_id is not None and token_id < len(tokens) else None


def token_text(config: CheckedSettings, key: str) -> str | None:
    """A special token in tokenizer_config.json: a string, or an object with its content."""
    if isinstance(config.values.get(key), dict):
        config, key = config.table(key), "content"
    return config.text(key, "") or None


def _add(tokenizer: Tokenizer, special: Iterable[str], plain: Iterable[str]) -> None:
    """Makes each text a single token. Special tokens are omitted from decoded text."""
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])


def _bpe(source: Path, vocab: dict[str, int], merges: Sequence[tuple[str, ...]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))  # type: ignore[arg-type]  # pairs, checked there
    except Exception as error:  # the library raises bare Exception
        said = " ".join(str(error).split())
        raise ModelError(f"{source}: vocabulary and merges do not match ({said})") from None


def _byte_level(
    vocab: dict[str, int], merges: list[tuple[str, ...]], source: Path, ignore_merges: bool = False
) -> Tokenizer:
    tokenizer = _bpe(source, vocab, merges, ignore_merges=ignore_merges)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gguf_byte_level(settings: CheckedSettings, tokens: Sequence[str], path: Path) -> Tokenizer:
    name = settings.text("pre", "default")
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(
            f"{path}: unknown pre-tokenizer {name!r} (only {known}); name a tokenizer.json with model.tokenizer"
        )
    merges = [tuple(line.split(" ")) for line in settings.texts("merges")]
    build = _PRE_TOKENIZERS[name]
    # Llama 3 uses a whole word of the vocabulary even if no merges lead to it.
    tokenizer = _byte_level(
        {text: index for index, text in enumerate(tokens)}, merges, path, ignore_merges=build is _llama3
    )
    tokenizer.pre_tokenizer = build()
    if build is _qwen2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _gguf_sentencepiece(
    settings: CheckedSettings, tokens: Sequence[str], types: Sequence[float], path: Path
) -> Tokenizer:
    """SentencePiece joins the adjacent pair with the best-scoring union: BPE with merges ordered by that score."""
    scores = settings.numbers("scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{path}: a llama vocabulary needs one score per token")
    joinable = {
        text: score
        for text, score, type_ in zip(tokens, scores, types, strict=True)
        if type_ not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    }
    ranked: list[tuple[float, int, str, str]] = []
    for order, (text, score) in enumerate(joinable.items()):
        for cut in range(1, len(text)):
            if text[:cut] in joinable and text[cut:] in joinable:
                ranked.append((-score, order, text[:cut], text[cut:]))
    ranked.sort(key=lambda item: item[:2])
    tokenizer = _bpe(
        path,
        {text: index for index, text in enumerate(tokens)},
        [(left, right) for _, _, left, right in ranked],
        unk_token=gguf_token(settings, "unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces = [normalizers.Replace(" ", "▁")]
    prefix = settings.flag("add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _wrap(tokenizer: Tokenizer, bos: str | None, eos: str | None, source: Path) -> None:
    """Makes `encode` put bos before and eos after each text."""
    ends = [(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text is not None]
    for text, token_id in ends:
        if token_id is None:
            raise ModelError(f"{source}: {text!r} must be added to every text, but is not in the vocabulary")
    if ends:
        template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
        try:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=template, pair=[*template, "$B"], special_tokens=ends
            )
        except ValueError as error:
            raise ModelError(f"{source}: bos and eos cannot be added to a text ({error})") from None
