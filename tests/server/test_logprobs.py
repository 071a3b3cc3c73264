"""Log-probabilities of completions: offsets in the text, and scores by id."""

import pytest

from quire.models.resolve import resolve_model
from quire.models.tokenizer import load_tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.test_completions import post

pytestmark = pytest.mark.anyio


async def test_text_offset_skips_what_the_text_does_not_show():
    lists = (await post({"prompt": "ab", "echo": True, "max_tokens": 1, "logprobs": 0}))["choices"][0]["logprobs"]
    assert lists["tokens"] == ["<s>", "a", "b", "a"]
    assert lists["text_offset"] == [0, 0, 1, 2]
    assert lists["top_logprobs"] is None


async def test_text_offset_counts_the_special_tokens_that_a_written_prompt_has():
    engine = FakeEngine()
    begin = engine.tokenizer.decode([256], skip_special=False)
    for skips in (None, True, False):
        options = {"echo": True, "max_tokens": 1, "logprobs": 0, "skip_special_tokens": skips}
        choice = (await post({"prompt": f"a{begin}b"} | options))["choices"][0]
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        # Encoding adds the first token, which the text does not have.
        assert tokens[:4] == [begin, "a", begin, "b"] and offsets == [0, 0, 1, 4, 5]
        assert all(
            choice["text"][offset:].startswith(each) for each, offset in list(zip(tokens, offsets, strict=True))[1:]
        )


async def test_text_offset_of_a_written_conversation_is_where_its_tokens_are():
    """With the tokenizer of SmolLM2, whose tokens <|im_start|> and <|im_end|> are special."""
    engine = FakeEngine()
    engine.tokenizer = load_tokenizer(resolve_model("smollm2"))
    engine.shape.vocab_size = engine.tokenizer.vocab_size
    prompt = "<|im_start|>user\nhi<|im_end|>\n"
    (choice,) = (await post({"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 0}, engine))["choices"]
    assert choice["text"] == prompt
    assert choice["logprobs"]["tokens"] == ["<|im_start|>", "user", "\n", "hi", "<|im_end|>", "\n"]
    assert choice["logprobs"]["text_offset"] == [0, 12, 16, 17, 19, 29]


async def test_text_offset_counts_characters_not_tokens():
    lists = (await post({"prompt": "é🌍!", "max_tokens": 3, "logprobs": 0, "add_special_tokens": False}))["choices"][0]
    assert lists["text"] == "é\ufffd"
    lists = (await post({"prompt": "é🌍!", "max_tokens": 7, "logprobs": 0}))["choices"][0]["logprobs"]
    assert lists["text_offset"] == [0, 0, 1, 1, 1, 1, 2]


async def test_tokens_of_equal_text_do_not_hide_the_best_one():
    # Bytes above 127 are no characters alone: all have the text U+FFFD.
    lists = (await post({"prompt": [[65, 201]], "echo": True, "max_tokens": 0, "logprobs": 3}))["choices"][0][
        "logprobs"
    ]
    assert lists["top_logprobs"][1] == {"\ufffd": -0.25}


async def test_prompt_logprobs_are_given_by_id():
    choice = (await post({"prompt": [104, 105], "prompt_logprobs": 1, "max_tokens": 1}))["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "105": {"logprob": -0.5, "rank": 2, "decoded_token": "i"},
            "106": {"logprob": -0.25, "rank": 2, "decoded_token": "j"},
        },
    ]
