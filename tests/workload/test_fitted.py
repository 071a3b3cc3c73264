"""Fitted workloads: what is drawn from them is like what they were fitted to."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from quire.errors import ConfigError
from quire.workload.fitted import fit
from quire.workload.traces import read_workload
from quire.workload.workload import Arrival, Arrivals, Floats, Ints, Span, Workload
from tests.effort import full_only
from tests.workloads import equal_conversations, trace


def plain(sizes: Ints, outs: Ints, times: Floats) -> Workload:
    """Requests that share nothing."""
    count = len(sizes)
    after, start, ids = np.full(count, -1), np.arange(count + 1), np.arange(count)
    return Workload("plain", Arrivals(times, np.zeros(count), outs, after, start, ids, sizes))


def renewals(random: np.random.Generator, count: int, cv: float, rate: float = 2.0) -> Floats:
    """Arrival times with gamma gaps."""
    return np.cumsum(random.gamma(cv**-2, cv**2 / rate, count))


def lengths_that_correlate(count: int, cv: float = 1.0) -> Workload:
    """Long prompts with short answers."""
    random = np.random.default_rng(7)
    sizes = random.lognormal(6, 1, count).astype(np.int64) + 1
    outs = (random.lognormal(4, 0.3, count) * (400 / sizes) ** 0.7).astype(np.int64) + 1
    return plain(sizes, outs, renewals(random, count, cv))


def documents(count: int = 1500) -> Workload:
    """Questions about documents, after one of two system prompts. A document is asked about up to 4 times, 20 to 300
    requests apart.
    """
    random = np.random.default_rng(11)
    places = sorted(
        (begin + float(step), document)
        for document in range(count)
        for begin in [random.uniform(-900, count)]
        for step in np.cumsum([0, *random.integers(20, 300, random.choice([0, 0, 1, 3]))])
    )
    kept = [document for place, document in places if 0 <= place < count]
    times = renewals(random, len(kept), 1.0)
    pages = 1 + random.integers(0, 12, count)
    arrivals = []
    for index, (at, document) in enumerate(zip(times, kept, strict=True)):
        system, question = Span(document % 2, 192), Span(10**6 + index, 20)
        body = (Span(10 + 20 * document + page, 256) for page in range(pages[document]))
        arrivals.append(Arrival(float(at), (system, *body, question), 1 + document % 7))
    return Workload("documents", Arrivals.of(arrivals))


def conversations(count: int = 60) -> Workload:
    """Conversations of up to 5 requests. Two of three are about one of 20 subjects; pauses tell them apart."""
    arrivals: list[Arrival] = []
    for index in range(count):
        first = (Span(index % 20, 100), Span(1000 + index, 8)) if index % 3 else (Span(1000 + index, 50),)
        begin = len(arrivals)
        arrivals.append(Arrival(float(index * index), first, 1 + index % 4))
        for turn in range(index % 5):
            # The last one goes on from the first answer again.
            before = begin if turn == 3 else len(arrivals) - 1
            own = (Span(2000 + 10 * index + turn, 5 + turn),)
            arrivals.append(Arrival(0.0, own, 2 + turn, before, index + turn / 10))
    return Workload("conversations", Arrivals.of(arrivals))


def hit_rate(workload: Workload, capacity: int) -> float:
    """Share of the spans that a cache of so many spans has, of which the least recently used one is dropped."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for arrival in workload.arrivals:
        is_hit = True
        for span in arrival.prompt:
            is_hit &= span.id in held
            held[span.id] = None
            held.move_to_end(span.id)
            hits, total = hits + is_hit, total + 1
        while len(held) > capacity:
            held.popitem(last=False)
    return hits / total


def distances(workload: Workload) -> list[int]:
    """Requests between two with the same first span after the system prompt."""
    last: dict[int, int] = {}
    found = []
    for index, arrival in enumerate(workload.arrivals):
        document = arrival.prompt[1].id
        if document in last:
            found.append(index - last[document])
        last[document] = index
    return found


def correlation(workload: Workload) -> float:
    return float(stats.spearmanr(workload.prompt_tokens, workload.columns.num_out).statistic)


def test_prompts_and_answers_are_drawn_in_pairs() -> None:
    workload = lengths_that_correlate(4000)
    drawn = fit(workload).sample(4000, 1)
    assert correlation(workload) < -0.8
    assert correlation(drawn) == pytest.approx(correlation(workload), abs=0.03)
    outs = np.random.default_rng(0).permutation(drawn.columns.num_out)
    apart = Workload("apart", replace(drawn.columns, num_out=outs))
    assert abs(correlation(apart)) < 0.1, "drawn one by one they would not correlate"
    pairs = set(zip(workload.prompt_tokens.tolist(), workload.columns.num_out.tolist(), strict=True))
    assert pairs.issuperset(zip(drawn.prompt_tokens.tolist(), drawn.columns.num_out.tolist(), strict=True))


