"""POST /v1/chat/completions: messages, streams, log probabilities."""

import asyncio
import threading
from typing import Any

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, client, error_of, events

pytestmark = pytest.mark.anyio


async def post(body, engine=None, **settings):
    async with client(engine, **settings) as http:
        response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_messages_go_through_the_template():
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "anna"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "Hello"},
    ]
    answer = await post({"model": "fake", "messages": messages})
    # The fake answers with what it was given.
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "system: Be brief.\nuser: one\ntwo\nassistant: \nuser: Hello\nassistant:",
        "refusal": None,
    }
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_the_template_reads_what_it_is_given():
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    said = (await post(CHAT | extra))["choices"][0]["message"]["content"]
    assert said.endswith("\nenable_thinking=False\nassistant:")
    async with client() as http:
        counts = [(await http.post("/tokenize", json=CHAT | each)).json()["count"] for each in (extra, {})]
        assert counts[0] - counts[1] == len("enable_thinking=False\n")
        for wrong in ([], "x", 1):
            refused = await http.post("/v1/chat/completions", json=CHAT | {"chat_template_kwargs": wrong})
            assert refused.status_code == 400 and error_of(refused)["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    "limits", [{"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}]
)
async def test_both_names_of_the_limit_are_honoured(limits):
    answer = await post(CHAT | limits)
    assert answer["choices"][0]["message"]["content"] == "use"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_without_a_limit_the_context_is():
    answer = await post(CHAT | {"ignore_eos": True}, FakeEngine(max_context=80))
    assert answer["usage"]["total_tokens"] == 80


async def test_logprobs_hold_token_bytes_and_alternatives():
    answer = await post(CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 2})
    content = answer["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == ["u", "s"]
    assert content[0] == {
        "token": "u",
        "logprob": -0.5,
        "bytes": [117],
        "top_logprobs": [
            {"token": "u", "logprob": -0.5, "bytes": [117]},
            {"token": "v", "logprob": -1.5, "bytes": [118]},
        ],
    }
    content = (await post(CHAT | {"logprobs": True, "max_tokens": 1}))["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


@pytest.mark.parametrize("given", [{"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0}, {"logprobs": False}])
async def test_no_alternatives_may_be_asked_for_where_there_are_no_logprobs(given):
    assert (await post(CHAT | given | {"max_tokens": 1}))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 3}, {"stop": "🌍"}, {"logprobs": True, "top_logprobs": 1}, {"max_tokens": 17, "n": 2, "seed": 1}],
)
async def test_a_stream_joined_is_the_whole_answer(options):
    whole = await post(CHAT | options)
    async with client() as http:
        body = CHAT | options | {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events((await http.post("/v1/chat/completions", json=body)).text)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in each["delta"] for each in mine[1:])
        assert "".join(each["delta"].get("content", "") for each in mine) == choice["message"]["content"]
        assert [each["finish_reason"] for each in mine if each["finish_reason"]] == [choice["finish_reason"]]
        if options.get("logprobs"):
            found = [entry for each in mine if each["logprobs"] for entry in each["logprobs"]["content"]]
            assert found == choice["logprobs"]["content"]


async def test_a_template_that_objects_is_the_clients_fault():
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    async with client() as http:
        response = await http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert "roles must alternate" in error_of(response)["message"]
    assert error_of(response)["param"] == "messages"


async def test_a_template_that_takes_its_time_stops_nobody_else(monkeypatch):
    engine, begun, go = FakeEngine(), threading.Event(), threading.Event()

    def chat(*_: Any) -> str:
        begun.set()
        assert go.wait(10)
        return "x"

    monkeypatch.setattr(engine.tokenizer, "chat", chat)
    async with client(engine) as http:
        slow = asyncio.ensure_future(http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1}))
        await asyncio.to_thread(begun.wait, 10)
        assert (await http.get("/health/ready")).status_code == 200 and not slow.done()
        go.set()
        assert (await slow).status_code == 200


async def test_a_conversation_too_long_blames_the_messages():
    async with client(FakeEngine(max_context=30)) as http:
        response = await http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 10})
    assert error_of(response) | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
