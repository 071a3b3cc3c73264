"""Many streams over sockets, a third of them dropped, and clients that do not read: nothing leaks.

The long form, with a real server and a real model, is `python benchmarks/edge.py --soak`.
"""

import asyncio
import gc
import json
import random
import socket
import sys

import pytest

from quire.server.connection_manager import ConnectionLimits
from tests.server.fake_engine import FakeEngine
from tests.server.harness import post_head, socket_server

pytestmark = pytest.mark.anyio

REQUESTS, AT_ONCE = 100, 16


@pytest.fixture
def anyio_backend():
    return ("asyncio", {"use_uvloop": True})


def completion(**fields):
    body = json.dumps({"prompt": "abcdefgh", "ignore_eos": True, "stream": True, **fields}).encode()
    return post_head("/v1/completions", f"Content-Length: {len(body)}", "Connection: close") + body


async def one(server, draw):
    """A stream that is read to its end, or dropped somewhere; how it ended."""
    client = await server.connect(completion(max_tokens=draw.randrange(1, 30)))
    server.clients.remove(client)
    try:
        if draw.random() < 1 / 3:
            await client.reader.readexactly(draw.randrange(1, 300))
            return "dropped"
        answer = await asyncio.wait_for(client.reader.read(), 10)
        return "complete" if answer.rstrip(b"\r\n0").endswith(b"data: [DONE]") else "cut"
    finally:
        client.close()


def unread(port):
    """A client with a stream of several MB that it never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(completion(prompt="a" * 40_000, echo=True, n=100, max_tokens=5000))
    return client


async def test_nothing_is_left_of_streams_that_are_dropped_or_not_read(seed):
    engine = FakeEngine(max_context=50_000)
    limits = ConnectionLimits(write_seconds=0.1, sweep_seconds=0.02, linger_seconds=0.1)
    ends, blocks = [], []
    async with socket_server(engine, limits=limits) as server:
        for half in range(2):
            held = [unread(server.port) for _ in range(2)]
            waiting = iter(range(REQUESTS // 2))

            async def client(waiting=waiting, half=half):
                for number in waiting:
                    ends.append(await one(server, random.Random(f"{seed} {half} {number}")))

            await asyncio.gather(*(client() for _ in range(AT_ONCE)))
            async with asyncio.timeout(10):
                while engine.live:  # those that nobody reads are dropped in time
                    await asyncio.sleep(0.01)
            for each in held:
                each.close()
            await asyncio.sleep(0.05)
            engine.prompts.clear()
            gc.collect()
            blocks.append(sys.getallocatedblocks())
        assert server.app.state.service.in_flight == 0
        text = server.app.state.service.metrics.text().decode()
        assert 'quire_http_responses_total{route="/v1/completions",status="200"}' in text
    assert engine.aborted >= 4, "who does not read was not dropped"
    assert set(ends) == {"complete", "dropped"} and ends.count("complete") > REQUESTS / 2
    # One object for each request would be 50, and its connection 20 each; blocks waver by some dozens.
    assert blocks[1] - blocks[0] < REQUESTS, f"{blocks[1] - blocks[0]} blocks more after {REQUESTS // 2} requests more"
