"""Files that are read and written past the page cache, and page-aligned memory for them.

If the file system refuses O_DIRECT, their data is dropped from the page cache afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

BLOCK_BYTES = 4096
"""Alignment of offsets, lengths and memory of direct requests."""
NICE = 10
"""Niceness of threads that read and write."""
REQUEST_BYTES = 4 << 20
"""Bytes of a single call; a quarter of a second with a throttle of 16 MB/s."""

MEASURE_PREFIX = ".quire-measure-"

_REFUSED = errno.EINVAL, errno.EOPNOTSUPP
"""Errors of a file system without direct requests."""

_MAX_VIEWS = 512  # buffers of one pwritev; Linux takes 1,024


def lower_thread_priority() -> None:
    """Lowers the priority of this thread: threads that compute tokens for running requests go first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def padded(num_bytes: int) -> int:
    """Rounds up to a multiple of a block."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


class AlignedBuffer:
    """Page-aligned memory that grows to the largest requested size."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def view(self, num_bytes: int) -> memoryview:
        """The first bytes of the memory. A later, larger view has other memory."""
        if len(self._view) < num_bytes:
            self._view = memoryview(mmap.mmap(-1, padded(num_bytes)))
        return self._view[:num_bytes]


def allows_direct(folder: Path) -> bool:
    """Whether files of a folder take direct writes: some file systems refuse only the write. A full disk counts as one
    that takes them. Raises OSError.
    """
    path = folder / f"{MEASURE_PREFIX}{os.getpid()}.tmp"
    path.unlink(missing_ok=True)
    try:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            return os.pwrite(file, AlignedBuffer().view(BLOCK_BYTES), 0) == BLOCK_BYTES
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and path.exists():
            return True
        raise
    finally:
        path.unlink(missing_ok=True)


def reads_direct(path: Path) -> bool:
    """Whether a file takes direct reads. Its folder may be read-only. Raises OSError."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            os.preadv(file, [AlignedBuffer().view(BLOCK_BYTES)], 0)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        raise
    return True


def measure_speed(folder: Path, num_bytes: int, before: Callable[[int], None], *, is_direct: bool) -> float:
    """Bytes per second of writing and then reading an unnamed file in a folder. A kill leaves no file behind.
    before: as in `DirectFile.read`. Raises OSError.
    """
    view = AlignedBuffer().view(num_bytes)
    view[:] = os.urandom(num_bytes)  # some file systems compress, and store zeros for nothing
    with measured_file(folder, is_direct=is_direct) as file:
        file.path.unlink(missing_ok=True)
        begun = time.monotonic()
        file.write([view], 0, before)
        file.sync()
        file.read(view, 0, before)
        return 2 * num_bytes / (time.monotonic() - begun)


@contextlib.contextmanager
def measured_file(folder: Path, *, is_direct: bool) -> Iterator[DirectFile]:
    """A new file to measure a disk with, which is removed at the end. Raises OSError."""
    file = DirectFile(folder / f"{MEASURE_PREFIX}{os.urandom(8).hex()}.tmp", is_direct=is_direct, is_new=True)
    try:
        yield file
    finally:
        file.close()
        file.path.unlink(missing_ok=True)


class DirectFile:
    """An open file. Every read and write is complete, or raises OSError."""

    def __init__(self, path: Path, *, is_direct: bool, is_new: bool = False) -> None:
        """is_new: created, with mode 0600; an existing one is an error. Otherwise it is opened for reading."""
        self.path = path
        self._is_direct = is_direct
        flags = os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0)
        flags |= os.O_CREAT | os.O_EXCL | os.O_RDWR if is_new else os.O_RDONLY | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)

    def read(self, view: memoryview, offset: int, before: Callable[[int], None]) -> None:
        """Fills the view. before: called with the number of bytes before each request."""
        for start in range(0, len(view), REQUEST_BYTES):
            part = view[start : start + REQUEST_BYTES]
            before(len(part))
            done = 0
            while done < len(part):
                num_bytes = os.preadv(self._descriptor, [part[done:]], offset + start + done)
                if num_bytes == 0 or (self._is_direct and num_bytes % BLOCK_BYTES):
                    raise OSError(errno.EIO, f"a read of {len(part)} bytes found {done + num_bytes}", str(self.path))
                done += num_bytes
        self._forget(offset, len(view))

    def write(self, views: Sequence[memoryview], offset: int, before: Callable[[int], None]) -> None:
        """Writes all views in order. before: as in `read`."""
        start, pending, size = offset, list[memoryview](), 0
        for view in views:
            for at in range(0, len(view), REQUEST_BYTES):
                part = view[at : at + REQUEST_BYTES]
                if pending and (size + len(part) > REQUEST_BYTES or len(pending) == _MAX_VIEWS):
                    self._write(pending, size, start, before)
                    start, pending, size = start + size, [], 0
                pending.append(part)
                size += len(part)
        if pending:
            self._write(pending, size, start, before)

    def _write(self, views: list[memoryview], size: int, offset: int, before: Callable[[int], None]) -> None:
        before(size)
        done = os.pwritev(self._descriptor, views, offset)
        while done < size:  # a full disk writes a part, and reports the reason at the next call
            rest = memoryview(b"".join(views))[done:]
            block = AlignedBuffer().view(len(rest))
            block[:] = rest
            num_bytes = (
                0 if self._is_direct and done % BLOCK_BYTES else os.pwrite(self._descriptor, block, offset + done)
            )
            if num_bytes == 0:
                raise OSError(errno.EIO, f"a write of {size} bytes wrote {done}", str(self.path))
            done += num_bytes

    def sync(self) -> None:
        """Waits until everything is on the disk, and drops it from the page cache."""
        os.fsync(self._descriptor)
        self._forget(0, 0)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _forget(self, offset: int, num_bytes: int) -> None:
        if not self._is_direct:
            os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
