"""Moves bytes between memory and a file in the background.

The file has no name, so a process that ends leaves nothing behind. Knows bytes, not chunks or layers.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.errors import QuireError
from quire.stores.direct import DirectFile, allows_direct
from quire.stores.throttle import Throttle

if TYPE_CHECKING:
    from torch import Tensor

NUM_MOVERS = 2
CLOSE_SECONDS = 1.0
"""Seconds that a thread has to end. A thread that hangs in a request is left running, and its file open."""


class IoRequest(NamedTuple):
    """Bytes to move: `view`, uint8 [n], is all of them, `offset` their place in the file. Both are multiples of 4 KiB,
    unless the file is the host's memory.
    """

    offset: int
    view: Tensor


class IoTicket:
    """Parts that move together. `wait` returns once all of them have."""

    def __init__(self, count: int, after: tuple[IoTicket, ...], what: str) -> None:
        self.left = count
        self.what = what
        self.after = after
        self.error: BaseException | None = None
        self.done = threading.Event()
        if not count:
            self.done.set()

    def wait(self) -> None:
        """Raises QuireError if a part could not be moved."""
        self.done.wait()
        if self.error is not None:
            raise QuireError(f"the offloaded {self.what} cannot be moved: {self.error}") from self.error


NOTHING = IoTicket(0, (), "")
"""A ticket without parts."""


def end_threads(threads: Sequence[threading.Thread], file: DirectFile) -> None:
    """Waits for threads that must end, then closes their file."""
    for thread in threads:
        thread.join(CLOSE_SECONDS)
    if not any(thread.is_alive() for thread in threads):
        file.close()


class Mover:
    """Threads that read and write one file, in the order of the requests.

    bytes_read, bytes_written  bytes moved so far
    """

    def __init__(self, folder: Path, throttle: Throttle, what: str = "cache") -> None:
        """throttle: shared by all users of the disk. what: name of the contents, for errors. Raises OSError."""
        self._throttle = throttle
        self._what = what
        path = folder / f".quire-cache-{os.getpid()}-{os.urandom(4).hex()}.tmp"
        self._file = DirectFile(path, is_direct=allows_direct(folder), is_new=True)
        path.unlink()
        self._changed = threading.Condition()
        self._queue: deque[tuple[IoTicket, bool, IoRequest]] = deque()
        self._num_moving = 0
        self._is_closed = False
        self.bytes_read = self.bytes_written = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"quire-mover-{number}", daemon=True)
            for number in range(NUM_MOVERS)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, parts: Iterable[IoRequest], *after: IoTicket) -> IoTicket:
        """Starts to fill the views, once the tickets `after` are done. Fails if one of them does."""
        return self._add(parts, False, after)

    def write(self, parts: Iterable[IoRequest], *after: IoTicket) -> IoTicket:
        """Starts to write the views, which must not change before it is done. after: as in `read`."""
        return self._add(parts, True, after)

    def settle(self) -> None:
        """Waits until nothing moves. A failed step may have started transfers from and to memory that the next step
        uses.
        """
        with self._changed:
            while (self._queue or self._num_moving) and not self._is_closed:
                self._changed.wait()

    def close(self) -> None:
        """Ends the threads. Tickets that are not done fail."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            left, self._queue = self._queue, deque()
            self._changed.notify_all()
        for ticket, _, _ in left:
            self._finish(ticket, QuireError("it was closed"))
        end_threads(self._threads, self._file)

    def _add(self, parts: Iterable[IoRequest], is_write: bool, after: tuple[IoTicket, ...]) -> IoTicket:
        todo = list(parts)
        if not todo:
            return NOTHING
        pending = tuple(each for each in after if not each.done.is_set() or each.error is not None)
        ticket = IoTicket(len(todo), pending, self._what)
        with self._changed:
            if self._is_closed:
                raise QuireError("the offloaded cache was closed")
            self._queue.extend((ticket, is_write, part) for part in todo)
            self._changed.notify_all()
        return ticket

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                ticket, is_write, part = self._queue.popleft()
                self._num_moving += 1
            error: BaseException | None = None
            try:
                # The tickets that a part waits for were added earlier, so other threads have begun or finished them.
                for earlier in ticket.after:
                    earlier.wait()
                view = part.view.numpy().data
                if is_write:
                    self._file.write([view], part.offset, self._pay)
                else:
                    self._file.read(view, part.offset, self._pay)
            except BaseException as failure:  # of any kind: the engine must not wait for ever
                error = failure
            with self._changed:
                if error is None and is_write:
                    self.bytes_written += len(part.view)
                elif error is None:
                    self.bytes_read += len(part.view)
                self._finish(ticket, error)
                self._num_moving -= 1
                if not self._queue and not self._num_moving:
                    self._changed.notify_all()

    def _pay(self, num_bytes: int) -> None:
        # First, because a micro-batch waits for these few bytes, while weights are read two layers ahead.
        self._throttle.take(num_bytes, first=True)

    def _finish(self, ticket: IoTicket, error: BaseException | None) -> None:
        with self._changed:
            ticket.left -= 1
            ticket.error = ticket.error or error
            if ticket.left == 0:
                ticket.done.set()
