"""The cost of a connection: bytes of head, time, and its place among others. On real sockets and uvloop, as in
service.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import time

import pytest

from quire.server import connection, disconnect_probe, run
from quire.server.connection_manager import ConnectionLimits, ConnectionManager
from quire.server.service import Service
from tests.server.fake_engine import FakeEngine
from tests.server.harness import TEXT, post_head, socket_server

pytestmark = pytest.mark.anyio

QUICK = ConnectionLimits(head_seconds=0.1, body_seconds=0.1, write_seconds=0.2, linger_seconds=0.3, sweep_seconds=0.01)
GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = json.dumps(TEXT | {"max_tokens": 3}).encode()
KIB = 1024


@pytest.fixture
def anyio_backend():
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def silence(caplog):
    """Nothing a client sends writes a traceback, nor anything else that it could fill a disk with."""
    with caplog.at_level(logging.INFO, "quire"), caplog.at_level(logging.WARNING):
        yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.fixture
def edges(monkeypatch):
    """What each server of a test knows of its connections."""
    found = []
    monkeypatch.setattr(run, "ConnectionManager", lambda *given: found.append(ConnectionManager(*given)) or found[-1])
    return found


def request(body=BODY, path="/v1/completions"):
    return post_head(path, f"Content-Length: {len(body)}") + body


def head_of(size):
    """A head of exactly so many bytes."""
    begin = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Long: "
    return begin + b"a" * (size - len(begin) - 4) + b"\r\n\r\n"


async def drained(client):
    """Wait for the end of a connection, whatever is said before."""
    async with asyncio.timeout(2):
        with contextlib.suppress(ConnectionError):
            await client.reader.read()


async def is_alive(server):
    answer = await server.ask(GET)
    return answer.status == 200


async def metric(server, name):
    answer = await server.ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return sum(float(line.split()[-1]) for line in answer.body.decode().splitlines() if line.startswith(name))


# --- heads -----------------------------------------------------------------------------------------------------------


async def test_a_head_of_32_kib_is_read_and_one_byte_more_is_431():
    async with socket_server() as server:
        assert (await server.ask(head_of(32 * KIB))).status == 200
        client = await server.connect(head_of(32 * KIB + 1))
        answer = await client.answer()
        assert (answer.status, answer.code) == (431, "headers_too_large")
        assert answer.headers["connection"] == "close" and await client.ended()
        assert await metric(server, 'quire_http_responses_total{route="none",status="431"}') == 1


@pytest.mark.parametrize(
    "sent",
    {
        "one header": b"GET / HTTP/1.1\r\nX: " + b"a" * (1 << 20),
        "many headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000,
        "one name": b"GET / HTTP/1.1\r\n" + b"a" * (1 << 20),
        "a url": b"GET /" + b"a" * (1 << 20),
        "empty lines": b"\r\n" * (1 << 19),
        "a continued header": b"GET / HTTP/1.1\r\nX: a\r\n" + b" a\r\n" * 200_000,
    }.items(),
    ids=lambda each: each[0],
)
async def test_a_head_without_an_end_is_refused_after_32_kib_and_not_kept(sent):
    async with socket_server() as server:
        client = await server.connect()
        client.writer.write(sent[1])
        answer = await client.answer()
        # 400 where the parser refuses the form before it is too long.
        assert answer.status in (431, 400) and len(answer.body) < 500
        assert await is_alive(server)
        client.close()


async def test_a_head_that_comes_in_many_pieces_is_counted_over_all_of_them():
    async with socket_server() as server:
        client = await server.connect(b"GET / HTTP/1.1\r\nX: ")
        for _ in range(33):
            await client.send(b"a" * KIB)
            await asyncio.sleep(0)
        assert (await client.answer()).status == 431


async def test_every_request_of_a_connection_has_its_own_32_kib():
    async with socket_server() as server:
        client = await server.connect()
        for _ in range(4):
            await client.send(head_of(20 * KIB))
            assert (await client.answer()).status == 200
            await client.send(request(json.dumps({"prompt": "a" * 200_000}).encode(), "/tokenize"))
            assert (await client.answer()).status in (200, 400)
        await client.send(head_of(33 * KIB))
        assert (await client.answer()).status == 431
        client.close()


async def test_pipelined_heads_are_answered_in_order_and_count_too():
    async with socket_server() as server:
        client = await server.connect(GET * 5)
        for _ in range(5):
            assert (await client.answer()).status == 200
        await client.send(GET * 2 + head_of(40 * KIB))
        found = []
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                found.append((await client.answer()).status)
        # While another request is answered there is nothing to say: then the connection just ends.
        assert found in ([], [200], [200, 200], [200, 200, 431])


async def test_a_client_that_leaves_is_heard_though_it_has_sent_another_request_ahead():
    engine = FakeEngine(step_seconds=0.01)
    async with socket_server(engine) as server:
        client = await server.connect(request(json.dumps(TEXT | {"max_tokens": 1000, "ignore_eos": True}).encode()))
        while not engine.live:
            await asyncio.sleep(0.005)
        await client.send(GET)
        await asyncio.sleep(0.02)
        client.close()
        async with asyncio.timeout(2):
            while engine.live:
                await asyncio.sleep(0.005)


async def test_bodies_sent_ahead_are_read_no_further_than_one_body_is(edges):
    size = 16 * KIB
    async with socket_server(FakeEngine(step_seconds=0.01), limits=ConnectionLimits(sweep_seconds=0.01)) as server:
        client = await server.connect(request(json.dumps(TEXT | {"max_tokens": 1000, "ignore_eos": True}).encode()))
        while not server.engine.live:
            await asyncio.sleep(0.005)
        sending = asyncio.ensure_future(client.send(request(b" " * size) * 8))
        (held,) = edges[0].open
        async with asyncio.timeout(2):
            while not held.flow.read_paused:
                await asyncio.sleep(0.005)
        assert 64 * KIB < sum(len(cycle.body) for cycle, _ in held.pipeline) <= 8 * size
        assert edges[0].bytes_ahead == held.ahead.num_bytes
        client.close()
        await asyncio.gather(sending, return_exceptions=True)
        async with asyncio.timeout(3):
            while server.engine.live:
                await asyncio.sleep(0.005)
        assert edges[0].bytes_ahead == 0


@pytest.mark.parametrize("resets", [True, False])
async def test_a_client_that_leaves_is_heard_though_its_next_body_is_not_read(edges, monkeypatch, resets):
    monkeypatch.setattr(disconnect_probe, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(disconnect_probe, "FIRST_PROBE_SECONDS", 0.02)
    async with socket_server(FakeEngine(step_seconds=0.01), limits=QUICK) as server:
        long = json.dumps(TEXT | {"max_tokens": 1000, "ignore_eos": True}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            if resets:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.sendall(request(long))
            async with asyncio.timeout(5):
                while not server.engine.live:
                    await asyncio.sleep(0.005)
                client.sendall(request(b" " * 100 * KIB))
                while not any(each.flow.read_paused for each in edges[0].open):
                    await asyncio.sleep(0.005)
        async with asyncio.timeout(2):
            while server.engine.live:
                await asyncio.sleep(0.005)


async def test_more_requests_sent_ahead_than_a_connection_may_hold_end_it():
    async with socket_server(FakeEngine(step_seconds=0.05)) as server:
        client = await server.connect(request() + GET * 5000)
        assert await client.ended()
        assert await is_alive(server)


@pytest.mark.parametrize(
    ("what", "status"),
    {
        b"5;" + b"x" * (40 * KIB): 431,
        b"0\r\n" + b"a: b\r\n" * 8000: 431,
        b"0\r\nA: " + b"b" * (40 * KIB): 431,
        b"0" * (40 * KIB): 400,
    }.items(),
    ids=["an endless chunk extension", "endless trailers", "an endless trailer", "an endless chunk size"],
)
async def test_what_frames_a_body_is_bounded(what, status):
    async with socket_server() as server:
        client = await server.connect(post_head("/v1/completions", "Transfer-Encoding: chunked"))
        client.writer.write(what)
        answer = await client.answer()
        assert answer.status in (status, 431)
        assert await is_alive(server) and server.engine.started == 0
        client.close()


async def test_a_body_in_chunks_of_single_bytes_is_read():
    body = json.dumps({"prompt": "a" * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\nTrailer: x\r\n\r\n"
    assert len(chunks) > 3 * 32 * KIB
    async with socket_server(FakeEngine(max_context=30_000)) as server:
        answer = await server.ask(post_head("/tokenize", "Transfer-Encoding: chunked") + chunks)
        assert answer.status == 200 and json.loads(answer.body)["count"] == 20_001


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"\x00" * 100,
        b"GET /\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA B: c\r\n\r\n",
    ],
    ids=["tls", "zeros", "http 0.9", "http 2", "http 9.9", "words", "url", "connect", "two lengths", "length", "name"],
)
async def test_what_is_no_http_is_400_and_closed(sent):
    async with socket_server() as server:
        client = await server.connect(sent)
        answer = await client.answer()
        assert answer.status == 400 and answer.code == "invalid_http" and await client.ended()
        assert await is_alive(server)


async def test_an_upgrade_that_nobody_offers_is_passed_over():
    upgrade = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n"
    async with socket_server() as server:
        client = await server.connect(upgrade % b"h2c" + upgrade % b"websocket" + GET)
        assert [(await client.answer()).status for _ in range(3)] == [200, 200, 200]
        client.close()


@pytest.mark.parametrize("offered", ["h2c", "websocket"])
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("size", [1, 7, 10**6])
async def test_a_body_behind_an_offered_upgrade_is_read(offered, is_chunked, size):
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    framing = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(BODY)}"
    head = post_head("/v1/completions", framing, "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {offered}")
    request = head + (chunked if is_chunked else BODY)
    async with socket_server() as server:
        client = await server.connect(b"")
        sent = request + request + GET
        for at in range(0, len(sent), size):
            await client.send(sent[at : at + size])
        answers = [await client.answer() for _ in range(3)]
        assert [each.status for each in answers] == [200, 200, 200] and await is_alive(server)
        client.close()


async def test_a_client_that_asks_before_it_sends_its_body_is_told_to_and_without_a_key_it_is_not():
    asked = post_head("/v1/completions", f"Content-Length: {len(BODY)}", "Expect: 100-continue")
    async with socket_server(keys=["secret"]) as server:
        client = await server.connect(asked.replace(b"Host:", b"Authorization: Bearer secret\r\nHost:"))
        async with asyncio.timeout(2):
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(BODY)
        assert (await client.answer()).status == 200
        refused = await server.connect(asked)
        assert (await refused.answer()).status == 401 and await refused.ended()


async def test_http_1_0_ends_with_its_answer_head_has_none_and_a_whole_url_is_its_path():
    async with socket_server() as server:
        old = await server.connect(GET.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await old.answer()).status == 200 and await old.ended()
        head = await server.connect(GET.replace(b"GET", b"HEAD") + GET.replace(b" /", b" http://localhost/", 1))
        async with asyncio.timeout(2):
            first = await head.reader.readuntil(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 200 ")
        assert json.loads((await head.answer()).body) == {"status": "ok"}
        head.close()


# --- time ------------------------------------------------------------------------------------------------------------


async def test_a_connection_that_says_nothing_is_closed():
    async with socket_server(limits=QUICK) as server:
        client = await server.connect()
        assert await client.ended(1)


@pytest.mark.parametrize("before", [b"", GET], ids=["the first request", "a later one"])
async def test_a_head_that_does_not_end_is_408_though_bytes_keep_coming(before):
    async with socket_server(limits=QUICK) as server:
        client = await server.connect(before)
        if before:
            await client.answer()
        waiting = asyncio.ensure_future(client.answer(2))
        await client.send(b"GET / HTTP/1.1\r\n")
        while not waiting.done():
            await client.send(b"a: b\r\n")
            await asyncio.sleep(0.02)
        assert (waiting.result().status, waiting.result().code) == (408, "head_timeout")


async def test_a_body_that_stops_is_408_and_one_that_trickles_is_read():
    async with socket_server(limits=QUICK) as server:
        client = await server.connect(request()[:-5])
        answer = await client.answer(2)
        assert (answer.status, answer.code) == (408, "body_timeout") and await client.ended()
        client = await server.connect(request()[:-5])
        for each in request()[-5:]:
            await asyncio.sleep(0.05)
            await client.send(bytes([each]))
        assert (await client.answer()).status == 200
        client.close()


async def test_lines_between_requests_do_not_keep_a_connection():
    async with socket_server(limits=QUICK) as server:
        client = await server.connect(GET)
        assert (await client.answer()).status == 200
        await client.send(b"\r\n")
        assert (await client.answer(2)).status == 408


async def test_an_answer_before_the_body_ends_the_connection_and_is_seen():
    # The body is never read: 401 says nothing of it.
    async with socket_server(keys=["secret"], limits=QUICK) as server:
        client = await server.connect(post_head("/v1/completions", "Content-Length: 5000000") + b"a" * 500_000)
        answer = await client.answer()
        assert answer.status == 401 and answer.headers["connection"] == "close" and await client.ended(2)
        over = await server.connect(
            post_head("/v1/completions", "Content-Length: 50000000", "Authorization: Bearer secret") + b"a" * 500_000
        )
        assert (await over.answer()).status == 413 and await over.ended(2)


async def test_an_answer_after_the_body_keeps_the_connection():
    async with socket_server(keys=["secret"], limits=QUICK) as server:
        client = await server.connect(request())
        for _ in range(2):
            answer = await client.answer()
            assert answer.status == 401 and "connection" not in answer.headers
            await client.send(request())
        client.close()


async def test_a_client_that_is_gone_when_it_is_refused_ends_no_other_connections_time(monkeypatch):
    def not_connected(_):
        raise OSError(errno.ENOTCONN, "not connected")

    async with socket_server(limits=QUICK) as server:
        with monkeypatch.context() as patch:
            patch.setattr(connection._Transport, "write_eof", not_connected, raising=False)
            for sent in (b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n"):  # refused by its bytes, and by the clock
                await drained(await server.connect(sent))
        assert (await (await server.connect(b"GET / HTTP/1.1\r\n")).answer(2)).status == 408


async def test_a_client_that_does_not_read_is_dropped_and_its_request_aborted():
    engine = FakeEngine(max_context=100_000)
    big = json.dumps({"prompt": "a" * 2000, "max_tokens": 90_000, "n": 8, "stream": True, "ignore_eos": True}).encode()
    async with socket_server(engine, limits=QUICK) as server:
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", server.port))
        reader.sendall(request(big))
        async with asyncio.timeout(8):
            while not engine.aborted:
                await asyncio.sleep(0.02)
        reader.close()
        assert await is_alive(server)


# --- places ----------------------------------------------------------------------------------------------------------


# --- drain -----------------------------------------------------------------------------------------------------------


async def test_a_shutdown_while_a_body_comes_ends_the_connection_with_its_answer(edges):
    async with socket_server() as server:
        client = await server.connect(post_head("/v1/completions", f"Content-Length: {len(BODY)}") + BODY[:5])
        while not (edges and edges[0].open and next(iter(edges[0].open)).waits_for_body):
            await asyncio.sleep(0.001)
        next(iter(edges[0].open)).shutdown()
        await client.send(BODY[5:])
        answer = await client.answer()
        assert answer.status == 200
        assert await client.ended(1)


async def test_a_slow_body_does_not_hold_a_drain_and_a_running_request_does():
    async with socket_server(FakeEngine(step_seconds=0.01), drain_seconds=20.0) as server:
        running = await server.connect(request(json.dumps(TEXT | {"max_tokens": 15, "ignore_eos": True}).encode()))
        while not server.engine.live:
            await asyncio.sleep(0.005)
        slow = [await server.connect(request()[:-1]) for _ in range(3)]
        await server.connect(b"GET / HTTP/1.1\r\n")
        os.kill(os.getpid(), signal.SIGTERM)  # as `serve` hears it; this process goes on
        answers = [await client.answer(1) for client in slow]
        assert [(each.status, each.code) for each in answers] == [(503, "shutting_down")] * 3
        assert (await running.answer(2)).status == 200
        await asyncio.wait_for(server.serving, 3)


async def test_a_turn_of_the_loop_accepts_many_connections(edges):
    async with socket_server() as server:
        with contextlib.ExitStack() as ends:
            for _ in range(64):
                ends.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(12):
                await asyncio.sleep(0)
            assert len(edges[0].open) == 64


async def test_health_passes_requests_that_have_not_begun_and_their_bodies_are_counted(edges, monkeypatch):
    """Each takes 5 ms to begin, and so the others wait for their turns."""
    entered = Service.request_started
    monkeypatch.setattr(Service, "request_started", lambda self: (entered(self), time.sleep(0.005)))
    body = json.dumps(TEXT | {"prompt": "a" * 20_000, "max_tokens": 1}).encode()
    async with socket_server(FakeEngine(max_context=30_000)) as server:
        clients = [await server.connect() for _ in range(40)]
        for each in clients:
            each.writer.write(request(body))
        async with asyncio.timeout(10):
            while edges[0].bytes_ahead < 20_000:
                await asyncio.sleep(0)
            assert (await server.ask(GET)).status == 200
            assert sum(each.ahead.waits for each in edges[0].open) > 20
            assert {(await each.answer()).status for each in clients} == {200}
        assert edges[0].bytes_ahead == 0


async def test_the_body_of_a_request_without_its_key_is_not_kept(edges):
    async with socket_server(keys=["k" * 32]) as server:
        client = await server.connect(request(b"a" * 20_000))
        assert (await client.answer()).status == 401
        (connection,) = edges[0].open
        assert not connection.cycle.body and not connection.ahead.num_bytes
        client.close()


@pytest.mark.parametrize(("keys", "status"), [([], 200), (["k" * 32], 401)])
async def test_requests_without_a_body_take_turns_on_open_connections(edges, monkeypatch, keys, status):
    begun, most, entered = [], [0], Service.request_started
    monkeypatch.setattr(Service, "request_started", lambda self: (entered(self), begun.append(0), time.sleep(0.002)))
    async with socket_server(keys=keys) as server:
        clients = [await server.connect(GET) for _ in range(40)]
        assert {(await each.answer()).status for each in clients} == {200}

        async def watch():
            while len(begun) < 80:
                before = len(begun)
                await asyncio.sleep(0)
                most[0] = max(most[0], len(begun) - before)

        watching = asyncio.ensure_future(watch())
        for each in clients:
            each.writer.write(GET.replace(b"/health/live", b"/metrics"))
        async with asyncio.timeout(10):
            assert {(await each.answer()).status for each in clients} == {status}
            await watching
    assert most[0] <= 4, "5 ms of 2 ms each"


async def test_what_a_connection_received_is_told_when_it_is_not_needed_any_more(edges):
    async with socket_server() as server:
        freed = []
        edges[0].freed = freed.append
        client = await server.connect(request())
        assert (await client.answer()).status == 200
        assert sum(freed) == len(request())
        await client.send(GET[:20])
        client.close()
        async with asyncio.timeout(2):
            while edges[0].open:
                await asyncio.sleep(0.01)
        assert sum(freed) == len(request()) + 20
