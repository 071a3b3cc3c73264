"""Estimates the time of a calibration before it begins, from the speed of one product on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from quire.calibrate.settings import CalibrationSettings
    from quire.models.shape import ModelShape

GATHERED = 2.1
"""Time to gather a token, in units of a float32 product of the token with all matrices: 0.65 forward over packed
weights, 1.0 for the gradient, 0.2 to decode weights, and the rest of a layer.
"""

WRITTEN = 1.25
"""Time to write a token with seven others in a step, in the same units."""

FITTED_SECONDS = 2e-3
"""Processor time to fit one channel of keys and values."""

_SIZE = 1024
_ROUNDS = 3


def estimated_seconds(shape: ModelShape, settings: CalibrationSettings, threads: int, *, writes: bool = True) -> float:
    """Seconds that a calibration will take on this CPU if nothing else uses its cores, accurate to within 50 %.

    writes  whether the model writes the text
    """
    tokens = settings.num_windows * settings.tokens_of(shape)
    product = 2.0 * shape.num_parameters * tokens / _product_rate()
    channels = shape.num_layers * shape.num_kv_heads * shape.head_dim
    seconds = product * (GATHERED + (WRITTEN if writes else 0.0)) + FITTED_SECONDS * channels
    return seconds / threads


def _product_rate() -> float:
    """Operations per second of a float32 product on one thread: the best of a few, which take 0.1 s together."""
    threads, best = torch.get_num_threads(), 0.0
    a = torch.ones(_SIZE, _SIZE)
    torch.set_num_threads(1)
    try:
        for _ in range(_ROUNDS):
            begun = time.thread_time()  # excludes the time that other programs use the core
            a @ a
            best = max(best, 2.0 * _SIZE**3 / (time.thread_time() - begun))
    finally:
        torch.set_num_threads(threads)
    return best


def duration_text(seconds: float) -> str:
    """A duration for a log line: `about 40 s`, `about 6 minutes`, `about 2.5 hours`."""
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    if seconds < 5400:
        return f"about {round(seconds / 60)} minutes"
    return f"about {seconds / 3600:.1f} hours"
