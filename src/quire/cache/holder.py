"""A sequence, as the cache sees it."""

from __future__ import annotations

from typing import Protocol

from quire.cache.keys import ChunkKeys
from quire.cache.path import Path, SwappedPath


class Holder(Protocol):
    """A sequence, as the cache sees it.

    path             the chunks it attends to
    num_preemptions  number of times that its pages were taken away
    swapped          its path while that is in a store; None otherwise
    fetched          by store, tokens that came from it before the first preemption
    keys             the keys of its chunks
    token_ids        prompt and generated tokens so far
    num_prompt       number of prompt tokens
    """

    path: Path
    num_preemptions: int
    swapped: SwappedPath | None
    fetched: dict[str, int]
    keys: ChunkKeys
    token_ids: list[int]
    num_prompt: int

    @property
    def priority(self) -> int:
        """See `Segment`."""

    @property
    def lifetime(self) -> float | None:
        """See `Segment`."""

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt may be found in the cache. It may not if every prompt row must be computed."""
