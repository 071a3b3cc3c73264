"""Many requests at once leave the event loop time for others, and begin in order."""

import asyncio
import json
import time

import pytest

from quire.server import app as app_module
from quire.server import start_throttle
from quire.server.start_throttle import StartThrottle
from tests.server.fake_engine import FakeEngine
from tests.server.harness import RawCall, application, asgi_client, post_head, socket_server
from tests.server.harness import turns as loop_turns

pytestmark = pytest.mark.anyio


async def test_requests_that_come_at_once_begin_in_order_and_never_fill_a_turn_of_the_loop():
    line, begun, most = StartThrottle(), [], [0]

    async def begin(number):
        await line.acquire()
        begun.append(number)
        time.sleep(0.002)

    async def watch():
        while len(begun) < 100:
            before = len(begun)
            await asyncio.sleep(0)
            most[0] = max(most[0], len(begun) - before)

    await asyncio.gather(watch(), *map(begin, range(100)))
    assert begun == list(range(100))
    assert most[0] <= 4  # 5 ms of 2 ms each


async def test_a_long_beginning_is_alone_in_its_turn(monkeypatch):
    monkeypatch.setattr(start_throttle, "TURN_SECONDS", 0.0)
    line, begun = StartThrottle(), []

    async def begin(number):
        await line.acquire()
        begun.append((number, watched))

    async def watch():
        nonlocal watched
        while len(begun) < 30:
            watched += 1
            await asyncio.sleep(0)

    watched = 0
    await asyncio.gather(watch(), *map(begin, range(30)))
    assert len({turn for _, turn in begun}) > 15


async def test_who_stops_waiting_holds_up_nobody():
    line, begun = StartThrottle(), []

    async def begin(number):
        await line.acquire()
        begun.append(number)
        time.sleep(0.006)

    tasks = [asyncio.ensure_future(begin(number)) for number in range(60)]
    for _ in range(6):
        await asyncio.sleep(0)
    assert 0 < len(begun) < 30
    for number in range(30, 59):
        tasks[number].cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks, return_exceptions=True)
        await line.acquire()
    assert begun == [*range(30), 59]


async def test_small_bodies_that_come_at_once_leave_turns_for_others():
    body = {"messages": [{"role": "user", "content": "a"}] * 900, "max_tokens": -1}
    content = json.dumps(body).encode()
    asked = post_head("/v1/chat/completions", f"Content-Length: {len(content)}") + content
    async with socket_server() as server:
        clients = [await server.connect() for _ in range(200)]
        async with loop_turns() as found:
            for each in clients:
                each.writer.write(asked)
            assert {(await each.answer()).status for each in clients} == {400}
    assert max(found) < sum(found) / 10, f"{max(found):.2f} s of {sum(found):.2f} s in one turn"


async def test_small_bodies_of_many_values_take_room_like_large_ones_and_others_take_none():
    app = application(FakeEngine())
    room = app.state.service.body_reader.parsed
    async with room.hold(room.size):
        dense = RawCall(app, "/tokenize", {"messages": [{"role": "user", "content": "a"}] * 900, "model": "other"})
        plain = RawCall(app, "/tokenize", {"prompt": "a" * 30_000})
        await asyncio.wait_for(plain.task, 5)
        assert plain.status == 200 and room.num_waiting == 1 and dense.status is None
    await asyncio.wait_for(dense.task, 5)
    assert dense.status == 404 and room.free == room.size


async def test_requests_give_way_to_connections_that_arrive_but_not_for_long(monkeypatch):
    monkeypatch.setattr(start_throttle, "ARRIVAL_SECONDS", 0.05)
    line, begun = StartThrottle(), []
    line.connection_arrived()
    asking = asyncio.ensure_future(line.acquire())
    asking.add_done_callback(lambda _: begun.append(time.monotonic()))
    since = time.monotonic()
    while not begun:
        line.connection_arrived()
        await asyncio.sleep(0)
    assert 0.05 <= begun[0] - since < 1
    async with asyncio.timeout(1):
        await line.acquire()
    await asyncio.sleep(0.01)
    assert not line._is_counting, "an idle loop has no rest"


async def test_the_description_of_the_api_is_encoded_once(monkeypatch):
    app = application(FakeEngine())
    async with asgi_client(app) as http:
        first = await http.get("/openapi.json")
        assert first.status_code == 200 and first.json() == app.openapi()
        monkeypatch.setattr(app_module, "json_response", None)
        assert (await http.get("/openapi.json")).content == first.content
