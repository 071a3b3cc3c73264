"""Requests that are refused: every kind of wrong field, body, header and framing."""

from __future__ import annotations

from typing import Any

from recorded.cases import DROPPED, JSON_HEADERS, Request, get, post, user, variants
from recorded.chats import PATH as CHAT
from recorded.completions import PATH as COMPLETIONS

PROMPT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 1, "temperature": 0}
MESSAGES: dict[str, Any] = {"messages": [user("Hi")], "max_tokens": 1, "temperature": 0}


def fields() -> list[Request]:
    """Wrong values, types and names of fields."""
    common: dict[str, dict[str, Any]] = {
        "temperature-text": {"temperature": "1"},
        "temperature-high": {"temperature": 2.5},
        "top-p-0": {"top_p": 0},
        "top-k-low": {"top_k": -2},
        "min-p-high": {"min_p": 1.5},
        "n-0": {"n": 0},
        "n-many": {"n": 129},
        "n-flag": {"n": True},
        "penalty-high": {"presence_penalty": 3},
        "repetition-0": {"repetition_penalty": 0},
        "seed-large": {"seed": 2**63},
        "stop-empty": {"stop": ""},
        "stop-many": {"stop": ["a"] * 17},
        "stop-number": {"stop": [1]},
        "stop-token-outside": {"stop_token_ids": [10**6]},
        "bias-outside": {"logit_bias": {"1000000": 1}},
        "bias-high": {"logit_bias": {"5": 101}},
        "bias-name": {"logit_bias": {"five": 1}},
        "max-tokens-negative": {"max_tokens": -1},
        "max-tokens-fraction": {"max_tokens": 1.5},
        "min-tokens-high": {"min_tokens": 5},
        "too-long": {"max_tokens": 100_000},
        "stream-text": {"stream": "yes"},
        "stream-options": {"stream_options": {"include_usage": True}},
        "stream-options-unknown": {"stream": True, "stream_options": {"usage": True}},
        "obfuscation": {"stream": True, "stream_options": {"include_obfuscation": True}},
        "unknown-field": {"max_new_token": 1},
        "habit": {"n_predict": 1},
        "another-model": {"model": "gpt-4"},
        "model-number": {"model": 4},
        "salt-long": {"cache_salt": "s" * 257},
        "pin-text": {"cache_pin": "yes"},
        "pin-short-prompt": {"cache_pin": True, "cache_salt": "p"},
        "priority-high": {"cache_priority": 101},
        "lifetime-negative": {"cache_lifetime": -1},
        "user-long": {"user": "u" * 1025},
    }
    completions: dict[str, dict[str, Any]] = {
        "no-prompt": {"prompt": DROPPED},
        "prompt-null": {"prompt": None},
        "prompt-empty": {"prompt": ""},
        "prompt-empty-list": {"prompt": []},
        "prompt-mixed": {"prompt": ["a", 1]},
        "prompt-number": {"prompt": 5},
        "prompt-outside": {"prompt": [10**6]},
        "prompt-long": {"prompt": "a " * 5000},
        "suffix": {"suffix": "x"},
        "best-of": {"best_of": 3},
        "logprobs-many": {"logprobs": 21},
        "prompt-logprobs-stream": {"prompt_logprobs": 1, "stream": True},
        "echo-number": {"echo": 1},
    }
    chat: dict[str, dict[str, Any]] = {
        "no-messages": {"messages": DROPPED},
        "messages-empty": {"messages": []},
        "messages-text": {"messages": "Hi"},
        "role-unknown": {"messages": [{"role": "robot", "content": "a"}]},
        "role-function": {"messages": [{"role": "function", "name": "f", "content": "a"}]},
        "content-missing": {"messages": [{"role": "user"}]},
        "content-number": {"messages": [{"role": "user", "content": 5}]},
        "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "unknown-field-of-message": {"messages": [user("a") | {"mood": "good"}]},
        "top-logprobs-alone": {"top_logprobs": 2},
        "lengths-differ": {"max_completion_tokens": 2},
        "continue-user": {"continue_final_message": True},
        "echo-user": {"echo": True},
        "modalities": {"modalities": ["audio"]},
        "reasoning-effort": {"reasoning_effort": "low"},
        "prediction": {"prediction": {"type": "content", "content": "a"}},
        "format-unknown": {"response_format": {"type": "xml"}},
        "format-without-schema": {"response_format": {"type": "json_schema"}},
        "prompt-long": {"messages": [user("a" * 5000)]},
        "template-variables": {"chat_template_kwargs": [1]},
    }
    return [
        *variants("refused/completions", COMPLETIONS, PROMPT, common | completions),
        *variants("refused/chat", CHAT, MESSAGES, chat),
        *variants(
            "refused/chat", CHAT, MESSAGES, {name: common[name] for name in ("n-0", "too-long", "another-model")}
        ),
    ]


def bodies() -> list[Request]:
    """Bodies that are no JSON object, and wrong headers."""
    texts: dict[str, bytes] = {
        "no-json": b"{",
        "empty": b"",
        "list": b"[]",
        "text": b'"a"',
        "nan": b'{"prompt": "a", "temperature": NaN}',
        "latin-1": b'{"prompt": "\xe9"}',
        "surrogate": b'{"prompt": "\\ud800"}',
        "deep": b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}",
        "many-digits": b'{"prompt": "a", "seed": ' + b"1" * 1200 + b"}",
    }
    found = [Request(f"refused/body/{name}", COMPLETIONS, text, headers=JSON_HEADERS) for name, text in texts.items()]
    body = b'{"prompt": "a", "max_tokens": 1}'
    plain = {"Content-Type": "text/plain"}
    return [
        *found,
        Request("refused/body/kind", COMPLETIONS, body, headers=plain),
        Request("refused/body/no-kind", COMPLETIONS, body),
        get("refused/host", "/v1/models", Host="example.org"),
        get("refused/host-of-health", "/health", Host="example.org"),
        get("refused/host-allowed", "/version", Host="localhost:80"),
    ]


def framing() -> list[Request]:
    """Bytes that are no request, or one that is not taken."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    body = b'{"prompt": "a", "max_tokens": 1, "temperature": 0}'
    texts = {
        "no-http": b"hello\r\n\r\n",
        "gzip": head + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "two-lengths": head + b"Content-Length: 3\r\nContent-Length: 5\r\n\r\nabc",
        "large-head": b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Large: " + b"x" * 40_000 + b"\r\n\r\n",
        "chunked": head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n",
        "http-1.0": b"GET /health/live HTTP/1.0\r\n\r\n",
    }
    return [Request(f"refused/framing/{name}", "", raw=text) for name, text in texts.items()]


def large(least: int) -> list[Request]:
    """A body above the limit of a server, with and without an announced length."""
    text = b'{"prompt": "' + b"a" * least + b'"}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(text) + text + b"\r\n0\r\n\r\n"
    return [
        post("refused/large", COMPLETIONS, text),
        Request("refused/large-chunked", COMPLETIONS, raw=chunked),
    ]
