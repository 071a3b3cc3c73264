"""Every error Quire raises on purpose. Knows no other module; anything else that escapes is a defect of ours."""

from __future__ import annotations


class QuireError(Exception):
    """Base of all errors whose message is meant for the person at the keyboard: one line, the value, the way out."""


class ConfigError(QuireError, ValueError):
    """A setting that cannot work: names the setting, its value and the nearest one that would."""


class ModelError(QuireError):
    """A model that cannot be used: unknown architecture, missing tensor, wrong shape, short file. Names the thing."""


class RequestError(QuireError, ValueError):
    """A request that cannot be served as it is written; the server answers it with 400.

    param  name of the offending request field, None when no single field is at fault
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(QuireError):
    """The waiting queue is full; the server answers 429.

    retry_after  seconds after which trying again makes sense
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnwantedError(QuireError):
    """Loading was given up, because nobody waits for it any more."""


class ExtentError(QuireError):
    """Bytes that are no extent of the run they were taken for."""


class CacheFullError(QuireError):
    """The arena has fewer free bytes than asked for; the scheduler makes room or waits, it never over-commits."""
