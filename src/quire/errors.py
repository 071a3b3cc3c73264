"""The errors that Quire raises on purpose. Any other exception that escapes is a defect. Imports no other module."""

from __future__ import annotations

import re

MOST_WORD_CHARS = 500
"""A longer word of a message, such as a path or a key of the user's, is cut in its middle."""

MOST_CHARS = 4000
"""A longer message is cut in its middle."""


def shortened(text: str) -> str:
    """The text of a message, with long words cut to MOST_WORD_CHARS, and itself to MOST_CHARS."""
    text = re.sub(rf"\S{{{MOST_WORD_CHARS + 1},}}", lambda word: _cut(word[0], MOST_WORD_CHARS), text)
    return _cut(text, MOST_CHARS)


def shown(value: object) -> str:
    """A value for a message: its `repr`, or its type if Python cannot write it."""
    try:
        return _cut(repr(value), MOST_WORD_CHARS)
    except (ValueError, RecursionError):  # a number of thousands of digits; lists in lists
        return f"a very long {type(value).__name__}"


def _cut(text: str, most: int) -> str:
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


class QuireError(Exception):
    """Base of all errors with a message for the user: one line with the value and the way out."""

    def __str__(self) -> str:
        return shortened(super().__str__())


class ConfigError(QuireError, ValueError):
    """An invalid setting. The message names the setting, its value and the nearest valid value."""


class ModelError(QuireError):
    """An unusable model. The message names the architecture, the missing tensor, the wrong shape or the short file."""


class RequestError(QuireError, ValueError):
    """An invalid request; the server answers it with 400.

    param  name of the invalid field; None if no single field is at fault
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(QuireError):
    """The waiting queue is full; the server answers 429.

    retry_after  seconds after which the caller should try again
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LoadCancelledError(QuireError):
    """Loading was cancelled because its caller no longer waits for it."""


class InstancesFailedError(QuireError):
    """A request failed on one instance after the other."""


class EngineStoppedError(QuireError):
    """The engine has failed, and all its requests with it. Deltas that were streamed before are valid."""


class ExtentError(QuireError):
    """Bytes that are not an extent of the expected run."""


class CacheFullError(QuireError):
    """The arena has too few free bytes. The scheduler evicts or waits; it never over-commits."""