def test_a_gamma_process_is_fitted_by_its_rate_and_variation() -> None:
    for cv in (0.5, 1.0, 2.0):
        workload = lengths_that_correlate(4000, cv)
        fitted = fit(workload)
        assert fitted.rate == workload.rate == pytest.approx(2.0, rel=0.1)
        assert fitted.cv == workload.cv == pytest.approx(cv, rel=0.1)
        assert max(fitted.ks_in, fitted.ks_out) < 0.03 and fitted.ks_gaps < 0.03 and fitted.accepted
        drawn = fitted.sample(20_000, 3)
        assert drawn.rate == pytest.approx(fitted.rate, rel=0.05) and drawn.cv == pytest.approx(fitted.cv, rel=0.05)


def test_gaps_that_are_no_gamma_distribution_are_far_from_it() -> None:
    times = np.cumsum([10.0 if index % 10 == 0 else 0.01 for index in range(1000)])
    fitted = fit(plain(np.full(1000, 9), np.full(1000, 9), times))
    assert fitted.ks_gaps > 0.3 and fitted.accepted, "the lengths are right"


def test_a_fit_is_accepted_below_a_distance_of_a_twentieth() -> None:
    fitted = fit(lengths_that_correlate(100))
    assert replace(fitted, ks_in=0.049, ks_out=0.049, ks_gaps=0.9).accepted
    assert not replace(fitted, ks_in=0.05).accepted and not replace(fitted, ks_out=0.05).accepted


def test_lengths_of_few_large_groups_are_not_accepted() -> None:
    """They are drawn too rarely to come near their shares."""
    arrivals = [
        Arrival(float(index), (Span(index % 40, 100), Span(100 + index, 1 + index % 40)), 1 + index % 40)
        for index in range(16_000)
    ]
    fitted = fit(Workload("few", Arrivals.of(arrivals)))
    assert min(fitted.ks_in, fitted.ks_out) > 0.05 and not fitted.accepted


def test_the_share_of_cached_tokens_survives() -> None:
    workload = documents()
    fitted = fit(workload)
    shares = [fitted.sample(len(workload.arrivals), seed).shared for seed in range(5)]
    assert workload.shared > 0.3
    assert np.mean(shares) == pytest.approx(workload.shared, abs=0.02)
    assert fitted.sample(4 * len(workload.arrivals), 1).shared == pytest.approx(workload.shared, abs=0.03)
    chosen = np.random.default_rng(0).integers(len(workload.arrivals), size=len(workload.arrivals))
    again = Workload("again", [replace(workload.arrivals[place], at=0.0) for place in chosen.tolist()])
    assert again.shared > workload.shared + 0.1, "requests drawn one by one would share with their copies"


def test_how_far_apart_requests_share_survives() -> None:
    workload = documents()
    fitted = fit(workload)
    drawn = [fitted.sample(len(workload.arrivals), seed) for seed in range(3)]
    order = np.random.default_rng(0).permutation(len(workload.arrivals))
    shuffled = Workload("shuffled", [replace(workload.arrivals[place], at=0.0) for place in order.tolist()])
    for share in (10, 50, 90):
        known, found = (np.percentile(distances(each), share) for each in (workload, drawn[0]))
        assert found == pytest.approx(known, rel=0.1), share
    for capacity in (100, 500, 1000, 2000):
        known, found = hit_rate(workload, capacity), [hit_rate(each, capacity) for each in drawn]
        assert np.mean(found) == pytest.approx(known, abs=0.02), capacity
    assert hit_rate(workload, 500) < hit_rate(workload, 2000) - 0.15, "the distance matters"
    assert hit_rate(shuffled, 2000) < hit_rate(workload, 2000) - 0.1, "in another order it would not survive"


def test_system_prompts_are_the_same_in_all_copies_and_nothing_else_is() -> None:
    workload = documents()
    drawn = fit(workload).sample(4 * len(workload.arrivals), 0)
    assert {arrival.prompt[0] for arrival in drawn.arrivals} == {Span(0, 192), Span(1, 192)}
    users: dict[int, set[tuple[int, ...]]] = {}
    for arrival in drawn.arrivals:
        users.setdefault(arrival.prompt[1].id, set()).add(tuple(span.id for span in arrival.prompt[:-1]))
    assert all(len(prompts) == 1 for prompts in users.values()), "a document has one body and one system prompt"
    most = Counter(arrival.prompt[1].id for arrival in workload.arrivals).most_common(1)[0][1]
    assert Counter(arrival.prompt[1].id for arrival in drawn.arrivals).most_common(1)[0][1] <= most
    questions = [arrival.prompt[-1].id for arrival in drawn.arrivals]
    assert len(set(questions)) == len(questions)


