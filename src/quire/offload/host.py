"""The host's memory as a tier of a computing device: chunks move between the two, or the host attends to them.

It replaces a `Mover` and its file. On a GPU, copies run on streams of their own, so that they overlap with kernels. A
device without streams copies at once; tests use one to count the bytes that cross.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.memory import huge_pages
from quire.offload.mover import NOTHING, IoRequest, IoTicket
from quire.options import format_bytes


def pinned(num_bytes: int, device: torch.device, owner: object) -> Tensor:
    """Pinned host memory, uint8 [num_bytes], for asynchronous copies of a device, valid as long as its owner lives.

    torch rounds pinned memory up to a power of two, which adds about half to a model's matrices.
    Raises ConfigError if the memory is too small.
    """
    memory = huge_pages(num_bytes)
    if device.type == "cuda":
        runtime, address = torch.cuda.cudart(), memory.data_ptr()
        result = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if result:
            raise ConfigError(f"{format_bytes(num_bytes)} of the host's memory cannot be pinned (CUDA error {result})")
        weakref.finalize(owner, runtime.cudaHostUnregister, address)
    return memory


class _Copied(IoTicket):
    """Copies on a stream. `wait` makes the device wait, not the host."""

    def __init__(self, event: torch.cuda.Event) -> None:
        super().__init__(0, (), "")
        self.event = event

    def wait(self) -> None:
        """See IoTicket."""
        torch.cuda.current_stream().wait_event(self.event)


class HostMemory:
    """See `Mover`: reads are copies to the device, writes are copies to the host.

    memory         uint8 [num_bytes] of the host, pinned if the device is a GPU
    bytes_read, bytes_written  bytes of chunks that moved
    bytes_crossed  bytes of queries and partials of attention on the host, in both directions
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises ConfigError if there is not that much memory."""
        self.device = device
        self._is_gpu = device.type == "cuda"
        self.memory = pinned(num_bytes, device, self)
        self._to_device = torch.cuda.Stream(device) if self._is_gpu else None
        self._to_host = torch.cuda.Stream(device) if self._is_gpu else None
        self.bytes_read = self.bytes_written = self.bytes_crossed = 0

    def read(self, parts: Iterable[IoRequest], *after: IoTicket) -> IoTicket:
        """Starts to fill the views, after all earlier work of the device and the tickets `after`."""
        return self._copy(list(parts), False, after)

    def write(self, parts: Iterable[IoRequest], *after: IoTicket) -> IoTicket:
        """Starts to write the views, after all earlier work of the device and the tickets `after`."""
        return self._copy(list(parts), True, after)

    def settle(self) -> None:
        """Waits until nothing moves."""
        for stream in (self._to_device, self._to_host):
            if stream is not None:
                stream.synchronize()

    def to_host(self, tensor: Tensor) -> Tensor:
        """Starts a copy to the host; `arrived` waits for it. The tensor must stay alive until then."""
        self.bytes_crossed += tensor.nbytes
        if not self._is_gpu:
            return tensor.clone()
        found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with self._after_device(self._to_host):
            found.copy_(tensor, non_blocking=True)
        return found

    def arrived(self) -> None:
        """Waits for the copies of `to_host`."""
        if self._to_host is not None:
            self._to_host.synchronize()

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy on the device. The tensor may be overwritten once this returns."""
        self.bytes_crossed += tensor.nbytes
        if not self._is_gpu:
            return tensor.clone()
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _copy(self, parts: list[IoRequest], is_write: bool, after: tuple[IoTicket, ...]) -> IoTicket:
        if not parts:
            return NOTHING
        stream = self._to_host if is_write else self._to_device
        with self._after_device(stream):
            for ticket in after:
                ticket.wait()
            for offset, view in parts:
                here = self.memory[offset : offset + len(view)]
                target, source = (here, view) if is_write else (view, here)
                target.copy_(source, non_blocking=True)
        num_bytes = sum(len(part.view) for part in parts)
        self.bytes_written += num_bytes * is_write
        self.bytes_read += num_bytes * (not is_write)
        return NOTHING if stream is None else _Copied(stream.record_event())

    @contextlib.contextmanager
    def _after_device(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield
