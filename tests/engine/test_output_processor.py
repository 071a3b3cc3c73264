"""The text of one sequence: whole characters, all of them, however the sequence ends."""

from __future__ import annotations

import pytest

from quire.engine.output_processor import OutputProcessor, TokenTexts
from quire.engine.params import SamplingParams
from quire.engine.request import Request, Sequence
from quire.models.tokenizer import Tokenizer
from tests.tiny_models import BOS, EOS, byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer(), None, BOS, EOS)
END = TOKENIZER.eos_ids[0]


class SlowTokenizer:
    """Decodes whole texts alone, as a vocabulary without a byte rule does, and holds text back until it is certain."""

    def __init__(self) -> None:
        self.decode = TOKENIZER.decode

    def stream(self, prompt_ids: list[int], skip_special: bool = True) -> Window:
        return Window()


class Window:
    def __init__(self) -> None:
        self.held = bytearray()

    def push(self, token_id: int) -> str:
        self.held += bytes([token_id]) if token_id < 256 else b""
        return ""

    def flush(self) -> str:
        text, self.held = self.held.decode(errors="replace").rstrip("\ufffd"), bytearray()
        return text


def shown(
    ids: list[int], params: SamplingParams, tokenizer: object, *, ending: str | None = None
) -> tuple[str, object]:
    """The joined text of a sequence of these tokens, and why it ended."""
    request = Request("x", None, [65], params, 0.0)
    answer = OutputProcessor(Sequence(request, 0, [65], len(ids)), tokenizer, TokenTexts(TOKENIZER), (END,))  # type: ignore[arg-type]
    deltas = [answer.push(each, None, ending is None and at == len(ids)) for at, each in enumerate(ids, 1)]
    if ending is not None:
        deltas.append(answer.end(ending))  # type: ignore[arg-type]
    return "".join(delta.text for delta in deltas), deltas[-1].finish_reason


@pytest.mark.parametrize("tokenizer", [TOKENIZER, SlowTokenizer()], ids=["bytes", "window"])
@pytest.mark.parametrize("tail", [b"", "\N{EURO SIGN}".encode()[:2]], ids=["whole", "inside a character"])
def test_every_ending_shows_whole_characters_and_all_of_them(tokenizer: object, tail: bytes) -> None:
    text = "a\N{GRINNING FACE}"
    ids = list(text.encode() + tail)
    params = SamplingParams(max_tokens=50, stop=["zzz"], stop_token_ids=[10])
    assert shown(ids, params, tokenizer) == (text, "length")
    assert shown([*ids, END], params, tokenizer) == (text, "stop")
    assert shown([*ids, 10], params, tokenizer) == (text, "stop")
    assert shown(ids, params, tokenizer, ending="abort") == (text, "abort")
    assert shown(ids, params, tokenizer, ending="error") == (text, "error")


def test_a_stop_token_brings_its_text_only_if_asked_for() -> None:
    ids = [97, 98, 10]
    assert shown(ids, SamplingParams(stop_token_ids=[10]), TOKENIZER) == ("ab", "stop")
    kept = SamplingParams(stop_token_ids=[10], include_stop_str_in_output=True)
    assert shown(ids, kept, TOKENIZER) == ("ab\n", "stop")


def test_held_text_that_might_begin_a_stop_string_comes_out_at_the_end() -> None:
    params = SamplingParams(max_tokens=9, stop=["abc"])
    assert shown([97, 98], params, TOKENIZER, ending="abort") == ("ab", "abort")
    assert shown([97, 98, END], params, TOKENIZER) == ("ab", "stop")
