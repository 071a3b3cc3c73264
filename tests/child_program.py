"""A program for `quire.models.child`: answers, waits, or says that it lacks something."""

from __future__ import annotations

import socket
import time

from quire.models.child import UNKNOWN, received, send


def serve(connection: socket.socket) -> None:
    """A request is the kind of its answer and seconds to wait before it."""
    received(connection)
    while True:
        kind, seconds = received(connection)
        time.sleep(seconds)
        send(connection, kind, "lacks" if kind == UNKNOWN else "answer")
