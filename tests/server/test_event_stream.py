"""Comments in streams that have nothing to send."""

import asyncio
import re

import pytest

from quire.config import ServeConfig
from quire.server.event_stream import PING, _Writer
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, TEXT, RawCall, application, client, openai_client

pytestmark = pytest.mark.anyio

ROUTES = pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT | {"max_tokens": 3}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 3, "n": 2}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 3}),
    ],
)


def slow(**more):
    """An engine that is silent for 0.1 s before each token, as one in whose queue a request waits."""
    return FakeEngine(step_seconds=0.1, **more)


async def streamed(engine, path, body, **settings):
    async with client(engine, **settings) as http:
        response = await http.post(path, json=body | {"stream": True, "seed": 1})
    assert response.status_code == 200
    return response.text


def untimed(text):
    """Events without what differs from request to request."""
    blocks = [block for block in text.split("\n\n") if not block.startswith(":")]
    return [re.sub(r'"(id|item_id)":"[^"]*"|"(created|created_at|completed_at)":\d+', "", block) for block in blocks]


@ROUTES
async def test_a_stream_that_is_silent_sends_comments_before_and_between_its_events(path, body):
    text = await streamed(slow(), path, body, ping_seconds=0.03)
    blocks = text.split("\n\n")
    first = next(index for index, block in enumerate(blocks) if not block.startswith(":"))
    assert blocks[:first] == [": ping"] * first and first, "while the request is queued or its prompt computed"
    assert blocks[first:].count(": ping") >= 2, "between two tokens"
    assert untimed(text) == untimed(await streamed(FakeEngine(), path, body))


@ROUTES
async def test_a_stream_without_silence_or_with_comments_off_has_none(path, body):
    assert ": ping" not in await streamed(slow(), path, body, ping_seconds=0)
    assert ": ping" not in await streamed(FakeEngine(step_seconds=0.01), path, body, ping_seconds=0.5)


def test_comments_come_after_ten_seconds_by_default():
    assert ServeConfig().ping_seconds == 10.0


async def test_an_error_after_a_comment_is_an_event_and_before_it_a_status():
    async with client(slow(fail_at=0), ping_seconds=0.03) as http:
        response = await http.post("/v1/completions", json=TEXT | {"stream": True})
    *comments, last, end = response.text.split("\n\n")
    assert response.status_code == 200 and set(comments) == {": ping"} and end == ""
    assert '"code":"internal_error"' in last
    async with client(slow(fail_at=0), ping_seconds=5.0) as http:
        assert (await http.post("/v1/completions", json=TEXT | {"stream": True})).status_code == 500


@ROUTES
async def test_a_client_that_leaves_between_comments_aborts_its_request(path, body):
    engine = FakeEngine(step_seconds=5.0)
    call = RawCall(application(engine, ping_seconds=0.01), path, body | {"stream": True})
    while call.body.count(PING) < 3:
        await asyncio.wait_for(call.arrived.wait(), 2)
        call.arrived.clear()
    call.leave()
    await asyncio.wait_for(call.task, 0.5)
    assert engine.aborted == 1 and not engine.live
    count = len(call.sent)
    await asyncio.sleep(0.05)
    assert len(call.sent) == count, "comments go on after the end"


async def test_no_comment_comes_within_an_event_or_while_the_client_does_not_read():
    sent, reads = [], asyncio.Event()
    reads.set()

    async def send(message):
        await reads.wait()
        sent.append(message.get("body", b"start"))

    writer = _Writer(send, [])
    pinging = asyncio.ensure_future(writer.ping(0.01))
    await writer.write(b"data: a long ")
    await asyncio.sleep(0.05)
    assert sent == [b"start", b"data: a long "]
    await writer.write(b"event\n\n")
    await asyncio.sleep(0.05)
    assert sent[3:] and set(sent[3:]) == {PING}
    reads.clear()
    waiting = asyncio.ensure_future(writer.write(b"data: next\n\n"))
    await asyncio.sleep(0.05)
    count = len(sent)
    reads.set()
    await waiting
    pinging.cancel()
    assert sent[count:].index(b"data: next\n\n") <= 1, "comments have piled up"


# ---- openai's client -------------------------------------------------------------------------------------------------


async def told(**settings):
    """What openai's client makes of three streams."""
    found = []
    async with openai_client(FakeEngine(step_seconds=settings.pop("step", 0.0)), **settings) as api:
        stream = await api.chat.completions.create(
            model="fake", messages=CHAT["messages"], max_tokens=3, seed=1, stream=True
        )
        found.append([chunk.choices[0].model_dump() async for chunk in stream])
        stream = await api.completions.create(model="fake", prompt="Hello", max_tokens=3, seed=1, stream=True)
        found.append([chunk.choices[0].model_dump() async for chunk in stream])
        stream = await api.responses.create(model="fake", input="Hello", max_output_tokens=3, stream=True)
        events = [event async for event in stream]
        found.append([event.type for event in events])
        found.append(events[-1].response.output_text)
    return found


async def test_openais_client_ignores_comments():
    assert await told(step=0.05, ping_seconds=0.01) == await told()
