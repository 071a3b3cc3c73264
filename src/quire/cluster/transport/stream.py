"""The interface of a transport: listeners, streams of bytes (see `sockets`), and a channel for extents beside each.

Knows neither messages nor secrets. `channel` authenticates a stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.cluster.transport.sockets import SocketListener, SocketStream


class TransportError(QuireError):
    """A connection that cannot be made, or has ended. The message gives the reason."""


class PeerClosedError(TransportError):
    """The peer has closed the connection."""


class ForeignUserError(TransportError):
    """The peer belongs to another user, who may not dial. The message names the user."""


class Transport(Protocol):
    """A way to reach a process: one row of `transport.TRANSPORTS`."""

    def listen(self, host: str, stall_seconds: float) -> SocketListener:
        """Starts to listen. Raises TransportError."""

    def dial(self, endpoint: str, stall_seconds: float, seconds: float) -> SocketStream:
        """A stream to a listener. endpoint: its address without scheme. Raises TransportError."""
