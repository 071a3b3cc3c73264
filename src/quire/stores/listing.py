"""The stored runs of a folder, for listings: read directly from the indexes, without the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.cache.namespace import Namespace
from quire.errors import ExtentError
from quire.stores.direct import padded
from quire.stores.folder import RUNS_SUFFIX, StoreFolder
from quire.stores.folder_view import used_by_others
from quire.stores.index import DamagedIndexError, RunIndex
from quire.stores.signer import ExtentSigner


@dataclass(frozen=True)
class StoredRun:
    """A stored run.

    names         keys of its chunks
    parent        key of the chunk before, or of the namespace
    start         index of the first chunk in its sequence
    num_bytes     bytes on the disk
    used          time of the last use of its file, in seconds since the epoch
    pinned_until  end of its pin, in seconds since the epoch; 0: not pinned
    is_own_namespace  whether this engine can read it
    """

    salt: str
    names: tuple[bytes, ...]
    parent: bytes
    start: int
    num_bytes: int
    used: float
    pinned_until: float
    is_own_namespace: bool


def list_stored(
    folder: StoreFolder, signer: ExtentSigner, digest: bytes, visible: Callable[[str], bool]
) -> list[StoredRun]:
    """All runs in the indexes of a folder with visible salts, the last used first. Skips damaged runs."""
    found: list[StoredRun] = []
    for subfolder in folder.subfolders():
        with contextlib.suppress(DamagedIndexError, OSError), RunIndex(subfolder, is_writer=False) as index:
            found += _list_subfolder(subfolder, index, signer, digest, visible)
    return sorted(found, key=lambda stored: -stored.used)


def _list_subfolder(
    subfolder: Path, index: RunIndex, signer: ExtentSigner, digest: bytes, visible: Callable[[str], bool]
) -> list[StoredRun]:
    found, pins = [], index.pins()
    files = {row.number: row for row in index.files()}
    for row, _, header in index.headers(index.runs(), signer):
        file = files.get(row.file)
        if isinstance(header, ExtentError) or file is None:  # damaged, or removed meanwhile
            continue
        run, path = header.run, subfolder / f"{row.file}{RUNS_SUFFIX}"
        salt = run.namespace.salt if isinstance(run.namespace, Namespace) else ""
        if visible(salt):
            num_bytes = sum(map(padded, header.lengths))
            used = max(file.used, used_by_others(path))
            until = max((pins.get(name, 0.0) for name in run.names), default=0.0)
            is_ours = row.digest == digest
            found.append(StoredRun(salt, run.names, run.parent, run.start, num_bytes, used, until, is_ours))
    return found
