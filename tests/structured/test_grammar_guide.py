"""Guides of grammars: forced tokens, and states that run out."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire.structured import grammar_guide
from quire.structured.grammar_compiler import GrammarCompiler
from quire.structured.grammar_guide import CompiledGrammar, GrammarGuide
from quire.structured.masks import TOO_COMPLEX
from quire.structured.params import StructuredOutputsParams
from tests.structured.test_grammar_compiler import SCHEMA, make_grammars
from tests.structured.test_grammar_compiler import llm as llm
from tests.structured.test_grammar_compiler import model as model

from ..toy_guide import members


def test_forced_tokens_take_no_steps_and_change_no_text(llm: LLM, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=seed, structured_outputs={"json": SCHEMA}, logprobs=1)

    def run() -> tuple[Any, int]:
        before = llm.stats()["steps"]
        (answer,) = llm.generate(["x"], params, use_tqdm=False)
        return answer.outputs[0], llm.stats()["steps"] - before

    drafted, steps = run()
    propose = GrammarGuide.propose
    monkeypatch.setattr(GrammarGuide, "propose", lambda self, token_ids, most: propose(self, token_ids, 0))
    alone, more = run()
    assert drafted.token_ids == alone.token_ids and drafted.text == alone.text
    assert [list(each) for each in drafted.logprobs] == [list(each) for each in alone.logprobs]
    # Names, quotes, colons and commas are known: 34 bytes and as many tokens of this vocabulary.
    assert len(alone.token_ids) - 3 <= more and steps <= more - 25


HUNGRY = r".*[A-Z].{0,80}"
"""An expression whose lexer needs some 350 states for a token of random text."""


def drawn(grammars: GrammarCompiler, grammar: CompiledGrammar, seed: int, most: int) -> list[int]:
    """An answer of at most `most` random tokens."""
    draw, guide, tokens = random.Random(seed), grammars.guide(grammar, 0), list[int]()
    ends = grammars._eos_token_ids
    while len(tokens) < most and not (tokens and tokens[-1] in ends):
        drafts, masks = guide.propose(tokens, 4)
        tokens += [*drafts, draw.choice(members(masks[-1]))]
    return tokens


def test_an_answer_does_not_end_because_others_have_used_up_the_states(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    wanted = StructuredOutputsParams(regex=HUNGRY)
    alone = make_grammars()
    expected = drawn(alone, alone.compile(wanted), seed, 40)
    monkeypatch.setitem(grammar_guide.LIMITS, "max_lexer_states", 20_000)
    grammars = make_grammars()
    held = grammars.compile(wanted)
    wear_out(held, grammars, seed)
    assert drawn(grammars, held, seed, 40) == expected


def wear_out(grammar: CompiledGrammar, grammars: GrammarCompiler, seed: int) -> None:
    """Uses up the states of the lexer that copies of a grammar share."""
    draw, words = random.Random(seed), np.empty(-(-grammars._vocab_size // 32), np.uint32)
    for _ in range(200):
        matcher = grammar.begin()
        while not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if matcher.is_error():
                assert "too many states" in matcher.get_error()
                return
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            matcher.consume_token(int(draw.choice(allowed)))
    pytest.fail("the states suffice")


def test_an_answer_that_needs_more_states_than_there_are_goes_on_with_new_ones(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    grammars, wanted = make_grammars(), StructuredOutputsParams(regex=HUNGRY + "z{60}")
    whole = drawn(grammars, grammars.compile(wanted), seed, 40)
    assert not grammars._live, "a grammar is freed with the last sequence that it guides"
    renewed: list[int] = []
    compiled = CompiledGrammar.compiled
    monkeypatch.setattr(grammar_guide, "RENEWAL_TOKENS", 2)
    monkeypatch.setitem(grammar_guide.LIMITS, "max_lexer_states", 4_000)
    few = grammars.compile(wanted)
    monkeypatch.setattr(CompiledGrammar, "compiled", lambda self: (renewed.append(1), compiled(self))[1])
    assert drawn(grammars, few, seed, 40) == whole
    assert len(renewed) > 1 or len(whole) < 40


def test_what_needs_too_many_states_at_once_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar_guide.LIMITS, "max_lexer_states", 500)
    grammars = make_grammars()
    with pytest.raises(QuireError, match=f"{TOO_COMPLEX}: the expressions in it need too many states"):
        drawn(grammars, grammars.compile(StructuredOutputsParams(regex=HUNGRY)), 1, 100)
