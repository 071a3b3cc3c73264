"""Prefixes in the arena and on a disk, as one: listed, found by their keys, and dropped. Listings name chunks by keys;
nothing here reads a page.

A prefix is known by the key of its last chunk. In the arena it ends a segment; on a disk it ends a chain of runs that
nothing else goes on from in between.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from quire.cache.keys import KEY_BYTES, ChunkKeys
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.namespace import Namespace
from quire.engine.prefixes import Prefix, find_chunk
from quire.errors import RequestError

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.stores.listing import Stored

ARENA, DISK = "arena", "disk"

_KEY = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")


@dataclass(frozen=True)
class Held:
    """What a tier has of a prefix: bytes of the chunks after its parent, and times in seconds since the epoch.

    pinned_until  0: not pinned; inf: without a time limit
    """

    num_bytes: int
    used: float
    pinned_until: float


@dataclass(frozen=True)
class KnownPrefix:
    """A prefix and where it is.

    key         key of its last chunk
    parent      key of the prefix that it goes on from; None: it is a first one
    num_tokens  tokens from the first one of the prompt up to its end
    tiers       by name of a tier
    """

    key: bytes
    parent: bytes | None
    num_tokens: int
    tiers: dict[str, Held]

    @property
    def used(self) -> float:
        """Time of its last use, in seconds since the epoch."""
        return max(held.used for held in self.tiers.values())


class Branch(NamedTuple):
    """A prefix by the keys of its chunks, and what lies around it on a disk.

    names  keys of its chunks, from the first one on, as far as they are known
    below  chunks that go on from its end
    kept   its chunks, but for the end, from which others go on too, or which are pinned without it
    """

    names: list[bytes]
    below: list[bytes]
    kept: set[bytes]


def known_prefixes(arena: Sequence[Prefix], stored: Sequence[Stored], now: float | None = None) -> list[KnownPrefix]:
    """Prefixes of both listings, those used last first. What ends with the same chunk is one.

    stored  runs of the engine's own namespace
    """
    now = time.time() if now is None else now
    chains = {chain[-1].names[-1]: chain for chain in _chains(stored)}
    run_of = {name: run for run in stored for name in run.names}
    found: list[KnownPrefix] = []
    for prefix in arena:
        key = bytes.fromhex(prefix.id)
        tiers = {ARENA: _in_arena(prefix, now)}
        if (run := run_of.get(key)) is not None:
            tiers[DISK] = _on_disk(chains.pop(key, [run]), prefix.num_tokens)
        parent = None if prefix.parent is None else bytes.fromhex(prefix.parent)
        found.append(KnownPrefix(key, parent, prefix.start + prefix.num_tokens, tiers))
    for key, chain in chains.items():
        first, last = chain[0], chain[-1]
        num_tokens = last.start * PAGE_TOKENS + last.num_tokens
        held = _on_disk(chain, sum(run.num_tokens for run in chain))
        found.append(KnownPrefix(key, first.parent if first.start else None, num_tokens, {DISK: held}))
    return sorted(found, key=lambda prefix: (-prefix.used, prefix.num_tokens))


def find_prefix(
    engine: Engine, key: bytes, stored: Sequence[Stored], visible: Callable[[str], bool]
) -> KnownPrefix | None:
    """The prefix that ends with this chunk, wherever that is; None if no visible one does. On the engine's thread."""
    tree, now = engine.scheduler.manager.tree, time.time()
    tiers: dict[str, Held] = {}
    parent, num_tokens = None, 0
    run = next((run for run in stored if key in run.names), None)
    if run is not None:
        count = run.names.index(key) + 1
        parent, num_tokens = run.parent if run.start else None, (run.start + count) * PAGE_TOKENS
        tiers[DISK] = _on_disk([run], count * PAGE_TOKENS)
    if (place := find_chunk(tree, key, lambda namespace: visible(namespace.salt))) is not None:
        segment, count = place
        assert segment.parent is not None
        parent, num_tokens = segment.parent.keys[-1] if segment.start else None, (segment.start + count) * PAGE_TOKENS
        idle = 0.0 if segment.most_locks else max(0.0, tree.now - segment.used_at)
        until = now + segment.pinned_until - tree.now if segment.pinned_until else 0.0
        num_bytes = count * engine.scheduler.manager.statistics.chunk_bytes
        tiers[ARENA] = Held(num_bytes, now - idle, until if count == len(segment.keys) else 0.0)
    return KnownPrefix(key, parent, num_tokens, tiers) if tiers else None


