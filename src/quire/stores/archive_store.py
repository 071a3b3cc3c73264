"""A read-only store of an archive's runs, for an engine that checks them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quire.cache.run import Run
from quire.cache.store import Transfer
from quire.errors import QuireError
from quire.stores.archive import RunArchive
from quire.stores.tiers import Tier


class ArchiveStore(Tier):
    """The runs of an open archive, delivered at once, in the caller's thread.

    hidden  chunks that `find` does not return
    """

    name = "parcel"
    keeps = True

    def __init__(self, archive: RunArchive) -> None:
        self.hidden: set[bytes] = set()
        self._archive = archive
        self._runs = {each.header.run: each for each in archive.runs}
        self._by_name = {name: run for run in self._runs for name in run.names}

    def find(self, name: bytes) -> Run | None:
        """The run with this chunk, unless it is hidden."""
        return None if name in self.hidden else self._by_name.get(name)

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Delivers the layers of some runs."""
        try:
            for run in runs:
                transfer.sources[run] = self.name
                for extent in self._archive.extents(self._runs[run]):
                    transfer.arrive(run, extent)
        except OSError as error:
            transfer.fail(QuireError(f"the file cannot be read: {error.strerror or error}"))
        except QuireError as error:
            transfer.fail(error)

    def drop(self, names: Iterable[bytes]) -> None:
        """Does nothing: the runs stay in the file."""

    def close(self) -> None:
        """Does nothing: the owner closes the archive."""

    def stats(self) -> dict[str, Any]:
        """The number of chunks."""
        return {"bytes": 0, "cap_bytes": 0, "chunks": len(self._by_name), "bytes_read": 0, "bytes_written": 0,
                "is_on": True}  # fmt: skip
