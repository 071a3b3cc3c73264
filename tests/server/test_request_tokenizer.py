"""Texts of requests are encoded off the event loop, and bounded before."""

import asyncio
import gc
import json
import threading
import tracemalloc
from types import SimpleNamespace

import pytest
from tokenizers import normalizers

from quire.models.tokenizer import Tokenizer
from quire.server import request_tokenizer
from quire.server.errors import ApiError
from quire.server.responses_schema import ResponsesRequest
from tests.server.fake_engine import ByteTokenizer, FakeEngine
from tests.server.harness import CHAT, RawCall, application, client, error_of, turns
from tests.server.test_strings import ask, called, replayed
from tests.tiny_models import byte_tokenizer

pytestmark = pytest.mark.anyio


async def test_the_conversation_of_a_response_is_made_where_it_does_not_hold_up_the_event_loop(monkeypatch):
    threads = set()
    original = ResponsesRequest.for_template

    def messages(self):
        threads.add(threading.current_thread())
        return original(self)

    monkeypatch.setattr(ResponsesRequest, "for_template", messages)
    body = json.dumps({"input": replayed(*["{}"] * 12_000)}).encode()
    async with client() as http, turns() as found:
        assert error_of(await ask(http, "POST", "/v1/responses", body))["code"] == "context_length_exceeded"
    assert threading.main_thread() not in threads and len(threads) == 1
    assert max(found) < 0.3, f"the event loop computed for {max(found):.3f} s"


@pytest.mark.parametrize("text", ["\ufdfa" * 16_000, "漢" * 16_000, "a" * 17_000])
async def test_texts_that_may_grow_are_encoded_off_the_event_loop(text, monkeypatch):
    threads = []
    original = ByteTokenizer.encode

    def encode(self, given, add_special=True, escape=""):
        threads.append(threading.current_thread())
        return original(self, given, add_special, escape)

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    async with client(FakeEngine(max_context=1_000_000)) as http:
        assert (await ask(http, "POST", "/tokenize", {"prompt": text})).status_code == 200
        assert (await ask(http, "POST", "/tokenize", {"prompt": "é" * 400})).status_code == 200
    assert threading.main_thread() not in threads[:-1] and threads[-1] is threading.main_thread()


def test_a_text_is_counted_as_normalized_before_it_is_encoded_as_a_whole(monkeypatch):
    pipeline = byte_tokenizer()
    pipeline.normalizer = normalizers.NFKC()
    tokenizer, sizes = Tokenizer(pipeline), []
    original = Tokenizer.encode

    def encode(self, text, add_special=True, escape=""):
        sizes.append(len(pipeline.normalizer.normalize_str(text).encode()))
        return original(self, text, add_special, escape)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    engine = SimpleNamespace(tokenizer=tokenizer, max_context=100_000, context_limit="a test")
    for count in (20_000, 262_144):
        sizes.clear()
        with pytest.raises(ApiError, match="at least") as refused:
            request_tokenizer.RequestTokenizer(engine)._encode("\ufdfa" * count, False, "prompt")
        assert refused.value.code == "context_length_exceeded"
        assert max(sizes) <= request_tokenizer.PIECE_BYTES and sum(sizes) <= 2 * (
            engine.max_context + request_tokenizer.PIECE_BYTES
        )
    assert (
        len(request_tokenizer.RequestTokenizer(engine)._encode("a" * request_tokenizer.WHOLE_BYTES, False, "prompt"))
        == request_tokenizer.WHOLE_BYTES
    )


async def test_texts_of_a_request_have_limited_tokens_together(monkeypatch):
    monkeypatch.setattr("quire.server.request_tokenizer.MAX_TOKENS", 1000)
    async with client(FakeEngine(max_context=2000)) as http:
        assert (await ask(http, "POST", "/v1/embeddings", {"input": ["a" * 90] * 10})).status_code == 200
        assert (await ask(http, "POST", "/v1/embeddings", {"input": ["a" * 1500]})).status_code == 200
        for path, field in (("/v1/embeddings", "input"), ("/v1/completions", "prompt")):
            error = error_of(await ask(http, "POST", path, {field: ["a" * 90] * 12}))
            assert error["param"] == field and "12 texts" in error["message"] and "1,000 tokens" in error["message"]


async def test_a_conversation_that_cannot_fit_is_not_rendered(monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "chat", lambda *given: pytest.fail("it was rendered"))
    text = "a" * 40_000
    async with client(FakeEngine(max_context=2000)) as http:  # 4 bytes a token, and 4 characters a byte
        for path, body, param in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
            ("/v1/chat/completions", {"messages": called(json.dumps({"a": text}))}, "messages"),
            ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"a": [text]}}, "messages"),
            ("/v1/responses", {"input": text}, "input"),
            ("/tokenize", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ):
            error = error_of(await ask(http, "POST", path, body))
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert "at most 32,000 can fit" in error["message"]


async def test_texts_to_embed_wait_as_four_bytes_a_token(monkeypatch):
    engine = FakeEngine(max_context=20_000)
    app = application(engine)
    generate, held = engine._generate, []

    def measured(*args):
        held.append(tracemalloc.get_traced_memory()[0])
        return generate(*args)

    monkeypatch.setattr(engine, "_generate", measured)
    text = "".join(chr(0x100 + each) for each in range(100)) * 10
    call = RawCall(app, "/v1/embeddings", {"input": [text] * 300})
    gc.collect()
    tracemalloc.start()
    try:
        await asyncio.wait_for(call.task, 60)
    finally:
        tracemalloc.stop()
    num_tokens = 300 * len(text.encode())
    assert call.status == 200 and held[0] < 7 * num_tokens, f"{held[0]} bytes for {num_tokens} tokens"
