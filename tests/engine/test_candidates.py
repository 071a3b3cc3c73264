"""The entries of a row that matter, compared with plain torch: the best, those above a floor, and the allowed ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from quire.engine import candidates
from quire.engine.candidates import best_ids, descending_order, lane_maxima, num_above
from tests.engine.test_sampler import QUICK
from tests.toy_guide import bits


@QUICK
@given(
    seed=st.integers(0, 2**32), vocab_size=st.sampled_from([1, 2, 63, 1000, 5000]), levels=st.sampled_from([1, 3, 50])
)
def test_ties_go_to_the_lowest_id(seed, vocab_size, levels):
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(generator.integers(-levels, levels, size=(3, vocab_size))).float()
    assert best_ids(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_the_two_zeros_are_equal():
    assert best_ids(torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]])).tolist() == [1, 1]
    assert descending_order(np.array([-0.0, 0.0, 1.0, -0.0], np.float32)).tolist() == [2, 0, 1, 3]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_one_bad_logit_is_noticed_wherever_it_stands(poison):
    """71 columns: whole vectors of every width, and some more."""
    logits = torch.randn(72, 71)
    logits[torch.arange(71), torch.arange(71)] = poison
    last = logits[71].tolist()
    assert best_ids(logits).tolist() == [-1] * 71 + [last.index(max(last))]


@QUICK
@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from([1, 7, 1023, 1024, 1025, 3000]))
@example(seed=0, vocab_size=2047)
def test_lane_maxima_bound_the_row(seed, vocab_size):
    scores = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, vocab_size)).astype(np.float32))
    best = lane_maxima(scores)
    down = np.sort(scores.numpy(), -1)[:, ::-1][:, : best.shape[1]]
    assert best.shape[1] == min(1024, vocab_size)
    assert (best <= down).all() and (best[:, 0] == down[:, 0]).all() and (np.diff(best) <= 0).all()
    assert num_above(scores, scores.argmax(-1)) == [0, 0]


@QUICK
@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from([1, 40, 1500]))
def test_the_variants_for_other_devices_agree_with_the_cpu_ones(seed, vocab_size):
    generator = np.random.default_rng(seed)
    scores = torch.from_numpy(generator.integers(-5, 5, size=(5, vocab_size)).astype(np.float32))
    scores[1, vocab_size // 2] = math.nan
    scores[2] = -math.inf
    ids = torch.from_numpy(generator.integers(0, vocab_size, size=5))
    floors = np.array([4.0, 0.0, -math.inf, 5.0, math.nan], np.float32)
    assert torch.equal(candidates._best_ids_on_device(scores), best_ids(scores))
    assert candidates._num_above_on_device(scores, ids) == num_above(scores, ids)
    there, here = candidates._at_least_on_device(scores, floors), candidates.entries_at_least(scores, floors)
    for (ids_there, values_there), (ids_here, values_here) in zip(there, here, strict=True):
        assert ids_there.tolist() == ids_here.tolist()
        assert values_there.tolist() == values_here.tolist()


@QUICK
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 31, 32, 33, 64, 999]),
    rows=st.integers(1, 5),
    share=st.sampled_from([0.0, 0.02, 0.9, 1.0]),
    spare=st.sampled_from([0, 40]),
)
def test_only_what_a_mask_allows_keeps_its_score(seed, vocab_size, rows, share, spare):
    generator = np.random.default_rng(seed)
    wide = torch.from_numpy(generator.normal(size=(rows, vocab_size + 3)).astype(np.float32))
    given = wide.clone()
    allowed = generator.random((rows, vocab_size)) < share
    masks = [bits({*np.flatnonzero(row).tolist()}, vocab_size + spare) for row in allowed]
    some = [None if not generator.integers(3) else words for words in masks]
    masks = some if any(words is not None for words in some) else masks
    scores = wide[:, :vocab_size]  # as the sampler has it of a padded head
    there = scores.clone()
    candidates.mask_disallowed(scores, masks)
    candidates._keep_allowed_on_device(there, masks)
    for row, words in enumerate(masks):
        for token in range(vocab_size):
            is_allowed = words is None or words[token // 32] >> np.uint32(token % 32) & 1
            expected = given[row, token] if is_allowed else -math.inf
            assert scores[row, token] == there[row, token] == expected
    assert torch.equal(wide[:, vocab_size:], given[:, vocab_size:])
