"""The prefix tree's contents, for people. Only reads the tree."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.cache.keys import namespace_key
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.segment import Segment
from quire.cache.tree import PrefixTree
from quire.engine.explain import num_same_tokens

if TYPE_CHECKING:
    from quire.engine.engine import Engine

SHOWN_TOKENS = 320
"""Maximum number of shown tokens of a prefix. Copying all tokens would delay the engine's next step."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """One segment of the tree: the tokens after its parent's, and their use.

    id                key of its last chunk (`cache/keys.py`): the same on every machine, independent of other prefixes
    space             key of the namespace: requests share segments only within one
    parent            id of the parent segment; None for a root
    start             position of its first token
    num_tokens        number of its tokens
    token_ids         its first tokens, at most `SHOWN_TOKENS`
    num_same          number of leading tokens that it has in common with a sibling
    sharers           live sequences that read it
    hits              sequences that reused it
    computed          sequences that computed it
    hit_rate          hits / (hits + computed)
    num_bytes         bytes of its pages
    idle_seconds      time since a sequence last took or left it; 0 while one reads it
    pinned_seconds    remaining time of its pin; None if it has none, inf if the pin never ends
    instance          instance of a cluster that has it; empty with one engine
    """

    id: str
    space: str
    parent: str | None
    start: int
    num_tokens: int
    token_ids: list[int]
    num_same: int
    sharers: int
    hits: int
    computed: int
    hit_rate: float
    num_bytes: int
    idle_seconds: float
    pinned_seconds: float | None
    instance: str = ""


def engine_prefixes(engine: Engine, visible: Callable[[str], bool] = lambda salt: True) -> list[Prefix]:
    """The prefix tree's contents under visible salts, parents first. On the engine's thread."""
    manager = engine.scheduler.manager
    manager.tick(engine.clock())
    return prefixes(manager.tree, manager.statistics.chunk_bytes, lambda namespace: visible(namespace.salt))


def prefixes(
    tree: PrefixTree, chunk_bytes: int, visible: Callable[[Any], bool] = lambda namespace: True
) -> list[Prefix]:
    """The segments of the visible namespaces, parents first."""
    found: list[Prefix] = []
    same: dict[Segment, int] = {}
    for segment in tree.segments():
        namespace = segment.namespace
        if not visible(namespace):
            continue
        assert segment.parent is not None
        if segment not in same:
            siblings = segment.parent.children.values()
            same |= _in_common([each for each in siblings if each.namespace == namespace])
        sharers = int(segment.locks.max())
        found.append(
            Prefix(
                id=segment.keys[-1].hex(),
                space=namespace_key(namespace).hex(),
                parent=segment.parent.keys[-1].hex() if segment.parent.keys else None,
                start=segment.start * PAGE_TOKENS,
                num_tokens=len(segment.tokens),
                token_ids=segment.tokens[:SHOWN_TOKENS].tolist(),
                num_same=same[segment],
                sharers=sharers,
                hits=segment.hits,
                computed=segment.computed,
                hit_rate=segment.hits / (segment.hits + segment.computed),
                num_bytes=len(segment.chunks) * chunk_bytes,
                idle_seconds=0.0 if sharers else max(0.0, tree.now - segment.used_at),
                pinned_seconds=segment.pinned_until - tree.now if segment.pinned_until else None,
            )
        )
    return found


def find_chunk(
    tree: PrefixTree, key: bytes, visible: Callable[[str], bool] = lambda salt: True
) -> tuple[Segment, int] | None:
    """The segment with this chunk, and the number of its chunks up to this one. None if no visible segment has it."""
    for segment in tree.segments():
        namespace: Any = segment.namespace
        if key in segment.keys and visible(namespace.salt):
            return segment, segment.keys.index(key) + 1
    return None


def _in_common(siblings: list[Segment]) -> dict[Segment, int]:
    """The number of leading tokens that each segment's first chunk has in common with the most similar sibling."""
    # In any lexicographic order, a segment's neighbours have the most in common with it. Bytes compare fastest.
    ordered = sorted(siblings, key=lambda segment: segment.tokens[:PAGE_TOKENS].tobytes())
    found = dict.fromkeys(ordered, 0)
    for left, right in itertools.pairwise(ordered):
        same = num_same_tokens(left.tokens[:PAGE_TOKENS], right.tokens[:PAGE_TOKENS])
        found[left], found[right] = max(found[left], same), same
    return found
