"""Column sums and recovery from log-sum-exps, block by block, compared with the whole attention matrix in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.attention.profile import column_sums, recovered
from quire.attention.reference import attend_dense
from quire.attention.spec import Scoring
from quire.cache.retention.policies import PolicyChain, decide
from tests.effort import examples

H, G, D = 3, 2, 16


def activations(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, H, G, D, generator=generator) * 2
    return q, torch.randn(H, rows, D, generator=generator), torch.randn(H, rows, D, generator=generator)


def whole(q: torch.Tensor, k: torch.Tensor, window: int | None) -> np.ndarray:
    """Attention [H, n, n], averaged over groups."""
    n = len(q)
    scores = torch.einsum("rhgd,htd->hgrt", q.double(), k.double()) / D**0.5
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = (distance >= 0) & (distance < (window or n))
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).mean(1).numpy()


@examples(15)
@given(
    n=st.integers(1, 70),
    cuts=st.lists(st.integers(1, 69), max_size=3),
    window=st.sampled_from([None, 1, 20]),
    local=st.integers(0, 30),
    seed=st.integers(0, 99),
)
def test_blocks_add_up_to_the_matrix(n: int, cuts: list[int], window: int | None, local: int, seed: int) -> None:
    q, k, v = activations(n, seed)
    at = torch.arange(n)
    matrix = whole(q, k, window)
    kept = torch.rand(H, n, generator=torch.Generator().manual_seed(seed)) < 0.3
    sums, mass = torch.zeros(H, n, dtype=torch.float64), torch.zeros(H, dtype=torch.float64)
    bounds = [0, *sorted({cut for cut in cuts if cut < n}), n]
    for low, high in itertools.pairwise(bounds):  # slices of the prompt ...
        rows = slice(low, high)
        lse = attend_dense(q[rows], k[:, :high], v[:, :high], at[rows], at[:high], Scoring(window)).lse
        for start in range(0, high, 16):  # ... over chunks of what came before
            columns = slice(start, min(high, start + 16))
            given = q[rows], k[:, columns], lse, at[rows], at[columns]
            sums[:, columns] += column_sums(*given, Scoring(window))
            mass += recovered(*given, kept[:, columns], local, Scoring(window))
    assert sums.numpy() == pytest.approx(matrix.sum(1), rel=1e-5, abs=1e-6)
    near = (at[:, None] - at < local).numpy()
    assert mass.numpy() == pytest.approx((matrix * (kept.numpy()[:, None] | near)).sum((1, 2)), rel=1e-5, abs=1e-6)


def test_padding_counts_for_nothing() -> None:
    """Prompts of 5 and of 9 tokens, the shorter one padded with rows and columns of NaN, decide as they do alone."""
    alone, together = [], []
    for n in (5, 9):
        q, k, v = activations(n, n)
        at = torch.arange(n)
        lse = attend_dense(q, k, v, at, at).lse
        alone.append((column_sums(q, k, lse, at, at), n))
        padded_q = torch.full((9, H, G, D), torch.nan)
        padded_k, padded_lse = torch.full((H, 9, D), torch.nan), torch.full((9, H, G), -torch.inf)
        padded_q[:n], padded_k[:, :n], padded_lse[:n] = q, k, lse
        at = torch.arange(9)
        together.append((column_sums(padded_q, padded_k, padded_lse, at, at)[:, :n], n))
    for first, second in zip(alone, together, strict=True):
        assert torch.allclose(first[0], second[0], rtol=1e-6)
        found = []
        for sums, n in (first, second):
            marks = {"special": np.arange(n) == 0, "punctuation": np.zeros(n, bool)}
            chain = PolicyChain(0.6, members=("special", "punctuation", "frequent"))
            found.append(decide(chain, marks, sums.double().numpy(), lambda *_: np.empty(0)))
        assert np.array_equal(found[0].policies, found[1].policies) and np.array_equal(found[0].kept, found[1].kept)


def test_sums_of_a_prefix_and_of_what_follows_are_those_of_the_prompt() -> None:
    """Rows of a prefix do not depend on what follows, so its sums may be stored, and added to a later prompt's own."""
    q, k, v = activations(40, 1)
    at = torch.arange(40)
    lse = attend_dense(q, k, v, at, at).lse
    prefix = column_sums(q[:24], k[:, :24], lse[:24], at[:24], at[:24])
    rest = column_sums(q[24:], k, lse[24:], at[24:], at)
    rest[:, :24] += prefix
    assert torch.allclose(rest, column_sums(q, k, lse, at, at), rtol=1e-6)
