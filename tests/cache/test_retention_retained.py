"""Sequences after retention: the right tokens in the right slots, no unnecessary page, and everything freed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.cache.arena import Arena
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.sums import SumsCodec
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS, Demand, PageLedger
from quire.cache.manager import CacheManager
from quire.cache.path import Path, SwappedPath
from quire.cache.retention.decisions import Retention, RetentionDecision
from quire.cache.retention.policies import PolicyChain
from quire.cache.table import ChunkTable
from quire.cache.tree import PrefixTree
from tests.effort import examples

L, H, D = 2, 2, 8
CODEC = DenseCodec(D, torch.float32)
CHAIN = PolicyChain(0.9, frequent=0.2, local=0.3)
FULL = CHAIN.full


@dataclass(eq=False)
class Holder:
    """A sequence, as the manager sees one."""

    prompt: list[int]
    generated: list[int] = field(default_factory=list)
    namespace: Hashable = "model"
    reads_cache: bool = True
    num_preemptions: int = 0
    priority: int = 0
    lifetime: float | None = None
    fetched: dict[str, int] = field(default_factory=dict)
    swapped: SwappedPath | None = None
    path: Path = field(default_factory=Path)
    # By position: which tokens heads keep, bool [L, H, n], as a plain list of rules would have it.
    kept: NDArray[np.bool_] | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def keys(self) -> ChunkKeys:
        return ChunkKeys(self.namespace, self.token_ids)


def make_manager(chunks: int, *, share: bool = True, rows: int = 16) -> CacheManager:
    size = CODEC.page_bytes * L * H
    ledger = PageLedger(chunks * size, CODEC.page_bytes)
    arena = Arena(ledger.num_bytes)
    arena.data.fill_(0xFF)
    table = ChunkTable(ledger, L, H, CODEC, sums=SumsCodec(), arena=arena)
    retention = Retention(CHAIN, special=[[1]], punctuation=frozenset([2]), profile_rows=rows)
    return CacheManager(table, PrefixTree((L, H), shares=share), retention=retention)


def values(layer: int, head: int, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    return (((tokens * 3 + layer) * 5 + head) * 4096 + positions).astype(np.float32)


def ranks(holder: Holder, layer: int, head: int, positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Attention of tokens: it does not depend on how the prompt was cut."""
    tokens = np.array(holder.token_ids)[positions]
    return ((tokens * 7919 + positions * 104729 + layer * 31 + head * 17) % 997).astype(np.float32) / np.float32(997)


