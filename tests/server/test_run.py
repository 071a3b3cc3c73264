"""The ports of a server, and what the garbage collector skips while it serves."""

import asyncio
import gc
import socket

import pytest

from quire.config import ServeConfig
from quire.errors import ConfigError
from quire.server.run import HttpListener, serve
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


def test_a_port_in_use_is_one_line():
    listener = HttpListener(ServeConfig(port=0))
    listener.socket.listen()
    with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1"):
        HttpListener(ServeConfig(port=listener.port))
    listener.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_of_two_servers_on_one_port_the_second_fails_before_either_listens(host):
    first = HttpListener(ServeConfig(host=host, port=0))
    for other in (host, "::" if ":" in host else "0.0.0.0"):
        with pytest.raises(ConfigError, match=rf"cannot listen on .*:{first.port} \(Address already in use\)"):
            HttpListener(ServeConfig(host=other, port=first.port, allow_public=True))
    with pytest.raises(ConnectionRefusedError):  # not left waiting
        socket.create_connection((host, first.port), timeout=5)
    first.listen()
    socket.create_connection((host, first.port), timeout=5).close()
    first.close()


def test_a_server_starts_again_at_once_and_still_has_the_port_to_itself():
    first = HttpListener(ServeConfig(port=0))
    first.listen()
    with socket.create_connection(("127.0.0.1", first.port), timeout=5) as peer:
        first.socket.accept()[0].close()  # this side closes first: its connection waits in TIME_WAIT
        assert peer.recv(1) == b""
    first.close()
    with pytest.raises(OSError), socket.socket() as plain:
        plain.bind(("127.0.0.1", first.port))
    second = HttpListener(ServeConfig(port=first.port))
    with pytest.raises(ConfigError, match="cannot listen"):
        HttpListener(ServeConfig(port=first.port))
    second.listen()
    second.close()


def test_a_port_that_was_taken_meanwhile_is_one_line():
    listener = HttpListener(ServeConfig(port=0))
    listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", listener.port))
        other.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            listener.listen()
    listener.close()


async def test_while_serving_collections_pass_over_what_loading_left():
    """They stop all threads: over the objects of torch alone for 0.1 s."""
    gc.unfreeze()  # tests/conftest.py has frozen the same objects
    listener, ready = HttpListener(ServeConfig(port=0)), asyncio.Event()
    server = asyncio.ensure_future(serve(FakeEngine(), listener, ready.set))
    await asyncio.wait_for(ready.wait(), 10)
    assert gc.get_freeze_count() > 10_000
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)
    assert gc.get_freeze_count() == 0