def test_conversations_stay_whole() -> None:
    workload = conversations()
    drawn = fit(workload).sample(600, 5)

    def told(source: Workload) -> list[tuple[tuple[object, ...], ...]]:
        """Every conversation without ids and indices."""
        found: dict[int, list[tuple[object, ...]]] = {}
        home: dict[int, tuple[int, int]] = {}
        for index, each in enumerate(source.arrivals):
            begin, place = home.get(each.after, (index, -1))
            home[index] = begin, len(found.setdefault(begin, []))
            found[begin].append((place, each.num_out, each.pause, *(span.num_tokens for span in each.prompt)))
        return [tuple(rows) for rows in found.values()]

    known = set(told(workload))
    *whole, last = told(drawn)
    assert known.issuperset(whole) and any(rows[: len(last)] == last for rows in known)
    assert len(set(whole)) > 0.9 * len(known)
    assert drawn.shared == pytest.approx(workload.shared, abs=0.05)


def test_a_rate_counts_the_requests_of_conversations() -> None:
    fitted = fit(conversations())
    assert fitted.rate == pytest.approx(180 / 60 * 59 / 59**2)
    drawn = replace(fitted, cv=1.0).sample(20_000, 0, rate=12.0)
    assert drawn.rate == pytest.approx(12.0, rel=0.05)
    assert 1 / np.diff(drawn.times).mean() == pytest.approx(4.0, rel=0.05), "three requests a conversation"


@pytest.mark.parametrize("rate", [0.5, 12.0])
def test_requests_that_count_arrive_at_the_rate_although_conversations_pause(rate: float) -> None:
    """Without an answer's time, as many arrive as the rate says, from the first second that counts on."""
    fitted = replace(fit(equal_conversations(400, turns=5, gap=10.0, pause=30.0)), cv=0.2)
    drawn = fitted.steady(300, 0, rate)
    begin, end = drawn.counted
    assert end - begin == pytest.approx(300 / rate) and begin == 120.0 and fitted.settles(300, rate)
    at = drawn.begun + drawn.waited
    assert ((at >= begin) & (at < end)).sum() == pytest.approx(300, rel=0.05)
    assert at.max() < end and (at < begin).sum() < 0.6 * 120 * rate
    # Without those before, far fewer arrive in as many seconds where pauses are long beside them.
    plain = fitted.sample(300, 0, rate)
    early = plain.begun + plain.waited < 300 / rate
    assert early.sum() < (0.98 if rate < 1 else 0.3) * 300
    # The same conversations begin at every rate.
    other = fitted.steady(300, 0, 2 * rate)
    count = min(len(other.times), len(drawn.times))
    assert other.times[:count] == pytest.approx(drawn.times[:count] / 2)


def test_pauses_that_are_too_long_to_wait_for_are_told() -> None:
    fitted = fit(equal_conversations(100, turns=2, gap=2.0, pause=1e5))
    assert not fitted.settles(300, 1.0) and len(fitted.steady(300, 0, 1.0).arrivals) <= 8 * 300


def test_some_requests_of_a_workload_keep_their_own_predecessors() -> None:
    workload = conversations()
    columns = workload.columns
    kept = np.ones(len(columns), dtype=np.bool_)
    roots = np.flatnonzero(columns.after < 0)
    kept[[index for index in range(len(columns)) if workload.begun[index] == columns.at[roots[1]]]] = False
    part = workload.only(kept)
    left = [each for each, is_kept in zip(columns, kept, strict=True) if is_kept]
    assert [(each.at, each.prompt, each.num_out, each.pause) for each in part.arrivals] == [
        (each.at, each.prompt, each.num_out, each.pause) for each in left
    ]
    assert part.prompt_tokens.tolist() == workload.prompt_tokens[kept].tolist()
    with pytest.raises(AssertionError, match="without the one that it follows"):
        workload.only(columns.after >= 0)


@pytest.mark.parametrize("workload", [lengths_that_correlate(300), documents(400), conversations()])
def test_one_seed_gives_the_same_requests_at_every_rate(workload: Workload) -> None:
    fitted = fit(workload)
    slow, fast = fitted.sample(500, 4, rate=0.5), fitted.sample(500, 4, rate=8.0)
    assert fast == fitted.sample(500, 4, rate=8.0) != fitted.sample(500, 5, rate=8.0)
    assert fast.times == pytest.approx(slow.times / 16)
    assert replace(fast.columns, at=slow.columns.at) == slow.columns
    bursty = replace(fitted, cv=3.0).sample(500, 4, rate=0.5)
    assert bursty != slow and replace(bursty.columns, at=slow.columns.at) == slow.columns
    for count in (1, 2, 39, len(workload.arrivals), 1000):
        assert len(fitted.sample(count, count).arrivals) == count