def branch_of(engine: Engine, key: bytes, stored: Sequence[Stored], visible: Callable[[str], bool]) -> Branch | None:
    """The branch that ends with this chunk; None if no visible one does. On the engine's thread."""
    tree = engine.scheduler.manager.tree
    run_of = {name: run for run in stored for name in run.names}
    names: list[bytes] = []
    end: bytes | None = key
    while end is not None and (place := find_chunk(tree, end, lambda ns: visible(ns.salt))) is None:
        run = run_of.get(end)
        if run is None or end in names:  # a part of it is lost
            break
        names[:0] = run.names[: run.names.index(end) + 1]
        end = run.parent if run.start else None
    else:
        if end is not None and place is not None:
            segment, count = place
            names[:0] = [name for each in segment.branch[:-1] for name in each.keys] + segment.keys[:count]
    if not names:
        return None
    after = _followers(stored)
    below = _descendants(after, key)
    along, gone = set(names), {key, *below}
    pinned = {name for run in stored if run.pinned_until > time.time() for name in run.names}
    pinned = set() if key in pinned else pinned
    kept: set[bytes] = set()
    for index in range(len(names) - 2, -1, -1):
        if names[index] in pinned or after[names[index]] - along - gone:
            kept.update(names[: index + 1])
            break
    return Branch(names, below, kept)


def drop_prefix(
    engine: Engine, key: bytes, stored: Sequence[Stored], visible: Callable[[str], bool]
) -> dict[str, int] | None:
    """Drops the prefix that ends with this chunk; see `Moving.drop`. None if no visible one does. On the engine's
    thread.
    """
    branch = branch_of(engine, key, stored, visible)
    return None if branch is None else engine.moving.drop(*branch)


def key_of(namespace: Namespace, prompt_ids: list[int], salt: str) -> bytes:
    """The key of a prompt's last whole chunk. Raises RequestError for a prompt shorter than a chunk."""
    if len(prompt_ids) < PAGE_TOKENS:
        count = "1 token" if len(prompt_ids) == 1 else f"{len(prompt_ids) or 'no'} tokens"
        raise RequestError(f"the prompt has {count}; the cache keeps whole chunks of {PAGE_TOKENS}", "prompt")
    return ChunkKeys(replace(namespace, salt=salt), prompt_ids).first(len(prompt_ids) // PAGE_TOKENS)[-1]


def read_key(text: str) -> bytes:
    """The key of a chunk from its hexadecimal digits. Raises RequestError for anything else."""
    if not isinstance(text, str) or not _KEY.fullmatch(text):
        raise RequestError(f"a prefix has a key of {2 * KEY_BYTES} hexadecimal digits, not {text!r:.80}", "key")
    return bytes.fromhex(text)


def _chains(stored: Iterable[Stored]) -> list[list[Stored]]:
    """Runs one after the other, where nothing else goes on in between. Of runs with equal chunks, the last used one."""
    runs: dict[bytes, Stored] = {}
    for run in stored:
        known = runs.get(run.names[-1])
        if known is None or (len(known.names), known.used) < (len(run.names), run.used):
            runs[run.names[-1]] = run
    after: dict[bytes, list[Stored]] = defaultdict(list)
    for run in runs.values():
        after[run.parent].append(run)
    chains: list[list[Stored]] = []
    todo = [[run] for run in runs.values() if not run.start or len(after[run.parent]) > 1 or run.parent not in runs]
    for chain in todo:
        while len(following := after[chain[-1].names[-1]]) == 1 and following[0].start:
            chain.append(following[0])
        chains.append(chain)
    return chains


def _followers(stored: Iterable[Stored]) -> dict[bytes, set[bytes]]:
    """By chunk, the chunks that follow it in some run."""
    after: dict[bytes, set[bytes]] = defaultdict(set)
    for run in stored:
        for before, name in zip((run.parent, *run.names), run.names, strict=False):
            after[before].add(name)
    return after


def _descendants(after: dict[bytes, set[bytes]], key: bytes) -> list[bytes]:
    found = list(after[key])
    for name in found:  # grows as it runs; keys are digests of all before them, so there is no circle
        found.extend(after[name])
    return found


def _in_arena(prefix: Prefix, now: float) -> Held:
    until = 0.0 if prefix.pinned_seconds is None else now + prefix.pinned_seconds
    return Held(prefix.num_bytes, now - prefix.idle_seconds, until)


def _on_disk(chain: Sequence[Stored], num_tokens: int) -> Held:
    """What the disk has of the last `num_tokens` tokens of a chain; their share of its bytes."""
    num_bytes, total = sum(run.num_bytes for run in chain), sum(run.num_tokens for run in chain)
    share = min(1.0, num_tokens / total)
    used, until = max(run.used for run in chain), max(run.pinned_until for run in chain)
    return Held(round(num_bytes * share), used, until)
