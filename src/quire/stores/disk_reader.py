"""Reads: threads that deliver the layers of transfers, the oldest transfer first, in the order of its layers."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from dataclasses import dataclass, field

from quire.cache.run import layer_of
from quire.cache.store import Transfer
from quire.errors import ExtentError, QuireError
from quire.rate_limited_warning import RateLimitedWarning
from quire.stores.catalog import Catalog, CatalogEntry, RunFile
from quire.stores.circuit_breaker import CircuitBreaker
from quire.stores.direct import AlignedBuffer, DirectFile, lower_thread_priority, padded
from quire.stores.folder import DRAFT_SUFFIX, RUNS_SUFFIX
from quire.stores.writer_folder import WriterFolder

log = logging.getLogger("quire")

NUM_READERS = 2
MIN_BYTES, MAX_BYTES = 1 << 20, 8 << 20
"""Bytes of one read: consecutive layers until one megabyte is reached, at most eight, except for one larger extent."""

STUCK_SECONDS = 10.0
MAX_STUCK = 8
"""Number of hanging readers that are replaced."""
FAILURES = 8
"""Failed reads in a row that turn the tier off."""


@dataclass(order=True)
class ReadRequest:
    """A range of layers of a run, for a transfer. age: number of the transfer."""

    age: int
    layer: int
    order: int
    transfer: Transfer = field(compare=False)
    entry: CatalogEntry = field(compare=False)
    end: int = field(compare=False)


@dataclass(eq=False)
class ReaderThread:
    """A thread that reads. call: the request that waits for the disk, and since when; None: none."""

    thread: threading.Thread | None = None
    call: tuple[ReadRequest, float] | None = None
    is_lost: bool = False


class DiskReader:
    """The queue of reads and its threads.

    A reader that hangs for ten seconds fails its transfer, and another one replaces it.
    """

    def __init__(self, writer_folder: WriterFolder, catalog: Catalog, circuit_breaker: CircuitBreaker) -> None:
        self.num_read = self.num_failed = self.bytes_read = 0
        self.seconds = self.cpu_seconds = 0.0
        self.stuck_seconds = STUCK_SECONDS
        self._lost_runs = RateLimitedWarning(log)
        self._catalog, self._writer_folder, self._circuit_breaker = catalog, writer_folder, circuit_breaker
        self._queue: list[ReadRequest] = []
        self._changed = threading.Condition()
        self._ages, self._orders = itertools.count(), itertools.count()
        self._is_closed = False
        self._stopping = threading.Event()
        self._num_started = 0
        self._readers: list[ReaderThread] = []
        for _ in range(NUM_READERS):
            self._start_reader()
        self._watchdog = threading.Thread(target=self._watch, name="quire-disk-watchdog", daemon=True)
        self._watchdog.start()

    def submit(self, transfer: Transfer, entries: list[CatalogEntry]) -> None:
        """Queues all layers of a transfer."""
        age, requests = next(self._ages), []
        for entry in entries:
            first = size = 0
            for layer, length in enumerate(entry.lengths):
                if size and (size >= MIN_BYTES or size + padded(length) > MAX_BYTES):
                    requests.append(ReadRequest(age, first, next(self._orders), transfer, entry, layer))
                    first, size = layer, 0
                size += padded(length)
            requests.append(ReadRequest(age, first, next(self._orders), transfer, entry, len(entry.lengths)))
        with self._changed:
            if not self._is_closed and any(not reader.is_lost for reader in self._readers):
                for request in requests:
                    heapq.heappush(self._queue, request)
                self._changed.notify_all()
                return
        transfer.fail(QuireError("the disk tier has stopped, or does not answer"))

    def close(self) -> None:
        """Fails queued requests and ends the threads, except for hanging ones."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._stopping.set()
            left, self._queue = self._queue, []
            self._changed.notify_all()
        for request in left:
            request.transfer.fail(QuireError("the disk tier was closed"))
        threads = [self._watchdog, *(each.thread for each in self._readers if each.thread and not each.is_lost)]
        for thread in threads:
            thread.join(1.0)

    def _start_reader(self) -> None:
        reader = ReaderThread()
        name = f"quire-disk-reader-{self._num_started}"
        self._num_started += 1
        reader.thread = threading.Thread(target=self._run, args=(reader,), name=name, daemon=True)
        with self._changed:
            self._readers.append(reader)
        reader.thread.start()

    def _run(self, reader: ReaderThread) -> None:
        lower_thread_priority()
        buffer = AlignedBuffer()
        while self._continues(reader):
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                request = heapq.heappop(self._queue)
            begun = time.thread_time()
            try:
                if not request.transfer.is_over:
                    self._serve(reader, request, buffer)
            except Exception as error:
                log.exception("a read of the disk tier failed")
                request.transfer.fail(QuireError(f"a read failed: {error}"))
            finally:
                reader.call = None
                self.cpu_seconds += time.thread_time() - begun

    def _continues(self, reader: ReaderThread) -> bool:
        """Whether a reader continues. A reader that hung ends if another one has replaced it."""
        with self._changed:
            if sum(not each.is_lost for each in self._readers if each is not reader) >= NUM_READERS:
                self._readers.remove(reader)
                return False
            reader.is_lost = False
            return True

    def _serve(self, reader: ReaderThread, request: ReadRequest, buffer: AlignedBuffer) -> None:
        entry, transfer = request.entry, request.transfer
        if not self._catalog.acquire(entry):
            transfer.fail(QuireError("the disk tier has lost a run"), entry.run)
            return
        file = entry.file
        try:
            if entry.staged:
                for layer in range(request.layer, request.end):
                    transfer.arrive(entry.run, entry.staged[layer].extent)
            else:
                self._bring(reader, request, buffer)
                self._circuit_breaker.succeed()
            self.num_read += 1
        except FileNotFoundError as error:
            self._fail(request, f"{error.filename} is gone", file)
        except (OSError, ExtentError) as error:
            if reader.is_lost:  # the watchdog has reported it
                return
            where = "a private file" if file is None else str(file.path)
            self._fail(request, f"{where}, {error}", None)
        finally:
            self._catalog.release(entry)

    def _bring(self, reader: ReaderThread, request: ReadRequest, buffer: AlignedBuffer) -> None:
        """Reads, verifies and delivers the layers of a request. Raises OSError and ExtentError."""
        entry = request.entry
        lengths = entry.lengths[request.layer : request.end]
        view = buffer.view(sum(map(padded, lengths)))
        begun = time.monotonic()
        self._read(reader, request, view)
        self.seconds += time.monotonic() - begun
        self.bytes_read += len(view)
        names, start, signer = b"".join(entry.run.names), 0, self._writer_folder.signer
        for layer, length in enumerate(lengths, request.layer):
            extent = view[start : start + length]
            signer.verify(names, extent)
            if layer_of(extent) != layer:
                raise ExtentError(f"layer {layer_of(extent)} in the place of layer {layer}")
            request.transfer.arrive(entry.run, extent)
            start += padded(length)

    def _read(self, reader: ReaderThread, request: ReadRequest, view: memoryview) -> None:
        def pace(num_bytes: int) -> None:
            reader.call = None  # waiting for the throttle does not count as hanging
            self._writer_folder.throttle.take(num_bytes)
            reader.call = request, time.monotonic()

        entry = request.entry
        offset = entry.offset_of(request.layer)
        try:
            if entry.private_file is not None:
                entry.private_file.read(view, offset, pace)
                return
            assert entry.file is not None, "a run without a place"
            reader.call = request, time.monotonic()
            file = self._open(entry.file)
            try:
                file.read(view, offset, pace)
            finally:
                file.close()
        finally:
            reader.call = None

    def _open(self, file: RunFile) -> DirectFile:
        path, is_direct = file.path, self._writer_folder.is_direct
        try:
            return DirectFile(path, is_direct=is_direct)
        except FileNotFoundError:
            if path.suffix != DRAFT_SUFFIX:
                raise
            # The file got its final name meanwhile, and `path` may still have the old one.
            return DirectFile(path.with_suffix(RUNS_SUFFIX), is_direct=is_direct)

    def _fail(self, request: ReadRequest, reason: str, removed: RunFile | None) -> None:
        """Fails a transfer and forgets the run. If the file was removed, forgets all its runs."""
        self.num_failed += 1
        is_collected = removed is not None and (removed.is_removed or not removed.is_own)
        if removed is not None:
            self._catalog.drop_file(removed)
        else:
            self._catalog.drop([request.entry])
        if is_collected:
            log.debug("a run was collected before it was read: %s", reason)
        else:
            self._lost_runs.warn(f"the disk tier lost a run, which is computed again: {reason}")
            self._circuit_breaker.fail(f"reads fail ({reason})")
        request.transfer.fail(QuireError(f"the disk tier lost a run: {reason}"), request.entry.run)

    def _watch(self) -> None:
        """Replaces hanging readers. Does not touch the disk itself."""
        while not self._stopping.wait(min(1.0, self.stuck_seconds / 4)):
            now = time.monotonic()
            for reader in list(self._readers):
                call = reader.call  # read once: the call may end, and another one begin
                if call is not None and now - call[1] > self.stuck_seconds and not reader.is_lost:
                    self._replace(reader, call[0])

    def _replace(self, reader: ReaderThread, request: ReadRequest) -> None:
        reader.is_lost = True
        reason = f"a read made no progress for {self.stuck_seconds:.0f} s"
        self._fail(request, reason, None)
        if sum(each.is_lost for each in self._readers) < MAX_STUCK:
            self._start_reader()
            return
        with self._changed:
            left = [] if any(not each.is_lost for each in self._readers) else self._queue
            self._queue = [] if left else self._queue
        for each in left:
            each.transfer.fail(QuireError(f"the disk tier does not answer: {reason}"))
