"""The folder of a disk store: layout, permissions, secret, and one sub-folder for each writer.

    DIR/            0700; other formats have folders beside v1, which stay untouched
      v1/
        lock        held while a writer joins, leaves or changes a quota
        secret      32 random bytes
        0/ 1/ ...   one sub-folder for each writer
          lock      held by the writer while it lives; contains its quota (see `quotas`)
          index.db  see `index`
          7.runs    a file of runs
          8.tmp     the file that is being written

Every process reads all sub-folders and writes to one. A sub-folder with a free lock has no live writer. All files have
mode 0600. Locks of sub-folders are taken only under DIR/v1/lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from quire.errors import ConfigError
from quire.stores.direct import MEASURE_PREFIX
from quire.stores.signer import SECRET_BYTES

log = logging.getLogger("quire")

VERSION = "v1"
RUNS_SUFFIX, DRAFT_SUFFIX = ".runs", ".tmp"
INDEX_NAME = "index.db"
LOCK_NAME, SECRET_NAME = "lock", "secret"

MIN_CAP = 64 << 20
SLACK_BYTES = 4 << 20
"""Part of the cap for directories, locks, and the files that SQLite creates beside indexes read by other processes."""
MAX_WRITERS = 64


class FileLock:
    """An exclusive `flock` on a file, until `close`."""

    def __init__(self, path: Path, *, waits: bool = True) -> None:
        """waits: whether to wait for the lock; otherwise raises BlockingIOError if another process holds it."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BaseException:
            os.close(self.descriptor)
            raise

    @property
    def is_intact(self) -> bool:
        """Whether its path still refers to the locked file."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), self.path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Releases the lock; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StoreFolder:
    """A folder that belongs to this user, with its secret."""

    def __init__(self, path: Path) -> None:
        """Creates missing files. Raises ConfigError for an unsafe folder, and OSError."""
        try:
            claim(path)
            self.path = path.resolve()
            self.root = self.path / VERSION
            self.root.mkdir(mode=0o700, exist_ok=True)
            self.root.chmod(0o700)  # independent of the umask
        except FileExistsError:
            raise ConfigError(f"{self.root} is not a folder: remove it, or use another folder") from None
        except OSError as error:
            raise _unusable(path, error) from None
        if self.root.is_symlink() or self.root.stat().st_uid != os.geteuid():
            raise ConfigError(f"{self.root} is a link, or belongs to another user: remove it, or use another folder")
        try:
            with self.lock():
                self.secret = self._secret()
                self._remove_measured()
        except IsADirectoryError as error:
            raise ConfigError(f"{error.filename} is a directory: remove it, or use another folder") from None

    def lock(self) -> FileLock:
        """Waits for the folder's lock. Every process holds it only for milliseconds."""
        return FileLock(self.root / LOCK_NAME)

    def take(self) -> FileLock:
        """Locks the lowest sub-folder without a live writer, under the folder's lock. A restarted process finds its own
        runs there. Raises ConfigError if there are too many writers.
        """
        for number in range(MAX_WRITERS):
            path = self.root / str(number)
            if _has_foreign_lock(path):
                log.warning("%s is no file of Quire: the sub-folder is not used", path / LOCK_NAME)
                continue
            with contextlib.suppress(BlockingIOError, FileExistsError):  # a foreign file may have the name
                path.mkdir(mode=0o700, exist_ok=True)
                return FileLock(path / LOCK_NAME, waits=False)
        raise ConfigError(f"{self.path} has {MAX_WRITERS} writers already: stop one, or use another folder")

    def subfolders(self) -> list[Path]:
        """All sub-folders of writers."""
        return writer_subfolders(self.root)

    def bytes_of_others(self) -> int:
        """Bytes of everything outside the writers' sub-folders, such as other formats."""
        subfolders = set(self.subfolders())
        found = 0
        for folder, folders, files in os.walk(self.path):
            here = Path(folder)
            folders[:] = [name for name in folders if here / name not in subfolders]
            if here not in (self.path, self.root):
                found += disk_bytes(here)
            elif here == self.path:
                found += sum(allocated(here / name) for name in files)
        return found

    def _remove_measured(self) -> None:
        """Removes files of measurements that were killed."""
        for path in self.path.glob(f"{MEASURE_PREFIX}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _secret(self) -> bytes:
        path = self.root / SECRET_NAME
        try:
            secret = path.read_bytes()
        except FileNotFoundError:
            secret = os.urandom(SECRET_BYTES)
            draft = path.with_suffix(DRAFT_SUFFIX)
            remove_file(draft)
            with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(secret)
                file.flush()
                os.fsync(file.fileno())
            os.rename(draft, path)
            sync_folder(self.root)
        except IsADirectoryError:
            raise
        except OSError as error:
            raise _unusable(self.path, error) from None
        if len(secret) != SECRET_BYTES:
            raise ConfigError(f"{path} has {len(secret)} bytes instead of {SECRET_BYTES}: remove {self.root}")
        return secret


def writer_subfolders(root: Path) -> list[Path]:
    """All sub-folders of writers, by number. root: DIR/v1"""
    try:
        entries = [entry for entry in os.scandir(root) if entry.name.isascii() and entry.name.isdecimal()]
        numbers = sorted(int(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
    subfolders = [root / str(number) for number in numbers]
    return [subfolder for subfolder in subfolders if not _has_foreign_lock(subfolder)]


def allocated(path: Path) -> int:
    """Bytes on the disk of one file or folder, without a folder's contents; 0 if it is gone."""
    try:
        return path.lstat().st_blocks * 512
    except (FileNotFoundError, NotADirectoryError):
        return 0


def disk_bytes(folder: Path) -> int:
    """Bytes on disk of a folder and the files in it, as `du` counts them."""
    return allocated(folder) + sum(allocated(path) for path in _entries(folder) if not path.is_dir())


def writer_bytes(subfolder: Path) -> int:
    """Bytes on the disk that count against a quota: all files except the lock."""
    return sum(allocated(path) for path in _entries(subfolder) if path.name != LOCK_NAME)


def remove_drafts(subfolder: Path) -> None:
    """Removes files that a killed writer did not finish. Only under the lock of the sub-folder."""
    for path in _entries(subfolder):
        if path.name.endswith(DRAFT_SUFFIX):
            remove_file(path)


def remove_file(path: Path) -> None:
    """Removes a file if it exists. Renames a directory of this name, which is not ours."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        if not path.is_dir():
            raise
        aside = path.with_name(f"{path.name}.aside-{os.urandom(4).hex()}")
        path.rename(aside)
        log.warning("%s is no file of Quire: it is called %s now", path, aside.name)


def number_of(path: Path) -> int | None:
    """The number of a file of runs; None for any other file."""
    stem = path.name.removesuffix(RUNS_SUFFIX)
    return int(stem) if path.name.endswith(RUNS_SUFFIX) and stem.isascii() and stem.isdecimal() else None


def run_files(subfolder: Path) -> Iterator[tuple[int, Path]]:
    """The files of runs in a sub-folder and their numbers."""
    for path in _entries(subfolder):
        if (number := number_of(path)) is not None:
            yield number, path


def sync_folder(path: Path) -> None:
    """Waits until a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def claim(path: Path) -> None:
    """Creates the folder, or checks the existing one."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
        path.chmod(0o700)
        return
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is a file: name a folder for the disk tier")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to user {status.st_uid}: name a folder of your own for the disk tier")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    is_open = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if is_open and (path.is_symlink() or any(path.iterdir())):
        raise ConfigError(f"other users may write to {path.resolve()}: run chmod go-w on it, or name another folder")
    if not path.is_symlink() and not any(path.iterdir()):
        path.chmod(0o700)


def _unusable(path: Path, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError(f"the disk tier cannot use {path} ({reason}): name a folder that you can write to")


def _has_foreign_lock(subfolder: Path) -> bool:
    path = subfolder / LOCK_NAME
    return path.is_dir() or path.is_symlink()


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
