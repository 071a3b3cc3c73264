"""Request bodies are bounded before they cost anything: in structure, in time, and in total."""

import asyncio
import json
import random
import threading
from contextlib import ExitStack

import pytest

from quire.config import ServeConfig
from quire.server import body_reader
from quire.server.chat_schema import ChatRequest
from quire.server.errors import ApiError
from quire.server.json_complexity import check_complexity
from tests.effort import tries
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, TEXT, RawCall, application, client, error_of, post_head, socket_server

pytestmark = pytest.mark.anyio

USER = b'{"role":"user","content":"a"}'
# Just what the bounds of structure let through, so that what is measured is what comes after them.
NUMBERS = b"[" + b",".join([b"1"] * 600_000) + b"]"
PAIRS = b",".join(b'"%05d":1' % each for each in range(60_000))
LISTS = b"[" + b",".join([b"[]"] * 60_000) + b"]"
BOMBS = {
    "numbers for messages": ("/v1/chat/completions", b'{"messages":' + NUMBERS + b"}"),
    "numbers for modalities": ("/v1/chat/completions", b'{"messages":[' + USER + b'],"modalities":' + NUMBERS + b"}"),
    "numbers for parts": ("/v1/chat/completions", b'{"messages":[{"role":"user","content":' + NUMBERS + b"}]}"),
    "pairs for metadata": ("/v1/chat/completions", b'{"messages":[' + USER + b'],"metadata":{' + PAIRS + b"}}"),
    "unknown names": ("/v1/chat/completions", b'{"messages":[' + USER + b"]," + PAIRS + b"}"),
    "unknown names in a message": ("/v1/chat/completions", b'{"messages":[{' + PAIRS + b"}]}"),
    "lists for messages": ("/v1/chat/completions", b'{"messages":' + LISTS + b"}"),
    "numbers for stop ids": ("/v1/completions", b'{"prompt":"a","stop_token_ids":' + NUMBERS + b"}"),
    "pairs for biases": ("/v1/completions", b'{"prompt":"a","logit_bias":{' + PAIRS + b"}}"),
    "strings for token ids": ("/detokenize", b'{"tokens":["a"' + NUMBERS.replace(b"[1", b"", 1) + b"}"),
}


