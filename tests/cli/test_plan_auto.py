"""`quire plan auto`: what it refuses."""

from __future__ import annotations

import pytest

from tests.cli.commands import refused
from tests.planning.test_auto import TARGETS
from tests.planning.test_auto import folder as folder
from tests.planning.test_auto import words as words


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cache.memory", "1GiB"], "cache.memory is 1073741824"),
        (["--cache.sparse_values", "0.5"], "cache.sparse_values is 0.5"),
        (["--offload.mode", "auto"], "quire plan offload"),
        (["--seed", "-1"], "--seed is -1"),
        (["--plan.quality", "-1"], "plan.quality is '-1'"),
        (["--text", "nowhere.txt"], "cannot read the text nowhere.txt"),
        (["--hardware", "h100"], "--plan.memory is for this machine"),
        (["--input-tokens", "5"], "--input-tokens is for quire plan offload"),
        (["--plan.gpu", "8GiB"], "--plan.gpu is for quire plan offload, not for auto"),
        (["--plan.cpu", "8GiB"], "--plan.cpu is for quire plan offload, not for auto"),
        (["--plan.disk", "8GiB"], "--plan.disk is for quire plan offload, not for auto"),
        (["--slo.attainment", "0"], "slo.attainment is 0"),
    ],
)
def test_what_a_plan_does_not_take_is_said(
    more: list[str], message: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, [*words, *more], message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["auto", "smollm2", *TARGETS], "needs --trace"),
        (["auto", "smollm2", "--trace", "t"], "needs a latency target"),
        (["auto", "smollm2", "--trace", "nowhere.csv", *TARGETS], "nowhere.csv"),
        (["offload", "smollm2", "--plan.quality", "0.1"], "--plan.quality is for quire plan auto"),
    ],
)
def test_a_plan_needs_a_trace_and_targets(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, ["plan", *words], message)