def write(manager: CacheManager, holder: Holder, start: int, end: int) -> None:
    """Keys and values that say whose they are, and sums that rank tokens."""
    table, path = manager.table, holder.path
    assert table.masks is not None
    for index in range(start // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
        at = np.arange(max(start, index * PAGE_TOKENS), min(end, (index + 1) * PAGE_TOKENS))
        slots, row = torch.from_numpy(at % PAGE_TOKENS), index - path.retention.num_dropped
        for layer in range(L):
            for head in range(H):
                numbers = values(layer, head, at, np.array(holder.token_ids)[at])
                page = table.arena.rows(CODEC.page_bytes)[table.pages[path.chunks[row], layer, head]]
                page.view(torch.float32).view(2, PAGE_TOKENS, D)[:, slots] = torch.from_numpy(numbers)[:, None]
                if len(path.retention.sums) and table.masks[path.retention.sums[row], layer, head]:
                    sums = table.arena.rows(256)[table.pages[path.retention.sums[row], layer, head]].view(torch.float32)
                    sums[slots] += torch.from_numpy(ranks(holder, layer, head, at))


def compute(manager: CacheManager, holder: Holder, most: int = 10**6) -> None:
    """Computes the prompt in slices of so many tokens at most."""
    while holder.path.num_tokens < holder.num_prompt:
        manager.paths.match(holder)
        start = holder.path.num_tokens
        limits = manager.retention.slice_limits(holder)
        end = min(limits.end, max(start + most // 64 * 64, limits.undivided))
        if start + most < end and end < holder.num_prompt:
            end = start + most // 64 * 64
        assert manager.paths.extend(holder, end)
        write(manager, holder, start, end)
        manager.paths.commit(holder, end)
        manager.check()


def start(manager: CacheManager, holder: Holder, policies: list[list[int]], most: int = 10**6) -> bool:
    if not manager.admit(holder):
        return False
    compute(manager, holder, most)
    retain(manager, holder, policies)
    return True


def retain(manager: CacheManager, holder: Holder, policies: list[list[int]]) -> None:
    n = holder.num_prompt
    sums = manager.table.load_sums(holder.path.retention.sums)[..., : holder.num_prompt]
    expected = [[ranks(holder, layer, head, np.arange(n)) for head in range(H)] for layer in range(L)]
    assert np.array_equal(sums, np.array(expected)), "sums are not those of the prompt's tokens"
    kept = np.ones((L, H, n), bool)
    for layer in range(L):
        for head in range(H):
            kept[layer, head] = by_rules(holder, layer, head, policies[layer][head], kept[layer, head], n)
    decided = RetentionDecision(np.array(policies, np.uint8), kept, np.full((L, H, FULL + 1), np.nan), CHAIN)
    manager.retain(holder, decided)
    holder.kept = kept.copy()
    holder.kept[..., n // PAGE_TOKENS * PAGE_TOKENS :] = True  # what is in an open chunk is not dropped yet
    manager.check()


def by_rules(
    holder: Holder, layer: int, head: int, policy: int, before: NDArray[np.bool_], n: int
) -> NDArray[np.bool_]:
    """The members' rules, one token after the other."""
    tokens = holder.token_ids[:n]
    if policy == FULL:
        return np.ones(n, bool)
    wanted = [j == 0 or tokens[j] == 1 or (policy >= 1 and tokens[j] == 2) for j in range(n)]
    if policy >= 3:
        wanted = [each or j >= n - CHAIN.num_local(holder.num_prompt) for j, each in enumerate(wanted)]
    kept = np.array(wanted) & before
    if policy >= 2:
        others = [j for j in range(n) if before[j] and not wanted[j]]
        found = ranks(holder, layer, head, np.arange(n))
        others.sort(key=lambda j: (-found[j], j))
        kept[others[: CHAIN.num_frequent(n)]] = True
    return kept


def decode(manager: CacheManager, holder: Holder, tokens: list[int]) -> None:
    """Generates tokens; whenever a chunk is full, what is kept is asked again."""
    for token in tokens:
        holder.generated.append(token)
        position = holder.path.num_tokens
        assert manager.retention.slice_limits(holder).end == position + 1
        assert manager.paths.extend(holder, position + 1)
        write(manager, holder, position, position + 1)
        manager.paths.commit(holder, position + 1)
        if holder.path.num_tokens % PAGE_TOKENS == 0:
            n = holder.path.num_tokens
            assert holder.kept is not None
            before = np.concatenate((holder.kept, np.ones((L, H, n - holder.kept.shape[-1]), bool)), -1)
            policies = (
                holder.path.retention.retained.policies
                if holder.path.retention.retained is not None
                else np.full((L, H), FULL)
            )
            holder.kept = np.array(
                [[by_rules(holder, la, h, int(policies[la, h]), before[la, h], n) for h in range(H)] for la in range(L)]
            )
    manager.check()


def read(manager: CacheManager, holder: Holder) -> dict[tuple[int, int], set[float]]:
    """The keys in the sealed slots that each head sees."""
    table, path = manager.table, holder.path
    found: dict[tuple[int, int], set[float]] = {}
    for layer in range(L):
        for head in range(H):
            seen: list[float] = []
            for row in path.chunks[: path.num_sealed - path.retention.num_dropped].tolist():
                mask = int(table.masks[row, layer, head])
                if mask:
                    image = table.arena.load(table.pages[row, layer, head : head + 1], CODEC.page_bytes)
                    keys, values = CODEC.decode(layer, head, image)
                    assert torch.equal(keys, values)
                    seen += [float(keys[0, t, 0]) for t in range(PAGE_TOKENS) if mask >> t & 1]
            assert len(set(seen)) == len(seen), "a token is seen twice"
            found[layer, head] = set(seen)
    return found


def check_tokens(manager: CacheManager, holder: Holder) -> None:
    sealed = holder.path.num_sealed * PAGE_TOKENS
    assert holder.kept is not None
    for (layer, head), seen in read(manager, holder).items():
        at = np.flatnonzero(holder.kept[layer, head, :sealed])
        expected = values(layer, head, at, np.array(holder.token_ids)[at])
        assert seen == set(expected.tolist()), f"layer {layer} head {head}"


def expected_bytes(holder: Holder) -> int:
    """Kept sealed tokens in whole pages, the open chunk, and sums of heads that need them."""
    path = holder.path
    assert holder.kept is not None and path.retention.retained is not None
    sealed = holder.kept[..., : path.num_sealed * PAGE_TOKENS].sum(-1)
    pages = -(-sealed // PAGE_TOKENS)
    is_open = path.num_tokens > path.num_sealed * PAGE_TOKENS
    policies = path.retention.retained.policies
    ranked = (policies >= 2) & (policies < FULL)
    return int((pages + is_open).sum() * CODEC.page_bytes + ((pages + is_open) * ranked).sum() * 256)


MIXED = [[0, 1], [2, 3]]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).choice([1, 2, *range(3, 30)], length).tolist()


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 300, 640])
def test_pages_are_those_of_the_tokens_that_are_kept(length: int, share: bool) -> None:
    manager = make_manager(60, share=share)
    holder = Holder(prompt(length))
    assert start(manager, holder, MIXED)
    check_tokens(manager, holder)
    assert manager.stats()["bytes_used"] == expected_bytes(holder)
    for _ in range(3):
        decode(manager, holder, prompt(100, len(holder.token_ids)))
        check_tokens(manager, holder)
        assert manager.stats()["bytes_used"] == expected_bytes(holder)
    manager.release(holder)
    manager.check()
    assert manager.stats()["bytes_used"] == 0


def test_a_second_request_is_admitted_into_what_the_first_has_freed() -> None:
    # 20 chunks and what sums take: a prompt of 16 alone.
    manager = make_manager(21, share=False)
    first, second = Holder(prompt(16 * 64)), Holder(prompt(8 * 64, 1))
    assert manager.admit(first)
    compute(manager, first)
    assert not manager.admit(second)
    retain(manager, first, MIXED)
    assert start(manager, second, MIXED)
    decode(manager, first, prompt(70, 2))
    for holder in (first, second):
        check_tokens(manager, holder)
        manager.release(holder)
    assert manager.table.ledger.allocated_bytes == 0


def test_all_full_is_as_without_retention() -> None:
    manager = make_manager(40)
    holder = Holder(prompt(300))
    assert start(manager, holder, [[FULL] * H] * L)
    assert holder.path.retention.retained is None and holder.path.num_shared == 4
    assert not len(holder.path.retention.sums)
    decode(manager, holder, prompt(100, 1))
    assert holder.path.num_shared == 6, "answers are shared as ever"


def test_full_heads_go_on_reading_what_is_shared() -> None:
    manager = make_manager(60)
    holder = Holder(prompt(300))
    assert start(manager, holder, [[FULL, 0], [1, 2]])
    assert manager.tree is not None
    (segment,) = {id(each): each for each in holder.path.segments}.values()
    assert segment.locks.tolist() == [[1, 0], [0, 0]]
    # Another prompt that finds all of it takes its pages and its rows, which then are not there to be evicted.
    idle = (segment.locks == 0) * np.int64(len(segment.chunks))
    found = [(segment, len(segment.chunks))]
    eviction, demand = manager.eviction, manager.table.demand
    sums = demand(sums=manager.tree.num_attached)
    assert eviction.evictable() - eviction.evictable_of(found) == sums
    assert eviction.evictable() == sums + manager.table.demand_of_pages(idle) + demand(rows=len(segment.chunks))
    check_tokens(manager, holder)
    # Under pressure the tree lets go of all, and the head keeps its pages.
    manager.eviction.evict(manager.tree.num_idle)
    assert manager.tree.num_chunks == 0
    manager.check()
    check_tokens(manager, holder)
    again = Holder(prompt(300))
    assert start(manager, again, [[FULL, 0], [1, 2]])
    for each in (holder, again):
        decode(manager, each, prompt(130, 5))
        check_tokens(manager, each)
        manager.release(each)
    manager.check()
    assert manager.stats()["bytes_used"] == 0


def test_many_readers_read_in_place() -> None:
    """Where copies would take more bytes than the shared pages, these are read through masks."""
    manager = make_manager(80)
    holders = [Holder(prompt(640)) for _ in range(6)]
    for holder in holders:
        assert start(manager, holder, [[3, 3], [3, 3]])
        check_tokens(manager, holder)
    in_place = [holder.path.retention.retained.in_place.any() for holder in holders]
    assert not in_place[0] and in_place[-1]
    # Ten shared chunks once, and not six times half of them.
    assert manager.stats()["bytes_used"] < 22 * CODEC.page_bytes * L * H
    for holder in holders:
        decode(manager, holder, prompt(130, 7))
        check_tokens(manager, holder)
    for holder in holders:
        manager.release(holder)
    manager.check()
    assert manager.stats()["bytes_used"] == 0


@pytest.mark.parametrize(("chunks", "has_room"), [(30, False), (60, True)])
def test_a_pinned_prompt_is_read_in_place_where_there_is_no_room_to_copy_it(chunks: int, has_room: bool) -> None:
    """Nobody else reads its pages, and yet they cannot be evicted for the copies of what it keeps."""
    manager = make_manager(chunks)
    holder, other = Holder(prompt(640)), Holder(prompt(700, 1))
    for each in (holder, other):
        assert manager.admit(each)
        compute(manager, each)
    assert manager.pins.add(holder, 640, float("inf"))
    retain(manager, holder, MIXED)
    retained = holder.path.retention.retained
    assert retained is not None and retained.in_place.any() != has_room
    check_tokens(manager, holder)
    assert manager.stats()["bytes_pinned"] == 10 * CODEC.page_bytes * L * H
    for each in (holder, other):
        manager.release(each)
    manager.check()


def test_a_prompt_is_found_as_far_as_its_sums_are_kept() -> None:
    manager = make_manager(80)
    first = Holder(prompt(640))
    assert start(manager, first, MIXED)
    again = Holder(prompt(640))
    assert manager.admit(again)
    assert again.path.num_shared == (640 - 16) // 64
    compute(manager, again)
    retain(manager, again, MIXED)
    # Another that begins alike: nothing is known of where it leaves the first, and then it is.
    for seed, known in ((3, 0), (4, 5), (3, 9)):
        other = Holder(prompt(640)[: 5 * 64 + 10] + prompt(300, seed))
        assert manager.admit(other)
        assert other.path.num_shared == known
        compute(manager, other)
        retain(manager, other, MIXED)
        check_tokens(manager, other)
        manager.release(other)


def test_of_two_equal_prompts_the_second_waits_for_the_sums_of_the_first() -> None:
    manager = make_manager(80)
    first, second = Holder(prompt(640)), Holder(prompt(640))
    assert manager.admit(first) and manager.admit(second)
    assert not manager.retention.must_wait(first) and manager.retention.must_wait(second)
    assert manager.paths.extend(first, 128)
    write(manager, first, 0, 128)
    manager.paths.commit(first, 128)
    assert manager.retention.must_wait(second)
    compute(manager, first)
    assert not manager.retention.must_wait(second)
    assert manager.paths.match(second) == 576
    compute(manager, second)
    for holder in (first, second):
        retain(manager, holder, MIXED)
        check_tokens(manager, holder)


def test_who_is_waited_for_may_end() -> None:
    manager = make_manager(80)
    first, second = Holder(prompt(640)), Holder(prompt(640))
    assert manager.admit(first) and manager.admit(second)
    manager.release(first)
    assert not manager.retention.must_wait(second)
    compute(manager, second)
    retain(manager, second, MIXED)


@examples(25)
@given(data=st.data(), share=st.booleans(), chunks=st.sampled_from([30, 48, 90]))
def test_histories(data: st.DataObject, share: bool, chunks: int) -> None:
    """Sequences come, decode and go in any order; each keeps what the rules say, in the pages that takes."""
    manager = make_manager(chunks, share=share)
    live: list[Holder] = []
    beginnings = [prompt(length, seed) for length, seed in ((0, 0), (192, 1), (330, 2))]
    for _ in range(data.draw(st.integers(2, 9))):
        what = data.draw(st.sampled_from(["start", "start", "decode", "end"]))
        if what == "start":
            tokens = data.draw(st.sampled_from(beginnings)) + prompt(
                data.draw(st.integers(1, 200)), data.draw(st.integers(0, 3))
            )
            policies = [[data.draw(st.integers(0, FULL)) for _ in range(H)] for _ in range(L)]
            holder = Holder(tokens)
            if start(manager, holder, policies, data.draw(st.sampled_from([128, 10**6]))):
                live.append(holder)
            else:
                assert live, "alone, it fits"
        elif live:
            holder = live[data.draw(st.integers(0, len(live) - 1))]
            if what == "end":
                live.remove(holder)
                manager.release(holder)
            elif manager.eviction.fits(manager.table.demand(4, sums=4)):
                decode(manager, holder, prompt(data.draw(st.integers(1, 130)), 9))
        manager.check()
        for holder in live:
            check_tokens(manager, holder)
    for holder in live:
        manager.release(holder)
    manager.check()
    assert manager.stats()["bytes_used"] == 0


@pytest.mark.parametrize("is_tight", [False, True])
def test_sums_that_are_found_are_copied_or_where_there_is_no_room_taken(
    is_tight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(40)
    tree = manager.tree
    assert tree is not None
    prompt = [1, *range(10, 309)]
    policies = [[0] * H for _ in range(L)]
    first, again = Holder(prompt), Holder(list(prompt))
    assert start(manager, first, policies)
    manager.release(first)
    held = tree.num_attached
    assert held > 0
    if is_tight:
        monkeypatch.setattr(manager.eviction, "make_room", lambda demand: False)
    assert manager.admit(again)
    assert again.path.num_shared > 0 and len(again.path.retention.sums) == again.path.num_shared
    assert tree.num_attached == (held - again.path.num_shared if is_tight else held)
    manager.check()
    monkeypatch.undo()
    compute(manager, again)
    retain(manager, again, policies)  # whose sums are those of the whole prompt


def test_sums_of_the_tree_go_when_nothing_idle_is_left() -> None:
    manager = make_manager(40)
    tree = manager.tree
    assert tree is not None
    holder = Holder([1, *range(10, 309)])
    assert manager.admit(holder)
    compute(manager, holder)
    held = tree.num_attached
    assert held > 0 and tree.num_idle == 0
    rows = manager.table.capacity - manager.table.num_taken + held
    manager.eviction.evict_for(lambda: manager.table.demand(rows=rows))
    assert tree.num_attached == 0 and manager.table.capacity - manager.table.num_taken == rows
    manager.check()
    retain(manager, holder, [[0] * H for _ in range(L)])


def test_prompts_that_are_kept_whole_count_among_the_shares_that_are_expected() -> None:
    """The 90th percentile of nine shares is the largest one."""

    def expected_of_two(manager: CacheManager) -> Demand:
        holders = [Holder(prompt(640)), Holder(prompt(640, 1))]
        for holder in holders:
            assert manager.admit(holder)
        found = manager.retention.expected()
        for holder in holders:
            manager.release(holder)
        return found

    manager = make_manager(60, share=False)
    without_shares = expected_of_two(manager)
    for number in range(9):
        holder = Holder(prompt(640, number))
        assert start(manager, holder, [[0] * H] * L if number < 8 else [[FULL] * H] * L)
        manager.release(holder)
        if number == 7:
            assert expected_of_two(manager) != without_shares
    assert expected_of_two(manager) == without_shares


def test_a_path_that_has_dropped_chunks_grows_by_the_sums_of_its_new_ones() -> None:
    manager = make_manager(60)
    holder = Holder(prompt(640))
    assert start(manager, holder, MIXED)
    path = holder.path
    assert path.retention.num_dropped > 0
    end = path.num_begun * PAGE_TOKENS
    assert not any(manager.retention.growth(path, end, 0))
    assert manager.retention.growth(path, end + 1, 1) == manager.table.demand(sums=1)


def test_what_lies_before_pages_that_are_read_in_place_is_not_evictable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads keep the first token and those of a chunk near the end, and nothing of the segment between them."""
    manager = make_manager(40)
    tokens = [*range(3, 30)] * 24
    tokens[9 * 64 + 5] = 1
    holder, other = Holder(tokens[:640]), Holder(tokens[:64] + prompt(100))
    for each in (holder, other):
        assert manager.admit(each)
        compute(manager, each)
    manager.release(other)
    assert manager.pins.add(holder, 640, float("inf"))
    monkeypatch.setattr(manager.reservations, "fits", lambda demand: False)
    retain(manager, holder, [[0] * H] * L)
    monkeypatch.undo()
    retained = holder.path.retention.retained
    assert retained is not None and retained.in_place[..., [0, -1]].all() and retained.num_rows == 2
    assert manager.pins.end_oldest() is not None
    assert [(segment.start, segment.most_locks, segment.is_idle) for segment in holder.path.segments] == [
        (start, 1, False) for start in (0, 1, 9)
    ]
    fitting = [count for count in range(40) if manager.eviction.fits(manager.table.demand(count))]
    manager.eviction.evict_for(lambda: manager.table.demand(fitting[-1]))
    manager.check()
    check_tokens(manager, holder)
