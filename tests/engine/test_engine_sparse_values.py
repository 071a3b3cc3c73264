"""Engines that read few values while decoding (cache.sparse_values)."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from quire.config import EngineConfig
from quire.engine import build
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.errors import ConfigError
from quire.evaluation.perplexity import measure
from quire.llm import merge_delta
from quire.load import load_engine
from quire.measure.engines import configs_of
from tests.engines import drain, generate, make_engine
from tests.real_model import embedded_gguf
from tests.tiny_models import tiny_shape

SHAPE = tiny_shape(head_dim=16, num_q_heads=4, num_kv_heads=2)
PARAMS = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
SHARE = {"cache.sparse_values": 0.3}

_random = np.random.default_rng(0)
_COMMON = _random.integers(0, 256, 128).tolist()
PROMPTS = [_random.integers(0, 256, count).tolist() for count in (65, 64, 130)]
PROMPTS += [_COMMON + _random.integers(0, 256, count).tolist() for count in (5, 70, 1)]


def answers(prompts: list[list[int]] = PROMPTS, **options: Any) -> tuple[list[list[int]], Engine]:
    engine = make_engine(SHAPE, **options)
    return generate(engine, prompts, PARAMS), engine


def preempted_answers() -> list[list[int]]:
    """The answers of an engine that computes two of them again, in part or almost whole."""
    engine = make_engine(SHAPE, **SHARE)
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, PARAMS)
    outputs: dict[str, RequestOutput] = {}
    for step in range(80):
        for delta in engine.step():
            merge_delta(outputs, delta)
        if step in (20, 68):
            engine.scheduler.check()
            engine.scheduler.preempt(engine.scheduler.running[step // 30])
    drain(engine, outputs)
    assert engine.scheduler.counters.replayed_tokens > 60
    return [outputs[str(index)].outputs[0].token_ids for index in range(len(PROMPTS))]


OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "nuq3": {"cache.codec": "nuq3"},
    "retain": {"retain.budget": 0.5, "retain.profile_rows": 16},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_answers_are_those_of_the_reference_however_they_are_computed(options: dict[str, Any]) -> None:
    """Together or alone, with shared prefixes or without, and after a preemption."""
    found, _ = answers(**SHARE, **options)
    reference, _ = answers(PROMPTS[2:5], **SHARE, **options, **{"attention.backend": "reference"})
    assert found[2:5] == reference
    alone, _ = answers(PROMPTS[3:], **SHARE, **options, **{"cache.share": False, "scheduler.max_running": 1})
    assert found[3:] == alone
    if not options:
        assert found == preempted_answers()
        plain, _ = answers()
        assert found != plain, "few values made no difference"
        # The first token of an answer is the prompt's own, which reads all values.
        assert [each[0] for each in found] == [each[0] for each in plain]


def test_with_all_values_answers_are_those_without_the_setting() -> None:
    found, engine = answers(**{"cache.sparse_values": 1.0})
    assert found == answers()[0]
    assert not engine.scheduler.manager.retention.replays


def test_chunks_of_answers_stay_out_of_the_tree() -> None:
    """A prompt that begins with an answer is computed as a prompt, whatever is cached."""
    prompt = PROMPTS[1]
    first, engine = answers([prompt], **SHARE)
    assert engine.scheduler.manager.tree.num_chunks == 1, "only the prompt's whole chunk"
    conversation = [*prompt, *first[0], *_random.integers(0, 256, 9).tolist()]
    (again,) = generate(engine, [conversation], PARAMS)
    assert engine.scheduler.manager.tree.num_chunks == 2
    (fresh,), _ = answers([conversation], **SHARE)
    assert again == fresh
    _, plain = answers([prompt])
    assert plain.scheduler.manager.tree.num_chunks == 2, "answers that read all values are cached"


def test_the_last_row_of_a_prompt_reads_all_values_even_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 of 129 tokens are cached: the prompt has a row left, and its plan does not go on as the answer's."""
    engine = make_engine(SHAPE, **SHARE)
    generate(engine, [_COMMON], SamplingParams(max_tokens=1))
    plan, rows = engine.runner.attention.plan, list[tuple[int, int, bool]]()

    def watched(slices: Any, *others: Any) -> Any:
        rows.extend((piece.start, piece.num_rows, piece.reads_all) for piece in slices)
        return plan(slices, *others)

    monkeypatch.setattr(engine.runner.attention, "plan", watched)
    (found,) = generate(engine, [PROMPTS[5]], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    assert rows == [(128, 1, True), (129, 1, False), (130, 1, False)]
    assert len(found) == 3


@pytest.mark.parametrize("num_tokens", [128, 133])
def test_a_preempted_answer_is_not_taken_from_prompts_that_begin_with_it(num_tokens: int) -> None:
    """Another prompt's chunk with the answer's tokens is in the tree, computed from all values."""
    prompt = PROMPTS[1]
    (answer,), _ = answers([prompt], **SHARE)
    engine = make_engine(SHAPE, **SHARE)
    generate(engine, [[*prompt, *answer][:128]], SamplingParams(max_tokens=1))
    (sequence,) = engine.add("answer", prompt, SamplingParams(max_tokens=90, temperature=0.0)).sequences
    while len(sequence.token_ids) < num_tokens:
        engine.step()
    tree = engine.scheduler.manager.tree
    assert tree.num_chunks == 2 and sequence.token_ids[:128] == [*prompt, *answer][:128]
    engine.scheduler.preempt(sequence)
    engine.step()
    assert sequence.path.num_shared == 1 and sequence.path.num_tokens == 65, "one row after the prompt's chunk"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache.sparse_values": 0}, r"cache\.sparse_values is 0\.0; it must be above 0 and at most 1"),
        ({"cache.sparse_values": 1.5}, r"cache\.sparse_values is 1\.5; it must be above 0 and at most 1"),
    ],
)
def test_a_share_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(SHAPE, **options)