async def post(http, path, content):
    return await http.post(path, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize("name", BOMBS)
async def test_a_body_of_many_wrong_values_costs_one_error(name, monkeypatch):
    path, content = BOMBS[name]
    counted = []
    original = body_reader.api_error
    monkeypatch.setattr(body_reader, "api_error", lambda error: counted.append(error.error_count()) or original(error))
    async with client() as http:
        response = await post(http, path, content)
    assert response.status_code == 400 and len(response.content) < 1500, response.content[:2000]
    # A missing name or two of the same object may come with it.
    assert 1 <= counted[0] <= 3, "validation went on after the first error"


def test_a_small_body_with_too_many_levels_is_no_invalid_one():
    """Small ones are not counted; the parser stops."""
    with pytest.raises(ApiError, match="the body has more than 200 levels") as refusal:
        body_reader._parse(bytearray(b'{"a": ' * 300 + b"1" + b"}" * 300), ChatRequest)
    assert refusal.value.code == "body_too_complex"


async def test_a_large_body_is_checked_where_it_does_not_hold_up_the_event_loop(monkeypatch):
    answered = threading.Event()
    waited = []

    def check(text):
        waited.append(answered.wait(5))
        return check_complexity(text)

    monkeypatch.setattr(body_reader, "check_complexity", check)
    async with client(FakeEngine(max_context=100_000)) as http:
        large = asyncio.ensure_future(post(http, "/tokenize", json.dumps({"prompt": "a" * 50_000}).encode()))
        small = await post(http, "/tokenize", json.dumps({"prompt": "a" * 1000}).encode())
        assert small.status_code == 200 and (await http.get("/health/live")).status_code == 200
        assert not large.done()
        answered.set()
        assert (await large).status_code == 200
    assert waited == [True], "the large body was not checked, or nothing else was answered meanwhile"


async def test_an_error_is_small_however_large_the_value_it_quotes():
    async with client() as http:
        for path, body in [
            ("/v1/chat/completions", CHAT | {"model": "m" * 500_000}),
            ("/v1/chat/completions", CHAT | {"n": "1" * 500_000}),
            ("/v1/chat/completions", CHAT | {"k" * 500_000: 1}),
            ("/v1/chat/completions", CHAT | {"modalities": ["t" * 500_000]}),
            ("/v1/completions", {"prompt": "a", "logit_bias": {"9" * 500_000: 1}}),
            ("/v1/completions", {"prompt": "a", "stop": ["s" * 500_000]}),
        ]:
            response = await post(http, path, json.dumps(body).encode())
            assert response.status_code in (400, 404) and len(response.content) < 1500
            error_of(response)


def test_messages_and_parameters_of_errors_are_cut():
    body = ApiError(400, "a" * 5000, param="b" * 5000).body()["error"]
    assert len(body["message"]) == 1000 and len(body["param"]) == 200
    assert body["message"].endswith("...") and body["param"].endswith("...")


# --- time and room ---------------------------------------------------------------------------------------------------


def slow_call(app, size, announced=True):
    headers = {"content-length": str(size)} if announced else {"transfer-encoding": "chunked"}
    return RawCall(app, "/tokenize", None, headers)


def part(data, more=True):
    return {"type": "http.request", "body": data, "more_body": more}


async def test_a_large_body_that_takes_too_long_in_all_is_408(monkeypatch):
    monkeypatch.setattr(body_reader, "BODY_RATE", 10**9)
    app = application(FakeEngine())
    app.state.service.body_reader.body_seconds = 0.05
    call = slow_call(app, 100_000)
    for _ in range(5):
        call.inbox.put_nowait(part(b" "))
        await asyncio.sleep(0.02)
    await asyncio.wait_for(call.task, 1)
    assert call.status == 408 and json.loads(call.body)["error"]["code"] == "body_timeout"


@pytest.mark.parametrize("announced", [True, False])
async def test_a_large_body_has_time_for_what_has_come_and_not_for_what_is_announced(announced, monkeypatch):
    monkeypatch.setattr(body_reader, "BODY_RATE", 100_000)
    app = application(FakeEngine())
    app.state.service.body_reader.body_seconds = 0.1
    trickling = slow_call(app, 1_000_000, announced)  # all of it could take 10 s
    trickling.inbox.put_nowait(part(b" "))
    steady = slow_call(app, 1_000_000, announced)
    steady.inbox.put_nowait(part(b" " * 100_000))
    await asyncio.wait_for(trickling.task, 0.9)
    assert trickling.status == 408 and not steady.task.done()
    steady.leave()
    await asyncio.wait_for(steady.task, 1)
    assert app.state.service.body_reader.memory_limiter.held == 0


def held(app):
    return app.state.service.body_reader.memory_limiter.held


@pytest.mark.parametrize("announced", [True, False])
async def test_what_is_announced_takes_no_room(announced):
    app = application(FakeEngine(max_context=50_000), max_request_bytes=100_000)
    slow = [slow_call(app, 100_000, announced) for _ in range(10)]
    for call in slow:
        call.inbox.put_nowait(part(b" " * 33_000))
    await asyncio.sleep(0.01)
    assert held(app) == 330_000
    body = json.dumps({"prompt": "a" * 40_000}).encode()
    late = slow_call(app, len(body), announced)
    late.inbox.put_nowait(part(body, more=False))
    await asyncio.wait_for(late.task, 2)
    assert late.status == 200
    for call in slow:
        call.leave()
        await asyncio.wait_for(call.task, 1)
    assert held(app) == 0


@pytest.mark.parametrize("announced", [True, False])
async def test_slow_bodies_are_ended_for_those_that_wait_and_small_ones_do_not_wait(announced, monkeypatch):
    monkeypatch.setattr(body_reader, "CONTESTED_SECONDS", 0.1)
    monkeypatch.setattr(body_reader, "CONTESTED_RATE", 300_000)
    app = application(FakeEngine(max_context=50_000), max_request_bytes=100_000)
    slow = [slow_call(app, 100_000, announced) for _ in range(4)]
    for call in slow[:3]:
        call.inbox.put_nowait(part(b" " * 99_000))
    slow[3].inbox.put_nowait(part(b" " * 40_000))
    await asyncio.sleep(0.05)
    assert held(app) == 337_000
    body = json.dumps({"prompt": "a" * 90_000}).encode()
    waiting = slow_call(app, len(body), announced)
    waiting.inbox.put_nowait(part(body, more=False))
    small = RawCall(app, "/tokenize", {"prompt": "a"})
    await asyncio.wait_for(small.task, 1)
    assert small.status == 200 and not waiting.task.done()
    # The fourth has come at less than the rate; one that is ended is enough.
    await asyncio.wait_for(waiting.task, 2)
    assert slow[3].status == 408 and json.loads(slow[3].body)["error"]["code"] == "body_timeout"
    assert [call.task.done() for call in slow] == [False] * 3 + [True]
    for call in slow:
        call.leave()
        await asyncio.wait_for(call.task, 1)
    assert held(app) == 0


async def test_where_all_wait_for_room_the_oldest_goes_on():
    app = application(FakeEngine(max_context=500_000), max_request_bytes=100_000)
    body = json.dumps({"prompt": "a" * 97_000}).encode()
    calls = [slow_call(app, len(body)) for _ in range(9)]
    for begin in range(0, len(body), 11_000):
        for call in calls:
            call.inbox.put_nowait(part(body[begin : begin + 11_000], more=begin + 11_000 < len(body)))
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        for call in calls:
            await call.task
    assert [call.status for call in calls] == [200] * 9 and held(app) == 0


async def test_a_large_body_that_finds_no_room_is_503():
    app = application(FakeEngine(), max_request_bytes=100_000)
    memory_limiter = app.state.service.body_reader.memory_limiter
    memory_limiter.seconds = 0.05
    slow = [slow_call(app, 100_000) for _ in range(5)]
    for call in slow:
        call.inbox.put_nowait(part(b" " * 80_000))
    await asyncio.sleep(0.01)
    assert held(app) == 400_000
    late = slow_call(app, 100_000)
    late.inbox.put_nowait(part(b" " * 80_000))
    await asyncio.wait_for(late.task, 1)
    assert late.status == 503 and json.loads(late.body)["error"]["code"] == "too_many_large_bodies"
    for call in slow:
        call.leave()
        await asyncio.wait_for(call.task, 1)
    assert held(app) == 0


async def test_a_body_that_has_come_needs_no_more_room(monkeypatch):
    monkeypatch.setattr(body_reader, "CONTESTED_SECONDS", 100.0)
    app = application(FakeEngine(max_context=1_000_000), max_request_bytes=1_000_000)
    app.state.service.body_reader.memory_limiter.size = 1_000_000
    body = json.dumps({"prompt": "a" * 600_000}).encode()
    oldest, other = slow_call(app, 1_000_000), slow_call(app, len(body))
    for call, sent in ((oldest, b" " * 300_000), (other, body), (oldest, b" " * 200_000)):
        call.inbox.put_nowait(part(sent))
        await asyncio.sleep(0.01)
    assert held(app) > 1_000_000  # the oldest went on
    other.inbox.put_nowait(part(b"", more=False))
    await asyncio.wait_for(other.task, 5)
    assert other.status == 200
    oldest.leave()
    await asyncio.wait_for(oldest.task, 1)
    assert held(app) == 0


async def test_the_time_of_a_body_rests_while_it_waits_for_room(monkeypatch):
    monkeypatch.setattr(body_reader, "BODY_RATE", 10**9)
    app = application(FakeEngine(max_context=500_000), max_request_bytes=100_000)
    found = app.state.service.body_reader
    slow = [slow_call(app, 100_000) for _ in range(4)]
    for call in slow:
        call.inbox.put_nowait(part(b" " * 95_000))
    await asyncio.sleep(0.01)
    found.body_seconds = 0.4
    body = json.dumps({"prompt": "a" * 80_000}).encode()
    waiting = slow_call(app, len(body))
    waiting.inbox.put_nowait(part(body[:-10]))
    await asyncio.sleep(0.8)
    assert not waiting.task.done()
    slow[0].leave()
    await asyncio.sleep(0.02)
    waiting.inbox.put_nowait(part(body[-10:], more=False))
    await asyncio.wait_for(waiting.task, 5)
    assert waiting.status == 200
    for call in slow[1:]:
        call.leave()
        await asyncio.wait_for(call.task, 1)
    assert held(app) == 0


async def test_waiting_in_turn_costs_no_look_at_all_others(monkeypatch):
    memory_limiter, looks = body_reader.BodyMemoryLimiter(1000, 5.0), []
    monkeypatch.setattr(memory_limiter, "_end_slow", lambda now: looks.append(now))
    with ExitStack() as stack:
        full = [stack.enter_context(memory_limiter.body()) for _ in range(3)]
        for body in full:
            await memory_limiter.grow(body, 300)
        waiting = [
            asyncio.ensure_future(memory_limiter.grow(stack.enter_context(memory_limiter.body()), 200))
            for _ in range(50)
        ]
        await asyncio.sleep(0)
        for _ in range(1000):
            with memory_limiter.body():  # small bodies, which hold no room
                pass
        assert not looks and memory_limiter.held == 900 and not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert memory_limiter.held == 0 and not memory_limiter._waiting


async def test_room_is_lent_in_turn_and_the_oldest_goes_on_only_where_none_is_whole():
    memory_limiter, order = body_reader.BodyMemoryLimiter(1000, 5.0), []
    with ExitStack() as stack:
        oldest, whole, large, small = (stack.enter_context(memory_limiter.body()) for _ in range(4))

        async def grow(name, body, size):
            await memory_limiter.grow(body, size)
            order.append(name)

        await memory_limiter.grow(oldest, 300)
        with memory_limiter.body() as leaving:
            await memory_limiter.grow(leaving, 100)
            await memory_limiter.grow(whole, 600)
            memory_limiter.mark_complete(whole)
            tasks = [asyncio.ensure_future(grow("large", large, 150))]
            await asyncio.sleep(0)
            tasks += [
                asyncio.ensure_future(grow("small", small, 50)),
                asyncio.ensure_future(grow("oldest", oldest, 900)),
            ]
            await asyncio.sleep(0.01)
            assert not order, "the small one overtook, or the oldest went on beside a whole one"
            memory_limiter.mark_complete(leaving)
        await asyncio.sleep(0.01)
        assert not order  # 100 are free, the large one waits for 150
        with memory_limiter.body() as late, pytest.raises(TimeoutError):
            await asyncio.wait_for(memory_limiter.grow(late, 50), 0.01)
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        assert order == ["small"]
    await asyncio.gather(*tasks[1:])
    memory_limiter = body_reader.BodyMemoryLimiter(1000, 5.0)
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(memory_limiter.body()) for _ in range(3))
        for body in (first, second, third):
            await memory_limiter.grow(body, 300)
        waiting = [asyncio.ensure_future(memory_limiter.grow(body, 900)) for body in (third, second)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        await asyncio.wait_for(memory_limiter.grow(first, 900), 1)  # the oldest, though others waited before it
        assert memory_limiter.held == 1500
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert memory_limiter.held == 0


async def test_a_body_that_waits_or_waited_is_not_called_slow(monkeypatch):
    monkeypatch.setattr(body_reader, "CONTESTED_SECONDS", 0.1)
    monkeypatch.setattr(body_reader, "CONTESTED_RATE", 1000)
    memory_limiter = body_reader.BodyMemoryLimiter(1000, 5.0)
    with ExitStack() as stack:
        first, second = (stack.enter_context(memory_limiter.body()) for _ in range(2))

        async def come(body, *sizes):
            async with asyncio.timeout(10) as body.limit:
                for size in sizes:
                    await memory_limiter.grow(body, size)
                await asyncio.sleep(0.05)

        await memory_limiter.grow(first, 800)
        tasks = [asyncio.ensure_future(come(second, 150, 250))]
        await asyncio.sleep(0.6)  # at 250 bytes a second, had it not waited
        assert not tasks[0].done() and second.limit.when() is None
        first.size, memory_limiter.held = 700, memory_limiter.held - 100
        memory_limiter._lend()
        memory_limiter._end_slow(asyncio.get_running_loop().time())
        await tasks[0]


async def test_a_body_whose_time_is_over_is_not_ended_again():
    memory_limiter = body_reader.BodyMemoryLimiter(1000, 5.0)
    with memory_limiter.body() as body:
        await memory_limiter.grow(body, 10)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0) as body.limit:
                await asyncio.sleep(1)
        memory_limiter._end_slow(asyncio.get_running_loop().time() + 100)


