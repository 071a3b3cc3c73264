"""Pages on their way to another instance, packed and signed while they are sent, by the sending thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator

from quire.cache.exports import ExportedSequence
from quire.cache.run import HeldPages
from quire.stores.signer import ExtentSigner


class OutgoingPages:
    """The extents of some runs: for each layer, one extent per run. A `Bulk` of `cluster.connections`.

    release  called with the pages when they were sent or will not be sent. It ends their holds on the engine's thread
    """

    def __init__(
        self, pages: list[HeldPages], num_layers: int, signer: ExtentSigner, release: Callable[[list[HeldPages]], None]
    ) -> None:
        self.num_extents = num_layers * len(pages)
        self.num_bytes = 0
        self._pages = pages
        self._num_layers = num_layers
        self._signer = signer
        self._release = release

    def pack(self) -> Iterator[memoryview]:
        """Yields the extents, each valid until the next one is taken. Counts them in `num_bytes`."""
        layers = range(self._num_layers)
        packed = [(b"".join(each.run.names), each.pack(layers)) for each in self._pages]
        for _ in layers:
            for names, extents in packed:
                extent = next(extents)
                self._signer.sign(names, extent)
                self.num_bytes += len(extent)
                yield extent

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of the pages of each run, without headers."""
        return [each.num_bytes for each in self._pages]

    def done(self) -> None:
        """Ends the holds."""
        self._release(self._pages)


class OutgoingExport:
    """An exported sequence that can be sent. Pages that are being sent stay, even if the attempt ends meanwhile.

    release  called by any thread, once the export is closed and none of its pages are being sent
    """

    def __init__(
        self, export: ExportedSequence, num_layers: int, signer: ExtentSigner, release: Callable[[], None]
    ) -> None:
        self._export = export
        self._num_layers = num_layers
        self._signer = signer
        self._release = release
        self._num_sending = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def outgoing_pages(self, groups: Collection[Collection[int]]) -> OutgoingPages | None:
        """Groups of parts as a bulk; None if the export is closed or lacks a part. The caller must call `done`."""
        try:
            pages = [self._export.pages(group) for group in groups]
        except ValueError:
            return None
        with self._lock:
            if self._is_closed or not pages:
                return None
            self._num_sending += 1
        return OutgoingPages(pages, self._num_layers, self._signer, self._sent)

    def close(self) -> None:
        """Closes the export: nothing more will be sent."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            is_last = not was_closed and not self._num_sending
        if is_last:
            self._release()

    def _sent(self, pages: list[HeldPages]) -> None:
        with self._lock:
            self._num_sending -= 1
            is_last = self._is_closed and not self._num_sending
        if is_last:
            self._release()
