"""A client that disconnects aborts only its own request; an engine that fails ends only its own."""

import asyncio
import json

import pytest

from quire.errors import QueueFullError
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, TEXT, RawCall, application, client, error_of

pytestmark = pytest.mark.anyio

LONG = {"ignore_eos": True, "max_tokens": 1000}
BODIES = [
    ("/v1/completions", TEXT | LONG),
    ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2} | LONG),
    ("/v1/chat/completions", CHAT | LONG | {"n": 2}),
]


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_leaving_frees_the_request_within_a_step(path, body, stream, tokens):
    engine = FakeEngine(step_seconds=0.005)
    app = application(engine)
    call = RawCall(app, path, body | {"stream": stream})
    while not engine.live or engine.decoded < tokens:
        await asyncio.sleep(0.001)
    decoded, live = engine.decoded, len(engine.live)
    call.leave()
    await asyncio.wait_for(call.task, 0.5)
    assert not engine.live and engine.aborted == live
    assert engine.decoded - decoded <= 2 * live * body.get("n", 1)
    assert app.state.service.in_flight == 0
    assert f'route="{path}",status="499"' in app.state.service.metrics.text().decode()


async def test_leaving_while_the_body_is_sent_reaches_no_engine():
    engine = FakeEngine()
    app = application(engine)
    call = RawCall(app, "/v1/completions", None)
    call.inbox.put_nowait({"type": "http.request", "body": b'{"prom', "more_body": True})
    call.leave()
    await asyncio.wait_for(call.task, 0.5)
    assert (engine.started, call.sent, app.state.service.in_flight) == (0, [], 0)


async def test_leaving_does_not_disturb_the_others():
    engine = FakeEngine(step_seconds=0.002)
    app = application(engine)
    calls = [RawCall(app, "/v1/chat/completions", CHAT | {"stream": bool(i % 2)}) for i in range(12)]
    await asyncio.sleep(0.01)
    for call in calls[::3]:
        call.leave()
    await asyncio.wait_for(asyncio.gather(*(call.task for call in calls)), 5)
    for index, call in enumerate(calls):
        if index % 3:
            assert call.status == 200
            assert b"[DONE]" in call.body if index % 2 else json.loads(call.body)["choices"]
    assert not engine.live


async def test_a_stream_that_is_cancelled_frees_the_request():
    engine = FakeEngine(step_seconds=0.005)
    call = RawCall(application(engine), "/v1/completions", TEXT | LONG | {"stream": True})
    await call.arrived.wait()
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.task
    assert not engine.live


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_engine_is_a_500_that_tells_no_secrets(stream, caplog):
    async with client(FakeEngine(fail_at=0)) as http:
        response = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"
    assert "boom" not in response.text and "boom" in caplog.text


async def test_an_error_in_mid_stream_is_an_event_and_ends_it():
    async with client(FakeEngine(fail_at=3)) as http:
        response = await http.post("/v1/completions", json=TEXT | {"stream": True})
    *chunks, last = [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n") if part]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT["prompt"][:3]
    assert last["error"]["code"] == "internal_error"
    assert "[DONE]" not in response.text and "boom" not in response.text


async def test_one_failing_prompt_ends_its_request_and_frees_the_rest():
    engine = FakeEngine(step_seconds=0.001, queue_limit=2)
    generate, calls = engine.generate, 0

    async def third_is_refused(prompt, params, request_id=None):
        nonlocal calls
        calls += 1
        if calls == 3:  # all three were admitted, and the queue is full before the third begins
            raise QueueFullError("the queue is full", retry_after=1.0)
        async for item in generate(prompt, params, request_id):
            yield item

    engine.generate = third_is_refused
    async with client(engine) as http:
        response = await http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "stream": True} | LONG)
    assert response.status_code == 429
    assert not engine.live
