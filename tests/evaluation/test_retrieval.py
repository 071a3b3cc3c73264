"""Hidden numbers: the prompts, the rule for found numbers, and the table."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.errors import ConfigError, ModelError
from quire.evaluation.retrieval import (
    ANSWER_TOKENS,
    FILLER,
    LEAD,
    QUESTION,
    answers,
    hidden_number,
    make_prompt,
    names,
    retrieval,
    split_sentences,
)
from quire.models.chat import ChatTemplate
from quire.models.tokenizer import Tokenizer

from ..engines import generate, make_engine
from ..real_model import embedded_gguf
from ..tiny_models import BOS, CHATML, EOS, byte_tokenizer

# The package's names are the functions.
MODULE = importlib.import_module("quire.evaluation.retrieval")

PLAIN = Tokenizer(byte_tokenizer(), None, BOS, EOS)
CHAT = Tokenizer(byte_tokenizer(), ChatTemplate(CHATML), BOS, EOS)


@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT], ids=["plain", "chat"])
@pytest.mark.parametrize("length", [400, 1000, 4096])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_prompt_fills_its_length_and_hides_one_number(tokenizer: Tokenizer, length: int, depth: float) -> None:
    ids = make_prompt(tokenizer, FILLER, length, depth, 12345)
    longest = max(map(len, FILLER)) + 1
    assert length - ANSWER_TOKENS - longest <= len(ids) <= length - ANSWER_TOKENS
    text = tokenizer.decode(ids)
    task, body, asked = text.split("\n\n")
    needle = "The pass key is the number 12345. Remember it."
    before, after = body.split(needle)
    assert body.count("12345") == 1 and "12345" not in task + asked
    assert before.count(".") == pytest.approx(depth * (before + after).count("."), abs=0.5)
    assert before.startswith(FILLER[0]) or depth == 0
    assert asked.startswith(QUESTION) and asked.endswith(f"<assistant>{LEAD}" if tokenizer is CHAT else f"\n{LEAD}")
    assert text.startswith("<user>") == (tokenizer is CHAT)


def test_a_prompt_is_never_longer_than_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences that take more tokens together than each by itself."""
    tokenizer = Tokenizer(byte_tokenizer(), None, BOS, EOS)
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, add_special=True: encode(text) + [0] * (len(text) // 100 * 5))
    for length in range(600, 1000, 9):
        room = length - ANSWER_TOKENS
        assert room - 100 < len(make_prompt(tokenizer, FILLER, length, 0.5, 12345)) <= room


def test_a_length_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="a length of 200 tokens has no room for text, question and answer"):
        make_prompt(PLAIN, FILLER, 200, 0.5, 12345)


def test_a_text_is_hidden_in_by_sentences_and_repeated() -> None:
    sentences = split_sentences("One is\nhere. Is\ttwo?  Three!\n")
    assert sentences == ["One is here.", "Is two?", "Three!"]
    body = PLAIN.decode(make_prompt(PLAIN, sentences, 400, 1.0, 12345)).split("\n\n")[1]
    assert body.startswith("One is here. Is two? Three! One is here. Is two?")
    with pytest.raises(ConfigError, match="the text to hide a number in is empty"):
        split_sentences(" \n")


@pytest.mark.parametrize(
    ("answer", "is_found"),
    [
        (" 12345.", True),
        ("12345", True),
        ("not 54321 but 12345!", True),
        (" 123456", False),
        ("0 12345", True),
        ("012345", False),
        ("12 345", False),
        ("", False),
    ],
)
def test_only_the_number_itself_counts(answer: str, is_found: bool) -> None:
    assert names(answer, 12345) is is_found


def test_numbers_have_five_digits_and_stay_the_same() -> None:
    cells = [(length, depth, trial) for length in (64, 128) for depth in (0.0, 0.5) for trial in range(5)]
    numbers = [hidden_number(*cell) for cell in cells]
    assert numbers == [hidden_number(*cell) for cell in cells] and len(set(numbers)) == len(cells)
    assert all(10_000 <= number < 100_000 for number in numbers)


def test_the_table_counts_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that sees the second half of a text alone; through the codec `blind`, nothing."""
    engines = {"dense": object(), "blind": object()}
    asked: dict[Any, list[str]] = {}

    def load(model: str, config: Any, context: int, codecs: Any, *, sequences: int) -> Any:
        assert (model, tuple(codecs), context) == ("fake", ("dense", "blind"), 600)
        return engines, PLAIN

    def answer(engine: Any, prompts: list[list[int]], progress: Any) -> list[str]:
        texts = asked[engine] = [PLAIN.decode(prompt) for prompt in prompts]
        progress(len(prompts))
        second = [text[len(text) // 2 :] for text in texts]
        return ["none" if engine is engines["blind"] else text.partition("number ")[2][:5] for text in second]

    monkeypatch.setattr(MODULE, "load_engines", load)
    monkeypatch.setattr(MODULE, "answers", answer)
    seen: list[tuple[int, int]] = []
    found = retrieval(
        "fake",
        codecs=("dense", "blind"),
        lengths=[600, 500],
        depths=[0.0, 1.0],
        num_trials=3,
        progress=lambda *done: seen.append(done),
    )
    assert [(each.codec, each.length, each.depth) for each in found] == [
        (codec, length, depth) for codec in engines for length in (600, 500) for depth in (0.0, 1.0)
    ]
    assert [each.num_found for each in found] == [0, 3, 0, 3, 0, 0, 0, 0]
    assert [each.found for each in found[:2]] == [0, 1] and all(each.num_trials == 3 for each in found)
    assert seen == [(12, 24), (24, 24)]
    first, second = asked.values()
    assert first == second, "every codec is asked the same"
    starts = {text.split("\n\n")[1][:20] for text in first[3:6]}
    assert starts == {sentence[:20] for sentence in FILLER[:3]}, "every trial begins with another sentence"


def test_answers_are_greedy_and_in_the_order_of_the_prompts() -> None:
    prompts = [list(range(start, start + 70)) for start in (0, 10, 20, 30, 40)]
    engine = make_engine(**{"scheduler.max_queue": 2, "scheduler.max_running": 2})
    seen: list[int] = []
    texts = answers(engine, prompts, seen.append)
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
    # An answer that stops inside a character leaves it out.
    alone = [PLAIN.decode(ids).rstrip("\ufffd") for ids in generate(make_engine(), prompts, params)]
    assert [text.rstrip("\ufffd") for text in texts] == alone and len(set(alone)) == 5
    assert seen == sorted(seen) and seen[-1] == 5
    assert engine.holds_nothing


def test_answers_of_a_broken_model_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine = make_engine()
    head = engine.runner.model.head
    monkeypatch.setattr(engine.runner.model, "head", lambda hidden: head(hidden) * float("nan"))
    with pytest.raises(ModelError, match="cannot be evaluated"):
        answers(engine, [[1, 2, 3]], lambda done: None)


def test_the_embedded_model_finds_a_number() -> None:
    embedded_gguf()
    found = retrieval("smollm2", lengths=[512], depths=[0.3], num_trials=2)
    assert [each.num_found for each in found] == [2]
