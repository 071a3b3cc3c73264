"""A sequence, as the cache sees it."""

from __future__ import annotations

from typing import Protocol

from quire.cache.keys import ChunkKeys
from quire.cache.path import Path, Swapped


class Holder(Protocol):
    """A sequence, as the cache sees it.

    path             the chunks it attends to
    num_preemptions  number of times that its pages were taken away
    swapped          its path while that is in a store; None otherwise
    """

    path: Path
    num_preemptions: int
    swapped: Swapped | None

    @property
    def keys(self) -> ChunkKeys:
        """The keys of its chunks."""
        ...

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt may be found in the cache. It may not if every prompt row must be computed."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens so far."""
        ...

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""
        ...
