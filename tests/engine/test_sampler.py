"""The sampler compared with a naive one in numpy; and independence of batch, order and preemption."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine import candidates
from quire.engine.params import SamplingParams
from quire.engine.sampler import Sampler, SampleRow, sequence_seed, uniform
from tests.effort import IS_FULL, examples

EOS = 1
QUICK = examples(80)


@dataclass
class Reference:
    """One row, straight from the definition: full sort, float64, no sharing of code with the sampler."""

    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]

    def processed(self, logits: np.ndarray) -> np.ndarray:
        params, scores = self.params, logits.astype(np.float64)
        for token_id, bias in (params.logit_bias or {}).items():
            scores[token_id] += bias
        for token_id in {*self.prompt_ids, *self.output_ids}:
            if scores[token_id] > 0:
                scores[token_id] /= params.repetition_penalty
            else:
                scores[token_id] *= params.repetition_penalty
        for token_id in self.output_ids:
            scores[token_id] -= params.frequency_penalty
        for token_id in set(self.output_ids):
            scores[token_id] -= params.presence_penalty
        if len(self.output_ids) < params.min_tokens:
            for token_id in {EOS, *params.stop_token_ids}:
                scores[token_id] = -math.inf
        return scores

    def kept(self, logits: np.ndarray, slack: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Ids that may be drawn, most probable first, and their probabilities; `slack` moves every border a little."""
        params = self.params
        scores = self.processed(logits) / params.temperature
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        order = sorted(range(len(probs)), key=lambda token_id: (-probs[token_id], token_id))
        if params.min_p:
            order = [token_id for token_id in order if probs[token_id] >= params.min_p * probs.max() * (1 + slack)]
        if params.top_k > 0:
            order = order[: params.top_k]
        total, mass, ids = probs[order].sum(), 0.0, []
        for token_id in order:
            if mass >= params.top_p * total * (1 + slack) and params.top_p < 1:
                break
            ids.append(token_id)
            mass += probs[token_id]
        ids = [token_id for token_id in ids if probs[token_id] > 0]
        return np.array(ids), probs[ids] / probs[ids].sum()

    def tokens(self, logits: np.ndarray, draw: float) -> set[int]:
        """Every token that rounding could make of the draw."""
        found = set()
        for slack in (-1e-5, 0.0, 1e-5):
            ids, probs = self.kept(logits, slack)
            if not len(ids):  # min_p = 1 with slack
                continue
            for moved in (draw - 1e-5, draw, draw + 1e-5):
                place = min(int(np.searchsorted(np.cumsum(probs), moved, side="right")), len(ids) - 1)
                found.add(int(ids[place]))
        return found


def row_of(reference: Reference, seed: int = 0) -> SampleRow:
    return SampleRow(reference.params, reference.prompt_ids, reference.output_ids, seed)


