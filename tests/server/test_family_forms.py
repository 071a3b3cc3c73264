"""Forms, calls and reasoning over HTTP, whole and streamed, with tokenizers that are built like those of families."""

import json

import jsonschema
import pytest

from tests.server.harness import events, real_server
from tests.tokenizer_families import FAMILIES, save_family_model

pytestmark = pytest.mark.anyio

ADD = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"],
       "additionalProperties": False}  # fmt: skip
SAY = {"type": "object", "properties": {"word": {"enum": ["yes", "no"]}}, "required": ["word"],
       "additionalProperties": False}  # fmt: skip
SCHEMAS = {"add": ADD, "say": SAY}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], "strict": True}} for name in SCHEMAS
]
NAMED = {"type": "function", "function": {"name": "say"}}
MESSAGES = [{"role": "user", "content": "What is 1 + 1?"}]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, tmp_path_factory):
    return request.param, str(save_family_model(tmp_path_factory.mktemp("family"), request.param))


async def ask(http, body):
    """The message of a whole answer, which is that of the same answer streamed, and why it ended."""
    body = {"messages": MESSAGES, "max_tokens": 300, "temperature": 1.5, "seed": 1, **body}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    whole = {name: value for name, value in choice["message"].items() if value and name != "role"}
    streamed = {}
    for chunk in events((await http.post("/v1/chat/completions", json=body | {"stream": True})).text):
        for name, value in chunk["choices"][0]["delta"].items() if chunk["choices"] else ():
            if name == "tool_calls":
                for part in value:
                    calls = streamed.setdefault(name, [])
                    if part["index"] == len(calls):
                        calls.append({"name": part["function"]["name"], "arguments": ""})
                    calls[part["index"]]["arguments"] += part["function"].get("arguments") or ""
            elif value and name != "role":
                streamed[name] = streamed.get(name, "") + value
    whole["tool_calls"] = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in whole.get("tool_calls", [])
    ]
    streamed.setdefault("tool_calls", [])
    assert {name: value for name, value in whole.items() if name in ("content", "reasoning_content", "tool_calls")} == {
        name: value for name, value in streamed.items() if name in ("content", "reasoning_content", "tool_calls")
    }
    return whole, choice["finish_reason"]


async def test_every_forced_call_is_valid(served):
    family, folder = served
    async with real_server(folder) as (_, _, http):
        for seed in range(3):
            for choice, names in (
                ("required", {"add", "say"}),
                (NAMED, {"say"}),
            ):
                message, reason = await ask(http, {"tools": TOOLS, "tool_choice": choice, "seed": seed})
                assert message["tool_calls"] and not message.get("content"), (family, message)
                for call in message["tool_calls"]:
                    assert call["name"] in names
                    if reason == "tool_calls":
                        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])


async def test_a_form_is_kept_beside_every_added_token(served):
    family, folder = served
    names = [*FAMILIES[family].special, *FAMILIES[family].plain, "<tool_call>", "</think>"]
    async with real_server(folder) as (_, _, http):
        for name in names:
            message, reason = await ask(http, {"structured_outputs": {"choice": [name]}, "include_reasoning": False})
            assert (message["content"], reason) == (name, "stop"), name
            form = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"const": name}}}
            message, reason = await ask(http, {"response_format": form, "include_reasoning": False})
            assert (json.loads(message["content"]), reason) == (name, "stop"), name


async def test_a_strict_tool_is_called_where_the_model_likes(served):
    """The bias makes it like the token that opens calls: what follows is then held."""
    family, folder = served
    marks = {"qwen2.5": "<tool_call>", "qwen3": "<tool_call>", "mistral": "[TOOL_CALLS]"}
    if family not in marks:
        pytest.skip("no token of its own opens calls")
    async with real_server(folder) as (llm, _, http):
        token = llm.tokenizer.token_id(marks[family])
        message, reason = await ask(http, {"tools": TOOLS, "logit_bias": {str(token): 100}, "include_reasoning": False,
                                           "parallel_tool_calls": False})  # fmt: skip
        assert len(message["tool_calls"]) == 1 and reason in ("tool_calls", "length")
        (call,) = message["tool_calls"]
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])


@pytest.mark.parametrize("family", ["qwen3", "deepseek", "mistral"])
async def test_a_form_stands_behind_reasoning_that_is_begun_opened_or_off(family, tmp_path):
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SAY}}
    begins, ends = ("[THINK]", "[/THINK]") if family == "mistral" else ("<think>", "</think>")
    async with real_server(str(save_family_model(tmp_path, family))) as (llm, _, http):
        begin, end = (str(llm.tokenizer.token_id(mark)) for mark in (begins, ends))
        # Begun by the template of deepseek; the others open it, because the bias makes them like to.
        body = {"response_format": form, "logit_bias": {begin: 50, end: 50}}
        message, reason = await ask(http, body)
        assert reason == "stop", message
        jsonschema.validate(json.loads(message["content"]), SAY)
        told = {"messages": MESSAGES, "max_tokens": 300, "seed": 1, "return_token_ids": True}
        (choice,) = (await http.post("/v1/chat/completions", json=told | body)).json()["choices"]
        assert int(end) in choice["token_ids"] and (family == "deepseek" or choice["token_ids"][0] == int(begin))
        if family == "qwen3":
            body = {"response_format": form, "chat_template_kwargs": {"enable_thinking": False}}
            message, reason = await ask(http, body | {"logit_bias": {begin: 50}})
            assert reason == "stop" and "reasoning_content" not in message
            jsonschema.validate(json.loads(message["content"]), SAY)