async def test_no_more_than_some_large_bodies_wait(monkeypatch):
    monkeypatch.setattr(body_reader, "MAX_WAITING", 3)
    app = application(FakeEngine(), max_request_bytes=100_000)
    calls = [slow_call(app, 100_000) for _ in range(15)]
    for call in calls:
        call.inbox.put_nowait(part(b" " * 80_000))
    await asyncio.sleep(0.05)
    done = [call for call in calls if call.task.done()]
    assert [call.status for call in done] == [503] * 7 and held(app) == 400_000
    for call in calls:
        call.leave()
        await asyncio.wait_for(call.task, 1)
    assert held(app) == 0


async def test_bodies_in_any_order_are_bounded_and_leave_nothing(seed):
    draw = random.Random(seed)
    for _ in range(tries(5)):
        memory_limiter = body_reader.BodyMemoryLimiter(1000, 5.0)
        most = [0]

        async def one(size, pause, leaves, memory_limiter=memory_limiter, most=most):
            with memory_limiter.body() as body:
                async with asyncio.timeout(5) as body.limit:
                    for came in range(50, size + 1, 50):
                        await asyncio.sleep(pause)
                        await memory_limiter.grow(body, came)
                        most[0] = max(most[0], memory_limiter.held)
                if not leaves:
                    memory_limiter.mark_complete(body)
                    await asyncio.sleep(pause)

        tasks = [
            asyncio.ensure_future(one(50 * draw.randrange(1, 9), draw.choice([0, 0, 0.001]), draw.random() < 0.3))
            for _ in range(30)
        ]
        for task in draw.sample(tasks, 5):
            asyncio.get_running_loop().call_later(draw.choice([0, 0.001, 0.003]), task.cancel)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in found), found
        assert most[0] <= 1400 and memory_limiter.held == 0
        assert not memory_limiter._unfinished and not memory_limiter._waiting and not memory_limiter._num_whole


