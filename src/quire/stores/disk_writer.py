"""The writer: the thread that writes staged runs, updates the index, collects files and polls other sub-folders."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import threading
import time
from collections import deque

from quire.errors import ConfigError
from quire.stores.catalog import Catalog, CatalogEntry
from quire.stores.circuit_breaker import CircuitBreaker
from quire.stores.direct import lower_thread_priority, measure_speed
from quire.stores.index import DamagedIndexError
from quire.stores.other_writers import OtherWriters
from quire.stores.writer_folder import WriterFolder

log = logging.getLogger("quire")

IDLE_SECONDS = 0.1
"""Seconds without a queued run after which a file is finished."""
TICK_SECONDS = 1.0
NOTE_SECONDS = 5.0
ROOM_SECONDS = 5.0
"""Seconds for which a run waits for other writers to give up room: they check once a second, and may collect files."""
TRY_SECONDS = 0.25
FULL_SECONDS = 60.0
"""Seconds for which further runs do not wait after a wait that brought no room."""
MEASURED_BYTES, MIN_MEASURED_BYTES = 8 << 20, 1 << 20


class DiskWriter:
    """Writes runs in the order in which they were queued.

    work  lock of all changes in the sub-folder; its holder sees no half-done change
    """

    def __init__(
        self, writer_folder: WriterFolder, catalog: Catalog, circuit_breaker: CircuitBreaker, lifetime: float | None
    ) -> None:
        self.num_refused = 0
        self.cpu_seconds = 0.0
        self.work = threading.RLock()
        self._writer_folder, self._catalog, self._circuit_breaker, self._lifetime = (
            writer_folder,
            catalog,
            circuit_breaker,
            lifetime,
        )
        self._other_writers = OtherWriters(writer_folder, catalog)
        self._queue: deque[CatalogEntry] = deque()
        self._changed = threading.Condition()
        self._is_busy = self._is_urgent = self._is_closing = False
        self._pins_changed = False
        self._room_until = -math.inf
        self._written = self._ticked = self._noted = time.monotonic()
        self._join()
        self._thread = threading.Thread(target=self._run, name="quire-disk-writer", daemon=True)
        self._thread.start()

    def put(self, entry: CatalogEntry) -> None:
        """Queues a staged run."""
        with self._changed:
            self._queue.append(entry)
            self._changed.notify_all()

    def note_pins(self) -> None:
        """Requests that the changed pins be written to the index."""
        with self._changed:
            self._pins_changed = self._is_urgent = True
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Waits until every stored run that is still found is on the disk and in the index. Returns False on a timeout
        or a failed write. A run without room is dropped, as if it had been collected.
        """
        end = time.monotonic() + seconds
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            while self._queue or self._is_busy or self._is_urgent:
                left = end - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._changed.wait(left)
        return self._circuit_breaker.reason is None

    def close(self) -> None:
        """Ends the thread and gives the sub-folder up. A hanging thread keeps the sub-folder until the process ends."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(2.0)
        if self.work.acquire(timeout=0.5):
            try:
                for step in (self._note_uses, self._writer_folder.close, self._other_writers.close):
                    with contextlib.suppress(OSError, DamagedIndexError):
                        step()
            finally:
                self.work.release()

    def measure(self) -> float | None:
        """Bytes per second of writing and reading a file in free room; None if there is no room, or if that fails."""
        writer_folder = self._writer_folder
        with self.work, contextlib.suppress(OSError):
            size = min(MEASURED_BYTES, writer_folder.free_bytes) // MIN_MEASURED_BYTES * MIN_MEASURED_BYTES
            if size:
                return measure_speed(
                    writer_folder.subfolder, size, writer_folder.throttle.take, is_direct=writer_folder.is_direct
                )
        return None

    def _run(self) -> None:
        lower_thread_priority()
        while True:
            with self._changed:
                while not (self._queue or self._is_urgent or self._is_closing):
                    seconds = self._seconds_to_wait()
                    if seconds <= 0:
                        break
                    self._changed.wait(seconds)
                if self._is_closing and not self._queue:
                    return
                entry = self._queue.popleft() if self._queue else None
                is_urgent = self._is_urgent and entry is None
                if is_urgent:  # later requests get their own turn
                    self._is_urgent = False
                self._is_busy = True
            begun = time.thread_time()
            waits = False
            try:
                with self.work:
                    waits = self._work(entry, is_urgent)
            except Exception as error:  # a defect of the tier must not stop the engine
                log.exception("the disk tier failed")
                self._circuit_breaker.fail(f"an error ({error})")
            finally:
                if entry is not None and not waits:
                    self._give_up(entry)
                self.cpu_seconds += time.thread_time() - begun
                with self._changed:
                    if waits and entry is not None and not self._is_closing:
                        self._queue.appendleft(entry)
                    self._is_busy = False
                    self._changed.notify_all()
                    if waits:
                        self._changed.wait_for(lambda: self._is_closing, TRY_SECONDS)

    def _seconds_to_wait(self) -> float:
        now = time.monotonic()
        seconds = self._ticked + TICK_SECONDS - now
        if self._writer_folder.has_draft and self._circuit_breaker.is_on:
            seconds = min(seconds, self._written + IDLE_SECONDS - now)
        return seconds

    def _work(self, entry: CatalogEntry | None, is_urgent: bool) -> bool:
        """Performs all due work. Returns whether the run waits for room."""
        waits = False
        try:
            if self._circuit_breaker.is_on:
                self._prepare()
                if entry is not None:
                    waits = not self._write(entry) and self._waits_for_room()
                elif self._writer_folder.has_draft and (is_urgent or time.monotonic() >= self._written + IDLE_SECONDS):
                    self._writer_folder.commit()
                    self._circuit_breaker.succeed()
                if is_urgent or time.monotonic() >= self._ticked + TICK_SECONDS:
                    self._tick()
            elif time.monotonic() >= self._ticked + TICK_SECONDS:
                self._ticked = time.monotonic()
                if self._writer_folder.is_intact:  # other writers may need the room, and runs may have expired
                    self._tick()
        except OSError as error:
            self._circuit_breaker.fail(f"writing to {self._writer_folder.subfolder} failed ({error.strerror or error})")
        except ConfigError as error:  # the folder cannot be recreated
            self._circuit_breaker.fail(str(error))
        except DamagedIndexError as error:
            log.warning("the index of %s is damaged, and its runs are lost: %s", self._writer_folder.subfolder, error)
            with contextlib.suppress(OSError):
                self._writer_folder.reset()
        return waits

    def _give_up(self, entry: CatalogEntry) -> None:
        """Forgets a run that was not written."""
        if entry.file is None and entry.private_file is None and not entry.is_dropped:
            self.num_refused += 1
            self._catalog.drop([entry])

    def _prepare(self) -> None:
        """Raises OSError if the folder is gone; recreates it if writing is being tried again."""
        if not self._writer_folder.is_intact:
            if self._circuit_breaker.reason is None:
                raise FileNotFoundError(errno.ENOENT, "the folder was removed")
            self._other_writers.close()
            with contextlib.suppress(OSError, DamagedIndexError):
                self._writer_folder.close()
            self._writer_folder.open()
            self._join()

    def _join(self) -> None:
        """Shrinks to the quota, once the other sub-folders' contents and their pins are known."""
        self._other_writers.poll()
        with contextlib.suppress(OSError, DamagedIndexError):
            self._writer_folder.make_room(0)

    def _write(self, entry: CatalogEntry) -> bool:
        """Writes a run. Returns False if there is no room for it."""
        if entry.is_dropped:
            return True
        has_room = self._writer_folder.write(entry)
        if has_room:
            self._room_until = -math.inf
            if entry.private_file is not None:
                self._circuit_breaker.succeed()
        self._written = time.monotonic()
        return has_room

    def _waits_for_room(self) -> bool:
        """Whether other writers may soon give up the room that the next run needs."""
        now = time.monotonic()
        if now > self._room_until + FULL_SECONDS:
            self._room_until = now + ROOM_SECONDS
        return self._writer_folder.quotas.is_short_of_room and now < self._room_until

    def _tick(self) -> None:
        self._ticked = time.monotonic()
        self._writer_folder.forget()
        self._writer_folder.shrink_to_fair_share()
        if self._pins_changed:
            self._pins_changed = False
            if not self._writer_folder.set_pins():
                self._pins_changed = True
        if self._lifetime is not None:
            self._writer_folder.indexed.remove_expired(self._lifetime)
        if self._ticked >= self._noted + NOTE_SECONDS:
            self._noted = self._ticked
            self._note_uses()
        self._other_writers.poll()

    def _note_uses(self) -> None:
        self._writer_folder.indexed.note_uses()
        self._other_writers.note_uses()
