"""Throughput of the links between two processes of this machine: extents through shared memory and through TCP.

    python benchmarks/links.py [--rounds 5] [--extents 64] [--mebibytes 1] [--json FILE]

One process packs extents into one buffer, one after the other, as an arena does. The other process copies each of them
into memory of its own, and answers once it has all. The time is from `send` to the answer; the first round warms up and
does not count. The floor is the same two copies within one thread, without links.
"""

from __future__ import annotations

import multiprocessing
import queue
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, arguments, format_table, hardware, hardware_line, median, spread

from quire.cluster.connections import PeerConnections
from quire.cluster.messages import Ack, Attempt, ManifestRequest

SECRET = bytes(32)
TRANSPORTS = ("shm", "tcp")


class Source:
    """Extents that are copied into one buffer when they are asked for. Also the handler of the process that sends."""

    def __init__(self, num_extents: int, extent_bytes: int) -> None:
        self.num_extents = num_extents
        self.pages = np.random.default_rng(0).integers(0, 256, (num_extents, extent_bytes), np.uint8)
        self.buffer = np.empty(extent_bytes, np.uint8)
        self.answers: queue.Queue[Any] = queue.Queue()

    def pack(self) -> Iterator[memoryview]:
        """See Bulk."""
        for pages in self.pages:
            np.copyto(self.buffer, pages)
            yield self.buffer.data

    def done(self) -> None:
        """See Bulk."""

    def receive(self, sender: str, message: Any, extents: Iterator[memoryview]) -> None:
        """See Handler."""
        self.answers.put(message)

    def connection_lost(self, name: str) -> None:
        """See Handler."""
        self.answers.put(None)


class Sink:
    """Copies extents, and answers."""

    def __init__(self, transport: str, num_extents: int, extent_bytes: int) -> None:
        self.arena = np.zeros((num_extents, extent_bytes), np.uint8)
        self.connections = PeerConnections("sink", SECRET, self, transport)

    def receive(self, sender: str, message: Any, extents: Iterator[memoryview]) -> None:
        """See Handler."""
        for row, extent in zip(self.arena, extents, strict=True):
            np.copyto(row, np.frombuffer(extent, np.uint8))
        self.connections.send(sender, Ack(message.attempt))

    def connection_lost(self, name: str) -> None:
        """See Handler."""


def run_sink(transport: str, num_extents: int, extent_bytes: int, told: Connection) -> None:
    """The process that receives, until the other one says that it is over."""
    sink = Sink(transport, num_extents, extent_bytes)
    told.send(sink.connections.listen())
    told.recv()
    told.send(int(sink.arena.sum(dtype=np.int64)))
    sink.connections.close()


def seconds_of(transport: str, source: Source, rounds: int) -> list[float]:
    """The time of each round."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=run_sink, args=(transport, *source.pages.shape, there), daemon=True)
    child.start()
    connections = PeerConnections("source", SECRET, source, transport)
    connections.learn("sink", here.recv())
    connections.connect("sink", 10.0)
    taken = []
    for number in range(rounds + 1):
        begun = time.perf_counter()
        connections.send("sink", ManifestRequest(Attempt(1, number)), source)
        assert source.answers.get(timeout=60) is not None, "the connection was lost"
        taken.append(time.perf_counter() - begun)
    connections.close()
    here.send("over")
    assert here.recv() == int(source.pages.sum(dtype=np.int64)), "other bytes arrived"
    child.join()
    return taken[1:]


def floor(source: Source, rounds: int) -> list[float]:
    """The time of the two copies alone."""
    arena, taken = np.zeros_like(source.pages), []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        for row, extent in zip(arena, source.pack(), strict=True):
            np.copyto(row, np.frombuffer(extent, np.uint8))
        taken.append(time.perf_counter() - begun)
    return taken[1:]


def main() -> None:
    """Prints one line for each transport."""
    parser = arguments(__doc__)
    parser.add_argument("--extents", type=int, default=64, help="of the message (default: 64)")
    parser.add_argument("--mebibytes", type=float, default=1.0, help="of each extent (default: 1)")
    args = parser.parse_args()
    source = Source(args.extents, int(args.mebibytes * (1 << 20)))
    times = {each: seconds_of(each, source, args.rounds) for each in TRANSPORTS}
    times["copies alone"] = floor(source, args.rounds)
    rows, speeds = [], {}
    for name, taken in times.items():
        speeds[name] = [source.pages.nbytes / seconds / 1e9 for seconds in taken]
        rows.append([name, f"{median(speeds[name]):.2f}", f"{spread(speeds[name]):.0%}"])
    print(f"{args.extents} extents of {args.mebibytes:g} MiB, median of {args.rounds}; {hardware_line(hardware())}\n")
    print(format_table(["transport", "GB/s", "spread"], rows))
    if args.json:
        append_record(args.json, {"benchmark": "links", "extents": args.extents, "gb_per_s": speeds})


if __name__ == "__main__":
    main()