async def test_many_large_bodies_at_once_are_all_answered():
    body = json.dumps({"prompt": "a" * 60_000}).encode()
    sent = post_head("/tokenize", f"Content-Length: {len(body)}") + body
    async with socket_server(FakeEngine(max_context=100_000), max_request_bytes=70_000) as server:
        answers = await asyncio.gather(*(server.ask(sent) for _ in range(20)))
    assert [each.status for each in answers] == [200] * 20


def test_the_default_limit_lets_a_million_token_ids_through():
    ids = b",".join([b"1234567"] * 1_000_000)
    assert len(ids) < ServeConfig().max_request_bytes
    check_complexity(b'{"prompt":[' + ids + b"]}")


BROKEN = {
    "empty": b"",
    "not json": b"hello",
    "two values": b'{"prompt": "a"} {}',
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "a float beyond floats": b'{"prompt": "a", "temperature": 1e999}',
    "an integer beyond integers": b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}",
    "more digits than are read": b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
    "invalid utf-8": b'{"prompt": "\xff\xfe"}',
    "an encoded surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a lone surrogate in a name": b'{"prompt": "a", "\\udc00": 1}',
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "nested arrays": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "a list": b"[]",
    "a string": b'"prompt"',
    "null": b"null",
    "a long unknown name": b'{"prompt": "a", "' + b"x" * 10_000 + b'": 1}',
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_broken_body_is_a_bad_request(path, name):
    async with client() as http:
        response = await http.post(path, content=BROKEN[name], headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert len(error_of(response)["message"]) < 500


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "\xff"]
)
async def test_another_content_type_is_a_bad_request(kind):
    headers = [] if kind is None else [(b"content-type", kind.encode("latin-1"))]
    async with client() as http:
        response = await http.post("/v1/completions", content=json.dumps(TEXT), headers=headers)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_content_type"


