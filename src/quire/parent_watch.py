"""Makes a child process end when its parent process ends, even if the parent is killed.

The parent keeps the writing end of a pipe. The child asks the kernel to send it SIGIO, which ends it, once the pipe has
no writer. This works even if the child is busy: a thread of its own would have to wait for the interpreter's lock,
which loading may hold for long. PR_SET_PDEATHSIG would end it as soon as the *thread* that started it ends.

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
    """As subprocess.run, for a command that does not watch its parent. It and its descendants end with this process."""
    reading, writing = os.pipe()
    try:
        words = [sys.executable, "-I", "-S", __file__, str(reading), *command]
        return subprocess.run(words, pass_fds=(reading,), text=True, **options)
    finally:
        os.close(reading)
        os.close(writing)


def exit_with_parent(number: int, *, is_group: bool = False) -> None:
    """Ends this process once no process has the writing end of a pipe open.

    number    file descriptor of the reading end
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
    """Lets this process continue when its parent ends."""
    os.close(number)


def main() -> None:
    """Replaces this process by the command in the arguments."""
    number, *command = sys.argv[1:]
    os.setsid()  # a process group of its own, for the command and its descendants
    exit_with_parent(int(number), is_group=True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
