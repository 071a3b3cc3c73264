"""Policies of heads as numbers: the worked example to the digit, a head made for every policy, and the rules of
decoding, compared with sums over whole rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.retention.policies import (
    MEMBERS,
    PolicyChain,
    RetentionDecision,
    decide,
    largest,
    occurrences,
    select_while_decoding,
)
from tests.effort import examples

EXAMPLE = [
    [1.0],
    [0.6, 0.4],
    [0.5, 0.2, 0.3],
    [0.5, 0.05, 0.25, 0.2],
    [0.45, 0.05, 0.2, 0.2, 0.1],
    [0.4, 0.02, 0.2, 0.18, 0.1, 0.1],
]


def square(rows: list[list[float]]) -> np.ndarray:
    return np.array([row + [0.0] * (len(rows) - len(row)) for row in rows])


def only(num_tokens: int, *positions: int) -> np.ndarray:
    return np.isin(np.arange(num_tokens), positions)


def local_recovery(attention: np.ndarray) -> Any:
    """By whole rows of attention [heads, n, n], all of them profiled."""

    def recovery(columns: np.ndarray, window: int) -> np.ndarray:
        at = np.arange(attention.shape[1])
        near = (at[:, None] >= at) & (at[:, None] - at < window)
        return (attention * (columns[:, None, :] | near)).sum(2).mean(1)

    return recovery


def decided(chain: PolicyChain, attention: np.ndarray, **marks: np.ndarray) -> RetentionDecision:
    """Of attention [heads, n, n]."""
    none = np.zeros(attention.shape[1], bool)
    marks = {"special": none, "punctuation": none, **marks}
    return decide(chain, marks, attention.sum(1), local_recovery(attention))


EXAMPLE_MARKS = {"special": only(6, 0), "punctuation": only(6, 2)}


@pytest.mark.parametrize(
    ("threshold", "policy", "kept"),
    [(0.0, 0, [0]), (0.70, 1, [0, 2]), (0.90, 2, [0, 1, 2, 3]), (0.96, 3, [0, 1, 2, 3, 4, 5]), (1.1, 4, range(6))],
)
def test_the_worked_example(threshold: float, policy: int, kept: list[int]) -> None:
    # Two of six tokens for either share.
    found = decided(PolicyChain(threshold, 0.3, 0.3), square(EXAMPLE)[None], **EXAMPLE_MARKS)
    assert found.policies.tolist() == [policy]
    assert np.flatnonzero(found.kept[0]).tolist() == list(kept)
    recovery = [0.575, 4.4 / 6, 0.95, 1.0, 1.0][: policy + 1]
    assert found.recovery[0, : policy + 1] == pytest.approx(recovery, abs=1e-12)
    assert np.isnan(found.recovery[0, policy + 1 :]).all()


def test_rows_count_and_not_the_last_one_alone() -> None:
    last = square(EXAMPLE)[-1]
    assert [last[[0]].sum(), last[[0, 2]].sum(), last[[0, 1, 2, 3]].sum()] == pytest.approx([0.4, 0.6, 0.8])
    found = decided(PolicyChain(0.7, 0.3, 0.3), square(EXAMPLE)[None], **EXAMPLE_MARKS)
    assert found.policies[0] == 1


def test_the_largest_raw_sum_recovers_most() -> None:
    sums = square(EXAMPLE).sum(0)[None]
    assert sums[0] == pytest.approx([3.45, 0.72, 0.95, 0.58, 0.20, 0.10])
    others = ~only(6, 0, 2)[None]
    assert np.flatnonzero(largest(sums, others, 1)[0]).tolist() == [1]
    assert (sums[0, [0, 2]].sum() + sums[0, 1]) / 6 == pytest.approx(0.8533, abs=5e-5)


def test_every_head_has_the_policy_it_needs() -> None:
    n = 40
    at = np.arange(n)
    causal = at[:, None] >= at
    heads = []
    for weight in (at == 0, at % 7 == 3, np.isin(at, (5, 9, 11)), None, at >= 0):
        scores = np.where(causal, 0.0 if weight is None else np.where(weight, 9.0, -9.0), -np.inf)
        if weight is None:
            scores = np.where(causal & (at[:, None] - at < 4), 9.0, np.where(causal, -9.0, -np.inf))
        heads.append(np.exp(scores) / np.exp(scores).sum(1, keepdims=True))
    attention = np.array(heads)
    found = decided(PolicyChain(0.8, 0.1, 0.1), attention, special=only(n, 0), punctuation=at % 7 == 3)
    assert found.policies.tolist() == [0, 1, 2, 3, 4]
    assert found.kept[4].all() and found.kept[:4].sum(1).tolist() == [1, 7, 11, 14]


def test_members_do_not_count_tokens_twice() -> None:
    """Frequent tokens are beside the special ones and the punctuation, which would be among the most frequent."""
    attention = square(EXAMPLE)[None]
    found = decided(PolicyChain(0.9, 0.3, 0.3), attention, special=only(6, 0), punctuation=only(6, 0, 2))
    assert found.kept.sum() == 2 + 2


@examples(60)
@given(seed=st.integers(0, 999), n=st.integers(1, 30), members=st.permutations(MEMBERS), length=st.integers(1, 4))
def test_more_is_kept_for_more_recovery(seed: int, n: int, members: list[str], length: int) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.normal(0, 3, (5, n, n)) + np.where(np.tri(n, dtype=bool), 0.0, -np.inf)
    attention = np.exp(scores - scores.max(2, keepdims=True))
    attention /= attention.sum(2, keepdims=True)
    special, punctuation = generator.random((2, n)) < 0.2
    before = np.zeros((5, n), bool)
    for threshold in (0.0, 0.3, 0.6, 0.8, 0.9, 0.97, 1.1):
        chain = PolicyChain(threshold, 0.25, 0.2, tuple(members[:length]))
        found = decided(chain, attention, special=special, punctuation=punctuation)
        assert (found.kept | ~before).all(), "something that less recovery keeps is dropped"
        before = found.kept
        for head, policy in enumerate(found.policies.tolist()):
            tried = found.recovery[head, : policy + 1]
            assert (tried[:-1] < threshold).all() and (tried[-1] >= threshold or policy == length)
            assert (np.diff(tried) > -1e-12).all()
    assert before.all() and (found.policies == length).all()


def test_while_decoding_budgets_grow_and_the_window_does_not() -> None:
    chain = PolicyChain(0.9)
    prompt, generated = 50, 100
    n = prompt + generated
    at = np.arange(n)
    marks = {"special": only(n, 0), "punctuation": at % 10 == 4}
    policies = np.arange(5, dtype=np.uint8)
    sums = np.random.default_rng(0).random((5, n))
    kept = np.ones((5, n), bool)
    kept[2:4, 20:30] = False  # dropped before
    slots = np.random.default_rng(1).permutation(n)  # the order of slots means nothing
    positions = np.where(kept, at, -1)[:, slots].astype(np.int32)
    in_slots = select_while_decoding(chain, policies, positions, marks, sums[:, slots], prompt, n)
    found = np.zeros((5, n), bool)
    found[:, slots] = in_slots
    assert found[4].all()
    assert np.array_equal(found[0], marks["special"])
    assert np.array_equal(found[1], marks["special"] | marks["punctuation"])
    assert not found[2:4, 20:30].any()
    by_sets = (marks["special"] | marks["punctuation"]) & kept[2]
    assert found[2].sum() == by_sets.sum() + math.ceil(0.3 * n)
    window = at >= n - math.ceil(0.3 * prompt)
    assert found[3][window].all() and found[3].sum() == ((by_sets | window) & kept[3]).sum() + math.ceil(0.3 * n)
    others = kept[2] & ~by_sets
    assert sums[2][found[2] & others].min() >= sums[2][others & ~found[2]].max(), "a larger sum was dropped"


def test_equal_sums_keep_the_first() -> None:
    assert np.flatnonzero(largest(np.ones((1, 6)), ~only(6, 1)[None], 3)[0]).tolist() == [0, 2, 3]
    assert largest(np.ones((1, 6)), only(6, 1)[None], 3).sum() == 1
    order = np.array([[5, 4, 3, 2, 1, 0]], np.int32)
    assert np.flatnonzero(largest(np.ones((1, 6)), ~only(6, 1)[None], 3, order)[0]).tolist() == [3, 4, 5]


@examples(60)
@given(seed=st.integers(0, 999), n=st.integers(1, 20), count=st.integers(0, 22))
def test_the_largest_are_those_of_a_sort(seed: int, n: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    sums = generator.integers(0, 4, (3, n)) / 4  # many are equal
    candidates = generator.random((3, n)) < 0.6
    order = np.argsort(np.where(candidates, -sums, np.inf), axis=1, kind="stable")[:, :count]
    expected = np.zeros((3, n), bool)
    np.put_along_axis(expected, order, True, axis=1)
    assert np.array_equal(largest(sums, candidates, count), expected & candidates)


def test_marks_of_several_tokens_are_found_whole() -> None:
    tokens = [7, 1, 2, 3, 1, 2, 9, 1, 7]
    assert np.flatnonzero(occurrences(tokens, [[1, 2], [9]])).tolist() == [1, 2, 4, 5, 6]
    assert np.flatnonzero(occurrences([1, 1, 1], [[1, 1]])).tolist() == [0, 1, 2]
    assert not occurrences([1], [[1, 2], []]).any()
