"""The index of one sub-folder: the places of its runs. An SQLite file, read by all processes and written by one.

    files  number, bytes, time of last use
    runs   file, offset, digest of the namespace without its salt, header (see `headers`)
    pins   name of a chunk, end of its pin

WAL with synchronous = FULL: a commit waits for the disk, so that a power failure loses no finished file. A kill between
two steps leaves a file without an index entry, or entries of a removed file; both are removed when the sub-folder is
taken.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire.errors import ExtentError
from quire.stores.folder import INDEX_NAME, allocated, remove_file
from quire.stores.headers import RunHeader, parse_run_header
from quire.stores.signer import ExtentSigner

VERSION = 1
_SCHEMA = """
CREATE TABLE files (number INTEGER PRIMARY KEY, bytes INTEGER NOT NULL, used REAL NOT NULL);
CREATE TABLE runs (id INTEGER PRIMARY KEY AUTOINCREMENT, file INTEGER NOT NULL, offset INTEGER NOT NULL,
                   digest BLOB NOT NULL, head BLOB NOT NULL);
CREATE INDEX runs_by_file ON runs (file);
CREATE TABLE pins (name BLOB PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID;
"""

WAL_PAGES = 256
MARGIN_BYTES = 3 << 19
"""Maximum bytes of an index beside its main file: the log of 256 pages of 4 KiB, and 32 KiB of shared memory."""


_SHARED_BYTES = 32 << 10
_SUFFIXES = "-wal", "-shm", "-journal", ""


class DamagedIndexError(Exception):
    """An index that cannot be read, or has another version. Only the runs of its sub-folder are lost."""


@dataclass(frozen=True)
class FileRow:
    """A file of runs."""

    number: int
    num_bytes: int
    used: float


@dataclass(frozen=True)
class RunRow:
    """The place of a run. digest: digest of its namespace, see `headers.common_digest`."""

    id: int
    file: int
    offset: int
    digest: bytes


class RunIndex:
    """An open index. Methods raise DamagedIndexError and OSError."""

    def __init__(self, subfolder: Path, *, is_writer: bool) -> None:
        """Opens the index of a sub-folder. A writer creates a missing index."""
        self.path = subfolder / INDEX_NAME
        _check_files(subfolder)
        is_new = is_writer and not self.path.exists()
        if is_new:  # SQLite gives its other files the same mode
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        with _errors():
            # Readers need mode rw, too, to read the log of a killed writer.
            uri = f"{self.path.absolute().as_uri()}?mode=rw"
            self._db = sqlite3.connect(uri, timeout=5.0, isolation_level=None, check_same_thread=False, uri=True)
        try:
            with _errors():
                self._begin(is_writer, is_new)
        except BaseException:
            self._db.close()
            raise

    def _begin(self, is_writer: bool, is_new: bool) -> None:
        version, num_tables = self._one("PRAGMA user_version"), self._one("SELECT count(*) FROM sqlite_schema")
        if is_writer:
            if version == num_tables == 0:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT")
                version = VERSION
            elif not is_new and self._one("PRAGMA quick_check") != "ok":
                raise DamagedIndexError("it is damaged")
            self._check_writable()
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
            self._db.execute(f"PRAGMA journal_size_limit = {WAL_PAGES * 4096}")
        else:
            self._db.execute("PRAGMA query_only = 1")
        if version == num_tables == 0 and not is_writer:
            raise FileNotFoundError(errno.ENOENT, "its writer is just making it", str(self.path))
        if version != VERSION:
            raise DamagedIndexError(f"it has version {version}, and this is {VERSION}")

    def _check_writable(self) -> None:
        """Raises DamagedIndexError if a damaged header claims that the index is read-only."""
        try:
            self._db.executescript(f"BEGIN; PRAGMA user_version = {VERSION}; ROLLBACK")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_READONLY or not os.access(self.path.parent, os.W_OK):
                raise
            raise DamagedIndexError("it cannot be written") from None

    def files(self) -> list[FileRow]:
        """All files."""
        rows = self._all("SELECT number, bytes, used FROM files")
        return [FileRow(*row) for row in rows if _are(row, int, int, float) and row[0] >= 0 and row[1] >= 0]

    def runs(self, after: int = 0) -> list[RunRow]:
        """All runs with larger ids, without their headers. Ids grow and are never reused."""
        rows = self._all("SELECT id, file, offset, digest FROM runs WHERE id > ?", (after,))
        return [RunRow(*row) for row in rows if _are(row, int, int, int, bytes) and row[2] >= 0]

    def ids(self) -> set[int]:
        """The ids of all runs."""
        return {row[0] for row in self._all("SELECT id FROM runs") if _are(row, int)}

    @property
    def num_runs(self) -> int:
        """The number of runs."""
        with _errors():
            return int(self._one("SELECT count(*) FROM runs"))

    def headers(
        self, rows: Iterable[RunRow], signer: ExtentSigner
    ) -> Iterator[tuple[RunRow, bytes, RunHeader | ExtentError]]:
        """Yields the headers of some runs as bytes and parsed, or with the parse error. Leaves out removed runs."""
        for row in rows:
            if blob := self.header(row.id):
                try:
                    yield row, blob, parse_run_header(blob, signer)
                except ExtentError as error:
                    yield row, blob, error

    def header(self, run_id: int) -> bytes:
        """The header of a run; empty if there is none."""
        rows = self._all("SELECT head FROM runs WHERE id = ?", (run_id,))
        return rows[0][0] if rows and _are(rows[0], bytes) else b""

    def pins(self) -> dict[bytes, float]:
        """The pinned chunks, with the ends of their pins."""
        return {row[0]: row[1] for row in self._all("SELECT name, until FROM pins") if _are(row, bytes, float)}

    @property
    def data_version(self) -> int:
        """A number that differs after a change by another connection."""
        with _errors():
            return int(self._one("PRAGMA data_version"))

    def add(self, file: FileRow, runs: Sequence[tuple[int, bytes, bytes]]) -> list[int]:
        """Adds a complete file with its runs: offset, digest, header. Returns their ids."""
        with self._transaction():
            self._db.execute("INSERT INTO files VALUES (?, ?, ?)", (file.number, file.num_bytes, float(file.used)))
            insert = "INSERT INTO runs (file, offset, digest, head) VALUES (?, ?, ?, ?)"
            return [int(self._db.execute(insert, (file.number, *run)).lastrowid or 0) for run in runs]

    def remove_files(self, numbers: Iterable[int]) -> None:
        """Forgets files and their runs."""
        rows = [(number,) for number in numbers]
        with self._transaction():
            self._db.executemany("DELETE FROM runs WHERE file = ?", rows)
            self._db.executemany("DELETE FROM files WHERE number = ?", rows)

    def remove_runs(self, ids: Iterable[int]) -> None:
        """Forgets runs."""
        with self._transaction():
            self._db.executemany("DELETE FROM runs WHERE id = ?", [(each,) for each in ids])

    def use(self, used: Iterable[tuple[int, float]]) -> None:
        """Sets the times of last use of files."""
        with self._transaction():
            self._db.executemany("UPDATE files SET used = ? WHERE number = ?", [(when, n) for n, when in used])

    def set_pins(self, pins: dict[bytes, float]) -> None:
        """Replaces all pins."""
        with self._transaction():
            self._db.execute("DELETE FROM pins")
            self._db.executemany("INSERT INTO pins VALUES (?, ?)", list(pins.items()))

    @property
    def num_bytes(self) -> int:
        """Maximum bytes of the index, now or soon."""
        log = self.path.with_name(INDEX_NAME + "-wal")
        return allocated(self.path) + max(MARGIN_BYTES, allocated(log) + _SHARED_BYTES)

    def close(self) -> None:
        """Closes the index."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with _errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _all(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with _errors():
            return self._db.execute(query, values).fetchall()

    def _one(self, query: str) -> Any:
        return self._db.execute(query).fetchone()[0]


def remove_index(subfolder: Path) -> None:
    """Removes an index with all its files. Only under the lock of the sub-folder."""
    for suffix in _SUFFIXES:
        remove_file(subfolder / (INDEX_NAME + suffix))


def _check_files(subfolder: Path) -> None:
    """Raises DamagedIndexError if one of the index's file names belongs to something other than a file."""
    for suffix in _SUFFIXES:
        path = subfolder / (INDEX_NAME + suffix)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise DamagedIndexError(f"{path.name} is not a file")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (sqlite3.OperationalError, sqlite3.InterfaceError) as error:
        # SQLite reports damage to the header or the schema as a general error, and damage to text without a code.
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) == sqlite3.SQLITE_ERROR:
            raise DamagedIndexError(str(error)) from None
        # The disk is full, does not answer, or the folder is gone.
        raise OSError(errno.EIO, f"SQLite: {error}") from None
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise DamagedIndexError(str(error)) from None


def _are(row: Sequence[Any], *types: type) -> bool:
    """Whether a row has these types. SQLite does not check types, and a damaged row may have any."""
    return len(row) == len(types) and all(isinstance(value, kind) for value, kind in zip(row, types, strict=True))
