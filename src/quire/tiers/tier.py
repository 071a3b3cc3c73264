"""A tier: a memory of page images. The plainest one is the arena itself; all others are added beside it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.partial import Partial
from quire.cache.page import PagePool


class Transfer(Protocol):
    """Bytes on their way."""

    def wait(self) -> None:
        """Returns when they have arrived; raises what went wrong."""
        ...


class Done:
    """A transfer that was complete when it was begun."""

    def wait(self) -> None:
        """Returns at once."""


class Tier(Protocol):
    """A memory of page images, by their size; it never looks inside them."""

    def load(self, ids: NDArray[np.int32], into: torch.Tensor) -> Transfer:
        """Copies page images into a buffer uint8 [n, page_bytes]."""
        ...

    def store(self, pages: torch.Tensor) -> tuple[NDArray[np.int32], Transfer]:
        """Keeps page images uint8 [n, page_bytes]; returns their ids, int32 [n]. Raises CacheFullError if they do not
        fit.
        """
        ...

    def attend(self, pages: NDArray[np.int32], q: torch.Tensor, layer: int) -> Partial | None:
        """The partial attention of q over pages where they are, or None if the tier cannot compute: then they must be
        fetched.
        """
        ...


class ArenaTier:
    """The tier attention reads: its pages are near already, so it never computes on its own."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool

    def load(self, ids: NDArray[np.int32], into: torch.Tensor) -> Transfer:
        """See Tier."""
        into.copy_(self.pool.load(ids, into.shape[1]))
        return Done()

    def store(self, pages: torch.Tensor) -> tuple[NDArray[np.int32], Transfer]:
        """See Tier."""
        ids = self.pool.take(len(pages), pages.shape[1])
        self.pool.store(ids, pages.shape[1], pages)
        return ids, Done()

    def attend(self, pages: NDArray[np.int32], q: torch.Tensor, layer: int) -> Partial | None:
        """None: the backend reads the arena itself."""
        return None
