"""Fits the corrections of a profile to whole generations, by least squares on relative errors.

The speeds of products, attention and reads alone do not add up to the time of a generation: reading takes cores and
memory bandwidth from computing, and a step has work of its own.

Source: the cost model of FlexGen's public code is fitted to end-to-end runs for the same reason. Ours fits seven
numbers on top of measured tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.offload.planning.profile import Corrections, ProfiledRun

PULL = 0.1
"""Weight of the distance from no correction: the error of a run over the expected size of a correction, 5 % over 0.5.
It determines corrections that noisy runs leave undetermined.
"""

MOST_FACTOR = 5.0
"""Largest and inverse of the smallest factor on measured seconds."""


def fit(runs: Sequence[ProfiledRun], seconds_of: Callable[[ProfiledRun, Corrections], float]) -> Corrections:
    """The corrections with the least squared relative error.

    runs        measured generations; with few runs, some corrections stay near 1 or 0
    seconds_of  the prediction of a run
    """
    from scipy.optimize import least_squares

    # Seconds between passes are in units of the fastest pass.
    unit = min(run.seconds / (run.output_tokens * run.sequences) for run in runs)

    def corrections(values: NDArray[np.float64]) -> Corrections:
        disk, bus, prefill, decode, exposed, step, sequence = (float(value) for value in values)
        return Corrections(
            math.exp(disk), math.exp(prefill), math.exp(decode),
            min(1.0, max(0.0, exposed)), max(0.0, step) * unit, max(0.0, sequence) * unit, bus=math.exp(bus),
        )  # fmt: skip

    def errors(values: NDArray[np.float64]) -> NDArray[np.float64]:
        chosen = corrections(values)
        found = [seconds_of(run, chosen) / run.seconds - 1 for run in runs]
        return np.array([*found, *(PULL * values)])

    most = math.log(MOST_FACTOR)
    low, high = [-most] * 4 + [0.0] * 3, [most] * 4 + [1.0] * 3
    answer = least_squares(errors, [0.0] * 4 + [0.1, 0.01, 0.01], bounds=(low, high), diff_step=1e-4)
    return corrections(answer.x)
