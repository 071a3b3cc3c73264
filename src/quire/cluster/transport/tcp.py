"""Streams over TCP.

The kernel chooses the sizes of buffers. Fixed ones of 0.25 to 4 MiB were not faster between two processes of a machine
(2.2 to 2.7 GB/s, without them 2.4 to 3.9: benchmarks/links.py), and cannot grow with a slow network.
"""

from __future__ import annotations

import functools
import re
import socket

from quire.cluster.transport.sockets import SocketListener, SocketStream
from quire.cluster.transport.stream import TransportError

_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 10, 5, 3
"""Keep-alive probes detect a peer whose machine is gone: such a peer sends nothing, not even an end."""
_ENDPOINT = re.compile(r"(\[(?P<inner>[^]]+)\]|(?P<host>[^]:[]+|[0-9a-f:]+?:[0-9a-f:]*))(:(?P<port>[0-9]{1,5}))?")


class TcpTransport:
    """See Transport."""

    def listen(self, host: str, stall_seconds: float) -> SocketListener:
        """See Transport. host: may have a port, as in 10.0.0.1:4711 or [::1]:4711; otherwise any free port is taken."""
        inner, port = _split(host)
        family = socket.AF_INET6 if ":" in inner else socket.AF_INET
        bound = socket.socket(family)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((inner, port))
        except (OSError, UnicodeError) as error:
            bound.close()
            raise TransportError(f"cannot listen at {host}: {error}") from None
        port = bound.getsockname()[1]
        address = f"tcp://[{inner}]:{port}" if family == socket.AF_INET6 else f"tcp://{inner}:{port}"
        return SocketListener(bound, address, functools.partial(_stream, stall_seconds=stall_seconds))

    def dial(self, endpoint: str, stall_seconds: float, seconds: float) -> SocketStream:
        """See Transport."""
        try:
            connected = socket.create_connection(_split(endpoint), seconds)
        except (OSError, UnicodeError) as error:
            raise TransportError(f"nothing answers at tcp://{endpoint}: {error}") from None
        try:
            return _stream(connected, stall_seconds)
        except OSError as error:
            connected.close()
            raise TransportError(f"the connection to tcp://{endpoint} has ended: {error}") from None


def _stream(connected: socket.socket, stall_seconds: float) -> SocketStream:
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
        # Without it the kernel sends again for a quarter of an hour what a dead machine does not acknowledge.
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(stall_seconds * 1000))),
    ):
        connected.setsockopt(level, option, value)
    return SocketStream(connected, stall_seconds)


def _split(endpoint: str) -> tuple[str, int]:
    """Host and port; port 0 if there is none. An IPv6 host with a port has brackets."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or int(found["port"] or 0) > 65535:
        raise TransportError(f"{endpoint!r} is no host with a port; it is written 10.0.0.1:4711 or [::1]:4711")
    return found["inner"] or found["host"], int(found["port"] or 0)
