"""The command line: `quire COMMAND`. Each command is a module with `add_arguments` and `run`.

Knows arguments, errors and exit codes. A command's module is imported when the command is given, and nothing heavy
before it runs: `quire --help` takes a fraction of a second. Exit codes: 0 success, 1 part of the work failed, 2 an
error reported in one line, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence

from quire.cli.parser import COMMANDS, parse
from quire.errors import ConfigError, QuireError, shortened, shown
from quire.interrupt import exit_on_next, install, remove

__all__ = ["COMMANDS", "check_open", "main", "parse"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of a disk that cannot be written. Any other unexpected OSError is a defect of ours."""

LEVELS = ("debug", "info", "warning", "error", "critical")
"""The values of QUIRE_LOG."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    installed = install()
    _open_missing_streams()
    log = logging.getLogger("quire")
    before = log.level
    debug = False
    try:
        args = parse(argv)
        debug = args.debug
        _set_up_output(args.command, log)
        if not _can_do_without_output(args):
            check_open("stdout")
        code = int(importlib.import_module(f"quire.cli.{args.command}").run(args))
        _flush_output()  # a failure here is still reported below
        return code
    except QuireError as error:
        if debug:
            raise
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if debug:
            raise
        exit_on_next()
        _leave_if_loading("quire: interrupted\n")
        print("quire: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has ended (`quire generate ... | head`).
        _forget_output()
        return 1
    except OSError as error:
        if debug or error.errno not in FULL:
            raise
        try:
            _flush_output()
        except OSError:
            _forget_output()
        print(
            f"quire: {shortened(str(error.filename or 'the output'))} cannot be written: {error.strerror}",
            file=sys.stderr,
        )
        return 2
    finally:
        log.setLevel(before)
        if installed:
            remove()


def check_open(*names: str) -> None:
    """Raises ConfigError if a stream, stdin or stdout, was closed when the process started."""
    for name in names:
        if getattr(sys, name) is None:
            example = "> FILE" if name == "stdout" else "< FILE"
            raise ConfigError(f"{name} is closed, and this command needs it; redirect it with {example}")


def _can_do_without_output(args: argparse.Namespace) -> bool:
    """Whether a command's result does not go to stdout: a server answers over HTTP, and --output names a file."""
    if getattr(args, "print_config", False):
        return False
    return args.command == "serve" or getattr(args, "output", None) is not None


def _open_missing_streams() -> None:
    """Opens /dev/null for descriptors 0 to 2 that are closed: otherwise a socket gets the number, and uvloop aborts.

    sys.stdin and sys.stdout stay None, so that `main` and commands can say that they need them.
    """
    # open takes the lowest free number: the descriptors below are open already.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)  # print(file=None) would write to stdout


def _flush_output() -> None:
    """Writes what stdout holds, unless it was closed when the process started."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _forget_output() -> None:
    """Redirects stdout, so that buffered output does not fail at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _set_up_output(command: str, log: logging.Logger) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without Unicode shows question marks instead of ending the answer.
        sys.stdout.reconfigure(errors="replace")
    level = os.environ.get("QUIRE_LOG") or ("info" if command in ("serve", "calibrate") else "warning")
    if level.lower() not in LEVELS:
        *others, last = LEVELS
        raise ConfigError(f"QUIRE_LOG is {shown(level)}; it must be {', '.join(others)} or {last}")
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(format="quire: %(asctime)s %(message)s", level=max(number, logging.WARNING))
    # Only our logger: libraries log every request they make.
    log.setLevel(number)


def _leave_if_loading(text: str) -> None:
    """Ends the process at once if an engine is still loading, because nothing can stop the loading thread.

    Writes the text to file descriptor 2: sys.stderr may belong to a progress bar, which has hidden the cursor.
    """
    module = sys.modules.get("quire.engine_thread")
    if module is not None and module.is_loading():
        images = sys.modules.get("quire.models.image_folder")
        if images is not None:
            images.drop_drafts()
        os.write(2, ("\r\n\x1b[?25h" * os.isatty(2) + text).encode())
        _flush_output()
        os._exit(130)
