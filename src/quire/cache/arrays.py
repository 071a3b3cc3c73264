"""Short names for the types of arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Indices = NDArray[np.intp]
Int32s = NDArray[np.int32]
"""Ids of pages or chunks, tokens, positions."""
Int64s = NDArray[np.int64]