def test_every_request_is_drawn_as_often_as_others_whatever_its_group() -> None:
    """100 groups of 1, 2, ... 19 requests. Answers tell requests apart. What the last group drawn has too many is cut
    off, so the last 19 are a little rarer.
    """
    owners = np.random.default_rng(3).permutation([group for group in range(100) for _ in range(1 + group % 19)])
    arrivals = [
        Arrival(float(index), (Span(int(owner), 64), Span(100 + index, 1)), 1 + index)
        for index, owner in enumerate(owners)
    ]
    groups, total = Workload("groups", Arrivals.of(arrivals)), len(owners)
    alone = plain(np.arange(1, 191), np.arange(1, 191), np.arange(190.0))
    for workload, count in ((groups, total), (groups, 3 * total), (alone, 60), (alone, 190)):
        fitted, expected = fit(workload), 200
        draws = expected * len(workload.arrivals) // count
        outs = np.concatenate([fitted.sample(count, seed).columns.num_out for seed in range(draws)])
        counts = np.bincount(outs - 1, minlength=len(workload.arrivals))
        assert 0.6 * expected < counts[:-19].min() and counts.max() < 1.4 * expected, count
        assert 0.5 * expected < counts.min(), count


def test_a_coarse_clock_does_not_pass_for_bursts() -> None:
    random = np.random.default_rng(0)
    times = renewals(random, 4000, 1.0, rate=3.0)
    coarse = plain(np.full(4000, 9), np.full(4000, 9), np.floor(times / 3) * 3)
    fitted = fit(coarse)
    assert coarse.cv > 2.5
    assert fitted.cv == pytest.approx(1.0, abs=0.05) and fitted.ks_gaps < 0.03
    bursts = plain(np.full(4000, 9), np.full(4000, 9), np.repeat(times[:400], 10))
    assert fit(bursts).cv == bursts.cv > 3, "a fine clock shows bursts as they are"


def test_regular_arrivals_stay_regular() -> None:
    fitted = fit(plain(np.arange(1, 101), np.full(100, 3), np.arange(100) * 0.1))
    assert fitted.cv < 1e-9 and fitted.ks_gaps == 0
    assert np.diff(fitted.sample(50, 1, rate=2.0).times) == pytest.approx(np.full(49, 0.5))


def test_what_cannot_be_fitted_or_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match="all requests of the workload plain arrive at once; a fit needs their times"):
        fit(plain(np.array([1, 2]), np.array([1, 2]), np.zeros(2)))
    fitted = fit(lengths_that_correlate(10))
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="a rate is"):
            fitted.sample(1, 0, rate=rate)


@pytest.mark.data
@pytest.mark.parametrize(("name", "gaps"), [("conv", 0.026), ("code", 0.913)])
def test_the_azure_traces_are_fitted(data_dir: Path, name: str, gaps: float) -> None:
    workload = read_workload(trace(data_dir, f"AzureLLMInferenceTrace_{name}.csv"))
    fitted = fit(workload)
    assert fitted.accepted and max(fitted.ks_in, fitted.ks_out) < 0.01
    assert fitted.ks_gaps == pytest.approx(gaps, abs=0.001)
    drawn = fitted.sample(20_000, 0)
    # Pearson's of the conversations: -0.11.
    found, known = (np.corrcoef(each.prompt_tokens, each.columns.num_out)[0, 1] for each in (drawn, workload))
    assert found == pytest.approx(known, abs=0.03)


@pytest.mark.data
def test_the_mooncake_trace_is_fitted_with_its_prefixes(data_dir: Path) -> None:
    workload = read_workload(trace(data_dir, "mooncake_conversation.jsonl"), 4000)
    fitted = fit(workload)
    assert fitted.accepted and fitted.ks_gaps < 0.03 and fitted.cv == pytest.approx(1.0, abs=0.05) and workload.cv > 2.5
    drawn = fitted.sample(4000, 3)
    assert drawn.shared == pytest.approx(workload.shared, abs=0.04)
    for capacity in (10_000, 30_000):
        assert hit_rate(drawn, capacity) == pytest.approx(hit_rate(workload, capacity), abs=0.04), capacity


@pytest.mark.data
@full_only("a million requests take seconds")
def test_a_million_requests_are_drawn_in_seconds(data_dir: Path) -> None:
    begun = time.perf_counter()
    fitted = fit(read_workload(trace(data_dir, "AzureLLMInferenceTrace_conv.csv")))
    drawn = fitted.sample(1_000_000, 0, rate=50.0)
    assert sum(arrival.num_out for arrival in drawn.arrivals) == drawn.columns.num_out.sum()
    assert time.perf_counter() - begun < 20
    assert drawn.rate == pytest.approx(50, rel=0.01)
