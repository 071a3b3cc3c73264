"""Ctrl-C while modules are imported: the process ends at once, with code 130 and one line.

As an exception an interrupt would meet code that was not written for it: libraries turn it into an ImportError, and
what an import leaves half done prints tracebacks. There is nothing to save yet. Everywhere else Ctrl-C stays a
KeyboardInterrupt. Only programs install this; a library leaves signals alone.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_IMPORTING = "<frozen importlib._bootstrap>"


def install() -> bool:
    """From now on, until `remove`; returns whether it was not there and could be: on the main thread, by default."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupted)
            return True
    except ValueError:  # not the main thread, which alone gets signals
        pass
    return False


def leave() -> None:
    """A further Ctrl-C ends the process at once and silently: the first one is being reported."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, _end)


def remove() -> None:
    """Has Python's own handler back."""
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
