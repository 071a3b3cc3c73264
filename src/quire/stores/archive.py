"""An archive: runs in one file, for another machine. It has checksums, but neither a secret nor a MAC.

bytes      content
8          QUIREKV and a newline
4          version, u32
for each run, after the run that it continues:
4          bytes of the header, u32
...        the header (see `headers`), with a zero MAC
...        the extents in order of layers (docs/reference/page-format.md), with zero MACs
at the end:
4          zero
16         BLAKE3 of all earlier bytes
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from blake3 import blake3

from quire.cache.run import layer_of
from quire.errors import ConfigError, ExtentError
from quire.safe_io import open_file
from quire.stores.headers import RunHeader, parse_run_header
from quire.stores.signer import HEADER_BYTES, ExtentSigner

MAGIC, VERSION = b"QUIREKV\n", 1
_NUMBER = struct.Struct("<I")
_START = MAGIC + _NUMBER.pack(VERSION)
_CHECKSUM_BYTES = 16
_MAC = slice(48, HEADER_BYTES)

MAX_HEAD_BYTES = 1 << 26
_PIECE = 1 << 20


class RunArchiveWriter:
    """Writes an archive. The file gets its name only when it is complete; leaving with an error removes it."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if there is a file of this name."""
        if path.exists():
            raise ConfigError(f"{path} exists already: remove it, or name another file")
        self._path, self._draft = path, path.with_name(path.name + ".new")
        self._hash = blake3()
        with contextlib.suppress(FileNotFoundError):
            self._draft.unlink()
        self._file = BufferedWriter(FileIO(os.open(self._draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w"))
        self._write(_START)

    def add(self, header: bytes, extents: Iterable[memoryview]) -> None:
        """Appends a run."""
        self._write(_NUMBER.pack(len(header)))
        self._write(_without_mac(header))
        for extent in extents:
            self._write(_without_mac(extent))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if kind is None:
                    self._write(_NUMBER.pack(0))
                    self._file.write(self._hash.digest(length=_CHECKSUM_BYTES))
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                os.rename(self._draft, self._path)
        finally:
            self._draft.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)


def _without_mac(data: bytes | memoryview) -> bytes:
    return bytes(data[: _MAC.start]) + bytes(HEADER_BYTES - _MAC.start) + bytes(data[_MAC.stop :])


@dataclass(frozen=True)
class ArchivedRun:
    """A run of an archive. offset: of its first extent in the file."""

    header: RunHeader
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its extents."""
        return sum(self.header.lengths)


class RunArchive:
    """An open archive. The headers of its runs are verified: keys must follow from the tokens and the key before."""

    def __init__(self, path: Path) -> None:
        """Raises ExtentError for a file that is no archive or is damaged, and OSError for one that cannot be read."""
        self._signer = ExtentSigner(None)
        self._file = open_file(path, "rb")
        try:
            self._check_whole()
            self.runs = list(self._scan())
        except BaseException:
            self._file.close()
            raise

    def extents(self, run: ArchivedRun) -> Iterator[memoryview]:
        """The extents of a run, verified against their checksums. Raises ExtentError."""
        names, offset = b"".join(run.header.run.names), run.offset
        for layer, length in enumerate(run.header.lengths):
            extent = memoryview(bytearray(os.pread(self._file.fileno(), length, offset)))
            self._signer.verify(names, extent)
            if layer_of(extent) != layer:
                raise ExtentError(f"the extent of layer {layer_of(extent)} stands in the place of layer {layer}")
            offset += length
            yield extent

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_whole(self) -> None:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise ExtentError("it is not a file of quire cache export")
        version = _NUMBER.unpack(self._read(_NUMBER.size))[0]
        if version != VERSION:
            raise ExtentError(f"it has version {version}, and this is {VERSION}")
        left = os.fstat(self._file.fileno()).st_size - len(_START) - _CHECKSUM_BYTES
        hashed = blake3(_START)
        while left > 0:
            data = self._read(min(left, _PIECE))
            hashed.update(data)
            left -= len(data)
        if left < 0 or self._file.read() != hashed.digest(length=_CHECKSUM_BYTES):
            raise ExtentError("it is truncated or damaged: its checksum differs")
        self._file.seek(len(_START))

    def _scan(self) -> Iterator[ArchivedRun]:
        end = os.fstat(self._file.fileno()).st_size - _CHECKSUM_BYTES
        while (size := _NUMBER.unpack(self._read(_NUMBER.size))[0]) > 0:
            if size > MAX_HEAD_BYTES:
                raise ExtentError(f"a run with a head of {size} bytes")
            run = ArchivedRun(parse_run_header(self._read(size), self._signer), self._file.tell())
            if run.offset + run.num_bytes > end - _NUMBER.size:
                raise ExtentError("the last run is not whole")
            yield run
            self._file.seek(run.offset + run.num_bytes)
        if self._file.tell() != end:
            raise ExtentError(f"{end - self._file.tell()} bytes follow its last run")

    def _read(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        if len(data) < size:
            raise ExtentError("it is truncated")
        return data
