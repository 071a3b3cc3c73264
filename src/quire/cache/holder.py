"""What the cache needs to know of a sequence."""

from __future__ import annotations

from typing import Protocol

from quire.cache.keys import ChunkKeys
from quire.cache.path import Path, Swapped


class Holder(Protocol):
    """A sequence, as the cache sees it.

    path             what it attends to
    num_preemptions  how often its pages were taken away
    swapped          its path while that is in a store; None: it is not
    """

    path: Path
    num_preemptions: int
    swapped: Swapped | None

    @property
    def keys(self) -> ChunkKeys:
        """The names of its chunks."""
        ...

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt may be matched; not if every prompt row is wanted."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens so far."""
        ...

    @property
    def num_prompt(self) -> int:
        """How many of them are the prompt."""
        ...
