"""The number of connections, the memory of all of them, and which ones give way to new ones."""

import asyncio
import contextlib
import json
import socket
import time

import pytest

from quire.config import ServeConfig
from quire.server.connection import ConnectionState
from quire.server.connection_manager import ConnectionLimits, ConnectionManager
from quire.server.run import connection_limits
from quire.server.service import Service
from tests.server.fake_engine import FakeEngine
from tests.server.harness import TEXT, post_head, socket_server
from tests.server.test_connection import BODY, GET, KIB, QUICK, is_alive, request
from tests.server.test_connection import edges as edges
from tests.server.test_connection import silence as silence

pytestmark = pytest.mark.anyio

CHUNKED = post_head("/v1/completions", "Transfer-Encoding: chunked") + b"5\r\n{"


async def test_bodies_sent_ahead_have_a_limit_over_all_connections(edges):
    engine = FakeEngine(step_seconds=0.01)
    async with socket_server(engine, limits=ConnectionLimits(ahead_bytes=100 * KIB, sweep_seconds=0.01)) as server:
        long = request(json.dumps(TEXT | {"max_tokens": 100, "ignore_eos": True}).encode())
        first = await server.connect(long + request(b" " * 60 * KIB))
        async with asyncio.timeout(5):
            while not edges[0].bytes_ahead:
                await asyncio.sleep(0.005)
        second = await server.connect(long + request(b" " * 60 * KIB))
        assert await second.ended()
        assert 0 < edges[0].bytes_ahead <= 100 * KIB
        assert (await first.answer()).status == 200
        assert (await first.answer()).status == 400  # blanks are no JSON
        assert edges[0].bytes_ahead == 0


async def test_a_connection_that_cannot_be_checked_is_closed_and_the_others_are_watched_on(monkeypatch, caplog):
    check = ConnectionManager.check
    broken = []

    def checked(self, each, now):
        broken[:] = broken or [each]
        if each is broken[0]:
            raise ValueError("of the test")
        check(self, each, now)

    async with socket_server(limits=QUICK) as server:
        monkeypatch.setattr(ConnectionManager, "check", checked)
        first = await server.connect(CHUNKED)
        assert await first.ended(1)
        assert (await (await server.connect(CHUNKED)).answer(2)).status == 408
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]
    caplog.clear()


async def test_connections_without_a_request_give_way_to_new_ones():
    async with socket_server(limits=ConnectionLimits(connections=8)) as server:
        idle = [await server.connect(sent) for sent in [b"", b"GET / HT", GET, request()[:-1], CHUNKED] * 6]
        assert await is_alive(server)
        ended = 0
        for client in idle:
            try:
                async with asyncio.timeout(0.01):
                    while await client.reader.read(1000):
                        pass
                    ended += 1
            except TimeoutError:
                pass
            except ConnectionError:
                ended += 1
            client.close()
        assert 22 <= ended < 30


async def test_a_begun_body_behind_an_answered_request_gives_way_too():
    async with socket_server(limits=ConnectionLimits(connections=3)) as server:
        for _ in range(3):
            client = await server.connect(GET + request()[:-1])
            assert (await client.answer()).status == 200
        assert await is_alive(server)


async def test_the_time_of_a_body_begins_when_the_requests_before_it_are_answered():
    limits = ConnectionLimits(body_seconds=0.3, sweep_seconds=0.01)
    async with socket_server(FakeEngine(step_seconds=0.05), limits=limits) as server:
        long = json.dumps(TEXT | {"max_tokens": 8, "ignore_eos": True}).encode()
        client = await server.connect(request(long) + request()[:-1])
        assert (await client.answer()).status == 200
        await client.send(request()[-1:])
        assert (await client.answer()).status == 200
        client.close()


async def test_clients_that_stay_after_a_refusal_keep_no_place(edges):
    limits = ConnectionLimits(connections=2, lingering=4, linger_seconds=60)
    async with socket_server(limits=limits) as server:
        for _ in range(10):
            assert (await (await server.connect(b"hello\r\n\r\n")).answer()).status == 400
            assert await is_alive(server)
        assert len(edges[0].open) <= 2 + 4, "refused ones are kept beyond the files that there are"


async def test_a_client_that_leaves_its_last_answer_unread_gives_way(edges):
    limits = ConnectionLimits(connections=1, stalled_seconds=0.1, sweep_seconds=0.01)
    async with socket_server(limits=limits) as server:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        while not edges[0].open:
            await asyncio.sleep(0)
        (held,) = edges[0].open
        held.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        while not held.transport.get_write_buffer_size():
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asyncio.sleep(0.01)
        assert held.state is ConnectionState.IDLE
        assert (await server.ask(GET)).status == 503, "who may still be reading keeps its place"
        async with asyncio.timeout(2):
            while (await server.ask(GET)).status != 200:
                await asyncio.sleep(0.02)
        client.close()


