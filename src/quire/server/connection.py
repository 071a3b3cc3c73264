"""Limits on a connection before the application sees a request: bytes of the head, time, number of connections.

This is uvicorn's protocol with limits. A connection that exceeds one gets an error answer, if one can still be sent,
and is closed. Knows HTTP's framing; knows nothing of the API.
"""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.server.disconnect_probe import DisconnectProbe
from quire.server.errors import ApiError, bad_request
from quire.server.framing import check_codings, is_old, parser_of_body, unchunked
from quire.server.read_ahead import ReadAhead

if TYPE_CHECKING:
    from quire.server.connection_manager import ConnectionManager


HEALTH = frozenset({"/health", "/health/live", "/health/ready"})
"""Paths of requests that never wait for other requests."""


class ConnectionState(enum.Enum):
    """The event that a connection waits for."""

    IDLE = enum.auto()
    """The next request."""
    HEAD = enum.auto()
    """The end of a head."""
    BODY = enum.auto()
    """The end of a body."""
    ANSWER = enum.auto()
    """The application's answer."""
    CLOSED = enum.auto()
    """The client, which may still read the last answer."""


class HttpConnection(HttpToolsProtocol):
    """One connection.

    state           the event it waits for
    since           start of the wait, by the loop's clock; in a body, the time of its last byte
    non_body_bytes  bytes of the current request outside the body
    keeps_body      whether the current request has the key that it needs; otherwise its body is discarded
    upgrade_parser  parses the body of a request that offers an upgrade; None: the current request offers none, or has
                    no body
    ahead           bodies that it reads before their requests begin
    received        bytes since the last answer
    unsent          bytes that the client had not read when its reading was last checked
    unsent_since    when it last read something, or all was read
    """

    # uvicorn declares this field as optional.
    transport: Any

    def __init__(
        self,
        manager: ConnectionManager,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.manager = manager
        self.state = ConnectionState.HEAD
        self.since = 0.0
        self.non_body_bytes = 0
        self.address = ""
        self.keeps_alive = True
        self.keeps_body = True
        self.upgrade_parser: httptools.HttpRequestParser | None = None
        self.answering: RequestResponseCycle | None = None
        self.ahead = ReadAhead(self)
        self.received = 0
        self.unsent = 0
        self.unsent_since = 0.0
        self.disconnect_probe = DisconnectProbe(self, self.loop)

    @property
    def is_closed(self) -> bool:
        """Whether the connection reads no more requests."""
        return self.state is ConnectionState.CLOSED

    @property
    def waits_for_body(self) -> bool:
        """Whether it waits for the rest of a body, and no earlier request is being answered."""
        return self.state is ConnectionState.BODY and self.answering is self.cycle

    # Called by asyncio.

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(_Transport(transport, self.close))  # type: ignore[arg-type]
        self.since = self.unsent_since = self.loop.time()
        self.address = self.client[0] if self.client else ""
        try:
            self.manager.add(self, self.address)
        except ApiError as error:
            self.refuse(error)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. It gets its answers if all its requests are complete; otherwise it has left."""
        if self.state is not ConnectionState.ANSWER:
            return False
        self.disconnect_probe.start()
        self.cycle.keep_alive = False
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self.state = ConnectionState.CLOSED
        self.manager.remove(self, self.address)
        self._unset_keepalive_if_required()
        self._cancel_requests()
        self._count_freed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self.received += len(data)
        if self.is_closed:
            return
        self._unset_keepalive_if_required()
        if self.state is ConnectionState.IDLE:
            self._enter_state(ConnectionState.HEAD)
        elif self.state is ConnectionState.BODY:
            self.since = self.loop.time()
        most = self.manager.limits.head_bytes
        rest = memoryview(data)
        while rest and not self.is_closed:
            # At most the remaining bytes of a head: a head that does not end within them is too large. Small pieces,
            # because bytes after the end of a request in its last piece are not counted for the next request.
            part = rest[: max(1, min(PIECE, most - self.non_body_bytes))]
            self.non_body_bytes += len(part)
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade as upgrade:
                # To HTTP/2 or to a web socket. A server may ignore this offer (RFC 9110, section 7.8).
                part = rest[: max(1, upgrade.args[0])]
                if self.upgrade_parser is not None:
                    self.parser, self.upgrade_parser = self.upgrade_parser, None
            except httptools.HttpParserError:
                self.refuse(_not_http())
            rest = rest[len(part) :]
            if self.non_body_bytes >= most and self.state in (ConnectionState.HEAD, ConnectionState.BODY):
                message = f"request line, headers, trailers and chunk sizes exceed {most} bytes"
                self.refuse(ApiError(431, message, code="headers_too_large"))

    # Called by the parser.

    def on_message_begin(self) -> None:
        """A head begins."""
        if not self.is_closed:
            super().on_message_begin()
            if self.state is not ConnectionState.HEAD:
                self._enter_state(ConnectionState.HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Trailers are ignored."""
        if self.state is ConnectionState.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: the application starts."""
        if self.is_closed:
            return
        if len(self.pipeline) >= self.manager.limits.pipelined:
            message = f"more than {self.manager.limits.pipelined} requests were sent before their answers"
            self.refuse(ApiError(429, message, code="too_many_pipelined"))
            return
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self.refuse(_not_http())
            return
        try:
            check_codings(self.headers, version)
        except ApiError as error:
            self.refuse(error)
            return
        self.expect_100_continue = self.expect_100_continue and version != "1.0"
        if self.parser.should_upgrade():
            self.upgrade_parser = parser_of_body(self, self.headers, version)
        super().on_headers_complete()
        scope: Any = self.scope
        self.keeps_body = self.manager.is_authorized(scope)
        # If a request is answered before its body arrives, such as with 401, the answer closes the connection.
        self.keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
        self._enter_state(ConnectionState.BODY)
        if self.pipeline:
            # uvicorn would stop reading here, and not notice that the client disconnects.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if self.state is ConnectionState.BODY:
            if self.keeps_body:
                super().on_body(body)
            if self.pipeline or self.ahead.waits:
                self.ahead.count()
                if self.ahead.num_bytes > HIGH_WATER_LIMIT:
                    self.flow.pause_reading()
            self.non_body_bytes = max(0, self.non_body_bytes - (1 + self.manager.limits.framing) * len(body))

    def on_message_complete(self) -> None:
        """The request is complete."""
        # The parser takes the offer of an upgrade for the end of the request.
        if self.state is not ConnectionState.BODY or self.upgrade_parser is not None:
            return
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self.keeps_alive
        self.non_body_bytes = 0
        self._enter_state(ConnectionState.ANSWER)

    # Called by uvicorn.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.answering = cycle
        app = unchunked(app, cycle) if is_old(cycle) else app
        scope: Any = cycle.scope
        super()._start_asgi_task(cycle, app if scope["path"] in HEALTH else self.ahead.in_turn(cycle, app))

    def on_response_complete(self) -> None:
        """An answer has been sent."""
        if self.is_closed:
            return
        super().on_response_complete()
        self.ahead.count()
        self._count_freed()
        if self.state is ConnectionState.HEAD or (
            self.state is ConnectionState.BODY and not self.cycle.response_complete
        ):
            self._enter_state(self.state)  # its timer starts now
        elif self.state is ConnectionState.ANSWER and self.cycle.response_complete:
            self._enter_state(ConnectionState.IDLE)
        elif self.state is ConnectionState.BODY:
            # Answered before its body arrived, such as with 401: the rest is not needed.
            self.close()

    def shutdown(self) -> None:
        """The server ends: closes the connection unless a request is being answered."""
        if self.is_closed and not self.transport.get_write_buffer_size():
            self.abort()
        elif self.state in (ConnectionState.IDLE, ConnectionState.HEAD):
            self.transport.close_now()
        else:
            self.keeps_alive = False
            super().shutdown()

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: any client could fill the log."""

    # Ends of a connection.

    def refuse(self, error: ApiError) -> None:
        """Answers `error`, unless another answer has begun, and closes."""
        if self.is_closed:
            return
        self.manager.refused(error.status)
        if self.is_silent() or self._may_answer() or self.ahead.waits:
            body = json.dumps(error.body()).encode()
            headers = {
                **error.headers,
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            }
            lines = [b"%s: %s\r\n" % each for each in self.server_state.default_headers]
            lines += [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
            self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self.close()

    def is_silent(self) -> bool:
        """Whether no request is being answered."""
        return self.answering is None or self.answering.response_complete

    def _may_answer(self) -> bool:
        """Whether the request being read is also the one being answered, and its answer has not begun."""
        return self.waits_for_body and not self.cycle.response_started

    def close(self) -> None:
        """Sends the written bytes and closes, with time for the client to read: see ConnectionLimits.linger_seconds."""
        if self.is_closed:
            return
        unread = self.state in (ConnectionState.HEAD, ConnectionState.BODY)
        self._enter_state(ConnectionState.CLOSED)
        self._unset_keepalive_if_required()
        self._cancel_requests()
        if not unread or self.manager.is_full:
            self.transport.close_now()
            return
        self.manager.lingering[self] = None
        self.flow.resume_reading()
        try:
            self.transport.write_eof()
        except OSError:  # the client has reset the connection; asyncio's own loop raises here, uvloop does not
            self.abort()

    def abort(self) -> None:
        """Closes at once, without sending the written bytes."""
        self.state = ConnectionState.CLOSED
        # Frees its place at once: many connections may arrive in one turn of the loop.
        self.manager.remove(self, self.address)
        self._cancel_requests()
        self.transport.abort()

    def _cancel_requests(self) -> None:
        """Tells the current requests that their client has gone."""
        self.disconnect_probe.end()
        for cycle in (self.answering, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.waiting_for_100_continue = False
                cycle.body = bytearray()
                cycle.message_event.set()
        self.flow.resume_writing()
        self.pipeline.clear()
        self.ahead.cancel()

    def _count_freed(self) -> None:
        self.manager.freed(self.received)
        self.received = 0

    def _enter_state(self, state: ConnectionState) -> None:
        self.state = state
        self.since = self.loop.time()
        self.manager.awaiting_request.pop(self, None)
        if (state in (ConnectionState.IDLE, ConnectionState.HEAD) and self.is_silent()) or self._may_answer():
            self.manager.awaiting_request[self] = None


PIECE = 4096
"""Maximum number of bytes per call of the parser."""


def _not_http() -> ApiError:
    return bad_request("this is not HTTP/1.1", code="invalid_http")


class _Transport:
    """A transport that calls the connection's `close`, because uvicorn closes transports in several places."""

    def __init__(self, transport: Any, close: Callable[[], None]) -> None:
        self._transport = transport
        self.write = transport.write
        self.close = close
        self.close_now = transport.close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
