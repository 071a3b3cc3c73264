"""The turns of requests on one connection, and the bodies that are read before their requests begin.

Knows nothing of the contents of requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

if TYPE_CHECKING:
    from quire.server.connection import HttpConnection


class ReadAhead:
    """Bytes of bodies that a connection has read while an earlier request is answered, or before a request's turn.

    waits      whether the request waits for its turn
    num_bytes  last counted bytes; the manager has the sum over all connections
    """

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self.waits = False
        self.num_bytes = 0

    def in_turn(self, cycle: RequestResponseCycle, app: Any) -> Any:
        """Wraps the application so that it waits for the request's turn: hundreds of requests may arrive at once, and
        each takes 0.3 ms to begin. Until then little of the body is read.
        """
        connection, throttle = self._connection, self._connection.manager.start_throttle

        async def begin(scope: Any, receive: Any, send: Any) -> None:
            if throttle.waits and not connection.is_closed:
                self.waits = True
                connection.flow.pause_reading()
                self.count()
            await throttle.acquire()
            if self.waits:
                self.waits = False
                self.count()
                if not connection.is_closed:
                    connection.since = connection.loop.time()
                    connection.flow.resume_reading()
            if not cycle.disconnected:
                await app(scope, receive, send)

        return begin

    def cancel(self) -> None:
        """Ends the wait and forgets the bodies of a client that has gone."""
        self.waits = False
        self.count()

    def count(self) -> None:
        """Counts the bytes again. Refuses a connection if they grew and all connections hold too many."""
        connection, manager = self._connection, self._connection.manager
        now = sum(len(cycle.body) for cycle, _ in connection.pipeline)
        if self.waits and connection.answering is not None:
            now += len(connection.answering.body)
        grows = now > self.num_bytes
        manager.bytes_ahead += now - self.num_bytes
        self.num_bytes = now
        if grows and manager.bytes_ahead > manager.limits.ahead_bytes:
            manager.refuse_ahead(connection)
