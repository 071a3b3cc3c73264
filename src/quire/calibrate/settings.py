"""How a calibration is made, and where it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.cache.codecs.nuq import MAX_SLOTS
from quire.cache.ledger import PAGE_TOKENS
from quire.calibrate.fit import KINDS
from quire.config import CacheConfig
from quire.errors import ConfigError
from quire.models.embedded import cache_folder

ALGORITHM = 1
"""Raised when the same settings make other tables."""

WIDTHS = (2, 3, 4)
"""Bits for which there is a codec."""

WINDOW_TOKENS = 1024
HELD_OUT = 4
"""One window in so many is not fitted to; books are tried on it."""


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """How a calibration is made.

    bits           widths that it has tables for, on average over keys and values
    outlier_slots  of each key and value vector
    sink_tokens    first tokens of a sequence that the cache keeps exact; they and at least one are left out
    num_windows    pieces of text that are read
    window_tokens  tokens of each; None: 1,024, or as many as the model reads
    seed           of the text that the model writes itself
    kinds          of books to choose from, see `fit`
    spends         whether bits go where they pay; else all have the same
    q_norm         whether what is stored has the mean and deviation of what was
    Raises ConfigError for what cannot be.
    """

    bits: tuple[int, ...] = WIDTHS
    outlier_slots: int = 1
    sink_tokens: int = 1
    num_windows: int = 8
    window_tokens: int | None = None
    seed: int = 0
    kinds: tuple[str, ...] = KINDS
    spends: bool = True
    q_norm: bool = False

    def __post_init__(self) -> None:
        if not self.bits or set(self.bits) - set(WIDTHS):
            raise ConfigError(f"bits are {_listed(self.bits)}; there are codecs of {_listed(WIDTHS)}")
        if not self.kinds or set(self.kinds) - set(KINDS):
            raise ConfigError(f"books are {_listed(self.kinds)}; there are {_listed(KINDS)}")
        if not 0 <= self.outlier_slots <= MAX_SLOTS:
            raise ConfigError(f"outlier slots are {self.outlier_slots}; there may be 0 to {MAX_SLOTS}")
        if not 0 <= self.sink_tokens <= PAGE_TOKENS:
            raise ConfigError(f"sink tokens are {self.sink_tokens}; there may be 0 to {PAGE_TOKENS}")
        if self.num_windows < 2:
            raise ConfigError(f"windows are {self.num_windows}; at least 2 are needed, one of them to try books on")

    @classmethod
    def of(cls, cache: CacheConfig) -> CalibrationSettings:
        """Those of the calibration that a cache with these settings makes for itself."""
        return cls(outlier_slots=cache.outlier_slots, sink_tokens=cache.sink_tokens)

    @property
    def skipped(self) -> int:
        """First tokens of a window that are left out: the first is like no other, whether it is kept exact or not."""
        return max(1, self.sink_tokens)

    @property
    def num_held_out(self) -> int:
        """Windows that books are tried on."""
        return max(1, self.num_windows // HELD_OUT)

    def file(self, model: str) -> Path:
        """Where a calibration for the model with this fingerprint is kept unless told otherwise.

        The name has all that says what the tables are, and nothing of what they were fitted to: the last calibration
        made is the one that caches take.
        """
        words = [model[:16], f"slots{self.outlier_slots}", f"sinks{self.sink_tokens}"]
        if set(self.bits) != set(WIDTHS):
            words.append("bits" + "".join(map(str, sorted(self.bits))))
        if set(self.kinds) != set(KINDS):
            words += sorted(self.kinds)
        words += ["same-bits"] * (not self.spends) + ["q-norm"] * self.q_norm
        return folder() / ("-".join(words) + ".safetensors")


def folder() -> Path:
    """Where calibrations are kept: quire/calibrations in the user's cache folder."""
    return cache_folder().parent / "calibrations"


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values)) or "none"
