"""Weights that are read from the disk while layers compute.

The layers are used in order, pass after pass. Threads read each layer's pieces into one of two buffers, ahead of its
use, and past the page cache. A buffer is filled again once its layer has been computed. Knows bytes and layers, not
products: `moved` tells others where a matrix is now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from quire.errors import QuireError
from quire.kernels.memory import huge_pages
from quire.offload.mover import end_threads
from quire.offload.weight_placement import ReadRange, buffer_sizes
from quire.stores.direct import REQUEST_BYTES, DirectFile, reads_direct
from quire.stores.throttle import Throttle

NUM_READERS = 2
"""Number of threads: one reads while the other one's request completes."""

OnLoaded = Callable[[str, torch.Tensor], None]
"""Called with a matrix's name and its bytes, uint8 [num_bytes], which stay valid until its layer has been computed."""


class WeightStream:
    """Reads layers cyclically. Layers without pieces are skipped.

    Layers are counted since the start. With b buffers, layer n uses buffer n mod b, and is read after layer n - b has
    been computed; without overlap only when it is taken.

    throttle  limits bytes per second; others that use the disk may share it
    """

    def __init__(
        self,
        path: Path,
        layers: Sequence[Sequence[ReadRange]],
        moved: OnLoaded,
        bandwidth: float | None = None,
        *,
        overlaps: bool = True,
        memory: Callable[[int], torch.Tensor] = huge_pages,
    ) -> None:
        """layers: by layer, the byte ranges to read. bandwidth: most bytes per second; None: no limit. memory:
        allocates a buffer, uint8 [num_bytes]. Raises OSError.
        """
        self._items = [tuple(layer) for layer in layers if layer]
        read = [index for index, layer in enumerate(layers) if layer]
        self._order = {index: order for order, index in enumerate(read)}
        self._moved = moved
        self.throttle = Throttle(bandwidth)
        self._overlaps = overlaps
        self._file = DirectFile(path, is_direct=reads_direct(path))
        sizes = buffer_sizes([sum(piece.num_bytes for piece in item) for item in self._items])
        self._num_buffers = len(sizes)
        self._buffers = list(memory(max(1, sum(sizes)))[: sum(sizes)].split(sizes))
        self._requests = [self._requests_of(item) for item in self._items]
        self._changed = threading.Condition()
        self._next = (0, 0)  # the next request: layer counted since the start, and its number there
        self._left: dict[int, int] = {}  # requests of a layer that are not done
        self.num_loads = 0
        """Layers that were loaded so far."""
        self._given = self._wanted = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self.bytes_read = 0
        self.wait_seconds = 0.0
        """Seconds that computing waited for weights."""
        self._threads = [
            threading.Thread(target=self._run, name=f"quire-weights-{number}", daemon=True)
            for number in range(NUM_READERS if self._items else 0)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def bytes_from_disk(self) -> int:
        """Bytes of `bytes_read` that came from the disk: all of them."""
        return self.bytes_read

    def begin(self) -> None:
        """Begins a pass. If the last one ended early, the layers that it did not use are skipped."""
        if self._items:
            with self._changed:
                count = len(self._items)
                self._given = -(-self._given // count) * count
                self._changed.notify_all()

    def take(self, layer: int) -> None:
        """Waits until a layer's weights are loaded. Raises QuireError if they cannot be read."""
        order = self._order.get(layer)
        if order is None:
            return
        begun = time.perf_counter()
        with self._changed:
            number = self._given // len(self._items) * len(self._items) + order
            assert number == self._given, f"layer {layer} is taken out of order"
            self._wanted = number + 1
            self._changed.notify_all()
            while self.num_loads <= number and self._error is None and not self._is_closed:
                self._changed.wait()
            self.wait_seconds += time.perf_counter() - begun
            if self._error is not None:
                raise QuireError(f"weights cannot be read: {self._error}") from self._error
            if self._is_closed:
                raise QuireError("the weights were closed")

    def give(self, layer: int) -> None:
        """Returns a layer's buffer once it has been computed."""
        if layer in self._order:
            with self._changed:
                self._given += 1
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads and closes the file."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self.throttle.close()
        end_threads(self._threads, self._file)

    @staticmethod
    def _requests_of(item: Sequence[ReadRange]) -> list[tuple[int, int, int]]:
        """(offset in the file, offset in the buffer, bytes) of every request."""
        found, start = [], 0
        for piece in item:
            for at in range(0, piece.num_bytes, REQUEST_BYTES):
                size = min(REQUEST_BYTES, piece.num_bytes - at)
                found.append((piece.offset + at, start + at, size))
            start += piece.num_bytes
        return found

    def _run(self) -> None:
        try:
            while (request := self._take_request()) is not None:
                number, index = request
                order = number % len(self._items)
                offset, start, size = self._requests[order][index]
                view = self._buffers[number % self._num_buffers].numpy().data[start : start + size]
                self._file.read(view, offset, self.throttle.take)
                self._finish(number, size)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            if not isinstance(error, OSError):
                raise

    def _take_request(self) -> tuple[int, int] | None:
        """The next request, once its buffer is free; None when closed."""
        with self._changed:
            while not self._is_closed and self._error is None and self._next[0] >= self._limit():
                self._changed.wait()
            if self._is_closed or self._error is not None:
                return None
            number, index = self._next
            count = len(self._requests[number % len(self._items)])
            if index == 0:
                self._left[number] = count
            self._next = (number, index + 1) if index + 1 < count else (number + 1, 0)
            return number, index

    def _limit(self) -> int:
        """Layers before this one may be read now."""
        free = min(self._given, self.num_loads) + self._num_buffers
        return free if self._overlaps else min(free, self._wanted)

    def _finish(self, number: int, size: int) -> None:
        with self._changed:
            self.bytes_read += size
            self._left[number] -= 1
            # Layers become available in order, even if a later one was read first.
            while self._left.get(self.num_loads) == 0:
                del self._left[self.num_loads]
                self._announce(self.num_loads)
                self.num_loads += 1
            self._changed.notify_all()

    def _announce(self, number: int) -> None:
        buffer, start = self._buffers[number % self._num_buffers], 0
        for piece in self._items[number % len(self._items)]:
            for place in piece.places:
                at = start + place.offset - piece.offset
                self._moved(place.name, buffer[at : at + place.num_bytes])
            start += piece.num_bytes
