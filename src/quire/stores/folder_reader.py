"""A disk store's folder for its administrator: its contents, written by any engine, and their removal.

Reading changes nothing and works while engines write. Only sub-folders without a live writer are cleared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quire.cache.namespace import Namespace
from quire.errors import ConfigError, ExtentError
from quire.folders import user_path
from quire.stores.collect import clear_subfolder
from quire.stores.folder import (
    DRAFT_SUFFIX,
    INDEX_NAME,
    LOCK_NAME,
    SECRET_NAME,
    VERSION,
    FileLock,
    disk_bytes,
    number_of,
    remove_drafts,
    remove_file,
    run_files,
    writer_bytes,
    writer_subfolders,
)
from quire.stores.folder_view import used_by_others
from quire.stores.headers import RunHeader
from quire.stores.index import DamagedIndexError, RunIndex
from quire.stores.quotas import cap_of, lower_quota
from quire.stores.signer import SECRET_BYTES, ExtentSigner

SHOWN_NAMES = 5


@dataclass(frozen=True)
class LocatedRun:
    """A run in a folder: its header as bytes and parsed, and the place of its extents."""

    blob: bytes
    header: RunHeader
    path: Path
    offset: int
    used: float

    @property
    def namespace(self) -> Namespace:
        """The namespace of its tokens."""
        assert isinstance(self.header.run.namespace, Namespace), "a header without a namespace"
        return self.header.run.namespace


@dataclass
class NamespaceUsage:
    """The runs that share a namespace apart from the salt, so that one engine can read them, and their totals.

    namespace  without a salt
    salts      salts of its runs
    used       time of the last use, in seconds since the epoch
    """

    namespace: Namespace
    num_bytes: int = 0
    num_chunks: int = 0
    num_runs: int = 0
    used: float = 0.0
    salts: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class SubfolderStatus:
    """A sub-folder. is_live: whether an engine writes to it now."""

    path: Path
    num_bytes: int
    is_live: bool


class FolderReader:
    """A folder of a disk store, opened for reading.

    problems  unreadable and foreign files, one line each; grows while the folder is read
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the folder has no disk tier, and OSError."""
        self.path = user_path(path)
        self.root = self.path / VERSION
        self.problems: list[str] = []
        path = self.root / SECRET_NAME
        try:
            secret = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{self.path} has no disk tier{_instead(self.path)}") from None
        if len(secret) != SECRET_BYTES:
            raise ConfigError(f"{path} is damaged: it has {len(secret)} bytes and not {SECRET_BYTES}")
        self.signer = ExtentSigner(secret)

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk of the whole folder."""
        return sum(disk_bytes(Path(here)) for here, _, _ in os.walk(self.path))

    @property
    def cap(self) -> int:
        """The largest cap that an engine has set for the folder; 0: unknown."""
        caps = []
        for subfolder in writer_subfolders(self.root):
            with contextlib.suppress(OSError):
                caps.append(cap_of(subfolder))
        return max(caps, default=0)

    def subfolders(self) -> list[SubfolderStatus]:
        """The sub-folders of the folder."""
        with FileLock(self.root / LOCK_NAME):
            return [SubfolderStatus(path, writer_bytes(path), _is_live(path)) for path in writer_subfolders(self.root)]

    def runs(self) -> Iterator[LocatedRun]:
        """Every complete run of some index. Adds incomplete ones to the problems."""
        for subfolder in writer_subfolders(self.root):
            is_open = False
            try:
                with RunIndex(subfolder, is_writer=False) as index:
                    is_open = True
                    yield from self._runs_of(subfolder, index)
            except (DamagedIndexError, OSError) as error:
                if is_open or (subfolder / INDEX_NAME).exists():
                    self.problems.append(f"{subfolder / INDEX_NAME}: {error}")

    def usages(self) -> list[NamespaceUsage]:
        """Runs by namespace, those used last first."""
        found: dict[Namespace, NamespaceUsage] = {}
        for located in self.runs():
            common = dataclasses.replace(located.namespace, salt="")
            usage = found.setdefault(common, NamespaceUsage(common))
            usage.num_bytes += sum(located.header.lengths)
            usage.num_chunks += len(located.header.run.names)
            usage.num_runs += 1
            usage.used = max(usage.used, located.used)
            usage.salts.add(located.namespace.salt)
        return sorted(found.values(), key=lambda usage: -usage.used)

    def note_foreign(self) -> None:
        """Adds each file that no known version of Quire would have written to the problems."""
        for entry in sorted(self.path.iterdir()):
            if entry.name != VERSION:
                self.problems.append(f"{entry}: not of this version of Quire")
        subfolders = writer_subfolders(self.root)
        for entry in sorted(self.root.iterdir()):
            if entry.name not in (LOCK_NAME, SECRET_NAME) and entry not in subfolders:
                self.problems.append(f"{entry}: not a file of Quire")
        for subfolder in subfolders:
            for entry in sorted(subfolder.iterdir()):
                if not _is_known(entry):
                    self.problems.append(f"{entry}: not a file of Quire")

    def clear(self, chosen: Callable[[Namespace], bool] | None = None) -> tuple[int, list[Path]]:
        """Removes the files all of whose runs have chosen namespaces; None: everything, damaged files too. Returns the
        freed bytes, and the sub-folders with a live writer, which stay unchanged. Adds damaged indexes to the problems.
        """
        freed, live = 0, []
        with FileLock(self.root / LOCK_NAME):
            for subfolder in writer_subfolders(self.root):
                try:
                    lock = FileLock(subfolder / LOCK_NAME, waits=False)
                except BlockingIOError:
                    live.append(subfolder)
                    continue
                with lock:
                    before = writer_bytes(subfolder)
                    remove_drafts(subfolder)
                    if chosen is None:
                        clear_subfolder(subfolder)
                    else:
                        try:
                            self._remove(subfolder, chosen)
                        except (DamagedIndexError, OSError) as error:
                            self.problems.append(f"{subfolder / INDEX_NAME}: {error}")
                    lower_quota(lock.descriptor, subfolder)
                    freed += before - writer_bytes(subfolder)
        return freed, live

    def _remove(self, subfolder: Path, chosen: Callable[[Namespace], bool]) -> None:
        if not (subfolder / INDEX_NAME).exists():
            return
        with RunIndex(subfolder, is_writer=False) as index:
            kept, rows = set[int](), index.runs()
            known = {row.file for row in rows}
            for row, _, header in index.headers(rows, self.signer):
                if isinstance(header, ExtentError):
                    continue
                namespace = header.run.namespace
                if not (isinstance(namespace, Namespace) and chosen(namespace)):
                    kept.add(row.file)
        stale = known - kept
        if not stale:
            return
        with RunIndex(subfolder, is_writer=True) as index:
            index.remove_files(stale)
        for number, path in run_files(subfolder):
            if number in stale:
                remove_file(path)

    def _runs_of(self, subfolder: Path, index: RunIndex) -> Iterator[LocatedRun]:
        files = {row.number: row for row in index.files()}
        paths = dict(run_files(subfolder))
        for number, path in list(paths.items()):
            if number not in files:
                self.problems.append(f"{path}: in no index")
            elif (size := _size_of(path)) not in (files[number].num_bytes, None):
                self.problems.append(f"{path}: damaged, it has {size} bytes and not {files[number].num_bytes}")
                del paths[number]
        for row, blob, header in index.headers(index.runs(), self.signer):
            file_path = paths.get(row.file)
            if file_path is None or row.file not in files:
                continue  # removed meanwhile
            if isinstance(header, ExtentError):
                self.problems.append(f"{file_path}, run {row.id}: {header}")
            else:
                used = max(files[row.file].used, used_by_others(file_path))
                yield LocatedRun(blob, header, file_path, row.offset, used)


def _instead(path: Path) -> str:
    """The end of a message: what a folder without a tier of this version contains instead."""
    if (path / VERSION).is_dir():
        return f" that can be read: {path / VERSION / SECRET_NAME} is missing"
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f" of this version; in it are {', '.join(names[:SHOWN_NAMES])}{more}" if names else ""


def _is_known(path: Path) -> bool:
    name = path.name
    index = {INDEX_NAME + suffix for suffix in ("", "-wal", "-shm", "-journal")}
    return name in index | {LOCK_NAME} or name.endswith(DRAFT_SUFFIX) or number_of(path) is not None


def _size_of(path: Path) -> int | None:
    """The size of a file; None if it was removed meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _is_live(subfolder: Path) -> bool:
    """Whether a writer holds the lock of a sub-folder. Under the folder's lock, which starting writers hold."""
    try:
        descriptor = os.open(subfolder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
