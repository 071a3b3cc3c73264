"""Workloads: counted, scaled and made into tokens."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from quire.cache.ledger import PAGE_TOKENS
from quire.errors import ConfigError
from quire.workload import workload as module
from quire.workload.traces import tokens
from quire.workload.workload import Arrival, Arrivals, Span, Workload
from tests.effort import tries

TALK = (
    Arrival(0.5, (Span(0, 512), Span(7, 30)), 129),
    Arrival(0.0, (Span(8, 25),), 64, after=0, pause=4.0),
    Arrival(2.5, (Span(0, 512), Span(9, 1)), 1),
)


def plain(*rows: tuple[float, int, int]) -> Workload:
    """Requests (at, num_in, num_out) that share nothing."""
    return Workload("w", tuple(Arrival(at, (Span(index, size),), out) for index, (at, size, out) in enumerate(rows)))


@pytest.mark.parametrize(
    ("arrivals", "said"),
    [
        ((), "the workload w has no requests"),
        ((Arrival(0.0, (Span(0, 1),), 0),), "request 0 of the workload w: num_out is 0"),
        ((Arrival(0.0, (), 1),), "request 0 of the workload w: its prompt has no tokens"),
        ((TALK[0], Arrival(0.6, (Span(0, 1), Span(1, 0)), 1)), "request 1 of the workload w: a span"),
        ((TALK[0], Arrival(0.6, (Span(-1, 1),), 1)), "request 1 of the workload w: a span"),
        ((TALK[0], Arrival(0.4, (Span(0, 1),), 1)), "request 1 of the workload w: at is 0.4"),
        ((TALK[1],), "request 0 of the workload w: after is 0"),
        ((TALK[0], Arrival(math.inf, (Span(0, 1),), 1)), "request 1 of the workload w: at is inf"),
        ((TALK[0], Arrival(0.0, (Span(0, 1),), 1, 0, math.inf)), "request 1 of the workload w: pause is inf"),
        ((TALK[0], Arrival(0.4, (Span(0, 1),), 0), Arrival(0.0, (), 1)), "request 1 of the workload w: num_out is 0"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(arrivals: tuple[Arrival, ...], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Workload("w", arrivals)
    assert str(error.value).startswith(said)


def test_columns_are_the_requests_that_they_were_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    prompts = [tuple(Span(draw.randrange(9), draw.randint(1, 9)) for _ in range(1 + index % 3)) for index in range(40)]
    arrivals = tuple(Arrival(float(index), prompt, 1 + index) for index, prompt in enumerate(prompts))
    columns = Arrivals.of(arrivals)
    for piece in (1, 7, 40, 100):
        monkeypatch.setattr(module, "PIECE", piece)
        assert tuple(columns) == arrivals
    assert columns == arrivals and arrivals == columns and columns == Arrivals.of(arrivals)
    assert columns != arrivals[1:] and columns != Arrivals.of((*arrivals[:-1], arrivals[0]))
    for index in (0, 5, 39, -1, -40):
        assert columns[index] == arrivals[index]
    assert columns[3:20:4] == arrivals[3:20:4]
    assert columns[5].num_in == sum(span.num_tokens for span in arrivals[5].prompt)
    for index in (40, -41):
        with pytest.raises(IndexError):
            columns[index]
    with pytest.raises(ValueError, match="read-only"):
        columns.at[0] = 1.0


def test_a_conversation_counts_whole_prompts_and_all_its_requests() -> None:
    turns = (
        Arrival(0.0, (Span(0, 100),), 29),
        Arrival(0.0, (Span(1, 10),), 64, after=0, pause=1.0),  # 100 + 29 + 10
        Arrival(0.0, (Span(2, 1),), 5, after=1, pause=1.0),  # 139 + 64 + 1
        Arrival(10.0, (Span(0, 100),), 1),
        Arrival(0.0, (Span(1, 10),), 1, after=0),  # goes on from the first answer again
        Arrival(0.0, (Span(3, 10),), 1, after=0),  # and elsewhere
    )
    workload = Workload("talk", turns)
    assert workload.prompt_tokens.tolist() == [100, 139, 204, 100, 139, 139]
    assert workload.mean_in == pytest.approx((100 + 139 + 204 + 100 + 139 + 139) / 6)
    # Two gaps would be needed for a variation; six requests come in two conversations, 10 s apart.
    assert workload.rate == pytest.approx(0.1 * 6 / 2) and workload.cv == 0
    # The last token of an answer is not computed: 128 of 129 tokens are whole chunks, and 192 of 202.
    assert workload.cached_tokens.tolist() == [0, 128, 192, 64, 128, 128]
    shorter = Workload("talk", (turns[0], Arrival(0.0, (Span(1, 63),), 1, after=0)))
    assert Workload("talk", (Arrival(0.0, (Span(0, 100),), 28), shorter.arrivals[1])).cached_tokens[1] == 64


@pytest.mark.parametrize("seed", range(tries(4)))
def test_cached_tokens_are_the_common_prefixes_of_the_tokens(seed: int) -> None:
    """Of spans of any length, with conversations. Lengths are multiples of 4, so that no chunk ends too early."""
    draw = random.Random(seed)
    arrivals: list[Arrival] = []
    for index in range(40):
        before = draw.randrange(index) if index and draw.random() < 0.4 else -1
        spans = tuple(Span(draw.randrange(4), 4 * draw.choice([8, 20, 21, 40])) for _ in range(draw.randint(1, 4)))
        arrivals.append(Arrival(float(index), spans, 4 * draw.randint(1, 30), before))
    workload = Workload("w", tuple(arrivals))
    held: list[list[int]] = []
    whole: list[list[int]] = []
    found = []
    for index, own in enumerate(tokens(workload, range(1000, 1100), seed)):
        before = arrivals[index].after
        answer = [-index - 1] * arrivals[index].num_out
        prompt = [*(whole[before] if before >= 0 else ()), *own]
        common = max((_equal(prompt, each) for each in held), default=0)
        found.append(min(common // PAGE_TOKENS * PAGE_TOKENS, len(prompt) - 1))
        whole.append(prompt + answer)
        held.append(whole[-1][:-1])
    assert workload.cached_tokens.tolist() == found and sum(found) > 0


def _equal(one: list[int], other: list[int]) -> int:
    least = min(len(one), len(other))
    return next((place for place in range(least) if one[place] != other[place]), least)


def test_another_rate_scales_times_and_nothing_else() -> None:
    workload = Workload("talk", TALK)
    assert workload.rate == pytest.approx(1 / 2 * 3 / 2)
    faster = workload.at_rate(7.5)
    assert faster.rate == pytest.approx(7.5) and faster.cv == workload.cv
    assert [each.at for each in faster.arrivals] == pytest.approx([0.05, 0.0, 0.25])
    assert faster.arrivals[1].pause == 4.0 and faster.shared == workload.shared
    assert workload.at_rate(workload.rate) == workload
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="a rate is"):
            workload.at_rate(rate)
    at_once = plain((1, 3, 1), (1, 3, 1))
    assert at_once.rate == math.inf and at_once.cv == 0
    with pytest.raises(ConfigError, match="arrive at once"):
        at_once.at_rate(1.0)


def test_the_first_requests_are_a_workload() -> None:
    workload = Workload("talk", TALK)
    assert workload.first(2).arrivals == TALK[:2] and workload.first(9) == workload


def test_equal_spans_are_equal_tokens_and_others_differ_at_once() -> None:
    ids = range(5000, 5011)
    spans = [Span(index, 4 + index % 30) for index in range(900)]
    arrivals = [Arrival(0.0, (spans[index], spans[-index - 1], Span(7, 3)), 1) for index in range(900)]
    made = tokens(Workload("w", arrivals), ids, 3)
    parts: dict[int, list[int]] = {}
    for arrival, prompt in zip(arrivals, made, strict=True):
        assert len(prompt) == arrival.num_in and all(token in ids for token in prompt)
        for span in arrival.prompt:
            part, prompt = prompt[: span.num_tokens], prompt[span.num_tokens :]
            longest = parts.setdefault(span.id, part)
            parts[span.id] = max(part, longest, key=len)
            assert longest[: len(part)] == part[: len(longest)]
    assert len({tuple(part[:4]) for part in parts.values()}) == 900
    assert made == tokens(Workload("w", arrivals), ids, 3) != tokens(Workload("w", arrivals), ids, 4)
    (long,) = tokens(Workload("w", (Arrival(0.0, (Span(0, 20_000),), 1),)), ids, 3)
    counts = np.bincount(np.array(long) - ids.start)
    assert counts.min() > 0.9 * counts.mean() and counts.max() < 1.1 * counts.mean(), "tokens are drawn evenly"


def test_ids_that_four_tokens_cannot_tell_apart_are_refused() -> None:
    every = Workload("w", [Arrival(0.0, (Span(index, 4),), 1) for index in range(81)])
    assert len(set(map(tuple, tokens(every, range(3), 0)))) == 81
    with pytest.raises(ConfigError, match="4 of 3 tokens cannot tell span 81 apart"):
        tokens(Workload("w", (Arrival(0.0, (Span(81, 4),), 1),)), range(3), 0)
