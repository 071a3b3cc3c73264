"""The settings of a calibration, and its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cache.codecs import CODECS
from quire.cache.codecs.nuq import MAX_SLOTS
from quire.cache.ledger import PAGE_TOKENS
from quire.calibrate.fit import KINDS
from quire.config import CacheConfig
from quire.errors import ConfigError
from quire.models.embedded import cache_folder
from quire.models.shape import ModelShape

ALGORITHM = 2
"""Version of the algorithm; raised when the same settings give other tables."""

CODEC_OF = {row.bits: row.name for row in CODECS.values() if row.is_calibrated}
"""The calibrated codec of each bit width."""

WIDTHS = tuple(sorted(CODEC_OF))

WINDOW_TOKENS = 1024
LEAST_WINDOW_TOKENS = 256

MOST_WORK = 4e12
"""Tokens times parameters above which windows are halved: 2,048 tokens of a model with 1.5 billion parameters are 3e12.
More tokens gain less than another seed changes (docs/design/calibration.md).
"""

HELD_OUT = 4
"""One window in this many is held out from fitting, to measure the cost of codebooks."""


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """The settings of a calibration.

    bits           average bit widths to make tables for, over keys and values
    outlier_slots  number of slots of each key and value vector
    sink_tokens    number of first tokens of a sequence that the cache keeps exact; they, and at least one, are left out
    num_windows    number of windows of text
    window_tokens  tokens per window; None: 1,024, or the model's context if that is less, and down to 256 for models so
                   large that they exceed MOST_WORK
    seed           seed of the text that the model writes itself
    kinds          kinds of codebooks to choose from, see `fit`
    spends         whether widths vary by channel and head; otherwise all are the same
    q_norm         whether decoded elements keep the mean and deviation of the original ones
    Raises ConfigError for invalid settings.
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
            raise ConfigError(f"bits are {_listed(self.bits)}; they must be some of {_listed(WIDTHS)}")
        if not self.kinds or set(self.kinds) - set(KINDS):
            raise ConfigError(f"books are {_listed(self.kinds)}; they must be some of {_listed(KINDS)}")
        if not 0 <= self.outlier_slots <= MAX_SLOTS:
            raise ConfigError(f"outlier_slots is {self.outlier_slots}; it must be from 0 to {MAX_SLOTS}")
        if not 0 <= self.sink_tokens <= PAGE_TOKENS:
            raise ConfigError(f"sink_tokens is {self.sink_tokens}; it must be from 0 to {PAGE_TOKENS}")
        if self.num_windows < 2:
            raise ConfigError(f"there are {self.num_windows} windows; at least 2 are needed, one of them held out")

    @classmethod
    def of(cls, cache: CacheConfig) -> CalibrationSettings:
        """The default calibration settings for a cache with these settings."""
        return cls(outlier_slots=cache.outlier_slots, sink_tokens=cache.sink_tokens)

    def tokens_of(self, shape: ModelShape) -> int:
        """Tokens per window for a model."""
        if self.window_tokens is not None:
            return self.window_tokens
        tokens = WINDOW_TOKENS
        while tokens > LEAST_WINDOW_TOKENS and self.num_windows * tokens * shape.num_parameters > MOST_WORK:
            tokens //= 2
        return min(tokens, shape.max_context)

    @property
    def skipped(self) -> int:
        """Number of first tokens of a window to leave out. The very first token is unlike all others, even without
        sinks.
        """
        return max(1, self.sink_tokens)

    @property
    def num_held_out(self) -> int:
        """Number of held-out windows."""
        return max(1, self.num_windows // HELD_OUT)

    def of_tables(self) -> dict[str, Any]:
        """The settings that define the tables, as a calibration's file has them."""
        return {
            "bits": sorted(self.bits),
            "outlier_slots": self.outlier_slots,
            "books": list(self.kinds),
            "same_bits": not self.spends,
            "q_norm": self.q_norm,
        }

    def file(self, model: str) -> Path:
        """The default file of a calibration for the model with this fingerprint.

        The name depends on the settings that define the tables, and not on the text. So caches use the last calibration
        made.
        """
        words = [model[:16], f"slots{self.outlier_slots}", f"sinks{self.sink_tokens}"]
        if set(self.bits) != set(WIDTHS):
            words.append("bits" + "".join(map(str, sorted(self.bits))))
        if set(self.kinds) != set(KINDS):
            words += sorted(self.kinds)
        words += ["same-bits"] * (not self.spends) + ["q-norm"] * self.q_norm
        return folder() / ("-".join(words) + ".safetensors")


def folder() -> Path:
    """The folder of calibrations: quire/calibrations in the user's cache folder."""
    return cache_folder().parent / "calibrations"


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values)) or "none"
