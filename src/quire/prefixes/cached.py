"""Prefixes in the arena and on a disk, merged: listing, finding by key, and dropping. Listings name chunks by keys;
this module reads no page.

A prefix is identified by the key of its last chunk. In the arena it ends a segment; on a disk it ends a chain of runs
without branches in between.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from quire.cache.keys import KEY_BYTES, ChunkKeys
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.namespace import Namespace
from quire.errors import RequestError
from quire.prefixes.disk_index import DiskPrefixIndex, TierCopy
from quire.prefixes.listing import Prefix, find_chunk

if TYPE_CHECKING:
    from quire.engine.engine import Engine

ARENA, DISK = "arena", "disk"

_KEY = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")


@dataclass(frozen=True)
class CachedPrefix:
    """A prefix and its copies.

    key         key of its last chunk, in hexadecimal
    parent      key of the prefix that it continues, in hexadecimal; None: it begins a prompt
    num_tokens  tokens from the start of the prompt to its end
    tiers       its copies by name of the tier
    """

    key: str
    parent: str | None
    num_tokens: int
    tiers: dict[str, TierCopy]

    @property
    def used(self) -> float:
        """Time of its last use, in seconds since the epoch."""
        return max(tier_copy.used for tier_copy in self.tiers.values())


@dataclass(frozen=True)
class SaltFilter:
    """The salts that a caller may see: those that begin with `begin`. By default all salts."""

    begin: str = ""

    def __call__(self, salt: str) -> bool:
        """Whether a salt is visible."""
        return salt.startswith(self.begin)


class Branch(NamedTuple):
    """A prefix by the keys of its chunks, and its surroundings on a disk.

    names  keys of its chunks, from the first one on, as far as they are known
    descendants  chunks after its end
    kept   its chunks, except the last, that other prefixes continue or that are pinned by themselves
    """

    names: list[bytes]
    descendants: list[bytes]
    kept: set[bytes]


def known_prefixes(
    arena: Sequence[Prefix], disk_index: DiskPrefixIndex, now: float | None = None
) -> list[CachedPrefix]:
    """Prefixes of the arena and of a disk, those used last first. Copies with the same last chunk are merged."""
    now = time.time() if now is None else now
    found: list[CachedPrefix] = []
    for prefix in arena:
        until = 0.0 if prefix.pinned_seconds is None else now + prefix.pinned_seconds
        tiers = {ARENA: TierCopy(prefix.num_bytes, now - prefix.idle_seconds, until)}
        if (tier_copy := disk_index.tier_copy(bytes.fromhex(prefix.id), prefix.num_tokens)) is not None:
            tiers[DISK] = tier_copy
        found.append(CachedPrefix(prefix.id, prefix.parent, prefix.start + prefix.num_tokens, tiers))
    in_arena = {prefix.key for prefix in found}
    ends = (chain[-1].names[-1] for chain in disk_index.chains)
    found += [known for key in ends if key.hex() not in in_arena and (known := _stored(disk_index, key)) is not None]
    return sorted(found, key=lambda prefix: (-prefix.used, prefix.num_tokens))


def find_prefix(
    engine: Engine, key: bytes, disk_index: DiskPrefixIndex, visible: Callable[[str], bool]
) -> CachedPrefix | None:
    """The prefix that ends with this chunk, on any tier; None if no visible one does. On the engine's thread."""
    tree, now = engine.scheduler.manager.tree, time.time()
    if (place := find_chunk(tree, key, visible)) is None:
        return _stored(disk_index, key)
    segment, count = place
    assert segment.parent is not None
    parent = segment.parent.keys[-1].hex() if segment.start else None
    idle = 0.0 if segment.most_locks else max(0.0, tree.now - segment.used_at)
    until = now + segment.pinned_until - tree.now if segment.pinned_until else 0.0
    num_bytes = count * engine.scheduler.manager.statistics.chunk_bytes
    tiers = {ARENA: TierCopy(num_bytes, now - idle, until if count == len(segment.keys) else 0.0)}
    if (tier_copy := disk_index.tier_copy(key, count * PAGE_TOKENS)) is not None:
        tiers[DISK] = tier_copy
    return CachedPrefix(key.hex(), parent, (segment.start + count) * PAGE_TOKENS, tiers)


def branch_of(engine: Engine, key: bytes, disk_index: DiskPrefixIndex, visible: Callable[[str], bool]) -> Branch | None:
    """The branch that ends with this chunk; None if no visible one does. On the engine's thread."""
    tree = engine.scheduler.manager.tree
    names: list[bytes] = []
    end: bytes | None = key
    while end is not None and (place := find_chunk(tree, end, visible)) is None:
        run = disk_index.run_of.get(end)
        if run is None or end in names:  # a part of the prefix is lost
            break
        names[:0] = run.names[: run.names.index(end) + 1]
        end = run.parent if run.start else None
    else:
        if end is not None and place is not None:
            segment, count = place
            names[:0] = [name for each in segment.branch[:-1] for name in each.keys] + segment.keys[:count]
    if not names:
        return None
    descendants, now = disk_index.descendants(key), time.time()
    along, dropped = set(names), {key, *descendants}
    pinned = {name for name in names if disk_index.pins.get(name, 0.0) > now}
    pinned = set() if key in pinned else pinned
    kept: set[bytes] = set()
    for index in range(len(names) - 2, -1, -1):
        if names[index] in pinned or disk_index.after.get(names[index], set()) - along - dropped:
            kept.update(names[: index + 1])
            break
    return Branch(names, descendants, kept)


def drop_prefix(
    engine: Engine, key: bytes, disk_index: DiskPrefixIndex, visible: Callable[[str], bool]
) -> dict[str, int] | None:
    """Drops the prefix that ends with this chunk; see `Tiering.drop`. None if no visible one does. On the engine's
    thread.
    """
    branch = branch_of(engine, key, disk_index, visible)
    return None if branch is None else engine.tiering.drop(*branch)


def prompt_key(namespace: Namespace, prompt_ids: list[int], salt: str) -> bytes:
    """The key of a prompt's last whole chunk. Raises RequestError for a prompt shorter than a chunk."""
    if len(prompt_ids) < PAGE_TOKENS:
        count = "1 token" if len(prompt_ids) == 1 else f"{len(prompt_ids) or 'no'} tokens"
        raise RequestError(f"the prompt has {count}; the cache keeps whole chunks of {PAGE_TOKENS}", "prompt")
    return ChunkKeys(replace(namespace, salt=salt), prompt_ids).first(len(prompt_ids) // PAGE_TOKENS)[-1]


def parse_prefix_key(text: str) -> bytes:
    """The key of a chunk from its hexadecimal digits. Raises RequestError for anything else."""
    if not isinstance(text, str) or not _KEY.fullmatch(text):
        raise RequestError(f"a prefix has a key of {2 * KEY_BYTES} hexadecimal digits, not {text!r:.80}", "key")
    return bytes.fromhex(text)


def _stored(disk_index: DiskPrefixIndex, key: bytes) -> CachedPrefix | None:
    """The prefix that ends with a chunk on the disk. Its parent is the prefix before the chain of its runs."""
    run = disk_index.run_of.get(key)
    if run is None:
        return None
    first, num_tokens = disk_index.chain_start(run), (run.start + run.names.index(key) + 1) * PAGE_TOKENS
    tier_copy = disk_index.tier_copy(key, num_tokens - first.start * PAGE_TOKENS)
    assert tier_copy is not None, "a stored chunk without bytes"
    return CachedPrefix(key.hex(), first.parent.hex() if first.start else None, num_tokens, {DISK: tier_copy})
