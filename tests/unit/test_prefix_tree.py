"""The prefix tree against a dictionary of what was published, under every order of joining, growing, leaving and
eviction.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from quire.cache.codecs.dense import DenseCodec
from quire.cache.manager import CacheManager
from quire.cache.page import PAGE_TOKENS, PagePool
from quire.cache.segment import ChunkTable, Path
from quire.cache.tree import PrefixTree

L, H = 2, 1
CODEC = DenseCodec(16, torch.float32)


@dataclass(eq=False)
class Holder:
    """A sequence, as the manager sees one."""

    token_ids: list[int]
    namespace: str = "model"
    reads_cache: bool = True
    path: Path = field(default_factory=Path)


def make_manager(chunks: int) -> CacheManager:
    bytes_per_chunk = CODEC.page_bytes * L * H
    pool = PagePool(chunks * bytes_per_chunk, slab_bytes=bytes_per_chunk)
    return CacheManager(ChunkTable(pool, L, H, CODEC), PrefixTree((L, H)))


def run_prompt(manager: CacheManager, holder: Holder) -> bool:
    """Admits a sequence and computes its whole prompt; False if it does not fit."""
    if manager.admit(holder) is None:
        return False
    assert manager.extend(holder, len(holder.token_ids))
    manager.commit(holder, len(holder.token_ids))
    return True


def chunk(letter: int, count: int = PAGE_TOKENS) -> list[int]:
    return [letter] * count


def test_a_second_prompt_reads_the_first_one_s_chunks() -> None:
    manager = make_manager(20)
    first = Holder(chunk(1) + chunk(2) + chunk(3, 10))
    assert run_prompt(manager, first)
    second = Holder(chunk(1) + chunk(2) + chunk(4, 30))
    admission = manager.admit(second)
    assert admission is not None and admission.cached_tokens == 128
    assert second.path.chunks.tolist() == first.path.chunks[:2].tolist()
    manager.check()


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (64, 0), (65, 64), (127, 64), (128, 64), (129, 128)])
def test_the_last_token_is_always_computed(length: int, cached: int) -> None:
    manager = make_manager(20)
    assert run_prompt(manager, Holder(chunk(1) + chunk(1) + chunk(1)))
    admission = manager.admit(Holder(chunk(1, length)))
    assert admission is not None and admission.cached_tokens == cached


def test_two_equal_prompts_of_whole_chunks_diverge_in_tails_of_their_own() -> None:
    manager = make_manager(20)
    holders = [Holder(chunk(1) + chunk(2)), Holder(chunk(1) + chunk(2))]
    for holder in holders:
        assert run_prompt(manager, holder)
    assert holders[0].path.chunks.tolist() == holders[1].path.chunks.tolist(), "the second took the first one's chunks"
    assert manager.table.num_taken == 2
    for letter, holder in enumerate(holders, 5):
        holder.token_ids += chunk(letter)
        assert manager.extend(holder, 192)
    assert holders[0].path.chunks[2] != holders[1].path.chunks[2]
    for holder in holders:
        manager.commit(holder, 192)
    manager.check()


def test_another_namespace_never_hits() -> None:
    manager = make_manager(20)
    assert run_prompt(manager, Holder(chunk(1) + chunk(2), "bfloat16"))
    admission = manager.admit(Holder(chunk(1) + chunk(2), "float16"))
    assert admission is not None and admission.cached_tokens == 0


def test_a_prompt_whose_every_row_is_wanted_reads_nothing_but_gives() -> None:
    manager = make_manager(20)
    assert run_prompt(manager, Holder(chunk(1) + chunk(2), reads_cache=False))
    second = Holder(chunk(1) + chunk(2), reads_cache=False)
    assert run_prompt(manager, second)
    assert manager.table.num_taken == 2, "what it computed again was given back"
    manager.check()


def test_a_segment_is_divided_where_a_newcomer_differs() -> None:
    manager = make_manager(20)
    first = Holder(chunk(1) + chunk(2) + chunk(3))
    assert run_prompt(manager, first)
    assert [len(segment.chunks) for segment in first.path.segments] == [3]
    second = Holder(chunk(1) + chunk(9) + chunk(3))
    assert run_prompt(manager, second)
    assert [len(segment.chunks) for segment in first.path.segments] == [1, 2]
    assert [len(segment.chunks) for segment in second.path.segments] == [1, 2]
    assert first.path.segments[0] is second.path.segments[0]
    assert first.path.segments[0].locks.tolist() == [[2]] * L
    manager.check()


def test_what_nobody_reads_stays_until_room_is_needed_and_the_oldest_goes_first() -> None:
    manager = make_manager(6)
    for letter in (1, 2):
        holder = Holder(chunk(letter) + chunk(letter + 10))
        assert run_prompt(manager, holder)
        manager.release(holder)
    assert manager.stats()["bytes_used"] == 0 and manager.tree is not None and manager.tree.num_idle == 4
    again = Holder(chunk(1) + chunk(11) + [7])
    assert run_prompt(manager, again)
    assert again.path.num_shared == 2
    manager.release(again)
    # Six chunks in all: the three of a newcomer need one that is cached, and the second prompt is the one unused for
    # longest.
    assert run_prompt(manager, Holder(chunk(5) + chunk(6) + chunk(7, 5)))
    manager.check()
    found = {
        letter: manager.tree.extend("model", Path(), chunk(letter) + chunk(letter + 10) + [7]) for letter in (1, 2)
    }
    assert found == {1: 2, 2: 1}, "leaves go from their end"


def test_locked_paths_are_never_evicted() -> None:
    manager = make_manager(4)
    holder = Holder(chunk(1) + chunk(2) + [3])
    assert run_prompt(manager, holder)
    assert manager.admit(Holder(chunk(8) + chunk(9))) is None
    manager.check()
    manager.release(holder)
    assert run_prompt(manager, Holder(chunk(8) + chunk(9) + chunk(10)))
    manager.check()


class Churn(RuleBasedStateMachine):
    """Random joins, growth, leaves and aborts in a small arena. The model: contents of every page, by the tokens up
    to its end.
    """

    live: Bundle[Holder] = Bundle("live")

    @initialize(chunks=st.integers(4, 24))
    def start(self, chunks: int) -> None:
        self.manager = make_manager(chunks)
        self.written: dict[
            int, tuple[int, ...]
        ] = {}  # chunk id -> tokens of the whole prefix up to its end, as it was written
        self.holders: list[Holder] = []

    @rule(
        target=live,
        letters=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        tail=st.integers(1, 64),
        reads=st.booleans(),
        space=st.sampled_from("ab"),
    )
    def join(self, letters: list[int], tail: int, reads: bool, space: str) -> Holder | object:
        tokens = [letter for letter in letters[:-1] for _ in range(PAGE_TOKENS)] + [letters[-1]] * tail
        holder = Holder(tokens, space, reads)
        before = self.manager.table.num_taken
        if self.manager.admit(holder) is None:
            assert self.manager.table.num_taken == before
            return multiple()
        limit = (len(tokens) - 1) // PAGE_TOKENS
        assert holder.path.num_shared <= limit
        self.holders.append(holder)
        return holder

    @rule(holder=live, steps=st.integers(1, 3))
    def compute(self, holder: Holder, steps: int) -> None:
        """The next slices of a prompt, whole chunks, or what is left of it."""
        if holder not in self.holders:
            return
        self.manager.match_again(holder)
        path = holder.path
        end = min(len(holder.token_ids), (path.num_tokens // PAGE_TOKENS + steps) * PAGE_TOKENS)
        if end > path.num_tokens and self.manager.extend(holder, end):
            self.write(holder, end)

    @rule(holder=live, count=st.integers(1, 70), letter=st.integers(0, 2))
    def generate(self, holder: Holder, count: int, letter: int) -> None:
        if holder not in self.holders or holder.path.num_tokens < len(holder.token_ids):
            return
        for _ in range(count):
            holder.token_ids.append(letter)
            if not self.manager.extend(holder, len(holder.token_ids)):
                holder.token_ids.pop()
                return
            self.write(holder, len(holder.token_ids))

    @rule(holder=consumes(live))
    def leave(self, holder: Holder) -> None:
        """Done or aborted, wherever it stands."""
        if holder in self.holders:
            self.holders.remove(holder)
            self.manager.release(holder)

    def write(self, holder: Holder, end: int) -> None:
        path, tokens = holder.path, holder.token_ids
        for index in range(path.num_tokens // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
            assert index >= path.num_sealed, "a sealed page is written"
            self.written[int(path.chunks[index])] = (holder.namespace, *tokens[: min(end, (index + 1) * PAGE_TOKENS)])
        self.manager.commit(holder, end)

    @invariant()
    def everything_adds_up(self) -> None:
        self.manager.check()
        for holder in self.holders:
            for index in range(-(-holder.path.num_tokens // PAGE_TOKENS)):
                upto = min(holder.path.num_tokens, (index + 1) * PAGE_TOKENS)
                expected = (holder.namespace, *holder.token_ids[:upto])
                assert self.written[int(holder.path.chunks[index])] == expected, (
                    "a path reads pages with other contents"
                )

    def teardown(self) -> None:
        for holder in self.holders:
            self.manager.release(holder)
        tree = self.manager.tree
        assert tree is not None
        assert all(not segment.locks.any() for _, segment in tree.segments())
        assert tree.num_idle == tree.num_chunks == self.manager.table.num_taken
        assert self.manager.stats()["bytes_used"] == 0
        self.manager.table.give(tree.evict(tree.num_idle))
        assert self.manager.table.num_taken == 0
        self.manager.check()


TestChurn = Churn.TestCase
TestChurn.settings = settings(
    max_examples=int(os.environ.get("QUIRE_CHURN", "100")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
