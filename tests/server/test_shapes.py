"""The OpenAPI document and its source types: real answers match them, key by key."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from quire.prefixes.cached import CachedPrefix
from quire.prefixes.disk_index import TierCopy
from quire.server import response_shapes, shapes
from tests.server.fake_engine import MOVED, FakeEngine
from tests.server.harness import CHAT, TEXT, application, client, events
from tests.server.test_debug_cache import prefix

pytestmark = pytest.mark.anyio

SCORED = [{}, {"logprobs": 0}, {"logprobs": 2}, {"logprobs": 2, "echo": True, "n": 2}, {"max_tokens": 0, "echo": True}]
CHATS = [{}, {"n": 2}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}, {"stop": "W"}]
USAGE = [{}, {"include_usage": True}, {"continuous_usage_stats": True}]
GETS = [
    ("/v1/models", shapes.ModelList),
    ("/v1/models/fake", shapes.ModelInfo),
    ("/v1/models/none", shapes.ErrorResponse),
    ("/health", shapes.Status),
    ("/health/live", shapes.Status),
    ("/version", shapes.Version),
    ("/debug/cache", shapes.CacheInfo),
    ("/debug/cache?limit=no", shapes.ErrorResponse),
    ("/v1/cache/prefixes", shapes.ListedPrefixes),
    ("/v1/cache/prefixes/" + "6b" * 16, shapes.ListedPrefix),
    ("/v1/cache/prefixes/none", shapes.ErrorResponse),
    ("/nowhere", shapes.ErrorResponse),
]


def check(shape: type, answer: Any) -> None:
    """The answer has the shape, and no key besides."""
    TypeAdapter(shape).validate_python(answer, strict=True, extra="forbid")


def full_engine() -> FakeEngine:
    """One whose answers have every key there is."""
    engine = FakeEngine()
    engine.kept_fraction = 0.5
    engine.moved = MOVED
    held = {"arena": TierCopy(5, 1.0, math.inf), "disk": TierCopy(6, 2.0, 3.0)}
    first, second = (b"k" * 16).hex(), (b"l" * 16).hex()
    engine.known = [("", CachedPrefix(first, None, 64, held)), ("", CachedPrefix(second, first, 128, held))]
    engine.cached = [("", prefix(0)), ("", prefix(1, 0, pinned_seconds=math.inf)), ("", prefix(2, 1, pinned_seconds=3))]
    return engine


def test_a_key_too_many_or_too_few_and_a_value_of_another_type_are_found() -> None:
    good: dict[str, Any] = {"object": "list", "data": []}
    check(shapes.ModelList, good)
    details: dict[str, Any] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    found: dict[str, Any] = {"cached_tokens": 0, "cached_tokens_by_tier": {}}
    check(shapes.UsageInfo, details | {"prompt_tokens_details": found})
    for shape, bad in (
        (shapes.ModelList, good | {"more": 1}),
        (shapes.ModelList, {"object": "list"}),
        (shapes.ModelList, good | {"object": "lists"}),
        (shapes.UsageInfo, details | {"prompt_tokens_details": found | {"cached_tokens": -1}}),
        (shapes.UsageInfo, details | {"prompt_tokens_details": found | {"others": 1}}),
        (shapes.UsageInfo, details | {"prompt_tokens_details": found | {"cached_tokens_by_tier": {"disk": -1}}}),
    ):
        with pytest.raises(ValidationError):
            check(shape, bad)


@pytest.mark.parametrize("fields", [*SCORED, {"prompt_logprobs": 1}], ids=str)
async def test_completions_have_their_shape(fields: dict[str, Any]) -> None:
    async with client(full_engine()) as http:
        answer = await http.post("/v1/completions", json=TEXT | {"max_tokens": 3} | fields)
    check(shapes.Completion, answer.json())


@pytest.mark.parametrize("fields", CHATS, ids=str)
async def test_chat_completions_have_their_shape(fields: dict[str, Any]) -> None:
    async with client(full_engine()) as http:
        answer = await http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 3} | fields)
    check(shapes.ChatCompletion, answer.json())


@pytest.mark.parametrize("usage", USAGE, ids=str)
async def test_chunks_have_their_shapes(usage: dict[str, Any]) -> None:
    stream = {"stream": True, "stream_options": usage or None, "max_tokens": 3}
    cases = [("/v1/completions", TEXT, each, shapes.CompletionChunk) for each in SCORED]
    cases += [("/v1/chat/completions", CHAT, each, shapes.ChatCompletionChunk) for each in CHATS]
    async with client(full_engine()) as http:
        for path, body, fields, shape in cases:
            *chunks, last = events((await http.post(path, json=body | stream | fields)).text)
            check(shapes.UsageChunk if usage.get("include_usage") else shape, last)
            assert chunks and all("usage" in each for each in chunks) == bool(usage)
            for chunk in chunks:
                check(shape, chunk)


@pytest.mark.parametrize(("path", "shape"), GETS)
async def test_what_is_asked_for_with_get_has_its_shape(path: str, shape: type) -> None:
    async with client(full_engine()) as http:
        check(shape, (await http.get(path)).json())


async def test_tokens_texts_and_refusals_have_their_shapes() -> None:
    async with client() as http:
        check(shapes.TokenizeResponse, (await http.post("/tokenize", json={"prompt": "ü"})).json())
        check(shapes.DetokenizeResponse, (await http.post("/detokenize", json={"tokens": [65]})).json())
        check(shapes.WarmPrefix, (await http.post("/v1/cache/prefixes", json={"prompt": "a" * 99})).json())
        for body in ({}, {"prompt": []}, {"prompt": "a", "suffix": "b"}):
            check(shapes.ErrorResponse, (await http.post("/v1/completions", json=body)).json())


async def test_a_dropped_prefix_has_its_shape() -> None:
    async with client(full_engine()) as http:
        answer = await http.request("DELETE", "/v1/cache/prefixes", json={"key": "6b" * 16})
    check(shapes.DroppedPrefix, answer.json())


async def test_an_error_in_a_stream_has_its_shape() -> None:
    async with client(FakeEngine(fail_at=1)) as http:
        text = (await http.post("/v1/completions", json=TEXT | {"stream": True})).text
    check(shapes.ErrorResponse, json.loads(text.rpartition("data: ")[2]))


def test_every_schema_that_the_document_names_is_in_it_once() -> None:
    document = application(FakeEngine()).openapi()
    schemas = document["components"]["schemas"]
    named = {text.partition('"')[0] for text in json.dumps(document).split("#/components/schemas/")[1:]}
    assert named <= schemas.keys()
    # pydantic puts the module before the name where two classes have the same one.
    assert not [name for name in schemas if "__" in name]
    unnamed = (shapes.ChatCompletionChunk, shapes.CompletionChunk, shapes.UsageChunk, response_shapes.ResponseEvent)
    assert {shape.__name__ for shape in unnamed} <= schemas.keys()
    for path, chunk in (("/v1/completions", "CompletionChunk"), ("/v1/chat/completions", "ChatCompletionChunk")):
        stream = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
        assert f" {chunk}," in stream["description"] and " UsageChunk " in stream["description"]
