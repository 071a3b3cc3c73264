"""Ctrl-C while modules are imported: the process ends at once, with code 130 and one line.

A KeyboardInterrupt during imports causes trouble: some libraries turn it into an ImportError, and half-done imports
print tracebacks. There is nothing to save yet. Everywhere else Ctrl-C stays a KeyboardInterrupt. Only programs install
this handler; a library leaves signals alone.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_IMPORTING = "<frozen importlib._bootstrap>"


def install() -> bool:
    """Installs the handler until `remove`. Returns whether it did: only on the main thread, over Python's own
    handler.
    """
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupted)
            return True
    except ValueError:  # not on the main thread, which alone receives signals
        pass
    return False


def exit_on_next() -> None:
    """Makes a second Ctrl-C end the process at once and silently, while the first one is reported."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, _end)


def remove() -> None:
    """Restores Python's own handler."""
    if signal.getsignal(signal.SIGINT) in (_interrupted, _end):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(130)


def _interrupted(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            os.write(2, b"quire: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt
