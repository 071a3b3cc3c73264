"""The file of a batch's answers, which is also the only record of its progress.

It belongs to one run at a time, which appends line by line. The next run cuts off a line torn by a crash and removes
failed lines. Answers to stdout are not remembered.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
from collections.abc import Collection
from io import FileIO
from typing import Any

from quire.errors import ConfigError, QuireError
from quire.safe_io import parse_json

log = logging.getLogger("quire")


class AnswerFile:
    """The output: stdout, a device or pipe, or a file, locked until this object is closed.

    wanted       ids of the input: only failed lines with these ids are removed from the file
    done         ids of the answers in the file
    num_retried  number of lines that failed in an earlier run; they are removed and tried again
    """

    def __init__(self, name: str, wanted: Collection[str | int]) -> None:
        self.name = name
        self.done: set[str | int] = set()
        self.num_retried = 0
        # A folder counts as a file that cannot be opened.
        self.is_file = name != "-" and (os.path.isfile(name) or os.path.isdir(name) or not os.path.exists(name))
        if name == "-":
            if sys.stdout is None:
                raise ConfigError("stdout is closed, and --output - writes to it; give a file")
            # Not through sys.stdout, which replaces characters that its encoding lacks.
            sys.stdout.flush()
            self._file = FileIO(sys.stdout.fileno(), "w", closefd=False)
            return
        try:
            if not self.is_file:
                self._file = FileIO(name, "w")
                return
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"cannot write {name}: {error.strerror or error}") from error
        try:
            self._resume(wanted)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Closes the file and releases its lock."""
        self._file.close()

    def write(self, answer: dict[str, Any]) -> None:
        """Appends one line. Raises QuireError if it cannot be written, BrokenPipeError if the reader has ended."""
        # An id may contain half of a surrogate pair, which becomes its JSON escape.
        self._write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n", self._file)

    def _write(self, content: bytes, file: FileIO) -> None:
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.is_file:
                with contextlib.suppress(OSError):  # removes the partial line
                    file.truncate(os.fstat(file.fileno()).st_size - (len(content) - len(rest)))
            kept = "; finished answers are kept, and the same command resumes" if self.is_file else ""
            where = "to stdout" if self.name == "-" else self.name
            raise QuireError(f"cannot write {where}: {error.strerror or error}{kept}") from error

    def _open(self) -> FileIO:
        """Opens and locks the file; creates a missing one."""
        while True:
            file = FileIO(self.name, "a+")
            try:
                self._lock(file)
                # The previous owner of the lock may have replaced the file after it was opened here.
                if os.path.exists(self.name) and os.path.samestat(os.fstat(file.fileno()), os.stat(self.name)):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()

    def _lock(self, file: FileIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another quire generate is writing {self.name}; wait for it, or give another --output"
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked (%s); do not start a second run on it", self.name, error.strerror or error)

    def _resume(self, wanted: Collection[str | int]) -> None:
        """Reads the file. Removes a torn last line and the failed lines that will be tried again."""
        self._file.seek(0)
        *lines, tail = self._file.readall().split(b"\n")
        kept: list[bytes] = []
        for number, line in enumerate(lines, 1):
            try:
                answer = parse_json(line) if line.strip() else None
                if answer is not None:
                    if "error" in answer and answer["id"] in wanted:
                        continue
                    self.done.add(answer["id"])
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"{self.name}:{number}: not an output of quire generate; give another --output"
                ) from error
            kept.append(line + b"\n")
        # A last line without a newline may be torn and look complete, such as 12 of 123. It must begin like our lines.
        begin = tail[:7].replace(b" ", b"")
        if not begin.startswith(b'{"id":') and not b'{"id":'.startswith(begin):
            raise ConfigError(f"{self.name}:{len(lines) + 1}: not an output of quire generate; give another --output")
        self.num_retried = len(lines) - len(kept)
        if self.num_retried:
            self._replace(b"".join(kept))
        elif tail:
            self._file.truncate(sum(map(len, kept)))

    def _replace(self, content: bytes) -> None:
        """Replaces the output by a complete new file with this content, so that a crash loses no answer."""
        path = os.path.realpath(self.name)
        new = path + ".new"
        try:
            with contextlib.ExitStack() as undo:
                file = undo.enter_context(FileIO(new, "a+"))
                self._lock(file)
                undo.callback(os.unlink, new)
                file.truncate(0)
                self._write(content, file)
                shutil.copymode(path, new)
                os.replace(new, path)
                undo.pop_all()
        except OSError as error:
            raise ConfigError(f"cannot write {new}: {error.strerror or error}") from error
        self._file.close()
        self._file = file
