"""scripts/recorded.py compares what does not depend on the speed of the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.models.fingerprint import fingerprint

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from recorded import masks

    return masks


def test_a_prefix_that_was_computed_again_is_the_same_answer_as_one_from_the_disk(masks: Any) -> None:
    def shown(text: str, num_cached: int) -> Any:
        usage = {"prompt_tokens": 370, "cached_tokens": num_cached, "cached_tokens_by_tier": {"disk": num_cached}}
        line = json.dumps({"id": 1, "text": text, "usage": usage})
        return masks.output_of(line, "generated", masks.Marks())

    assert shown("a", 320) == shown("a", 0)
    assert shown("a", 320) != shown("b", 320)
    assert shown("a", 320)[0]["usage"] == {"prompt_tokens": 370}


def test_a_line_of_an_error_has_no_usage_and_the_others_are_compared(masks: Any) -> None:
    failed = {"id": 0, "error": "the prompt is too long"}
    answered = {"id": 1, "text": "a", "usage": {"prompt_tokens": 3, "cached_tokens": 2}}
    text = "".join(json.dumps(line) + "\n" for line in (answered, failed, {"id": 2, "usage": None}))
    assert masks.output_of(text, "generated", masks.Marks()) == [
        failed, {"id": 1, "text": "a", "usage": {"prompt_tokens": 3}}, {"id": 2, "usage": None},
    ]  # fmt: skip


def test_a_plan_that_ends_with_an_error_is_no_answer(masks: Any, tmp_path: Path) -> None:
    from recorded.cases import Line, Places
    from recorded.runs import Run

    run = Run.__new__(Run)
    run.places, run.tell, run.environment, run.texts = Places(tmp_path, tmp_path, tmp_path), print, {}, {}
    refused = ("plan", "everything")
    assert run.line(Line("a", refused, "plan")) == {"failed": "RunError"}
    assert run.line(Line("a", refused))["status"] == 2


def test_logs_of_steps_of_different_kinds_have_different_numbers(masks: Any) -> None:
    from recorded.plans import steps_of

    works = set()
    for name, options in (("g4", {"cache.codec": "g4"}), ("kept", {"retain.budget": 0.5}), ("disk", {"tiers.disk": "x"})):
        lines = [json.loads(line) for line in steps_of(name, options).splitlines()[1:]]
        works.add(json.dumps([line[:7] for line in lines]))
        assert steps_of(name, options) == steps_of(name, options)
    assert len(works) == 3


def test_logs_of_steps_are_the_same_in_every_process(masks: Any) -> None:
    script = "from recorded.plans import steps_of; print(steps_of('g4', {'cache.codec': 'g4'}))"
    logs = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONPATH": str(SCRIPTS), "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(logs) == 1


def test_logs_of_steps_name_the_tiny_model(masks: Any, tmp_path: Path) -> None:
    from recorded.models import save_tiny
    from recorded.plans import FINGERPRINT

    assert fingerprint(save_tiny(tmp_path / "tiny")) == FINGERPRINT
