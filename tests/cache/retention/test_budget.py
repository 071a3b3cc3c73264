"""Pages allocated to heads within a budget of bytes, compared with plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.retention.budget import AFTER, BEFORE, allocate, scores_of
from tests.effort import examples

PAGE = 4


def plain_scores(peaks: np.ndarray, positions: np.ndarray) -> np.ndarray:
    found = np.zeros_like(peaks)
    for head, slot in np.ndindex(peaks.shape):
        if positions[head, slot] >= 0:
            distance = positions[head, slot] - positions[head]
            near = (positions[head] >= 0) & (distance <= AFTER) & (distance >= -BEFORE)
            found[head, slot] = peaks[head, near].max()
    return found


def tokens_in_slots(generator: np.random.Generator, heads: int, n: int) -> np.ndarray:
    """Positions below n in any order, some of them missing."""
    positions = np.stack([generator.permutation(n) for _ in range(heads)]).astype(np.int32)
    return np.where(generator.random(positions.shape) < 0.2, np.int32(-1), positions)


@examples(40)
@given(seed=st.integers(0, 999), n=st.integers(1, 60))
def test_neighbours_are_worth_as_much(seed: int, n: int) -> None:
    generator = np.random.default_rng(seed)
    positions = tokens_in_slots(generator, 3, n)
    peaks = generator.random(positions.shape, np.float32)
    assert np.array_equal(scores_of(peaks, positions, n), plain_scores(peaks, positions))


def test_what_follows_a_token_counts_for_longer_than_what_precedes_it() -> None:
    peaks = np.zeros((1, 40), np.float32)
    peaks[0, 20] = 0.5
    found = scores_of(peaks, np.arange(40, dtype=np.int32)[None], 40)
    assert np.flatnonzero(found[0]).tolist() == list(range(20 - BEFORE, 20 + AFTER + 1))


def plain_allocation(
    scores: np.ndarray,
    positions: np.ndarray,
    special: np.ndarray,
    n: int,
    page_bytes: np.ndarray,
    most: float,
) -> np.ndarray:
    """Page by page, the one with the most score for a byte first."""
    pages = []
    kept = np.zeros(positions.shape, bool)
    for head in range(len(positions)):
        held = [slot for slot in range(positions.shape[1]) if positions[head, slot] >= 0]
        last = [slot for slot in held if positions[head, slot] >= n - PAGE]
        if last:
            gain = np.inf if special[positions[head, last]].any() else PAGE
            pages.append((-gain / page_bytes[head], head, 0, last))
        rest = sorted(
            set(held) - set(last),
            key=lambda slot: (not special[positions[head, slot]], -scores[head, slot], positions[head, slot]),
        )
        for at in range(0, len(rest), PAGE):
            page = rest[at : at + PAGE]
            gain = sum(np.inf if special[positions[head, slot]] else float(scores[head, slot]) for slot in page)
            pages.append((-gain / page_bytes[head], head, 1 + at, page))
    total, full = 0.0, False
    for rate, head, _, page in sorted(pages, key=lambda page: page[:3]):
        total += page_bytes[head]
        full = full or total > most
        if not full or rate == -np.inf:
            kept[head, page] = True
    return kept


@examples(80)
@given(
    seed=st.integers(0, 9999),
    n=st.integers(1, 40),
    share=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 1.0]),
    marked=st.sampled_from([0.0, 0.1, 0.5]),
    levels=st.sampled_from([2, 4, 1000]),
)
def test_pages_go_where_they_hold_most(seed: int, n: int, share: float, marked: float, levels: int) -> None:
    generator = np.random.default_rng(seed)
    positions = tokens_in_slots(generator, 5, n)
    # Few levels make many equals, and sums are exact whatever their order.
    scores = (generator.integers(0, levels, positions.shape) / 1024).astype(np.float32)
    special = generator.random(n) < marked
    page_bytes = 2 ** generator.integers(0, 3, 5)
    most = share * page_bytes.sum() * -(-n // PAGE)
    found = allocate(scores, positions, special, page_bytes, PAGE, most)
    assert np.array_equal(found, plain_allocation(scores, positions, special, n, page_bytes, most))


def test_a_head_that_is_looked_back_at_gets_the_pages() -> None:
    positions = np.tile(np.arange(64, dtype=np.int32), (3, 1))
    scores = np.zeros(positions.shape, np.float32)
    scores[1] = 0.5
    special = np.arange(64) == 0
    found = allocate(scores, positions, special, np.ones(3, np.int64), PAGE, 3 * 16 / 2)
    # Two pages for each: what begins the sequence, and its end; the rest where something has a score.
    assert found[1].all() and found[:, 0].all() and found[:, -PAGE:].all() and found.sum() == 3 * 64 / 2


@pytest.mark.parametrize("most", [0.0, 3.0])
def test_special_tokens_are_kept_whatever_the_budget(most: float) -> None:
    positions = np.tile(np.arange(64, dtype=np.int32), (3, 1))
    special = np.isin(np.arange(64), (0, 30, 62))
    found = allocate(np.ones(positions.shape, np.float32), positions, special, np.ones(3, np.int64), PAGE, most)
    # That of the first two, and the last one.
    assert found[:, special].all() and found.sum() == 3 * 2 * PAGE
