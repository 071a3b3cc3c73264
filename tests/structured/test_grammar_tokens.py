"""Tokens of a grammar, with tokenizers that are built like those of families."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from quire.models.tokenizer import Tokenizer
from quire.structured.grammar_compiler import GrammarCompiler
from quire.structured.grammar_tokens import _TextCutter, make_vocabulary, token_table
from quire.structured.params import StructuredOutputsParams
from tests.models.test_tokenizer_families import drawn
from tests.models.test_tokenizer_families import family as family
from tests.models.test_tokenizer_families import grammars as grammars
from tests.models.test_tokenizer_families import tokenizer as tokenizer
from tests.tokenizer_families import FAMILIES, family_tokenizer


def test_only_tokens_that_the_tokenizer_calls_special_are_no_text(family: str, tokenizer: Tokenizer) -> None:
    table = token_table(tokenizer, tokenizer.vocab_size + 3, tokenizer.eos_ids)
    vocabulary = make_vocabulary(table)
    assert vocabulary.vocab_size == tokenizer.vocab_size + 3 and vocabulary.eos_tokens == list(tokenizer.eos_ids)
    for text in FAMILIES[family].special:
        assert vocabulary.is_special_token(tokenizer.token_id(text)), text
    for text in FAMILIES[family].plain:
        assert not vocabulary.is_special_token(tokenizer.token_id(text)), text


TEXTS = [
    "a", " a", "  two  blanks ", 'the tool is "add": {"a": 1}', "\n\n", "日本 é\U0001f600", "e\u0301", "ﷺ", "\x00\x7f",
    "",
]  # fmt: skip


def test_forced_text_is_cut_as_a_continuation_into_its_own_bytes(family: str, tokenizer: Tokenizer) -> None:
    cutter = _TextCutter(token_table(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids))
    names = [*FAMILIES[family].special, *FAMILIES[family].plain]
    for text in [*TEXTS, *names, *(f"a{name} b" for name in names)]:
        ids = cutter(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode(), text
        assert not tokenizer.special_ids & {*ids}, text
    for text in FAMILIES[family].plain:
        assert cutter(text) == [tokenizer.token_id(text)], "a plain added token is one token, as in the model's prompts"
    for text in ("the name of the tool", "yes, no"):
        before = tokenizer.encode("x", add_special=False)
        assert cutter(text) == tokenizer.encode(f"x{text}", add_special=False)[len(before) :] or len(before) > 1


@pytest.mark.parametrize("way", ["regex", "choice", "json", "grammar", "in a word"])
def test_a_form_may_have_the_name_of_any_added_token(
    family: str, grammars: GrammarCompiler, way: str, seed: int
) -> None:
    draw = random.Random(seed)
    for name in [*FAMILIES[family].special, *FAMILIES[family].plain, "<tool_call>", "<|im_end|>", "</think>"]:
        given: dict[str, Any] = {
            "regex": {"regex": re.escape(name).replace("▁", "▁") + "ab"}, "choice": {"choice": [name, name + "x"]},
            "json": {"json": {"const": name}}, "grammar": {"grammar": f"start: {json.dumps(name)}"},
            "in a word": {"json": {"enum": [f"a{name}b", f"{name} {name}"]}},
        }[way]  # fmt: skip
        text = drawn(grammars, StructuredOutputsParams(**given), draw)
        expected = {
            "regex": [name + "ab"], "choice": [name, name + "x"], "json": [json.dumps(name, ensure_ascii=False)],
            "grammar": [name],
            "in a word": [json.dumps(each, ensure_ascii=False) for each in (f"a{name}b", f"{name} {name}")],
        }[way]  # fmt: skip
        assert text in expected, (name, text)


def test_a_tokenizer_that_lacks_characters_still_writes_what_it_can(tmp_path: Path) -> None:
    """The pipeline would write an unknown token; the longest tokens with the text's own bytes are taken."""
    tokenizer = family_tokenizer(tmp_path, "gemma")
    table = token_table(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    state = json.loads(table.pipeline)
    state["model"]["byte_fallback"] = False
    cutter = _TextCutter(table._replace(pipeline=json.dumps(state)))
    ids = cutter("ab 日 c")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "ab 日 c".encode()
