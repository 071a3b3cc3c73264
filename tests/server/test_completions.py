"""POST /v1/completions: forms of the prompt, echo, log probabilities, streams."""

import pytest

from tests.server.fake_engine import BOS, FakeEngine
from tests.server.harness import CHAT, TEXT, client, error_of, events

pytestmark = pytest.mark.anyio


async def post(body, engine=None, **settings):
    async with client(engine, **settings) as http:
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abc"]),
        (["abc", "xy"], ["abc", "xy"]),
        ([BOS, 104, 105], ["hi"]),
        ([[104, 105], [98, 121, 101]], ["hi", "bye"]),
    ],
)
async def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(prompt, texts):
    answer = await post({"model": "fake", "prompt": prompt, "max_tokens": 50})
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


async def test_choices_of_several_prompts_are_ordered_by_prompt():
    answer = await post({"prompt": ["abc", "xyz"], "n": 2, "max_tokens": 3})
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "bca", "xyz", "yzx"]
    assert answer["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 12,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 6, "cached_tokens_by_tier": {"arena": 2, "disk": 4}},
    }


async def test_max_tokens_defaults_to_sixteen():
    answer = await post({"prompt": "x" * 40})
    assert answer["choices"][0]["text"] == "x" * 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_null_means_default():
    nulls = dict.fromkeys(
        ["temperature", "top_p", "n", "stop", "seed", "logprobs", "suffix", "best_of", "logit_bias", "stream", "model"]
    )
    assert (await post(TEXT | nulls))["choices"][0]["text"] == (await post(TEXT))["choices"][0]["text"]


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
async def test_without_a_limit_a_completion_has_sixteen_tokens(given):
    answer = await post({"prompt": "x", "ignore_eos": True} | given, FakeEngine(max_context=100))
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
async def test_the_default_limit_stops_at_the_servers_limit(given):
    answer = await post({"prompt": "x", "ignore_eos": True} | given, max_output_tokens=7)
    assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("add_special_tokens", [True, False])
async def test_add_special_tokens_is_honoured(add_special_tokens):
    answer = await post({"prompt": "abc", "add_special_tokens": add_special_tokens})
    assert answer["usage"]["prompt_tokens"] == 3 + add_special_tokens


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_with_logprobs_scores_the_prompt(max_tokens):
    """What lm-eval's local-completions sends: ids, echo, logprobs 1, max_tokens 1 (0 in older versions)."""
    body = {
        "model": "fake",
        "prompt": [[104, 105, 106]],
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "seed": 0,
        "echo": True,
    }
    choice = (await post(body))["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "hij" + "h" * max_tokens
    assert logprobs["tokens"] == ["h", "i", "j"] + ["h"] * max_tokens
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5] + [-0.5] * max_tokens
    # 105 is not the best token of its place: its alternative stands beside it. 106 is.
    assert logprobs["top_logprobs"][:3] == [None, {"j": -0.25, "i": -0.5}, {"j": -0.5}]
    assert logprobs["text_offset"] == list(range(3 + max_tokens))
    assert choice["finish_reason"] == "length"


async def test_max_tokens_zero_generates_nothing():
    answer = await post({"prompt": "abc", "max_tokens": 0})
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 0


async def test_echo_gives_the_prompt_as_it_was_written():
    assert (await post(TEXT | {"echo": True, "max_tokens": 5}))["choices"][0]["text"] == TEXT["prompt"] + "Hello"


async def test_logit_bias_reaches_the_engine():
    answer = await post({"prompt": "abc", "max_tokens": 3, "logit_bias": {"90": 100, "89": -5.5}})
    assert answer["choices"][0]["text"] == "ZZZ"


