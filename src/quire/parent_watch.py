"""Processes that end with the process that started them, in whatever way that one ends.

The starter keeps the writing end of a pipe. The other process asks the kernel to send it SIGIO, which ends it, once the
pipe has no writer. That works however busy the process is: a thread of its own would have to wait for the interpreter's
lock, which loading may hold for long. PR_SET_PDEATHSIG would end it as soon as the *thread* that started it ends.

    python parent_watch.py NUMBER COMMAND...      COMMAND and all that it starts, tied to the pipe's reading end NUMBER

Imports the standard library alone, so that it takes effect before anything slow.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def start(command: Sequence[str], **options: Any) -> tuple[subprocess.Popen[Any], int]:
    """Starts a process, which must call `exit_with_parent` with the number that is its last argument. Raises OSError.

    Returns it, and the number of the writing end. The process ends when that is closed, unless it has called
    `outlive_parent`.
    """
    reading, writing = os.pipe()
    try:
        return subprocess.Popen([*command, str(reading)], pass_fds=(reading,), **options), writing
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, for a command that knows nothing of this. All that it starts ends with this process too."""
    reading, writing = os.pipe()
    try:
        words = [sys.executable, "-I", "-S", __file__, str(reading), *command]
        return subprocess.run(words, pass_fds=(reading,), text=True, **options)
    finally:
        os.close(reading)
        os.close(writing)


def exit_with_parent(number: int, *, is_group: bool = False) -> None:
    """Ends this process once nobody has the writing end of a pipe open.

    number    of the reading end
    is_group  ends its process group instead
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(number, fcntl.F_SETOWN, -os.getpgrp() if is_group else os.getpid())
    fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(number, 0)
    if poll.poll(0):  # it was closed before
        os._exit(1)


def outlive_parent(number: int) -> None:
    """Lets this process go on when its starter ends."""
    os.close(number)


def main() -> None:
    """Becomes the command of the arguments."""
    number, *command = sys.argv[1:]
    os.setsid()  # a group of its own, which has all that the command starts
    exit_with_parent(int(number), is_group=True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
