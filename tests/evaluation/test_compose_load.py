"""The loads of the benchmark."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.evaluation.compose_load import asked
from tests.evaluation.test_compose import LOAD

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared": 300}, "--shared-tokens is 300; it must be below --input-tokens, 300"),
        ({"output": 1}, "--output-tokens of at least 2"),
        ({"clients": ()}, "clients of at least 1"),
        ({"seconds": 0.0}, "--seconds is 0; it must be above 0"),
    ],
)
def test_loads_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LOAD, **changes)


def test_a_trace_s_prompts_have_no_shared_tokens_to_be_checked() -> None:
    assert replace(LOAD, prompt=100, shared=1792, trace="t").longest == 120


def test_prompts_take_turns_with_their_prefixes_and_are_the_same_each_time() -> None:
    first, second = (list(itertools.islice(asked(LOAD, 1000), 6)) for _ in range(2))
    assert first == second and all(len(each.prompt) == 300 and each.num_out == 20 for each in first)
    heads = [tuple(each.prompt[:200]) for each in first]
    assert heads[0] == heads[2] != heads[1] == heads[3]
    assert len({tuple(each.prompt[200:]) for each in first}) == 6
    assert all(250 <= token < 500 for each in first for token in each.prompt), "special tokens"


def test_a_trace_s_requests_that_fit_come_again_and_again(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [(512, 5, [0]), (1024, 1, [0, 1]), (4096, 5, list(range(8))), (512, 5, [7])]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": place, "input_length": num_in, "output_length": num_out, "hash_ids": ids}) + "\n"
            for place, (num_in, num_out, ids) in enumerate(lines)
        )
    )
    load = replace(LOAD, prompt=2000, shared=0, trace=str(trace))
    found = list(itertools.islice(asked(load, 10_000), 6))
    assert [(len(each.prompt), each.num_out) for each in found[:3]] == [(512, 5), (1024, 2), (512, 5)]
    assert found[:3] == found[3:] and found[1].prompt[:512] == found[0].prompt != found[2].prompt
    with pytest.raises(ConfigError, match="has no request of at most 120 tokens"):
        asked(replace(LOAD, prompt=100, shared=0, trace=str(trace)), 10_000)
