"""Requests with tools, for /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from recorded.cases import Answers, Request, post, user, variants
from recorded.chats import PATH, USAGE
from recorded.models import TOKENS

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def function(name: str, parameters: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """A tool."""
    about = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, "description": f"About {name}.", **about, **more}}


TOOLS = [function("weather", WEATHER), function("add", ADD), function("now", None)]
STRICT = [function("weather", WEATHER, strict=True), function("add", ADD, strict=True)]
NAMED = {"type": "function", "function": {"name": "add"}}
ASKED: dict[str, Any] = {
    "messages": [user("What is the weather in Bern?")], "tools": TOOLS, "max_tokens": 90, "temperature": 0,
}  # fmt: skip


def chosen(name: str) -> list[Request]:
    """Calls that are required or named, whole and streamed."""
    changed: dict[str, dict[str, Any]] = {
        "required": {"tool_choice": "required", "parallel_tool_calls": False},
        "required-stream": {"tool_choice": "required", "parallel_tool_calls": False, "stream": True} | USAGE,
        "required-parallel": {"tool_choice": "required", "parallel_tool_calls": True},
        "required-logprobs": {"tool_choice": "required", "parallel_tool_calls": False, "logprobs": True},
        "required-drawn": {
            "tool_choice": "required", "parallel_tool_calls": False, "n": 2, "temperature": 1.2, "seed": 5,
        },
        "required-cut": {"tool_choice": "required", "max_tokens": 25},
        "required-cut-stream": {"tool_choice": "required", "max_tokens": 25, "stream": True} | USAGE,
        "named": {"tool_choice": NAMED},
        "named-stream": {"tool_choice": NAMED, "stream": True} | USAGE,
        "named-without-parameters": {"tool_choice": {"type": "function", "function": {"name": "now"}}},
        "none": {"tool_choice": "none", "max_tokens": 6},
        "auto": {"max_tokens": 12},
        "auto-strict": {"tools": STRICT, "max_tokens": 12},
        "one-tool": {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False},
        "stop-in-a-call": {"tool_choice": NAMED, "stop": ["arg"]},
    }  # fmt: skip
    return variants(f"chat/tools/{name}", PATH, ASKED, changed)


def called() -> list[Request]:
    """Calls that the tiny model is free to make: a bias makes it begin one."""
    opens = {str(TOKENS["<tool_call>"]): 30}
    free = {"tools": STRICT, "logit_bias": opens}
    changed: dict[str, dict[str, Any]] = {
        "auto": free,
        "auto-stream": free | {"stream": True} | USAGE,
        "auto-one": free | {"parallel_tool_calls": False},
        "auto-one-stream": free | {"parallel_tool_calls": False, "stream": True} | USAGE,
        "auto-parallel": free | {"max_tokens": 250},
        "auto-parallel-stream": free | {"max_tokens": 250, "stream": True} | USAGE,
        "auto-not-strict": {"logit_bias": opens, "max_tokens": 30},
        "auto-not-strict-stream": {"logit_bias": opens, "max_tokens": 30, "stream": True} | USAGE,
        "auto-cut": free | {"max_tokens": 30},
        "auto-drawn": free | {"n": 2, "temperature": 1.0, "seed": 1},
        "special-shown": free | {"skip_special_tokens": False},
        "form": {"structured_outputs": {"regex": "[0-9]{3}"}, "tools": STRICT},
        "form-or-call": free | {"structured_outputs": {"regex": "[0-9]{3}"}},
    }
    return variants("chat/tools/free", PATH, ASKED, changed)


def replayed(name: str) -> list[Request]:
    """Conversations in which calls and their results are sent back. Ids are random, and some templates show them to the
    model: here they are replaced.
    """
    first = f"chat/tools/{name}/required"

    def goes_on(answers: Answers, **more: Any) -> dict[str, Any]:
        message = answers[first]["choices"][0]["message"]
        calls = [call | {"id": f"call_{place}"} for place, call in enumerate(message["tool_calls"])]
        message = message | {"tool_calls": calls}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "17 degrees"} for call in calls]
        return ASKED | {"messages": [*ASKED["messages"], message, *results], "max_tokens": 8} | more

    def streamed(answers: Answers) -> dict[str, Any]:
        call = answers[f"{first}-stream"]["choices"][0]["message"]["tool_calls"][0] | {"id": "call_0"}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "17"}]}
        return ASKED | {"messages": [*ASKED["messages"], message, result], "max_tokens": 8}

    return [
        post(f"chat/tools/{name}/result", PATH, goes_on),
        post(f"chat/tools/{name}/result-stream", PATH, lambda answers: goes_on(answers, stream=True, **USAGE)),
        post(
            f"chat/tools/{name}/result-and-call", PATH,
            lambda answers: goes_on(answers, tool_choice=NAMED, max_tokens=90),
        ),
        post(f"chat/tools/{name}/result-of-a-stream", PATH, streamed),
    ]  # fmt: skip


def refused() -> list[Request]:
    """Tools that contradict each other."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    changed: dict[str, dict[str, Any]] = {
        "twice": {"tools": [TOOLS[0], TOOLS[0]]},
        "no-tools": {"tools": [], "tool_choice": "required"},
        "unknown-name": {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "unknown-choice": {"tool_choice": "any"},
        "wrong-name": {"tools": [function("a b", None)]},
        "wrong-type": {"tools": [{"type": "retrieval"}]},
        "strict-schema": {"tools": [function("f", {"contains": {"type": "integer"}}, strict=True)]},
        "required-schema": {"tools": [function("f", {"properties": {"a": {"type": "x"}}})], "tool_choice": "required"},
        "old-functions": {"functions": [{"name": "f"}]},
        "result-without-id": {"messages": [user("a"), {"role": "tool", "content": "b"}]},
        "call-without-arguments": {
            "messages": [user("a"), {"role": "assistant", "tool_calls": [call | {"function": {"name": "add"}}]}],
        },
        "call-of-a-user": {"messages": [user("a") | {"tool_calls": [call]}]},
    }  # fmt: skip
    return variants("refused/tools", PATH, ASKED, changed)
