"""A model's tokens in llguidance's form: their bytes, the special ones, and the tokenization of forced text.

The library's own parser of a tokenizer.json treats every added token of the form `<name>` as special, even the plain
text `<tool_call>` and `</think>` of Qwen. Here, the model's tokenizer decides which tokens are special.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from llguidance import LLTokenizer, TokenizerWrapper
    from tokenizers import Tokenizer as Pipeline

    from quire.models.tokenizer import Tokenizer


class TokenTable(NamedTuple):
    """Plain values from which another process can rebuild the vocabulary.

    tokens         bytes of each token by id, one entry per logit; empty for ids without text
    special_ids    tokens without text
    eos_token_ids  tokens that end an answer
    pipeline       a tokenizer.json that tokenizes text as a continuation; see `continuing`
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_token_ids: list[int]
    pipeline: str


def token_table(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> TokenTable:
    """The table of a model with `vocab_size` logits. Raises ValueError if the model has no end token."""
    if not eos_token_ids:
        raise ValueError("no token ends an answer")
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    special = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
    return TokenTable(tokens, special, list(eos_token_ids), continuing(tokenizer.to_json()))


def make_vocabulary(table: TokenTable) -> LLTokenizer:
    """The vocabulary for grammars. Takes 0.5 s for 150,000 tokens."""
    from llguidance import LLTokenizer

    # LLTokenizer reads the attributes of TokenizerWrapper, whose own constructor would tokenize a test text.
    return LLTokenizer(cast("TokenizerWrapper", _TextCutter(table)), eos_token=table.eos_token_ids)


class _TextCutter:
    """Tokenizes text for llguidance. Never raises: an exception would end the thread that computes a mask."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        from tokenizers import Tokenizer as Pipeline

        self.tokens, self.special_token_ids = table.tokens, table.special_ids
        self.eos_token_id = table.eos_token_ids[0]
        self._pipeline: Pipeline = Pipeline.from_str(table.pipeline)
        special = set(table.special_ids)
        self._ids = {text: at for at, text in reversed(list(enumerate(table.tokens))) if text and at not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """The ids of a text's tokens, whose bytes together are the text."""
        found, data = self._pipeline.encode(text, add_special_tokens=False).ids, text.encode()
        if all(each < len(self.tokens) for each in found) and b"".join(self.tokens[each] for each in found) == data:
            return found
        return self._greedy(data)  # the text has characters that the vocabulary lacks

    def _greedy(self, data: bytes) -> list[int]:
        """Tokenizes greedily: the longest token at each position, up to a byte without a token."""
        found, place = list[int](), 0
        while place < len(data):
            ends = range(min(len(data), place + self._longest), place, -1)
            end = next((end for end in ends if data[place:end] in self._ids), 0)
            if not end:
                break
            found.append(self._ids[data[place:end]])
            place = end
        return found


def continuing(tokenizer: str) -> str:
    """A tokenizer.json that tokenizes a text as the continuation of another one: it adds no leading blank, does not
    change characters, and treats names of special tokens as plain text.
    """
    found = json.loads(tokenizer)
    names = {each["content"]: f"\ufdd0{each['id']}" for each in found["added_tokens"] if each["special"]}
    for each in found["added_tokens"]:
        each["content"] = names.get(each["content"], each["content"])
    model = found["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    found["normalizer"] = _kept_normalizer(found.get("normalizer"))
    found["pre_tokenizer"] = _without_prefix(found.get("pre_tokenizer"))
    found["post_processor"] = None
    return json.dumps(found)


def _kept_normalizer(step: Any) -> Any:
    """The part of a normalizer that only replaces characters, such as SentencePiece's blanks."""
    match step:
        case {"type": "Sequence", "normalizers": list() as steps}:
            return {"type": "Sequence", "normalizers": [kept for each in steps if (kept := _kept_normalizer(each))]}
        case {"type": "Replace"}:
            return step
    return None


def _without_prefix(step: Any) -> Any:
    """A pre-tokenizer without its leading blank."""
    match step:
        case {"type": "Sequence", "pretokenizers": list() as steps}:
            return {**step, "pretokenizers": [_without_prefix(each) for each in steps]}
        case {"type": "Metaspace"}:
            return {"type": "Metaspace", "replacement": step.get("replacement", "▁"), "prepend_scheme": "never",
                    "split": step.get("split", True)}  # fmt: skip
        case {"type": "ByteLevel"}:
            return {**step, "add_prefix_space": False}
    return step
