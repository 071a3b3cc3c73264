"""Sends requests, one at a time, each on a connection of its own. Knows HTTP, not what answers mean."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from recorded.cases import Answers, Request, get

SECONDS = 90.0
"""Time for one answer."""

IDLE_SECONDS = 0.05
"""Time after an idle connection is made, so that the server has accepted it, and between attempts."""


@dataclass(frozen=True)
class Answer:
    """An HTTP answer. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def ask(port: int, request: Request, answers: Answers) -> Answer:
    """The answer to a request. answers: those before it."""
    if request.raw is not None:
        return _ask_raw(port, request.raw)
    connection = _begun(port, request, answers)
    try:
        response = connection.getresponse()
        return _read(response)
    finally:
        connection.close()


def _begun(port: int, request: Request, answers: Answers) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request(request.method, request.url(answers), request.filled(answers), dict(request.headers))
    return connection


def _read(response: http.client.HTTPResponse) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, response.read())


def _ask_raw(port: int, sent: bytes) -> Answer:
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(sent)
        response = http.client.HTTPResponse(connection)
        response.begin()
        return _read(response)


@contextmanager
def running(port: int, requests: tuple[Request | None, ...], answers: Answers) -> Iterator[None]:
    """Requests that have begun to answer; they are dropped at the end of the context."""
    with ExitStack() as stack:
        for request in requests:
            if request is None:
                stack.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
                time.sleep(IDLE_SECONDS)
                continue
            connection, response = _taken(port, request, answers)
            stack.callback(connection.close)
            stack.callback(response.close)
        yield


def _taken(
    port: int, request: Request, answers: Answers
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A request that the server has taken. It refuses some while it still drops earlier ones."""
    until = time.monotonic() + SECONDS
    while True:
        connection = _begun(port, request, answers)
        response = connection.getresponse()
        if response.status == 200 or time.monotonic() > until:
            return connection, response
        connection.close()
        time.sleep(IDLE_SECONDS)


def wait_until_drained(port: int) -> None:
    """Returns once a server that has got SIGTERM refuses requests."""
    until = time.monotonic() + SECONDS
    while ask(port, get("", "/health/ready"), {}).status == 200 and time.monotonic() < until:
        time.sleep(IDLE_SECONDS)
