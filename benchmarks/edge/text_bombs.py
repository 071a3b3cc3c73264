"""What hostile clients write into the strings and fields of a body that a server reads again: JSON within JSON, texts
that grow when they are normalized, and fields whose sizes multiply.

Each body is within the limits of its own JSON, or just beyond a limit of what its strings hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from bombs import Target, ask, named, side_by_side

CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
TOKENIZE, EMBEDDINGS = "/tokenize", "/v1/embeddings"


def called(count: int, arguments: str) -> bytes:
    """The input of /v1/responses: calls with these arguments."""
    text = json.dumps(arguments).encode()
    call = b'{"type":"function_call","call_id":"c","name":"f","arguments":' + text + b"}"
    return b'{"model":"%s","input":[' + b",".join([call] * count) + b'],"max_output_tokens":1}'


def conversation(count: int, arguments: str, per_message: int = 125) -> bytes:
    """A body with messages that made calls with these arguments."""
    text = json.dumps(arguments).encode()
    call = b'{"id":"c","type":"function","function":{"name":"f","arguments":' + text + b"}}"
    calls = b",".join([call] * per_message)
    message = b'{"role":"assistant","content":null,"tool_calls":[' + calls + b"]}"
    return b'{"model":"%s","messages":[' + b",".join([message] * (count // per_message)) + b"]}"


def listed(item: str, count: int) -> str:
    """An object with a list of equal items, as JSON."""
    return '{"a":[' + ",".join([item] * count) + "]}"


def sent(path: str, make: Callable[[], bytes], count: int = 1) -> Callable[[Target], str]:
    """Sends a body, or several equal ones at once."""

    def send(target: Target) -> str:
        request = named(target, path, make())
        return ask(target, request) if count == 1 else side_by_side(count, lambda _: ask(target, request))

    return send


def fields(**given: object) -> bytes:
    """A body with these fields."""
    return json.dumps({"model": "%s", **given}, separators=(",", ":")).encode()


def asked(**given: object) -> bytes:
    """A chat's body with these fields."""
    return fields(messages=[{"role": "user", "content": "a"}], max_tokens=1, **given)


def large_tools() -> list[dict[str, object]]:
    """100 tools of 60 KB and 300 objects each."""
    schema = {"type": "object", "properties": {f"p{each:05d}": {"description": "d" * 180} for each in range(300)}}
    return [{"type": "function", "name": f"f{each}", "parameters": schema} for each in range(100)]


def said(text: str) -> bytes:
    """A conversation with a text, which is sent as UTF-8."""
    message = json.dumps({"role": "user", "content": text}, ensure_ascii=False).encode()
    return b'{"model":"%s","messages":[' + message + b'],"max_tokens":1}'


EMOJI = "\U0001f98a"
"""A string that has one takes four bytes for each of its characters once parsed."""

RARE = b'"' + ("\ufdfa" * 1360).encode() + b'"'
"""Four thousand bytes, which are four thousand tokens."""

LETTERS = "\ufdfa" * 262_144
"""U+FDFA is one character, and 18 under NFKC."""

TEXT_BOMBS: dict[str, Callable[[Target], str]] = {
    "1,000 calls x 700 objects": sent(RESPONSES, lambda: called(1000, listed("{}", 700))),
    "700 objects x 1,000 in chat": sent(CHAT, lambda: conversation(1000, listed("{}", 700))),
    "16 x 12,000 calls": sent(RESPONSES, lambda: called(12_000, "{}"), 16),
    "16 x 12,000 calls in chat": sent(CHAT, lambda: conversation(12_000, "{}"), 16),
    "1.6 million lists in a call": sent(TOKENIZE, lambda: conversation(1, listed("[[]]", 1_600_000), 1)),
    "60,000 lists in a call": sent(TOKENIZE, lambda: conversation(1, listed("[]", 60_000), 1)),
    "a million numbers in a call": sent(TOKENIZE, lambda: conversation(1, listed("1000000", 1_000_000), 1)),
    "1,500 x 4,000 digits in calls": sent(RESPONSES, lambda: called(1500, listed("9" * 4000, 1))),
    "a million template numbers": sent(
        CHAT, lambda: asked(chat_template_kwargs={"a": [1_000_000] * 1_000_000}).replace(b", ", b",")
    ),
    "8 x a million numbers": sent(COMPLETIONS, lambda: fields(prompt=[1_000_000 + x for x in range(1_000_000)]), 8),
    "16 x 16,000 messages": sent(
        CHAT, lambda: fields(messages=[{"role": "user", "content": "a"}] * 16_000, max_tokens=1), 16
    ),
    "262,144 x U+FDFA": sent(TOKENIZE, lambda: b'{"model":"%s","prompt":"' + LETTERS.encode() + b'"}'),
    "16,000 x U+FDFA, 16 at once": sent(
        TOKENIZE, lambda: b'{"model":"%s","prompt":"' + LETTERS[:16_000].encode() + b'"}', 16
    ),
    "a schema for 200 prompts": sent(
        COMPLETIONS,
        lambda: fields(
            prompt=["a"] * 200,
            max_tokens=1,
            structured_outputs={"json": {"type": "object", "properties": {f"p{x}": {} for x in range(15_000)}}},
        ),
    ),
    "1,024 biases for 8 prompts": sent(
        COMPLETIONS,
        lambda: fields(prompt=["a"] * 8, max_tokens=1, logit_bias={str(each): 1 for each in range(1024)}),
    ),
    "8 MB of long numbers": sent(COMPLETIONS, lambda: b'{"prompt":[' + b",".join([b"9" * 4299] * 1900) + b"]}"),
    "a schema of brackets": sent(
        COMPLETIONS, lambda: fields(prompt="a", structured_outputs={"json": "[" + ",".join(["[]"] * 87_000) + "]"})
    ),
    "a list of pins": sent(CHAT, lambda: asked(cache_pin={"tier": [1] * 1_000_000})),
    "6 MB of tools, no choice": sent(
        RESPONSES, lambda: fields(input="a", tools=large_tools(), tool_choice="none", max_output_tokens=1)
    ),
    "6 MB of tools, 8 at once": sent(
        RESPONSES, lambda: fields(input="a", tools=large_tools(), tool_choice="none", max_output_tokens=1), 8
    ),
    "8 MB and an emoji in chat": sent(CHAT, lambda: said("a" * 8_300_000 + EMOJI)),
    "8 x 8 MB and an emoji": sent(CHAT, lambda: said("a" * 8_300_000 + EMOJI), 8),
    "2 MB and an emoji in chat": sent(CHAT, lambda: said(" " * 2_600_000 + EMOJI)),
    "2,048 texts to embed": sent(EMBEDDINGS, lambda: b'{"input":[' + b",".join([RARE] * 2000) + b"]}"),
    "8 MB users, 32 at once": sent(CHAT, lambda: asked(user="u" * 8_300_000), 32),
    "echo for 24 choices": sent(
        COMPLETIONS, lambda: fields(prompt=" " * 100_000, echo=True, n=24, max_tokens=1, return_token_ids=True)
    ),
}
"""By name; each sends to a server and returns the outcome."""
