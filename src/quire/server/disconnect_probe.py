"""Detects whether a client that has sent its last byte still reads.

A client that ends only its sending (`shutdown(SHUT_WR)`) and one that has closed its socket look the same to the
server: the stream ends. They differ once the server sends something, because only the kernel of the second client
answers with a reset. Bytes of the answer show the difference. Before the answer begins, the server sends interim
responses: HTTP/1.1 allows any number of them, and clients ignore them (RFC 9110, section 15.2). HTTP/1.0 has none, so a
closed socket of such a client is noticed only when its answer begins.
"""

from __future__ import annotations

import asyncio
import select
from typing import TYPE_CHECKING

from quire.server.framing import is_old

if TYPE_CHECKING:
    from quire.server.connection import HttpConnection

CHECK_SECONDS = 0.5
"""Interval between checks for a reset."""
FIRST_PROBE_SECONDS = 1.0
"""Time between the end of the client's stream and the first interim response. Most answers begin before."""
PROBE_SECONDS = 10.0
"""Time between two interim responses: a client may close its socket later."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class DisconnectProbe:
    """Aborts a connection whose client has closed its socket, from `start` to `end`."""

    def __init__(self, connection: HttpConnection, loop: asyncio.AbstractEventLoop) -> None:
        self._connection, self._loop = connection, loop
        self._probe_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts the checks for a reset, if they do not run yet."""
        if self._timer is None:
            self._probe_at = self._loop.time() + FIRST_PROBE_SECONDS
            self._timer = self._loop.call_later(CHECK_SECONDS, self._check)

    def end(self) -> None:
        """Stops the checks."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        connection = self._connection
        if is_reset(connection.transport.get_extra_info("socket").fileno()):
            connection.abort()
            return
        if self._loop.time() >= self._probe_at and self._may_be_sent:
            connection.transport.write(CONTINUE)
            self._probe_at = self._loop.time() + PROBE_SECONDS
        self._timer = self._loop.call_later(CHECK_SECONDS, self._check)

    @property
    def _may_be_sent(self) -> bool:
        """Whether an interim response may be sent now: before an answer, and not to a client of HTTP/1.0."""
        cycle = self._connection.answering
        return cycle is not None and not cycle.response_started and not is_old(cycle)


def is_reset(number: int) -> bool:
    """Whether a connected socket, given by its descriptor, is closed in both directions."""
    return _has(number, 0)


def has_ended(number: int) -> bool:
    """Whether the client of a socket, given by its descriptor, sends no more. Unread bytes may remain. Always False on
    systems other than Linux, which do not tell.
    """
    return _has(number, getattr(select, "POLLRDHUP", 0))


def _has(number: int, events: int) -> bool:
    poll = select.poll()
    poll.register(number, events)
    return bool(poll.poll(0))
