"""Short names for the types of arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
Int32s = NDArray[np.int32]
"""Ids of pages or chunks, tokens, positions."""
Int64s = NDArray[np.int64]
