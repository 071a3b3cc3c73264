"""Transports between processes: streams of bytes over TCP or over shared memory.

A transport is a class with `listen` and `dial`, and a row of TRANSPORTS. The other layers are the same for all
transports: `channel` makes frames out of a stream, and `connection` makes messages out of frames.
"""

from __future__ import annotations

from quire.cluster.transport.shm import ShmTransport
from quire.cluster.transport.stream import Transport, TransportError
from quire.cluster.transport.tcp import TcpTransport

TRANSPORTS: dict[str, Transport] = {"tcp": TcpTransport(), "shm": ShmTransport()}
"""Transports by the scheme of their addresses."""


def transport_of(address: str) -> tuple[Transport, str]:
    """The transport of an address, and the address without its scheme. Raises TransportError."""
    scheme, separator, endpoint = address.partition("://")
    if scheme not in TRANSPORTS or not separator or not endpoint:
        raise TransportError(
            f"{address!r} is no address; they begin with {', '.join(f'{name}://' for name in TRANSPORTS)}"
        )
    return TRANSPORTS[scheme], endpoint
