"""Several rows of a sequence in a step: right, wrong or half right drafts change only the number of steps; sets of
allowed tokens are respected.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.engine.admission import AdmittedRequest
from quire.engine.engine import Engine
from quire.engine.handover import Handover
from quire.engine.outputs import CompletionOutput
from quire.engine.params import SamplingParams
from quire.structured.guide import GuideProposal

from ..effort import IS_FULL, combine, tries
from ..engines import GREEDY, drain, generate, make_engine
from ..tiny_models import tiny_shape
from ..toy_guide import ToyGuide, bits

VOCABULARY = 256
SHAPE = tiny_shape(head_dim=16)

CACHES: dict[str, dict[str, Any]] = {
    "dense": {},
    "reference": {"attention.backend": "reference"},
    "alone": {"cache.share": False},
    "g4": {"cache.codec": "g4"},
    "nuq3": {"cache.codec": "nuq3", "cache.sink_tokens": 3},
    "retained": {"retain.threshold": 0.9, "retain.profile_rows": 32, "retain.chain": "special,local"},
    "ranked": {"retain.budget": 0.5, "retain.profile_rows": 32},
    "retained nuq3": {
        "retain.threshold": 0.9,
        "retain.profile_rows": 32,
        "retain.chain": "special,local",
        "cache.codec": "nuq3",
    },
}

SAMPLING = {
    "greedy": GREEDY,
    "drawn": SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True),
    "penalised": SamplingParams(
        max_tokens=24, temperature=0.7, seed=5, repetition_penalty=1.3, frequency_penalty=0.4, ignore_eos=True
    ),
}


def prompts_of(rng: random.Random) -> list[list[int]]:
    shared = [rng.randrange(VOCABULARY) for _ in range(130)]
    own = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 150))] for _ in range(4)]
    return [own[0], shared + own[1], shared + own[2], own[3][:3]]


def guided(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], guides: list[ToyGuide]
) -> dict[str, Any]:
    for number, (prompt, wanted, guide) in enumerate(zip(prompts, params, guides, strict=True)):
        engine.add(str(number), prompt, wanted, guide=lambda guide=guide: guide)  # type: ignore[misc]
    return drain(engine)


def assert_near(one: CompletionOutput, other: CompletionOutput, tolerance: float) -> None:
    """Log-probabilities agree up to the first token that differs. A step of more rows rounds the last bit differently.
    That may move a number over the border between two codes, and a drawn number over the border between two tokens.
    """
    assert one.logprobs is not None and other.logprobs is not None
    for place, (mine, its) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        both = mine.keys() & its.keys()
        assert len(both) >= 3 and all(
            mine[token].logprob == pytest.approx(its[token].logprob, abs=tolerance) for token in both
        )
        if one.token_ids[place] != other.token_ids[place]:
            break


@combine(cache=list(CACHES), sampling=list(SAMPLING))
def test_drafts_change_nothing_but_the_number_of_steps(cache: str, sampling: str, seed: int) -> None:
    for number in range(tries(1)):
        rng = random.Random(seed + number)
        prompts = prompts_of(rng)
        is_exact = "cache.codec" not in CACHES[cache] and sampling == "greedy"
        params = [
            replace(
                SAMPLING[sampling],
                max_tokens=rng.randrange(1, 140 if IS_FULL else 80),
                logprobs=None if is_exact else 5,
            )
            for _ in prompts
        ]
        plain, engine = (make_engine(SHAPE, **CACHES[cache]) for _ in range(2))
        for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            plain.add(str(index), prompt, wanted)
        expected = drain(plain)
        answers = [expected[str(index)].outputs[0].token_ids for index in range(len(prompts))]
        guides = [
            ToyGuide(prompt + answer, rng, exact=is_exact) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        found = guided(engine, prompts, params, guides)
        for index, answer in enumerate(answers):
            output = found[str(index)].outputs[0]
            assert len(output.token_ids) == len(answer)
            if is_exact:
                assert output.token_ids == answer
            else:
                assert_near(expected[str(index)].outputs[0], output, 0.02 if "cache.codec" in CACHES[cache] else 1e-4)
        taken, before = engine.stats(), plain.stats()
        assert taken["decode_tokens"] == before["decode_tokens"] and engine.holds_nothing
        drafted = sum(sum(guide.proposed) for guide in guides)
        # Where attention is summed up, a refused row's looks could not be taken back.
        assert (drafted > 0) == (cache != "ranked")
        if cache != "ranked":
            proposals = sum(len(guide.proposed) for guide in guides)
            assert 0 < sum(sum(guide.right) for guide in guides) < drafted and proposals < before["decode_tokens"]


def test_a_preempted_sequence_with_drafts_resumes_with_the_same_tokens(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(60 + index)] for index in range(4)]
    params = replace(GREEDY, max_tokens=150)
    answers = generate(make_engine(), prompts, params)
    engine = make_engine(chunks=10)
    guides = [ToyGuide(prompt + answer, rng) for prompt, answer in zip(prompts, answers, strict=True)]
    found = guided(engine, prompts, [params] * 4, guides)
    assert [found[str(index)].outputs[0].token_ids for index in range(4)] == answers
    assert engine.stats()["preemptions"] > 0


def test_drafts_leave_every_other_sequence_its_row_and_prompts_a_chunk() -> None:
    class Eager:
        def propose(self, token_ids: list[int], most: int) -> GuideProposal:
            return GuideProposal([token_ids[-1]] * most, [])

    engine = make_engine(**{"scheduler.max_running": 4, "scheduler.token_budget": 68})
    params = replace(GREEDY, max_tokens=150)
    requests = [engine.add(str(n), [n + 1] * 5, params, guide=Eager if n < 2 else None) for n in range(3)]
    while any(not request.sequences[0].num_generated for request in requests):
        engine.step()
    for _ in range(100):
        before = [request.sequences[0].num_generated for request in requests]
        engine.step()
        assert all(
            request.finished or request.sequences[0].num_generated > count
            for request, count in zip(requests, before, strict=True)
        )
    drain(engine)


def test_log_probabilities_are_those_of_the_tokens_that_stay(seed: int) -> None:
    rng = random.Random(seed)
    prompts = prompts_of(rng)
    params = replace(GREEDY, max_tokens=40, logprobs=2, prompt_logprobs=0)
    plain, engine = make_engine(), make_engine()
    for index, prompt in enumerate(prompts):
        plain.add(str(index), prompt, params)
    expected = drain(plain)
    guides = [ToyGuide(prompt + expected[str(index)].outputs[0].token_ids, rng) for index, prompt in enumerate(prompts)]
    found = guided(engine, prompts, [params] * len(prompts), guides)
    for name, output in expected.items():
        both = [each[name].outputs[0].logprobs for each in (expected, found)]
        assert both[0] is not None and both[1] is not None and len(both[0]) == len(both[1]) == 40
        for mine, other in zip(*both, strict=True):
            assert mine.keys() == other.keys()
            for token, entry in mine.items():
                assert other[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
        assert found[name].outputs[0].cumulative_logprob == pytest.approx(
            output.outputs[0].cumulative_logprob, abs=1e-3
        )


def test_a_stop_among_accepted_drafts_ends_the_answer_there() -> None:
    prompt = [7, 8, 9]
    (answer,) = generate(make_engine(), [prompt], replace(GREEDY, max_tokens=30))
    stop = next(token for place, token in enumerate(answer) if place >= 9 and token not in answer[:place])

    class Right:
        def propose(self, token_ids: list[int], most: int) -> GuideProposal:
            return GuideProposal(answer[len(token_ids) - len(prompt) :][: min(most, 5)], [])

    params = replace(GREEDY, max_tokens=30, stop_token_ids=[stop])
    engine = make_engine()
    engine.add("x", prompt, params, guide=Right)
    output = drain(engine)["x"].outputs[0]
    assert output.token_ids == answer[: answer.index(stop) + 1] and output.finish_reason == "stop"
    assert engine.holds_nothing and engine.stats()["steps"] < 8


def test_only_allowed_tokens_are_chosen_with_drafts_and_without(seed: int) -> None:
    rng = random.Random(seed)
    prompts = prompts_of(rng)
    few = {rng.randrange(VOCABULARY) for _ in range(9)}
    allowed = bits(few, VOCABULARY + 3)

    class Few:
        def propose(self, token_ids: list[int], most: int) -> GuideProposal:
            return GuideProposal([], [lambda: allowed])

    for params in SAMPLING.values():
        wanted = [replace(params, max_tokens=60, logprobs=5)] * len(prompts)
        plain, engine = make_engine(), make_engine()
        for index, (prompt, each) in enumerate(zip(prompts, wanted, strict=True)):
            plain.add(str(index), prompt, each, guide=Few)
        expected = drain(plain)
        answers = [expected[str(index)].outputs[0].token_ids for index in range(len(prompts))]
        assert {*itertools.chain.from_iterable(answers)} <= few
        assert answers != generate(make_engine(), prompts, wanted[0])
        assert len({*itertools.chain.from_iterable(answers)}) > 1
        paths = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        guides = [ToyGuide(path, rng, allowed=allowed, exact=params is GREEDY) for path in paths]
        found = guided(engine, prompts, wanted, guides)
        for name, output in found.items():
            assert {*output.outputs[0].token_ids} <= few
            assert_near(expected[name].outputs[0], output.outputs[0], 1e-4)
        assert any(any(guide.right) for guide in guides)


def test_the_only_token_allowed_is_given_without_logits(seed: int) -> None:
    """It is the one that a set of one allows, with the log-probabilities that it has there."""
    rng = random.Random(seed)
    prompts = prompts_of(rng)
    forced = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 9))] for _ in prompts]

    class Forces:
        def __init__(self, index: int, is_given: bool) -> None:
            self.tokens, self.num_prompt, self.is_given = forced[index], len(prompts[index]), is_given

        def propose(self, token_ids: list[int], most: int) -> GuideProposal:
            left = self.tokens[len(token_ids) - self.num_prompt :]
            drafts = left[:most]
            allowed: list[Any] = [*left[: most + 1], *([None] if len(left) <= most else [])]
            if not self.is_given:
                allowed = [None if each is None else lambda each=each: bits({each}, VOCABULARY + 3) for each in allowed]
            return GuideProposal(drafts, allowed)

    for params in SAMPLING.values():
        for asked in ({}, {"logprobs": 5}, {"min_tokens": 12}, {"logit_bias": {7: 3.0}}):
            wanted = replace(params, max_tokens=30, **asked)
            found = []
            for is_given in (True, False):
                engine = make_engine()
                rows = counted_logits(engine)
                for index, prompt in enumerate(prompts):
                    engine.add(str(index), prompt, wanted, guide=lambda n=index, x=is_given: Forces(n, x))
                outputs = drain(engine)
                answers = [outputs[str(index)].outputs[0] for index in range(len(prompts))]
                assert [a.token_ids[: len(f)] for a, f in zip(answers, forced, strict=True)] == forced
                found.append((answers, sum(rows)))
            (given, few), (alike, many) = found
            for mine, other in zip(given, alike, strict=True):
                if "logprobs" in asked:
                    assert_near(mine, other, 1e-4)
                assert mine.token_ids == other.token_ids
            needs_none = not ({*asked} & {"logprobs", "min_tokens"})
            assert many - few == (sum(map(len, forced)) if needs_none else 0)


def test_an_end_that_may_not_come_yet_is_no_token() -> None:
    """Also if it is the only one that a guide allows."""

    class Ends:
        def propose(self, token_ids: list[int], most: int) -> GuideProposal:
            return GuideProposal([], [engine.eos_token_ids[0]])

    engine = make_engine()
    for least, reason in ((0, "stop"), (3, "error")):
        engine.add(str(least), [5], replace(GREEDY, min_tokens=least, ignore_eos=False), guide=Ends)
        assert drain(engine)[str(least)].outputs[0].finish_reason == reason


def counted_logits(engine: Engine) -> list[int]:
    """Counts the rows of logits of each step from now on, without padding."""
    found: list[int] = []
    runner: Any = engine.runner
    before = runner.sampler.sample

    def sample(logits: torch.Tensor, rows: list[Any]) -> Any:
        found.append(len(logits))
        return before(logits, rows)

    runner.sampler.sample = sample
    return found


def test_a_sequence_that_leaves_after_its_next_token_has_no_drafts() -> None:
    answer = generate(make_engine(SHAPE), [[5]])[0]
    for cache, given in (("dense", 0), ("retained", 3)):
        engine, guide = make_engine(SHAPE, **CACHES[cache]), AllRight([5, *answer], random.Random(0))
        continued = Handover(0, tuple(answer[:given]), will_hand_over=True)
        engine.queue("r", AdmittedRequest(None, [5], GREEDY), lambda guide=guide: guide, continued)  # type: ignore[misc]
        told: list[int] = []
        while not engine.exports:
            told += [token for delta in engine.step() for output in delta.outputs for token in output.token_ids]
        assert told == answer[given : given + 1] and guide.proposed == [0]
        assert engine.exports["r"].swapped.path.num_tokens == given + 1


class AllRight(ToyGuide):
    """Proposes as many drafts as it may, all of which are right."""

    def propose(self, token_ids: list[int], most: int) -> GuideProposal:
        """See Guide."""
        drafts = self.answer[len(token_ids) :][:most]
        self.proposed.append(len(drafts))
        return GuideProposal(drafts, [])