def test_a_backend_that_reads_all_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"attention\.backend triton reads all values; use attention\.backend ref"):
        build._check_sparse_values(0.5, "triton", False)
    with pytest.raises(ConfigError, match=r"a cache on the disk \(offload\.cache\) is read in whole pages"):
        build._check_sparse_values(0.5, "cpu", True)
    asked: list[tuple[float, str, bool]] = []
    monkeypatch.setattr(build, "_check_sparse_values", lambda *given: asked.append(given))
    make_engine(SHAPE, **SHARE)
    make_engine(SHAPE)
    assert asked == [(0.3, "cpu", False)]


def test_an_evaluation_decodes_what_it_scores() -> None:
    """A window read as a prompt would read all values."""
    assert [*configs_of(EngineConfig.from_options(SHARE))] == ["dense, cache.sparse_values 0.3"]
    both = configs_of(EngineConfig.from_options(SHARE | {"retain.budget": 0.5}), ["nuq3"], compares=True)
    assert [*both] == ["dense", "nuq3, retain.budget 0.5, cache.sparse_values 0.3"]
    assert both["dense"] == EngineConfig.from_options({"cache.check": False}), "the reference loses nothing"
    window = [(_COMMON + PROMPTS[2])[:200]]
    engines = {"plain": make_engine(SHAPE), "sparse": make_engine(SHAPE, **SHARE)}
    plain, sparse = measure(engines, window, "plain", continuation=40)
    assert plain.ratio == 1 and sparse.kl_mean is not None and sparse.kl_mean > 1e-4
    plain, sparse = measure(engines, window, "plain")
    assert sparse.kl_mean is not None and abs(sparse.kl_mean) < 1e-6


def test_the_start_says_that_it_is_on(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    path, caplog.handler.level = str(embedded_gguf()), logging.INFO
    with caplog.at_level(logging.INFO, "quire"):
        config = {"cache.memory": "64MiB", "cache.sparse_values": 0.1}
        load_engine(path, EngineConfig.from_options(config))
    assert sum("decoded tokens read 0.1 of the values" in message for message in caplog.messages) == 1
