"""The name of a checkpoint in data that outlives the process: a hash over all bytes that determine its computations.

    digest = SHA-256 of {"config": config.json, "files": [SHA-256 of each weight file], "version": 1}

That JSON has sorted keys and no spaces, so neither the order of settings nor the path of the model counts. A GGUF file
has its settings inside: its config is {}. `fingerprint` is the cheap name, for memory alone.

The hash of a file is remembered in the user's cache folder, under the file's device and inode, with its size and time
of change. SHA-256 and not BLAKE2b: 1.25 against 0.86 GB/s on one core of an EPYC, which has instructions for it, and
model hubs publish it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ModelError
from quire.folders import user_cache
from quire.models.files import read_json
from quire.safe_io import atomic_write

if TYPE_CHECKING:
    from quire.models.weights import Checkpoint

log = logging.getLogger("quire")

VERSION = 1
"""Version of the definition above and of the records."""

PIECE_BYTES = 1 << 20

SHOWN_DIGEST = 12
"""Characters of a digest in messages and tables."""

SETTLED_SECONDS = 2.0
"""The hash of a file that changed within this time is not remembered. File systems count time in steps of up to two
seconds, so a second change within one step would leave the same time."""

Report = Callable[[int, int], None]
"""Called with the bytes hashed so far, and the bytes to hash in all."""


@dataclass(frozen=True)
class Digest:
    """The digest of a checkpoint, in hexadecimal, and the bytes hashed for it.

    num_bytes         bytes of all weight files
    num_bytes_hashed  bytes of the files whose hashes were not remembered
    """

    digest: str
    num_bytes: int
    num_bytes_hashed: int
    seconds: float


@dataclass(frozen=True)
class _File:
    """The identity and state of a file. Any change of the file changes one of the fields."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _File:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    @property
    def record(self) -> Path:
        """The path of the file's record. Raises RuntimeError without a home folder."""
        return user_cache() / "digests" / f"{self.device:x}-{self.inode:x}.json"


def digest_of(checkpoint: Checkpoint, report: Report = lambda done, total: None) -> Digest:
    """The digest of a checkpoint that is on a disk.

    Several processes may compute it at once. Raises ModelError for a file that cannot be read, or that changes
    meanwhile.
    """
    assert checkpoint.path is not None, "the checkpoint is on no disk"
    begun = time.perf_counter()
    config = read_json(checkpoint.path / "config.json", required=True) if checkpoint.path.is_dir() else {}
    found: dict[Path, str] = {}
    sizes: dict[Path, int] = {}
    for path in checkpoint.files:
        try:
            file = _File.of(path.stat())
        except OSError as error:
            raise _unreadable(path, error) from None
        sizes[path] = file.size
        if (hashed := _recall(file)) is not None:
            found[path] = hashed
    missing = [path for path in checkpoint.files if path not in found]
    total, done = sum(sizes[path] for path in missing), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report(done, total)

    for path in missing:
        found[path] = _hash(path, count)
    whole = combined([found[path] for path in checkpoint.files], config)
    return Digest(whole, sum(sizes.values()), total, time.perf_counter() - begun)


def combined(hashes: list[str], config: dict[str, Any] | None = None) -> str:
    """The digest of a checkpoint whose files have these SHA-256."""
    whole = {"config": config or {}, "files": hashes, "version": VERSION}
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def remembered_digest(checkpoint: Checkpoint) -> str | None:
    """The digest, if the hashes of all files are remembered. Raises ModelError and OSError."""
    hashes = [_recall(_File.of(path.stat())) for path in checkpoint.files]
    return None if None in hashes else digest_of(checkpoint).digest


def known_names(digests: set[str]) -> dict[str, str]:
    """The names of the models that this machine knows without hashing: embedded ones, and those with packed layers."""
    from quire.models.embedded import EMBEDDED

    found = {combined([model.sha256]): name for name, model in EMBEDDED.items()}
    if digests <= found.keys():
        return found
    from quire.models.image_folder import ImageError, list_images
    from quire.models.weights import open_model

    with contextlib.suppress(ImageError, OSError):
        for image in list_images():
            with contextlib.suppress(ModelError, OSError), open_model(image.origin.path) as checkpoint:
                found.setdefault(remembered_digest(checkpoint) or "", image.origin.model)
    return found


def _hash(path: Path, count: Callable[[int], None]) -> str:
    """SHA-256 of a file, which is remembered. count: called with the bytes of each piece."""
    try:
        with path.open("rb", buffering=0) as source:
            file = _File.of(os.fstat(source.fileno()))
            hashed = _read(source, count)
            if _File.of(os.fstat(source.fileno())) != file:
                raise ModelError(f"{path}: changed while it was read")
    except OSError as error:
        raise _unreadable(path, error) from None
    if time.time_ns() - file.mtime_ns >= SETTLED_SECONDS * 1e9:
        try:
            _remember(file, hashed)
        except (OSError, RuntimeError) as error:
            log.warning("the digest of %s is not remembered: %s", path, error)
    return hashed


def _read(source: FileIO, count: Callable[[int], None]) -> str:
    hashed, buffer = hashlib.sha256(), bytearray(PIECE_BYTES)
    view = memoryview(buffer)
    while num_bytes := source.readinto(buffer):
        hashed.update(view[:num_bytes])
        count(num_bytes)
    return hashed.hexdigest()


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path}: cannot be read ({error.strerror or error})")


def _recall(file: _File) -> str | None:
    """The remembered hash of a file in its present state, or None. Logs a record that cannot be used."""
    try:
        text = file.record.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RuntimeError) as error:
        log.warning("a remembered digest cannot be read, and is computed again: %s", error)
        return None
    try:
        record = json.loads(text)
        hashed, known = str(record["sha256"]), _File(**record["file"])
        is_whole = record == _record(known, hashed) and re.fullmatch("[0-9a-f]{64}", hashed)
    except (ValueError, TypeError, KeyError, RecursionError):
        is_whole = None
    if not is_whole:
        log.warning("%s is damaged: the digest is computed again", file.record)
        return None
    return hashed if known == file else None


def _record(file: _File, hashed: str) -> dict[str, Any]:
    fields = {"file": asdict(file), "sha256": hashed, "version": VERSION}
    return fields | {"crc32": zlib.crc32(json.dumps(fields, sort_keys=True).encode())}


def _remember(file: _File, hashed: str) -> None:
    """Writes the record of a file atomically: concurrent readers see the previous record."""
    with atomic_write(file.record) as draft:
        draft.write_text(json.dumps(_record(file, hashed)), encoding="utf-8")
