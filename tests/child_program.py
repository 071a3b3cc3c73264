"""A program for `quire.models.child`: answers, waits, or says that it lacks something."""

from __future__ import annotations

import socket
import time

from quire.models.child import NEEDS_CONTEXT, receive_request, send_answer


def serve(connection: socket.socket) -> None:
    """A request is the kind of its answer and seconds to wait before it."""
    receive_request(connection)
    while True:
        kind, seconds = receive_request(connection)
        time.sleep(seconds)
        send_answer(connection, kind, "lacks" if kind == NEEDS_CONTEXT else "answer")