async def test_beyond_the_most_connections_with_requests_a_new_one_is_503_at_once():
    async with socket_server(FakeEngine(step_seconds=0.005), limits=ConnectionLimits(connections=3)) as server:
        long = json.dumps(TEXT | {"max_tokens": 1000, "ignore_eos": True}).encode()
        busy = [await server.connect(request(long)) for _ in range(3)]
        while len(server.engine.live) < 3:
            await asyncio.sleep(0.005)
        answer = await server.ask(GET)
        assert (answer.status, answer.code) == (503, "too_many_connections") and "retry-after" in answer.headers
        busy.pop().close()
        while len(server.engine.live) == 3:
            await asyncio.sleep(0.005)
        assert await is_alive(server), "a place that was left is free again"
        for client in busy:
            client.close()
        while server.engine.live:
            await asyncio.sleep(0.005)


async def test_a_flood_beyond_the_most_connections_is_answered_or_closed():
    async with socket_server(FakeEngine(step_seconds=0.005), limits=ConnectionLimits(connections=2)) as server:
        long = json.dumps(TEXT | {"max_tokens": 1000, "ignore_eos": True}).encode()
        busy = [await server.connect(request(long)) for _ in range(2)]
        while len(server.engine.live) < 2:
            await asyncio.sleep(0.005)
        flood = await asyncio.gather(*(server.connect() for _ in range(200)))
        for client in flood:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                assert (await client.answer()).status == 503
            client.close()
        for client in busy:
            client.close()
        while server.engine.live:
            await asyncio.sleep(0.005)
        assert await is_alive(server)


async def test_an_address_may_hold_as_many_connections_as_it_is_given():
    async with socket_server(limits=ConnectionLimits(per_address=2, linger_seconds=0, sweep_seconds=0.01)) as server:
        first, second = await server.connect(GET), await server.connect(GET)
        assert [(await each.answer()).status for each in (first, second)] == [200, 200]
        answer = await server.ask(GET)
        assert (answer.status, answer.code) == (429, "too_many_connections")
        first.close()
        async with asyncio.timeout(2):
            while (await server.ask(GET)).status != 200:
                await asyncio.sleep(0.02)
        second.close()


def test_no_more_connections_are_taken_than_files_can_be_opened(monkeypatch, caplog):
    files = {"now": (256, 512)}
    monkeypatch.setattr("resource.getrlimit", lambda which: files["now"])
    monkeypatch.setattr("resource.setrlimit", lambda which, pair: files.update(now=pair))
    assert connection_limits(ServeConfig(max_connections=100)).connections == 100
    assert files["now"] == (292, 512), "the soft limit is raised as far as needed"
    assert connection_limits(ServeConfig(max_connections=1024)).connections == 512 - 192
    assert "ulimit -n" in caplog.text
    caplog.clear()


async def test_bodies_of_requests_that_wait_for_their_turn_have_a_limit(edges, monkeypatch):
    entered = Service.request_started
    monkeypatch.setattr(Service, "request_started", lambda self: (entered(self), time.sleep(0.005)))
    body = json.dumps(TEXT | {"prompt": "a" * 20_000, "max_tokens": 1}).encode()
    async with socket_server(FakeEngine(max_context=30_000), limits=ConnectionLimits(ahead_bytes=100 * KIB)) as server:
        clients = [await server.connect() for _ in range(40)]
        for each in clients:
            each.writer.write(request(body))
        async with asyncio.timeout(10):
            found = {(await each.answer()).status for each in clients}
            assert found == {200, 503} and await is_alive(server)
        assert edges[0].bytes_ahead == 0


async def test_a_flood_without_keys_keeps_no_key_out(edges, monkeypatch):
    """Bodies of requests without a key do not count towards the bytes that may wait."""
    entered = Service.request_started
    monkeypatch.setattr(Service, "request_started", lambda self: (entered(self), time.sleep(0.005)))
    key = "k" * 32
    body = json.dumps(TEXT | {"prompt": "a" * 20_000, "max_tokens": 1}).encode()
    honest = post_head("/v1/completions", f"Content-Length: {len(BODY)}", f"Authorization: Bearer {key}") + BODY
    async with socket_server(FakeEngine(), keys=[key], limits=ConnectionLimits(ahead_bytes=100 * KIB)) as server:
        clients = [await server.connect() for _ in range(40)]
        for each in clients:
            each.writer.write(request(body))
        owner = await server.connect(honest)
        async with asyncio.timeout(10):
            assert (await owner.answer()).status == 200
            assert {(await each.answer()).status for each in clients} == {401}
