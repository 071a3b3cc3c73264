"""Structured answers in a cluster: the grammar goes along with the request, and its state follows the tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.errors import QueueFullError, RequestError
from quire.structured.masks import NO_TEXT

from ..call_counts import count_admission
from ..clusters import SMALL, RunningCluster, ThreadedInstances
from ..engines import GREEDY

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


DEAD_END = {
    "type": "object",
    "properties": {"abc": {"$ref": "#/$defs/a"}},
    "$defs": {"a": {"$ref": "#/$defs/a"}},
    "required": ["abc"],
    "additionalProperties": False,
}
"""After `{"abc": ` nothing may follow."""


def tokens(answer: RequestOutput) -> list[list[int]]:
    return [output.token_ids for output in answer.outputs]


def test_tokens_are_those_of_one_engine(model: Path, single_engine: LLM, seed: int) -> None:
    prompts: list[Any] = [[1 + seed % 50, *range(2, 2 + length)] for length in (3, 70, 140)]
    params = [
        SamplingParams(n=2, max_tokens=120, temperature=1.0, seed=seed, structured_outputs={"json": SCHEMA}),
        SamplingParams(max_tokens=40, temperature=0.0, structured_outputs={"regex": "[0-9]{3}(-[0-9]{2}){2}"}),
        SamplingParams(max_tokens=40, temperature=1.0, seed=seed, structured_outputs={"choice": ["left", "right"]}),
    ]
    expected = [tokens(each) for each in single_engine.generate(prompts, params, use_tqdm=False)]
    # Its last row is a slice of its own, with forced tokens behind it, and another instance goes on.
    last_alone = [[1 + seed % 50, *range(2, 130)]]
    forced = SamplingParams(max_tokens=40, temperature=0.0, structured_outputs={"choice": ["on the left"]})
    (of_forced,) = single_engine.generate(last_alone, forced, use_tqdm=False)
    with RunningCluster(model, SMALL, ThreadedInstances(), "shm") as cluster:
        assert [tokens(each) for each in cluster.generate(last_alone, forced)] == [tokens(of_forced)]
        answers = cluster.generate(prompts, params)
        assert [tokens(each) for each in answers] == expected
        for output in answers[0].outputs:
            assert output.finish_reason == "stop" and set(json.loads(output.text)) == {"name", "kind"}
        with pytest.raises(RequestError, match="uniqueItems"):
            cluster.generate([[1, 2]], SamplingParams(structured_outputs={"json": {"uniqueItems": True}}))
        wanted = [SamplingParams(max_tokens=1, pooling=pooling) for pooling in ("mean", "last", "mean")]
        vectors = [answer.embedding for answer in single_engine.generate(prompts, wanted, use_tqdm=False)]
        for answer, vector in zip(cluster.generate(prompts, wanted), vectors, strict=True):
            assert answer.embedding == pytest.approx(vector, abs=1e-5)
        # A row that fails behind drafts that are accepted: these stay.
        params = [SamplingParams(n=2, max_tokens=40, temperature=0.0, structured_outputs={"json": DEAD_END})]
        for prompt in ([1, 2], last_alone[0]):
            (mine,) = single_engine.generate([prompt], params, use_tqdm=False)
            (its,) = cluster.generate([prompt], params)
            assert its.outputs == mine.outputs
            for output in its.outputs:
                assert output.text == '{"abc": ' and len(output.token_ids) > 2
                assert (output.finish_reason, output.stop_reason) == ("error", NO_TEXT)
        cluster.settle()


def test_only_the_router_checks_a_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances take what the router has admitted. They compile its grammar, which does not travel, without a trial."""
    params = SamplingParams(max_tokens=9, temperature=0.0, structured_outputs={"choice": ["left", "right"]})
    with RunningCluster(model, SMALL, ThreadedInstances(), "shm") as cluster:
        calls = count_admission(monkeypatch)
        cluster.generate([[1, 2, 3]], params)
    assert calls == {"tokenized": 1, "check": 1, "prepare": 1}


def test_a_pin_that_no_instance_takes_is_refused_by_the_router(model: Path) -> None:
    with RunningCluster(model, SMALL, ThreadedInstances(), "shm") as cluster:
        limits = cluster.cluster.supervisor.limits
        assert limits.pins.most_chunks and not limits.pins.has_disk
        for length, pin, words in ((5, True, "whole chunks"), (70, {"tier": "disk"}, "there is none")):
            with pytest.raises(RequestError, match=words):
                cluster.generate([{"prompt_token_ids": [1] * length, "cache_pin": pin}], GREEDY)


def test_a_queue_that_filled_up_after_the_admission_refuses(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunningCluster(model, {**SMALL, "scheduler.max_queue": 2}, ThreadedInstances(), "shm") as running:
        cluster = running.cluster
        request = running.call(cluster.admit([1, 2, 3], GREEDY))
        monkeypatch.setattr(type(cluster.router), "num_waiting", 2)
        with pytest.raises(QueueFullError, match="2 sequences wait"):
            running.call(anext(cluster.generate(request)))
        monkeypatch.undo()
        assert running.call(anext(cluster.generate(request))).outputs
