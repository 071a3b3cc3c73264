"""Requests for /v1/responses."""

from __future__ import annotations

from typing import Any

from recorded.cases import Answers, Request, post, variants
from recorded.chats import PET
from recorded.models import TOKENS
from recorded.tools import ADD, WEATHER

PATH = "/v1/responses"

GREEDY: dict[str, Any] = {"input": "Name a colour.", "max_output_tokens": 6, "temperature": 0}


def function(name: str, parameters: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """A tool."""
    return {"type": "function", "name": name, "description": f"About {name}.", "parameters": parameters, **more}


TOOLS = [function("weather", WEATHER), function("add", ADD, strict=False)]
ASKED = GREEDY | {"input": "What is the weather in Bern?", "tools": TOOLS, "max_output_tokens": 150}


def message(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    """A message with one part."""
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def texts() -> list[Request]:
    """Inputs and options, whole and streamed."""
    shape = {"type": "json_schema", "name": "pet", "schema": PET, "strict": True}
    plain = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    unused = {"metadata": {"a": "b"}, "user": "u", "store": False, "truncation": "disabled", "background": False}
    turns = [message("user", "Name a colour."), message("assistant", "Red.", "output_text"), message("user", "Again.")]
    changed: dict[str, dict[str, Any]] = {
        "text": {},
        "instructions": {"instructions": "Answer in French."},
        "messages": {"input": turns},
        "plain-messages": {"input": plain},
        "reasoning-item": {
            "input": [
                turns[0],
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                *turns[1:],
            ],
        },
        "metadata": unused,
        "logprobs": {"top_logprobs": 2},
        "logprobs-included": {"include": ["message.output_text.logprobs"]},
        "whole": {"logit_bias": {"2": 100}},
        "stop": {"stop": ["a"], "max_output_tokens": 12},
        "seed": {"temperature": 1.0, "top_p": 0.9, "seed": 4},
        "form": {"text": {"format": shape}, "max_output_tokens": 40},
        "json-object": {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 8},
        "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
        "stream": {"stream": True},
        "stream-whole": {"stream": True, "logit_bias": {"2": 100}},
        "stream-logprobs": {"stream": True, "top_logprobs": 1},
        "stream-form": {"stream": True, "text": {"format": shape}, "max_output_tokens": 40},
        "stream-unicode": {"stream": True, "input": "Write three emoji.", "max_output_tokens": 12},
    }  # fmt: skip
    return variants("responses", PATH, GREEDY, changed)


def tools(name: str) -> list[Request]:
    """Calls, whole and streamed, and their results."""
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    changed: dict[str, dict[str, Any]] = {
        "required": one,
        "required-stream": one | {"stream": True},
        "required-parallel": {"tool_choice": "required"},
        "required-cut": one | {"max_output_tokens": 20},
        "named": {"tool_choice": {"type": "function", "name": "add"}},
        "named-stream": {"tool_choice": {"type": "function", "name": "add"}, "stream": True},
        "none": {"tool_choice": "none", "max_output_tokens": 6},
        "auto": {"max_output_tokens": 10},
        "schema-not-honoured": {
            "tools": [function("f", {"contains": {"type": "integer"}})], "max_output_tokens": 6,
        },
    }  # fmt: skip
    first = f"responses/tools/{name}/required"

    def goes_on(answers: Answers) -> dict[str, Any]:
        output = [each | {"call_id": "call_0"} if "call_id" in each else each for each in answers[first]["output"]]
        results = [{"type": "function_call_output", "call_id": "call_0", "output": "17 degrees"}]
        return ASKED | {"input": [message("user", ASKED["input"]), *output, *results], "max_output_tokens": 8}

    return [
        *variants(f"responses/tools/{name}", PATH, ASKED, changed),
        post(f"responses/tools/{name}/result", PATH, goes_on),
    ]


def free() -> list[Request]:
    """Reasoning, and calls that the tiny model is free to make."""
    thinks = {
        "chat_template_kwargs": {"begins_thinking": True}, "logit_bias": {str(TOKENS["</think>"]): 3},
        "max_output_tokens": 30,
    }  # fmt: skip
    calls = {"tools": TOOLS[:1], "logit_bias": {str(TOKENS["<tool_call>"]): 30}, "max_output_tokens": 90}
    changed: dict[str, dict[str, Any]] = {
        "reasoning": thinks,
        "reasoning-stream": thinks | {"stream": True},
        "reasoning-form": thinks | {"structured_outputs": {"choice": ["yes", "no"]}},
        "calls": calls,
        "calls-stream": calls | {"stream": True},
        "calls-one": calls | {"parallel_tool_calls": False},
    }
    return variants("responses/free", PATH, GREEDY, changed)


def refused() -> list[Request]:
    """What needs memory between requests, and wrong fields."""
    changed: dict[str, dict[str, Any]] = {
        "stored": {"store": True},
        "previous": {"previous_response_id": "resp_1"},
        "conversation": {"conversation": "c"},
        "prompt": {"prompt": {"id": "p"}},
        "background": {"background": True},
        "truncation": {"truncation": "auto"},
        "effort": {"reasoning": {"effort": "low"}},
        "item-reference": {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "unknown-item": {"input": [{"type": "computer_call"}]},
        "no-input": {"input": None},
        "empty-input": {"input": []},
        "image": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "other-tool": {"tools": [{"type": "web_search"}]},
        "max-tokens": {"max_tokens": 5},
        "include": {"include": ["file_search_call.results"]},
        "format": {"text": {"format": {"type": "json_schema", "name": "a"}}},
        "many-metadata": {"metadata": {str(place): "" for place in range(17)}},
        "too-long": {"max_output_tokens": 100_000},
    }
    return variants("refused/responses", PATH, GREEDY, changed)
