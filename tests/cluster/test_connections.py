"""Who may dial the sockets of a cluster, what it costs when others do, and addresses that cannot be used."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.cluster.connections import MOST_STRANGERS, PeerConnections
from quire.cluster.transport import shm, sockets, transport_of
from quire.cluster.transport.sockets import SocketStream
from quire.cluster.transport.stream import TransportError
from quire.errors import ConfigError
from quire.rate_limited_warning import RateLimitedWarning
from tests.cluster.transport.test_connection import PATIENCE, SECRET, Inbox, ask, eventually, until_the_end

NOBODY = 65534
JOIN_SECONDS = 1.0
"""Within this an instance must have its link, whoever else dials, in most cases: other programs use the cores too."""

FLOOD = """
import collections, os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
sys.stdout.write("ready\\n"); sys.stdout.flush()
held, count = collections.deque(maxlen=500), 0
try:
    while True:
        one = socket.socket(socket.AF_UNIX)
        one.connect("\\0" + sys.argv[1])
        held.append(one)
        count += 1
except OSError:
    print(count)
"""
"""Dials as another user, and keeps as many connections open as it may, until the listener is gone. Prints how many."""


@contextmanager
def listening(transport: str = "shm") -> Iterator[tuple[PeerConnections, Inbox, str]]:
    inbox = Inbox()
    made = PeerConnections("router", SECRET, inbox, transport)
    try:
        yield made, inbox, made.listen()
    finally:
        made.close()


def joins(address: str, inbox: Inbox, number: int = 0) -> float:
    """Seconds until the router has the first message of an instance."""
    began = time.monotonic()
    instance = PeerConnections(f"instance-{number}", SECRET, Inbox(), "shm")
    try:
        instance.learn("router", address)
        instance.connect("router", PATIENCE)
        assert instance.send("router", ask(number))
        inbox.wait(number + 1)
        return time.monotonic() - began
    finally:
        instance.close()


def dialled(address: str) -> SocketStream:
    transport, place = transport_of(address)
    return transport.dial(place, PATIENCE, PATIENCE)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_the_user_of_a_peer_is_what_the_kernel_says() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert shm.peer_user(one) == os.geteuid()


def test_a_connection_of_another_user_is_closed_before_it_takes_a_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Root is another user too, unless the listener is root."""
    users = iter([os.geteuid() + 1] * (3 * MOST_STRANGERS) + [0 if os.geteuid() else 1])
    monkeypatch.setattr(shm, "peer_user", lambda _: next(users, os.geteuid()))
    with listening() as (router, inbox, address):
        for _ in range(3 * MOST_STRANGERS + 1):
            stream = dialled(address)
            assert until_the_end(stream) == b""
            stream.close()
            assert router.num_strangers == 0
        assert joins(address, inbox) < PATIENCE
    told = warnings_of(caplog)
    assert len(told) == 2, told
    assert f"user {os.geteuid() + 1} dialled, and only user {os.geteuid()} may" in told[0]
    assert told[1] == f"such warnings since the last one: {3 * MOST_STRANGERS}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_flood_of_another_user_keeps_no_instance_out(caplog: pytest.LogCaptureFixture) -> None:
    with listening() as (router, inbox, address):
        command = [sys.executable, "-c", FLOOD, address.removeprefix("shm://"), str(NOBODY)]
        floods = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        try:
            for each in floods:
                assert each.stdout is not None and each.stdout.readline() == "ready\n"
            seconds, strangers = [], []
            for number in range(5):
                seconds.append(joins(address, inbox, number))
                strangers.append(router.num_strangers)
                time.sleep(0.05)
        finally:
            router.close()
            counts = [int(each.communicate(timeout=PATIENCE)[0]) for each in floods]
    assert min(counts) > MOST_STRANGERS, f"no flood: {counts} connections"
    assert max(strangers) <= 1, f"the flood has taken places: {strangers}"
    assert sorted(seconds)[2] < JOIN_SECONDS, f"joining took {seconds} s"
    assert len(warnings_of(caplog)) <= 2, warnings_of(caplog)


def test_a_dialer_waits_for_its_place_in_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that others flood has a full queue at most times."""
    monkeypatch.setattr(sockets, "_BACKLOG", 0)
    transport = shm.ShmTransport()
    listener = transport.listen("", PATIENCE)
    place = listener.address.removeprefix("shm://")
    first = transport.dial(place, PATIENCE, PATIENCE)
    with pytest.raises(TransportError, match="nothing answers"):
        transport.dial(place, PATIENCE, 0.05)
    later: list[SocketStream] = []
    waiting = threading.Thread(target=lambda: later.append(transport.dial(place, PATIENCE, PATIENCE)))
    waiting.start()
    time.sleep(0.05)
    assert not later
    accepted = [listener.accept(), listener.accept()]
    waiting.join(PATIENCE)
    assert len(later) == 1
    later[0].write(b"x")
    accepted[1].read(memoryview(bytearray(1)))
    for stream in (first, *later, *accepted):
        stream.close()
    listener.close()
    with pytest.raises(TransportError, match="the listener is closed"):
        listener.accept()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_stranger_that_says_nothing_gives_its_place_to_the_next(transport: str) -> None:
    with listening(transport) as (router, inbox, address):
        streams = [dialled(address) for _ in range(MOST_STRANGERS)]
        eventually(lambda: router.num_strangers == MOST_STRANGERS)
        assert joins(address, inbox) < PATIENCE
        assert until_the_end(streams[0]) == b""
        eventually(lambda: router.num_strangers == MOST_STRANGERS - 1)
        for stream in streams:
            stream.shut()
            stream.close()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_strangers_of_the_same_user_write_one_line_however_many_they_are(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(transport) as (router, _, address):
        for _ in range(50):
            stream = dialled(address)
            stream.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: nobody\r\n\r\n")
            until_the_end(stream)
            stream.close()
        eventually(lambda: router.num_strangers == 0)
    told = warnings_of(caplog)
    assert len(told) == 2, told
    assert "connection to an unknown peer: no process of a cluster" in told[0]
    assert told[1] == "such warnings since the last one: 49"


def test_a_repeated_warning_is_a_line_and_then_counts(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    warning = RateLimitedWarning(logging.getLogger("quire"), 60.0, lambda: now)
    warning.end()
    for text in ("one", "two", "three"):
        warning.warn(text)
        now += 29.0
    now += 4.0  # 91 s after the first
    warning.warn("four")
    warning.end()
    now += 60.0
    warning.warn("five")
    warning.warn("six")
    warning.end()
    assert caplog.messages == [
        "one",
        "four; 2 more since the last such line",
        "five",
        "such warnings since the last one: 1",
    ]


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        connections = PeerConnections("a", SECRET, Inbox())
        with pytest.raises(TransportError, match="cannot listen at 127.0.0.1"):
            connections.listen(f"127.0.0.1:{taken.getsockname()[1]}")


def test_an_unknown_transport_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no transport 'carrier pigeon'; there are tcp, shm"):
        PeerConnections("a", SECRET, Inbox(), "carrier pigeon")
