"""Pages on their way to another instance, packed and sealed while they are sent, by whatever thread sends them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator

from quire.cache.exports import Export
from quire.cache.run import Pages
from quire.stores.seal import Seal


class Cargo:
    """The extents of some runs: of each layer one for each run. A `Bulk` of `cluster.links`.

    let_go  called with the pages when they are sent, or will not be. It ends their holds on the engine's thread
    """

    def __init__(self, pages: list[Pages], num_layers: int, seal: Seal, let_go: Callable[[list[Pages]], None]) -> None:
        self.num_extents = num_layers * len(pages)
        self.num_bytes = 0
        self._pages = pages
        self._num_layers = num_layers
        self._seal = seal
        self._let_go = let_go

    def pack(self) -> Iterator[memoryview]:
        """The extents, each valid until the next one is taken. `num_bytes` counts them."""
        layers = range(self._num_layers)
        packed = [(b"".join(each.run.names), each.pack(layers)) for each in self._pages]
        for _ in layers:
            for names, extents in packed:
                extent = next(extents)
                self._seal.close(names, extent)
                self.num_bytes += len(extent)
                yield extent

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of the pages of each run: all but headers."""
        return [each.num_bytes for each in self._pages]

    def done(self) -> None:
        """Ends the holds."""
        self._let_go(self._pages)


class Shipment:
    """An exported sequence that can be sent. What is being sent stays, even if the attempt ends meanwhile.

    let_go  called once it is closed and nothing of it is being sent, by any thread
    """

    def __init__(self, export: Export, num_layers: int, seal: Seal, let_go: Callable[[], None]) -> None:
        self._export = export
        self._num_layers = num_layers
        self._seal = seal
        self._let_go = let_go
        self._num_sending = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def cargo(self, groups: Collection[Collection[int]]) -> Cargo | None:
        """Groups of parts, to be sent; None if it is closed or has no such parts. Whoever gets it calls its `done`."""
        try:
            pages = [self._export.pages(group) for group in groups]
        except ValueError:
            return None
        with self._lock:
            if self._is_closed or not pages:
                return None
            self._num_sending += 1
        return Cargo(pages, self._num_layers, self._seal, self._sent)

    def close(self) -> None:
        """Nothing more will be sent."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            is_last = not was_closed and not self._num_sending
        if is_last:
            self._let_go()

    def _sent(self, pages: list[Pages]) -> None:
        with self._lock:
            self._num_sending -= 1
            is_last = self._is_closed and not self._num_sending
        if is_last:
            self._let_go()
