"""Conversations as clients send them back, with fields that other servers gave or that libraries add."""

import itertools
import logging

import pytest

from quire.server import chat_schema
from quire.server.chat_schema import BaseMessage, ConversationObject, TextPart, reported_names
from tests.server.fake_engine import FakeEngine
from tests.server.harness import client, error_of

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "Hello"}
MARK = {"type": "ephemeral"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
REPLAYS = {
    "openai": {
        "role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "tool_calls": None, "parsed": None,
    },
    "openai, from a web search": {
        "role": "assistant", "content": "Hi",
        "annotations": [{"type": "url_citation", "url_citation": {"url": "https://example.org", "title": "a"}}],
    },
    "litellm": {
        "role": "assistant", "content": "Hi", "tool_calls": None, "function_call": None, "reasoning_content": "Hm.",
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}],
        "provider_specific_fields": {"refusal": None, "citations": None},
    },
    "openrouter": {
        "role": "assistant", "content": "Hi", "reasoning": "Hm.",
        "reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "index": 0}],
    },
    "a user interface": {"role": "assistant", "id": "msg_1", "content": [{"type": "text", "text": "Hi"}]},
    "langchain": {
        "role": "assistant", "name": "helper",
        "content": [{"type": "text", "text": "Hi", "id": "1", "index": 0, "annotations": [], "extras": {"a": 1}}],
    },
    "prompt caching": {
        "role": "assistant", "cache_control": MARK,
        "content": [{"type": "text", "text": "Hi", "cache_control": MARK, "provider_specific_fields": {}}],
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def said(monkeypatch):
    monkeypatch.setattr(chat_schema, "_said", set())


async def prompt_of(*messages, **more):
    engine = FakeEngine()
    async with client(engine) as http:
        response = await http.post("/v1/chat/completions", json={"messages": list(messages), "max_tokens": 1, **more})
    assert response.status_code == 200, response.text
    return engine.prompts[0]["prompt_token_ids"]


async def refusal_of(*messages):
    async with client() as http:
        response = await http.post("/v1/chat/completions", json={"messages": list(messages)})
    assert response.status_code == 400
    return error_of(response)


@pytest.mark.parametrize("name", REPLAYS)
async def test_an_answer_that_a_client_sends_back_is_the_same_prompt_as_its_text(name):
    plain = {"role": "assistant", "content": "Hi"}
    kept = {field: REPLAYS[name][field] for field in ("name", "reasoning_content") if field in REPLAYS[name]}
    assert await prompt_of(USER, REPLAYS[name], USER) == await prompt_of(USER, plain | kept, USER)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
async def test_messages_of_every_role_and_their_parts_may_have_the_fields(role):
    extras = {key: {"a": [1]} for key in sorted(reported_names(BaseMessage))} | {"refusal": None, "audio": None}
    part = {"type": "text", "text": "Hi"} | dict.fromkeys(sorted(reported_names(TextPart)), "x")
    own = {"tool_call_id": "c1"} if role == "tool" else {}
    before = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}] if role == "tool" else []
    plain = await prompt_of(*before, {"role": role, "content": "Hi", **own})
    assert await prompt_of(*before, {"role": role, "content": [part], **own, **extras}) == plain


async def test_calls_that_a_client_sends_back_may_have_the_fields():
    extras = {key: {"google": {"thought_signature": "x"}} for key in sorted(reported_names(ConversationObject))}
    made = CALL | extras | {"index": 0, "function": CALL["function"] | extras}
    answers = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in (CALL, made)]
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    prompts = [await prompt_of(USER, answer, result) for answer in answers]
    assert prompts[0] == prompts[1]


async def test_items_of_a_response_may_have_the_fields():
    extras = {key: {"a": 1} for key in sorted(reported_names(ConversationObject))}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello", **extras}], **extras},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm.", **extras}], **extras},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", **extras},
        {"type": "function_call_output", "call_id": "c1", "output": "3", **extras},
    ]
    async with client() as http:
        response = await http.post("/v1/responses", json={"input": items, "max_output_tokens": 1})
    assert response.status_code == 200, response.text


async def test_each_name_is_said_once_in_the_log(caplog):
    caplog.set_level(logging.INFO, "quire.server")
    for message in itertools.chain(REPLAYS.values(), REPLAYS.values()):
        await prompt_of(USER, message, USER)
    lines = [each.getMessage() for each in caplog.records if "passed over" in each.getMessage()]
    names = ["annotations", "cache_control", "extras", "id", "index", "provider_specific_fields", "reasoning"]
    names += ["reasoning_details", "thinking_blocks"]
    assert sorted(line.split("'")[1] for line in lines) == sorted(names)


async def test_a_field_that_is_null_is_not_worth_a_line(caplog):
    caplog.set_level(logging.INFO, "quire.server")
    await prompt_of(USER | dict.fromkeys(reported_names(BaseMessage)))
    assert "passed over" not in caplog.text


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        (USER | {"cache_contrl": MARK}, "messages[0].cache_contrl", "unknown_parameter"),
        (USER | {"x" * 5000: 1}, "messages[0]." + "x" * 64, "unknown_parameter"),
        (USER | {"audio": {"id": "a"}}, "messages[0].audio", "unsupported_parameter"),
        (USER | {"refusal": "no"}, "messages[0].refusal", "unsupported_parameter"),
        (USER | {"function_call": {"name": "f"}}, "messages[0].function_call", "unsupported_parameter"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "thinking": 1}]},
            "messages[0].content[0].thinking",
            "unknown_parameter",
        ),
    ],
)
async def test_other_names_are_refused_and_not_logged(message, param, code, caplog):
    caplog.set_level(logging.INFO, "quire.server")
    found = await refusal_of(message)
    assert (found["param"], found["code"]) == (param, code)
    assert "passed over" not in caplog.text and chat_schema._said == set()


def test_every_name_that_is_passed_over_is_a_field_without_a_meaning():
    for kind in (ConversationObject, BaseMessage, TextPart):
        own = {name for name, field in kind.model_fields.items() if field.description == "Accepted and not used."}
        assert own == reported_names(kind)
