"""A process that a test kills: `python -m tests.links_child TRANSPORT ADDRESS` sends extents to "here" without end, and
takes what comes, slowly.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from quire.cluster.connections import PeerConnections
from quire.cluster.messages import Attempt, ManifestRequest

SECRET = b"s" * 32
NUM_EXTENTS, EXTENT_BYTES = 16, 300_000


class Sender:
    num_extents = NUM_EXTENTS

    def pack(self) -> Iterator[memoryview]:
        buffer = bytearray(EXTENT_BYTES)
        for index in range(NUM_EXTENTS):
            buffer[:] = bytes([index]) * EXTENT_BYTES
            yield memoryview(buffer)

    def done(self) -> None:
        pass

    def receive(self, sender: str, message: Any, extents: Iterator[memoryview]) -> None:
        for _ in extents:
            time.sleep(0.01)

    def connection_lost(self, name: str) -> None:
        raise SystemExit


def main() -> None:
    sender = Sender()
    connections = PeerConnections("child", SECRET, sender, sys.argv[1])
    connections.listen()
    connections.learn("here", sys.argv[2])
    for number in range(sys.maxsize):
        connections.send("here", ManifestRequest(Attempt(1, number)), sender)
        time.sleep(0.002)


if __name__ == "__main__":
    main()
