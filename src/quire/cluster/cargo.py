"""Pages on their way to another instance, packed and sealed while they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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

    def done(self) -> None:
        """Ends the holds."""
        self._let_go(self._pages)