@st.composite
def sampling(draw, vocab_size: int, greedy: bool = False):
    """Parameters and a history for one row."""
    ids = st.integers(0, vocab_size - 1)
    penalty = st.sampled_from([0.0, 0.0, -0.5, 0.7, 2.0])
    biases = st.integers(-800, 800).map(lambda eighths: eighths / 8)  # no differences that float32 cannot see
    params = SamplingParams(
        temperature=0.0 if greedy else draw(st.sampled_from([0.01, 0.3, 0.8, 1.0, 1.5, 20.0])),
        top_k=-1 if greedy else draw(st.sampled_from([-1, 0, 2, 3, 10, 10_000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.001, 0.1, 0.9, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        logit_bias=draw(st.none() | st.dictionaries(ids, biases, max_size=4)),
        stop_token_ids=draw(st.lists(ids, max_size=2)),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        max_tokens=None,
    )
    prompt, output = draw(st.lists(ids, max_size=6)), draw(st.lists(ids, max_size=6))
    return Reference(params, prompt, output)


@st.composite
def cases(draw, greedy: bool = False):
    """A few rows over one vocabulary, smaller or larger than the number of lanes; logits on a grid: ties abound."""
    vocab_size = draw(st.sampled_from([5, 17, 100, 1024, 1025, 2500]))
    rows = draw(st.lists(sampling(vocab_size, greedy), min_size=1, max_size=4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread, grid = draw(st.sampled_from([0.0, 0.5, 3.0, 10.0])), draw(st.sampled_from([1.0, 8.0, 1e5]))
    logits = np.round(generator.normal(size=(len(rows), vocab_size)) * spread * grid) / grid
    return logits.astype(np.float32), rows


@QUICK
@given(case=cases(), seed=st.integers(-(2**63), 2**64 - 1))
def test_draws_like_the_naive_sampler(case, seed):
    logits, references = case
    sampler = Sampler(logits.shape[1], eos_token_ids=[EOS])
    given_logits = torch.from_numpy(logits.copy())
    sampled = sampler.sample(given_logits, [row_of(reference, seed) for reference in references])
    assert sampled.errors == {} and sampled.logprobs == [None] * len(references)
    assert np.array_equal(given_logits.numpy(), logits), "the caller's logits were changed"
    for row, reference, token_id in zip(logits, references, sampled.token_ids.tolist(), strict=True):
        assert token_id in reference.tokens(row, uniform(seed, len(reference.output_ids)))


@QUICK
@given(case=cases(greedy=True))
def test_greedy_takes_the_best_processed_logit(case):
    logits, references = case
    sampler = Sampler(logits.shape[1], eos_token_ids=[EOS])
    sampled = sampler.sample(torch.from_numpy(logits), [row_of(reference) for reference in references])
    for row, reference, token_id in zip(logits, references, sampled.token_ids.tolist(), strict=True):
        scores = reference.processed(row)
        assert scores[token_id] >= scores.max() - 1e-5 * max(1.0, abs(scores.max()))
        if not reference.params.needs_logits_processing:
            assert token_id == int(scores.argmax())


@QUICK
@given(case=cases(), greedy=cases(greedy=True), order=st.randoms(use_true_random=False))
def test_a_row_gets_the_same_token_alone_and_in_any_batch(case, greedy, order):
    logits, references = case
    more = [reference for reference in greedy[1] if greedy[0].shape[1] == logits.shape[1]]
    references = references + more + [Reference(SamplingParams(temperature=0, logprobs=2), [], [])]
    logits = np.concatenate([logits, logits[: len(more)] if len(more) <= len(logits) else greedy[0], logits[:1]])
    sampler = Sampler(logits.shape[1], eos_token_ids=[EOS])
    rows = [row_of(reference, seed=index) for index, reference in enumerate(references)]
    together = sampler.sample(torch.from_numpy(logits), rows)
    places = list(range(len(rows)))
    order.shuffle(places)
    shuffled = sampler.sample(torch.from_numpy(logits[places]), [row_of(references[i], seed=i) for i in places])
    for where, index in enumerate(places):
        alone = sampler.sample(torch.from_numpy(logits[index : index + 1]), [row_of(references[index], seed=index)])
        assert alone.token_ids[0] == together.token_ids[index] == shuffled.token_ids[where]
        assert alone.logprobs[0] == together.logprobs[index] == shuffled.logprobs[where]


@pytest.mark.parametrize("vocab_size", [777, 4096, 50257])
def test_the_same_row_in_a_large_batch_at_any_place(vocab_size):
    torch.manual_seed(0)
    logits = torch.randn(70, vocab_size) * 3
    params = [SamplingParams(), SamplingParams(top_p=0.9, logprobs=3), SamplingParams(temperature=0.7, min_p=0.02)]
    rows = [SampleRow(params[i % 3], [], [], i // 3) for i in range(70)]
    sampler = Sampler(vocab_size)
    together = sampler.sample(logits, rows)
    for i in range(0, 70, 7):
        alone = sampler.sample(logits[i : i + 1].clone(), [rows[i]])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


FILTERS = {
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "all": {
        "temperature": 0.8,
        "top_k": 6,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
    },
}


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_softmax(name):
    """Chi-square over 20,000 draws (6,000 in a quick run), one seed each. The seeds are fixed, so p > 1e-4 is
    deterministic.
    """
    num_draws = 20_000 if IS_FULL else 6_000
    logits = np.array([2.0, 1.5, 1.5, 1.0, 0.2, 0.0, -0.5, -1.0, -2.0, -5.0, 1.9, -30.0], np.float32)
    reference = Reference(SamplingParams(**FILTERS[name]), [0, 3], [1, 1, 5])
    ids, probs = reference.kept(logits)
    sampler = Sampler(len(logits))
    rows = [row_of(reference, seed) for seed in range(num_draws)]
    tokens = sampler.sample(torch.from_numpy(logits).expand(num_draws, -1), rows).token_ids.numpy()
    assert set(tokens.tolist()) <= set(ids.tolist())
    expected = probs * num_draws
    common = expected >= 5
    observed = np.array([(tokens == token_id).sum() for token_id in ids])
    statistic = float((((observed - expected) ** 2) / expected)[common].sum())
    degrees = int(common.sum()) - 1
    # Wilson-Hilferty: the cube root of chi-square over its degrees is nearly normal; 3.72 is p = 1e-4.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} over {degrees} degrees, limit {limit:.1f}"


def test_uniform_numbers_are_uniform_and_unrelated():
    """Neighbouring seeds and steps too: mean, variance and lag correlation of 40,000 within 4 sigma."""
    grid = np.array([[uniform(seed, step) for step in range(200)] for seed in range(200)])
    assert grid.min() >= 0 and grid.max() < 1 and len(np.unique(grid)) == grid.size
    assert abs(grid.mean() - 0.5) < 4 * math.sqrt(1 / 12 / grid.size)
    assert abs(grid.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / grid.size)
    centred = grid - 0.5
    for product in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred[1:, :-1] * centred[:-1, 1:]):
        assert abs(product.mean()) < 4 / 12 / math.sqrt(product.size)
    assert uniform(-1, 3) == uniform(2**64 - 1, 3), "seeds are taken modulo 2**64"


def test_the_first_uniform_numbers_never_change():
    """A seed is a promise: the same answer after an upgrade."""
    assert [uniform(0, 0), uniform(0, 1), uniform(42, 7)] == [
        0.6524484863740322,
        0.7012121095215252,
        0.7347204584623639,
    ]


def test_the_sequences_of_a_request_draw_differently():
    seeds = [sequence_seed(7, index) for index in range(128)]
    assert seeds[0] == 7 and len(set(seeds)) == 128
    assert not set(seeds[1:]) & {sequence_seed(8, index) for index in range(128)}


def test_a_resumed_row_draws_what_it_would_have_drawn():
    """Preemption forgets nothing that counts: a fresh SampleRow over the same history continues the same sequence."""
    torch.manual_seed(1)
    logits = torch.randn(12, 50)
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, top_p=0.95, logprobs=2)
    sampler = Sampler(50)
    output: list[int] = []
    kept = SampleRow(params, [3, 4, 3], output, 11)
    for step in range(12):
        fresh = SampleRow(params, [3, 4, 3], list(output), 11)
        first, second = (sampler.sample(logits[step : step + 1], [row]) for row in (kept, fresh))
        assert first.token_ids[0] == second.token_ids[0] and first.logprobs == second.logprobs
        output.append(int(first.token_ids[0]))
    output.clear()
    fresh = SampleRow(params, [3, 4, 3], [], 11)
    assert sampler.sample(logits[5:6], [kept]).token_ids[0] == sampler.sample(logits[5:6], [fresh]).token_ids[0]


def test_min_tokens_rules_out_every_ending():
    logits = torch.zeros(1, 10)
    logits[0, [EOS, 4]] = 50.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[4, 99])
    sampler = Sampler(10, eos_token_ids=[EOS, 77])
    chosen = [int(sampler.sample(logits, [SampleRow(params, [], [0] * n, 0)]).token_ids[0]) for n in range(4)]
    assert chosen == [0, 0, EOS, EOS]


def test_a_bad_row_leaves_the_others_alone():
    torch.manual_seed(2)
    logits = torch.randn(9, 30)
    logits[0, 3] = math.nan
    logits[2] = -math.inf
    logits[4, 29] = math.inf
    logits[6] = -math.inf
    logits[6, EOS] = 1.0
    kinds = [SamplingParams(temperature=0, logprobs=2), SamplingParams(top_p=0.9, logprobs=2), SamplingParams(top_k=3)]
    sampler = Sampler(30, eos_token_ids=[EOS])
    for kind in kinds:
        rows = [SampleRow(kind, [], [], i) for i in range(9)]
        rows[6] = SampleRow(SamplingParams(min_tokens=1), [], [], 6)
        sampled = sampler.sample(logits, rows)
        assert sorted(sampled.errors) == [0, 2, 4, 6]
        assert all("no token can be chosen" in reason for reason in sampled.errors.values())
        assert [index for index, token_id in enumerate(sampled.token_ids.tolist()) if token_id < 0] == [0, 2, 4, 6]
        for index in (1, 3, 5, 7, 8):
            alone = sampler.sample(logits[index : index + 1], [rows[index]])
            assert alone.token_ids[0] == sampled.token_ids[index] and alone.logprobs[0] == sampled.logprobs[index]


def test_a_row_with_one_possible_token_takes_it():
    logits = torch.full((1, 2000), -math.inf)
    logits[0, 1999] = -5.0
    for params in (SamplingParams(), SamplingParams(top_p=0.1), SamplingParams(top_k=50), SamplingParams(min_p=1.0)):
        assert Sampler(2000).sample(logits, [SampleRow(params, [], [], 5)]).token_ids.tolist() == [1999]


def test_padded_columns_are_never_chosen():
    logits = torch.zeros(2, 12)
    logits[:, 10:] = 100.0
    logits[:, 10] = math.nan
    rows = [SampleRow(SamplingParams(temperature=0, logprobs=20), [], [], 0), SampleRow(SamplingParams(), [], [], 0)]
    sampled = Sampler(10).sample(logits, rows)
    assert sampled.errors == {} and max(sampled.token_ids.tolist()) < 10
    assert sorted(sampled.logprobs[0]) == list(range(10))


def test_a_nearly_flat_row_is_sorted_whole():
    """Where the maxima of the lanes do not hold the mass, the second bound must: 50,000 near-equal tokens."""
    torch.manual_seed(3)
    logits = torch.randn(1, 50_000) * 0.01
    for params in (SamplingParams(top_p=0.98), SamplingParams(), SamplingParams(top_k=40_000, top_p=0.99)):
        reference = Reference(params, [], [])
        for seed in range(3):
            token_id = int(Sampler(50_000).sample(logits, [row_of(reference, seed)]).token_ids[0])
            ids, probs = reference.kept(logits[0].numpy())
            place = int(np.flatnonzero(ids == token_id)[0])
            assert abs(np.cumsum(probs)[place] - uniform(seed, 0)) < 1e-4


@QUICK
@given(case=cases(), k=st.sampled_from([0, 1, 3, 20]), data=st.data())
def test_logprobs_are_those_of_the_raw_logits(case, k, data):
    logits, _ = case
    vocab_size = logits.shape[1]
    wide = logits.astype(np.float64)
    exact = wide - wide.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    targets = [data.draw(st.integers(0, vocab_size - 1)) for _ in logits]
    found = Sampler(vocab_size).prompt_logprobs(torch.from_numpy(logits), targets, k)
    for row, logprobs, target, entry in zip(logits, exact, targets, found, strict=True):
        order = sorted(range(vocab_size), key=lambda token_id: (-row[token_id], token_id))
        best = order[:k]
        assert list(entry) == [target, *(token_id for token_id in best if token_id != target)]
        for token_id, logprob in entry.items():
            assert logprob.rank == order.index(token_id) + 1
            assert logprob.decoded_token is None
            assert logprob.logprob == pytest.approx(logprobs[token_id], abs=1e-4)


def test_sampled_logprobs_hold_the_chosen_token_and_ignore_processing():
    torch.manual_seed(4)
    logits = torch.randn(3, 40)
    rows = [
        SampleRow(SamplingParams(temperature=0, logit_bias={7: 100}, logprobs=3), [], [], 0),
        SampleRow(SamplingParams(temperature=5.0, logprobs=0), [], [], 1),
        SampleRow(SamplingParams(temperature=5.0), [], [], 1),
    ]
    sampled = Sampler(40).sample(logits, rows)
    exact = torch.log_softmax(logits, -1)
    assert sampled.token_ids[0] == 7 and next(iter(sampled.logprobs[0])) == 7
    assert sampled.logprobs[0][7].logprob == pytest.approx(float(exact[0, 7]))
    assert list(sampled.logprobs[1]) == [int(sampled.token_ids[1])]
    assert sampled.logprobs[2] is None


def test_prompt_logprobs_run_in_blocks_and_take_a_bad_row():
    torch.manual_seed(5)
    logits = torch.randn(candidates.BLOCK_ROWS * 2 + 3, 60)
    logits[40] = math.nan
    targets = torch.randint(0, 60, (len(logits),))
    found = Sampler(60).prompt_logprobs(logits, targets, 2)
    assert len(found) == len(logits) and all(int(target) in entry for target, entry in zip(targets, found, strict=True))
    assert math.isnan(found[40][int(targets[40])].logprob) and found[40][int(targets[40])].rank is None
    assert Sampler(60).prompt_logprobs(logits[:0], [], 2) == []
    assert found[50] == Sampler(60).prompt_logprobs(logits[50:51], targets[50:51], 2)[0]


def test_sampling_an_empty_batch_is_nothing():
    sampled = Sampler(5).sample(torch.empty(0, 5), [])
    assert sampled.token_ids.shape == (0,) and sampled.logprobs == [] and sampled.errors == {}


def test_an_id_outside_the_vocabulary_cannot_touch_the_next_row():
    rows = [SampleRow(SamplingParams(temperature=0, presence_penalty=1.0), [], [5], 0) for _ in range(2)]
    with pytest.raises(AssertionError, match="5"):
        Sampler(5).sample(torch.zeros(2, 5), rows)


def test_a_tally_counts_each_output_once_and_starts_over_when_outputs_are_taken_back():
    output: list[int] = []
    row = SampleRow(SamplingParams(temperature=0, frequency_penalty=1.0), [1, 1], output, 0)
    logits = torch.tensor([[3.5, 2.9, 2.3]])
    for _ in range(2):
        for _ in range(9):
            output.append(int(Sampler(3).sample(logits, [row]).token_ids[0]))
        assert output == naive_frequency(logits[0].tolist(), 9)
        output.clear()


def naive_frequency(logits: list[float], steps: int) -> list[int]:
    output: list[int] = []
    for _ in range(steps):
        scores = [logit - output.count(token_id) for token_id, logit in enumerate(logits)]
        output.append(scores.index(max(scores)))
    return output
