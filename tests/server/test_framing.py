"""How requests and answers say where their bodies end, and clients that end their own side first. On real sockets."""

import asyncio
import json
import re
import socket
import struct
import time

import pytest

from quire.server import disconnect_probe
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, TEXT, post_head, socket_server

pytestmark = pytest.mark.anyio

LONG = {"ignore_eos": True, "max_tokens": 2000}
GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
WHOLE_AND_STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
ROUTES = pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT), ("/v1/responses", {"input": "Hello"})],
)


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request):
    return ("asyncio", {"use_uvloop": request.param})


@pytest.fixture
def quick(monkeypatch):
    """A server that finds out soon whether a client still reads."""
    monkeypatch.setattr(disconnect_probe, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(disconnect_probe, "FIRST_PROBE_SECONDS", 0.05)
    monkeypatch.setattr(disconnect_probe, "PROBE_SECONDS", 0.1)


def request(path, body, *lines, version="1.1"):
    content = json.dumps(body).encode()
    head = post_head(path, f"Content-Length: {len(content)}", *lines)
    return head.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1) + content


def text_of(path, body, stream):
    """The text of an answer, whatever its form."""
    if not stream:
        found = json.loads(body)
        if path == "/v1/responses":
            return found["output"][0]["content"][0]["text"]
        choice = found["choices"][0]
        return choice["text"] if path == "/v1/completions" else choice["message"]["content"]
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n") if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    if path == "/v1/responses":
        return "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
    assert body.endswith(b"data: [DONE]\n\n")
    deltas = [each["choices"][0] for each in events if each["choices"]]
    return "".join(each["text"] if path == "/v1/completions" else each["delta"].get("content", "") for each in deltas)


async def said(client, seconds=5):
    """All bytes until the server closes the connection."""
    async with asyncio.timeout(seconds):
        return await client.reader.read()


async def until(is_true, seconds=3):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


# ---- HTTP/1.0 --------------------------------------------------------------------------------------------------------


@WHOLE_AND_STREAMED
@ROUTES
async def test_an_http_1_0_client_gets_no_chunks_and_the_connection_ends_the_answer(path, body, stream):
    async with socket_server() as server:
        new = await server.ask(request(path, body | {"stream": stream}, "Connection: close"))
        old = await server.connect(request(path, body | {"stream": stream}, "Connection: keep-alive", version="1.0"))
        head, _, answer = (await said(old)).partition(b"\r\n\r\n")
    head = head.decode().lower()
    assert head.startswith("http/1.1 200 ") and "transfer-encoding" not in head and "connection: close" in head
    assert ("content-length" in head) is not stream
    assert (new.headers.get("transfer-encoding") == "chunked") is stream
    plain = re.sub(rb"(?m)^[0-9a-f]+\r\n|\r\n", b"", new.body) if stream else new.body
    assert text_of(path, answer, stream) == text_of(path, plain, stream) != ""


async def test_an_http_1_0_client_gets_errors_and_heads_with_a_length():
    async with socket_server() as server:
        client = await server.connect(request("/v1/completions", {"prompt": 5, "stream": True}, version="1.0"))
        answer = await client.answer()
        assert answer.status == 400 and len(answer.body) == int(answer.headers["content-length"])
        assert await client.ended()
        client = await server.connect(b"HEAD /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert (await said(client)).endswith(b"\r\n\r\n")


async def test_an_http_1_0_client_gets_no_interim_response():
    """RFC 9110, section 10.1.1: its Expect is ignored."""
    async with socket_server() as server:
        client = await server.connect(request("/v1/completions", TEXT, "Expect: 100-continue", version="1.0"))
        assert (await client.answer()).status == 200


# ---- transfer codings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["gzip, chunked"], 501),
        (["gzip", "chunked"], 501),
        (["GZIP ,\tChunked"], 501),
        (["deflate, gzip, chunked"], 501),
        (["identity, chunked"], 501),
        (["x" * 500 + ", chunked"], 501),
        (["chunked, gzip"], 400),
        (["chunked", "gzip"], 400),
        (["chunked, chunked"], 400),
        (["chunked;a=b"], 400),
        (["chunked,"], 400),
        (["gzip"], 400),
        (["identity"], 400),
        (["xchunked"], 400),
        ([""], 400),
    ],
)
async def test_a_coding_other_than_chunked_alone_is_refused(lines, status):
    engine = FakeEngine()
    async with socket_server(engine) as server:
        head = post_head("/v1/completions", *(f"Transfer-Encoding: {each}" for each in lines))
        client = await server.connect(head + b"e\r\n" + b'{"prompt":"a"}' + b"\r\n0\r\n\r\n" + GET)
        answer = await client.answer()
        assert answer.status == status and len(answer.body) < 500
        assert (
            answer.code
            in {400: ("invalid_transfer_encoding", "invalid_http"), 501: ("unsupported_transfer_encoding",)}[status]
        )
        assert await client.ended(), "what follows may be a part of the body"
    assert engine.started == 0


