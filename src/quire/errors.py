"""The errors that Quire raises on purpose. Any other exception that escapes is a defect. Imports no other module."""

from __future__ import annotations


class QuireError(Exception):
    """Base of all errors with a message for the user: one line with the value and the way out."""


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


class UnwantedError(QuireError):
    """Loading was cancelled because nobody waits for it any more."""


class InstancesFailedError(QuireError):
    """A request failed on one instance after the other."""


class EngineStoppedError(QuireError):
    """The engine has failed, and all its requests with it. What they had streamed before is whole."""


class ExtentError(QuireError):
    """Bytes that are no extent of the run they were taken for."""


class CacheFullError(QuireError):
    """The arena has too few free bytes. The scheduler evicts or waits; it never over-commits."""
