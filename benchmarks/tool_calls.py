"""Tool calls over HTTP, in conversations: whether every call is valid, whole and streamed.

    python benchmarks/tool_calls.py --model QWEN.gguf

Sends --conversations conversations of two turns through the model's own chat template: a third with a call that is
required, a third with a named one, a third with strict tools where the model is free. Calls are answered, and the model
goes on. Prints what came, and what was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import httpx
import jsonschema
from common import hardware, hardware_line

from quire.async_llm import AsyncLLM
from quire.config import ServeConfig
from quire.server.app import create_app

MODES = ("required", "named", "auto")
AT_ONCE = 16

Body = dict[str, Any]


def tools_of(draw: random.Random) -> list[Body]:
    """Three strict tools, different each time."""
    kinds: list[Body] = [
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"type": "string", "maxLength": 20},
        {"enum": ["celsius", "fahrenheit"]},
        {"type": "boolean"},
        {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
        {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    ]
    found = []
    for name in draw.sample(["add", "weather", "search", "book_table", "translate", "convert"], 3):
        properties = {f"{name}_{number}": draw.choice(kinds) for number in range(draw.randrange(1, 4))}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        schema["additionalProperties"] = False
        function = {"name": name, "description": f"{name} something", "parameters": schema, "strict": True}
        found.append({"type": "function", "function": function})
    return found


async def ask(http: httpx.AsyncClient, body: Body) -> tuple[Body, str]:
    """The message of an answer, and why it ended."""
    if not body["stream"]:
        response = await http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise ValueError(f"{response.status_code}: {response.text[:200]}")
        (choice,) = response.json()["choices"]
        return choice["message"], choice["finish_reason"]
    message: Body = {"role": "assistant", "content": "", "tool_calls": []}
    reason = ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"{response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:]).get("choices", ()):
                reason = choice["finish_reason"] or reason
                message["content"] += choice["delta"].get("content") or ""
                for part in choice["delta"].get("tool_calls", ()):
                    if "id" in part:
                        message["tool_calls"].append(
                            {"id": part["id"], "type": "function", "function": part["function"]}
                        )
                    else:
                        function = message["tool_calls"][part["index"]]["function"]
                        function["arguments"] += part["function"]["arguments"]
    return message, reason


async def converse(http: httpx.AsyncClient, number: int, args: argparse.Namespace, counts: Counter[str]) -> None:
    """One conversation."""
    draw, mode = random.Random(number), MODES[number % 3]
    tools = tools_of(draw)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    named = draw.choice([*schemas])
    choice = {"required": "required", "named": {"type": "function", "function": {"name": named}}, "auto": "auto"}[mode]
    messages: list[Body] = [{"role": "user", "content": f"Use the tool {named} for something, then tell me of it."}]
    for turn in range(2):
        temperature = draw.choice([0.0, 0.7, 1.2])
        body = {
            "messages": messages, "tools": tools, "tool_choice": choice if not turn else "auto",
            "stream": number % 2 == 1, "max_tokens": args.max_tokens, "temperature": temperature, "seed": number,
            "parallel_tool_calls": draw.choice([True, False]),
        }  # fmt: skip
        try:
            message, reason = await ask(http, body)
            calls = message.get("tool_calls") or []
            counts[f"{mode}: {'calls' if calls else 'text'}, {reason}"] += not turn
            if not turn and mode != "auto" and not calls:
                raise ValueError(f"no call, but {message.get('content')!r:.120}")
            for call in calls[: len(calls) if reason != "length" else -1]:
                name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                jsonschema.validate(arguments, schemas[name])
                if not turn and mode == "named" and name != named:
                    raise ValueError(f"{name} in place of {named}")
        except (ValueError, KeyError, jsonschema.ValidationError) as error:
            counts["WRONG"] += 1
            print(f"  conversation {number} ({mode}), turn {turn}: {str(error).partition(chr(10))[0][:200]}")
            return
        if reason == "length" or not calls:
            return
        results = [{"role": "tool", "tool_call_id": call["id"], "content": '{"ok": true}'} for call in calls]
        messages += [{name: value for name, value in message.items() if value}, *results]


async def run(args: argparse.Namespace) -> int:
    """See the module."""
    options = {"runtime.threads": args.threads, "scheduler.max_running": AT_ONCE, "model.max_context": 4096}
    counts, begun = Counter[str](), time.perf_counter()
    async with AsyncLLM(args.model, options) as llm:
        app = create_app(llm, ServeConfig())
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000", timeout=None
        ) as http:
            gate = asyncio.Semaphore(AT_ONCE)

            async def one(number: int) -> None:
                async with gate:
                    await converse(http, number, args, counts)

            await asyncio.gather(*map(one, range(args.conversations)))
    wrong = counts.pop("WRONG", 0)
    for what, count in sorted(counts.items()):
        print(f"  {count:4} {what}")
    print(f"{args.conversations} conversations in {time.perf_counter() - begun:.0f} s: {wrong} wrong")
    return int(wrong > 0)


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=300, help="(default: 300)")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an answer (default: 160)")
    args = parser.parse_args()
    print(hardware_line(hardware()))
    return asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