@pytest.mark.parametrize("value", ["chunked", "Chunked", " chunked "])
async def test_chunked_alone_is_read(value):
    async with socket_server() as server:
        head = post_head("/v1/completions", f"Transfer-Encoding: {value}", "Connection: close")
        answer = await server.ask(head + b"e\r\n" + b'{"prompt":"a"}' + b"\r\n0\r\n\r\n")
        assert answer.status == 200


async def test_http_1_0_has_no_transfer_coding():
    async with socket_server() as server:
        head = post_head("/v1/completions", "Transfer-Encoding: chunked").replace(b"HTTP/1.1", b"HTTP/1.0")
        answer = await server.ask(head + b"e\r\n" + b'{"prompt":"a"}' + b"\r\n0\r\n\r\n")
        assert (answer.status, answer.code) == (400, "invalid_transfer_encoding")


# ---- clients that send no more ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@WHOLE_AND_STREAMED
@ROUTES
async def test_a_client_that_ends_its_side_after_its_request_gets_its_answer(path, body, stream, version):
    async with socket_server(FakeEngine(step_seconds=0.005)) as server:
        client = await server.connect(request(path, body | {"stream": stream}, version=version))
        client.writer.write_eof()
        head, _, answer = (await said(client)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head.lower()
    if b"chunked" in head:
        answer = re.sub(rb"(?m)^[0-9a-f]+\r\n|\r\n", b"", answer)
    assert text_of(path, answer, stream)


async def test_requests_sent_ahead_of_the_end_are_all_answered():
    async with socket_server(FakeEngine(step_seconds=0.002)) as server:
        client = await server.connect(GET + request("/v1/completions", TEXT) + request("/v1/chat/completions", CHAT))
        client.writer.write_eof()
        answers = [await client.answer() for _ in range(3)]
        assert [each.status for each in answers] == [200] * 3 and await client.ended()
        assert ["connection" in each.headers for each in answers] == [False, False, True]


@pytest.mark.parametrize("cut", [1, 60, 150], ids=["body", "head", "line"])
async def test_a_client_that_ends_its_side_within_a_request_has_left(cut):
    engine = FakeEngine()
    async with socket_server(engine) as server:
        client = await server.connect(request("/v1/completions", TEXT)[:-cut])
        client.writer.write_eof()
        assert await client.ended()
    assert engine.started == 0


async def test_a_client_that_waits_long_for_its_answer_is_asked_and_gets_it(quick):
    """The interim responses ask; the answer follows them."""
    async with socket_server(FakeEngine(step_seconds=0.02)) as server:
        client = await server.connect(request("/v1/completions", TEXT))
        client.writer.write_eof()
        parts = (await said(client)).split(b"HTTP/1.1 ")
    *interim, answer = parts[1:]
    assert 2 <= len(interim) <= 5 and set(interim) == {b"100 Continue\r\n\r\n"}
    assert answer.startswith(b"200 OK\r\n") and json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]


async def test_most_answers_begin_before_a_client_is_asked():
    async with socket_server(FakeEngine(step_seconds=0.02)) as server:
        client = await server.connect(request("/v1/completions", TEXT))
        client.writer.write_eof()
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
@WHOLE_AND_STREAMED
@ROUTES
async def test_a_client_that_closes_its_socket_aborts_its_request(path, body, stream, reset, quick):
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    engine = FakeEngine(step_seconds=0.01)
    async with socket_server(engine) as server:
        client = await server.connect(request(path, body | {"ignore_eos": True, length: 2000, "stream": stream}))
        await until(lambda: engine.live)
        client.writer.write_eof()  # it still reads, for a while
        await asyncio.sleep(0.1)
        assert engine.live
        taken = client.writer.get_extra_info("socket")
        if reset:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.writer.close()
        await until(lambda: not engine.live)
        assert engine.aborted == 1


@WHOLE_AND_STREAMED
async def test_a_client_that_just_closes_is_noticed_within_two_seconds(stream):
    engine = FakeEngine(step_seconds=0.01)
    async with socket_server(engine) as server:
        client = await server.connect(request("/v1/completions", TEXT | LONG | {"stream": stream}))
        await until(lambda: engine.live)
        client.writer.close()
        await until(lambda: not engine.live, 2)
        assert engine.aborted == 1


async def test_an_http_1_0_client_that_closes_is_noticed_when_it_is_written_to(quick):
    engine = FakeEngine(step_seconds=0.005)
    async with socket_server(engine) as server:
        client = await server.connect(request("/v1/completions", TEXT | LONG | {"stream": True}, version="1.0"))
        await until(lambda: engine.live)
        client.writer.close()
        await until(lambda: not engine.live)
        assert engine.aborted == 1


async def test_a_half_closed_connection_leaves_no_timer(quick):
    async with socket_server() as server:
        client = await server.connect(request("/v1/completions", TEXT))
        client.writer.write_eof()
        assert (await client.answer()).status == 200 and await client.ended()
        await asyncio.sleep(0.1)  # a timer that is left would log an error
