"""Estimates the remaining time of a batch."""

from __future__ import annotations

import numpy as np

LEAST_SAMPLES = 4


class Forecast:
    """Fits the seconds per prompt token and per generated token to the progress so far, by least squares. Both are
    needed, because a block computes all its prompts before its first tokens.
    """

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, int]] = [(0.0, 0, 0)]

    def note(self, seconds: float, prompt_tokens: int, tokens: int) -> None:
        """Notes the total progress. Times without progress count with the next progress."""
        if (prompt_tokens, tokens) != self._samples[-1][1:]:
            self._samples.append((seconds, prompt_tokens, tokens))

    def remaining_seconds(self, prompt_tokens: float, tokens: float) -> float | None:
        """Seconds for these numbers of further tokens; None if nothing is known yet."""
        if len(self._samples) < LEAST_SAMPLES:
            return None
        steps = np.diff(np.array(self._samples, np.float64), axis=0)
        seconds, work = steps[:, 0], steps[:, 1:]
        found = np.linalg.lstsq(work, seconds, rcond=None)[0]
        if found.min() < 0:  # the samples do not separate the two rates
            found = np.full(2, seconds.sum() / work.sum())
        return float(found @ (prompt_tokens, tokens))


def format_duration(seconds: float) -> str:
    """A time for people: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