async def test_an_encoding_in_a_second_header_is_refused():
    headers = [("content-type", "application/json"), ("content-encoding", "identity"), ("content-encoding", "gzip")]
    async with client() as http:
        response = await http.post("/v1/completions", content=json.dumps(TEXT), headers=headers)
        assert response.status_code == 415 and "'identity, gzip'" in error_of(response)["message"]


async def test_an_encoded_body_is_refused_by_its_encoding():
    async with client() as http:
        for encoding, status in [("gzip", 415), ("br, gzip", 415), ("Identity", 200), ("", 200)]:
            headers = {"content-type": "application/json", "content-encoding": encoding}
            response = await http.post("/v1/completions", content=json.dumps(TEXT), headers=headers)
            assert response.status_code == status
            if status == 415:
                assert error_of(response)["code"] == "unsupported_content_encoding"
                assert repr(encoding) in error_of(response)["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
async def test_json_is_json_however_it_is_written(kind):
    async with client() as http:
        assert (
            await http.post("/v1/completions", content=json.dumps(TEXT), headers={"content-type": kind})
        ).status_code == 200


async def test_a_body_over_the_limit_is_refused_before_it_is_read():
    async with client(max_request_bytes=1000) as http:
        response = await http.post("/v1/completions", json={"prompt": "x" * 1000})
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"
        assert (await http.post("/v1/completions", json={"prompt": "x" * 900})).status_code == 200


async def test_a_body_of_unknown_length_is_counted_as_it_comes():
    app = application(FakeEngine(), max_request_bytes=1000)
    call = RawCall(app, "/v1/completions", None)
    for _ in range(100):
        call.inbox.put_nowait({"type": "http.request", "body": b" " * 100, "more_body": True})
    await call.task
    assert call.status == 413
    assert call.inbox.qsize() >= 89, "the server read on after the limit"