@pytest.mark.parametrize("stop", ["Wö", ["nothing", "Wö"]])
async def test_a_stop_string_ends_the_text(stop):
    choice = (await post(TEXT | {"max_tokens": 50, "stop": stop}))["choices"][0]
    assert choice["text"] == "Hello, "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Wö")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3},
        {"stop": "🌍"},
        {"stop": ["rld 🌍 never", "!"], "n": 2},
        {"echo": True, "logprobs": 2},
        {"logprobs": 0, "prompt": ["abc", "dé", "🌍🌍"]},
        {"max_tokens": 8},
        {"prompt": [[72, 200, 73]], "max_tokens": 3},
        {"stop_token_ids": [33], "include_stop_str_in_output": True},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
        {"seed": 3, "min_tokens": 2, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1},
    ],
)
async def test_a_stream_joined_is_the_whole_answer(options):
    body = TEXT | {"max_tokens": 40} | options
    whole = await post(body)
    async with client() as http:
        response = await http.post(
            "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        )
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        assert [each["finish_reason"] for each in mine if each["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["finish_reason"] and mine[-1]["stop_reason"] == choice["stop_reason"]
        assert not any("\ufffd" in each["text"] for each in mine) or "\ufffd" in choice["text"]
        if choice["logprobs"] is not None:
            for name in ("tokens", "token_logprobs", "text_offset"):
                joined = [entry for each in mine if each["logprobs"] for entry in each["logprobs"][name]]
                assert joined == choice["logprobs"][name]


async def test_continuous_usage_counts_along():
    body = {
        "prompt": "abc",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with client() as http:
        chunks = events((await http.post("/v1/completions", json=body)).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("options", "counts", "last"),
    [
        ({}, False, False),
        ({"include_usage": None, "continuous_usage_stats": None}, False, False),
        ({"include_usage": True, "continuous_usage_stats": None}, False, True),
        ({"include_usage": None, "continuous_usage_stats": True}, True, False),
        ({"include_usage": False, "continuous_usage_stats": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
async def test_usage_comes_where_it_was_asked_for(path, options, counts, last):
    """A chunk without choices breaks clients that did not ask for it."""
    body = (CHAT if "chat" in path else TEXT) | {"stream": True, "stream_options": options}
    async with client() as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    chunks = events(answer.text)
    with_choices = [chunk for chunk in chunks if chunk["choices"]]
    assert all((chunk.get("usage") is not None) == counts for chunk in with_choices)
    assert all(("usage" in chunk) == (counts or last) for chunk in with_choices)
    assert len(chunks) - len(with_choices) == last and (not last or chunks[-1]["usage"]["total_tokens"])


async def test_a_prompt_too_long_names_the_context():
    async with client(FakeEngine(max_context=10)) as http:
        response = await http.post("/v1/completions", json={"prompt": "x" * 8, "max_tokens": 2})
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert "10 tokens" in error_of(response)["message"]


async def test_a_text_that_cannot_fit_is_refused_without_encoding_it(monkeypatch):
    engine = FakeEngine(max_context=2000)
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_: 1 / 0)
    async with client(engine) as http:
        for path, body in (
            ("completions", {"prompt": "x" * 50_000}),
            ("chat/completions", {"messages": [{"role": "user", "content": "x" * 50_000}]}),
        ):
            response = await http.post(f"/v1/{path}", json=body)
            assert response.status_code == 400 and "characters" in response.text
            assert error_of(response)["code"] == "context_length_exceeded"
        response = await http.post("/tokenize", json={"prompt": "x" * 50_000})
        assert response.status_code == 400 and "characters" in response.text


async def test_a_long_text_is_read_no_further_than_the_context_goes(monkeypatch):
    engine = FakeEngine(max_context=100_000)
    encode, lengths = engine.tokenizer.encode, []
    monkeypatch.setattr(
        engine.tokenizer, "encode", lambda text, *more: lengths.append(len(text)) or encode(text, *more)
    )
    async with client(engine) as http:
        for path in ("/v1/completions", "/tokenize"):
            lengths.clear()
            response = await http.post(path, json={"prompt": "x" * 1_500_000})
            assert response.status_code == 400 and error_of(response)["param"] == "prompt"
            assert error_of(response)["code"] == "context_length_exceeded"
            assert 100_000 < sum(lengths) < 200_000 and max(lengths) <= 65_536


async def test_a_long_text_that_fits_is_encoded_as_a_whole():
    async with client(FakeEngine(max_context=400_000)) as http:
        text = "x" * 300_000
        assert (await http.post("/tokenize", json={"prompt": text})).json()["count"] == 300_001


async def test_of_several_prompts_the_first_that_is_too_long_ends_the_work(monkeypatch):
    engine = FakeEngine(max_context=100)
    encode, lengths = engine.tokenizer.encode, []
    monkeypatch.setattr(
        engine.tokenizer, "encode", lambda text, *more: lengths.append(len(text)) or encode(text, *more)
    )
    async with client(engine) as http:
        response = await http.post("/v1/completions", json={"prompt": ["a", "x" * 200, "b", "c"]})
    assert error_of(response)["code"] == "context_length_exceeded" and lengths == [1, 200]


async def test_more_ids_than_the_context_holds_are_not_decoded():
    async with client(FakeEngine(max_context=100)) as http:
        assert (await http.post("/detokenize", json={"tokens": [65] * 100})).json()["prompt"] == "A" * 100
        response = await http.post("/detokenize", json={"tokens": [65] * 101})
    assert response.status_code == 400 and error_of(response)["param"] == "tokens"
    assert "100 tokens" in error_of(response)["message"]
