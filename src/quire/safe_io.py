"""Opens and parses the files that users name. Knows files and texts, not their meaning.

Opening a pipe waits for its writer, and a device may have no end, so only regular files are opened. JSON may be nested
more deeply, and have longer numbers, than Python parses; both are ordinary errors here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from quire.errors import ConfigError

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


class NotRegularError(OSError):
    """The path leads to a pipe, a device or a socket."""

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        kind = _KINDS.get(stat.S_IFMT(mode), "special")
        super().__init__(errno.EINVAL, f"it is {kind}; a regular file is needed", os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises NotRegularError, or the OSError of a path that leads nowhere or to a folder. Never waits."""
    _check_mode(path, os.stat(path).st_mode)


def open_file(path: str | os.PathLike[str], mode: str = "r", **options: Any) -> IO[Any]:
    """As the built-in `open`, for reading regular files only. Raises OSError. Never waits for a writer."""
    check_regular(path)
    return open(path, mode, opener=_opened, **options)


def read_text(path: str | os.PathLike[str], encoding: str = "utf-8") -> str:
    """The text of a regular file. Raises OSError and UnicodeDecodeError."""
    with open_file(path, encoding=encoding) as file:
        return str(file.read())


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a regular file. Raises OSError."""
    with open_file(path, "rb") as file:
        return bytes(file.read())


def read_given_text(path: Path) -> str:
    """The text of a file that a user gave as one. Raises ConfigError."""
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text {path}: {error}") from error


def read_source(name: str) -> bytes:
    """The bytes of a regular file, or with - of the standard input. Raises OSError, ConfigError if stdin is closed."""
    if name != "-":
        return read_bytes(name)
    if sys.stdin is None:
        raise ConfigError("- reads the standard input, but stdin is closed")
    return sys.stdin.buffer.read()


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a draft beside a file, to write to; makes the folder if it is missing. On success the draft replaces the
    file, so readers never see a partial file. A symbolic link stays, and leads to the new file. Raises OSError,
    NotRegularError for a path to a pipe, a device or a socket.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        check_regular(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def parse_json(text: str | bytes, **options: Any) -> Any:
    """As `json.loads`. Raises ValueError for all text that it cannot parse, including brackets that are nested too
    deeply.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        # Python converts up to 4,300 digits, and names a function of its own as the way out.
        raise ValueError("a number has too many digits" if "digits" in str(error) else str(error)) from None


def _opened(path: str, flags: int) -> int:
    # Since the check, a pipe may have replaced the file. Opening it without O_NONBLOCK would wait for a writer.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_mode(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_mode(path: str | os.PathLike[str], mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise NotRegularError(path, mode)
