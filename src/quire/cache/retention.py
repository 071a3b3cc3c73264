"""Which tokens each head keeps. This is the plainest policy: all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

FULL = 0
"""The policy of a head that keeps every token."""


class KeepAll:
    """Every head of every layer keeps every token. Its answers depend on nothing, so not on cache state."""

    def __init__(self, num_layers: int, num_heads: int) -> None:
        self._shape = (num_layers, num_heads)

    def observe(self, layer: int, rows: slice, lse: torch.Tensor) -> None:
        """Sees the log-sum-exp [R, H, G] of a slice of prompt rows; has no use for it."""

    def decide(self) -> NDArray[np.uint8]:
        """The policy of every head at the end of the prompt, uint8 [L, H]: full."""
        return np.full(self._shape, FULL, np.uint8)

    def reseal(self, chunk: int) -> None:
        """Called when a chunk fills while decoding; nothing is dropped."""
