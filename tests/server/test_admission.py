"""A request is checked in one place, once, whatever its endpoint and whoever computes it."""

from collections import Counter
from typing import Any

import pytest

from tests.call_counts import count_admission
from tests.server.harness import RawCall, real_server

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
MESSAGES = [{"role": "user", "content": "a"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
TEXT_FORMAT = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
CALLS = {
    "a completion": ("/v1/completions", {"prompt": "a", "max_tokens": 2}, 1, 0),
    "prompts": ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 2, "n": 2}, 3, 0),
    "a constrained completion": (
        "/v1/completions", {"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": SCHEMA}}, 1, 1,
    ),
    "a stream": ("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}, 1, 0),
    "a chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}, 1, 0),
    "a constrained chat": (
        "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "response_format": FORMAT}, 1, 1,
    ),
    "a constrained stream": (
        "/v1/chat/completions", {"messages": MESSAGES, "response_format": FORMAT, "stream": True, "max_tokens": 2}, 1, 1
    ),
    "a response": ("/v1/responses", {"input": "a", "max_output_tokens": 16}, 1, 0),
    "a constrained response": ("/v1/responses", {"input": "a", "max_output_tokens": 16, "text": TEXT_FORMAT}, 1, 1),
    "texts to embed": ("/v1/embeddings", {"input": ["a", "b", "c"]}, 3, 0),
    "a pin": ("/v1/cache/prefixes", {"prompt": "a" * 200}, 1, 0),
}  # fmt: skip


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often requests were read and checked, and their grammars asked for and compiled."""
    return count_admission(monkeypatch, compiles=True)


@pytest.mark.parametrize(("path", "body", "num_requests", "num_grammars"), CALLS.values(), ids=CALLS)
async def test_an_engine_checks_a_request_once(
    folder: Any, counted: Counter[str], path: str, body: dict[str, Any], num_requests: int, num_grammars: int
) -> None:
    async with real_server(folder) as (_, app, _):
        counted.clear()
        call = RawCall(app, path, body)
        await call.task
    assert call.status in (200, 201), call.body
    expected = {"tokenized": num_requests, "check": num_requests, "prepare": num_grammars}
    assert counted == {name: count for name, count in expected.items() if count}
