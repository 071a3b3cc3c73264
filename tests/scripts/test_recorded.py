"""scripts/recorded.py compares what does not depend on the speed of the machine."""

from __future__ import annotations

import importlib.util
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


@pytest.fixture
def script(masks: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """scripts/recorded.py itself: its folder of the same name hides it from import statements."""
    spec = importlib.util.spec_from_file_location("recorded_script", SCRIPTS / "recorded.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", sys.argv)
    return module


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
    answer = run.line(Line("a", refused, "plan"))
    assert list(answer) == ["failed"]
    assert answer["failed"].startswith("RunError: quire plan: argument ACTION: invalid choice: 'everything'")
    assert run.line(Line("a", refused))["status"] == 2


def test_equal_failures_of_two_runs_have_one_text(masks: Any) -> None:
    def told(folder: str, text: str) -> str:
        return masks.failure_of(OSError(text), masks.Marks({folder: "FOLDER"}))

    first = told("/tmp/quire-recorded-a1", "no file /tmp/quire-recorded-a1/tiny/x of 3,104 bytes after 1.25 s")
    assert first == "OSError: no file FOLDER/tiny/x of N bytes after N s"
    assert first == told("/tmp/quire-recorded-b2", "no file /tmp/quire-recorded-b2/tiny/x of 77 bytes after 2 s")
    assert told("/x", "<A at 0x7f12ab00>\nat '/tmp/pip-x9/y'") == told("/x", "<A at 0x55d0>\n at '/tmp/pip-zz/y'")
    assert told("/x", "no file") != told("/x", "no memory")
    assert told("/x", "") == "OSError: no message"


def test_failures_are_counted_and_printed_though_both_are_the_same(script: Any, tmp_path: Path, capsys: Any) -> None:
    failed, answered = {"failed": "RunError: no model"}, {"status": 0, "output": "a"}

    def run(action: str, **found: Any) -> tuple[int, str]:
        script.parts_of = lambda given, folder: iter([("plans", found)])
        sys.argv = ["recorded.py", action, str(tmp_path)]
        status = script.main()
        return status, capsys.readouterr().out

    assert run("record", a=failed, b=answered) == (
        1, "plans/a\n    failed: RunError: no model\n1 of 2 answers failed\n",
    )  # fmt: skip
    before, now = ("plans/a\n    failed before: RunError: no model\n", "plans/a\n    failed now: RunError: no model\n")
    status, said = run("compare", a=failed, b=answered)
    assert (status, said) == (1, f"{before}{now}0 of 2 answers differ, and 1 failed before or now\n")
    status, said = run("compare", a=answered, b=answered)
    assert status == 1 and before in said and now not in said
    assert said.endswith("1 of 2 answers differ, and 1 failed before or now\n")
    assert run("record", a=answered) == (0, "0 of 1 answers failed\n")
    status, said = run("compare", a=failed)
    assert status == 1 and now in said and before not in said
    assert run("compare", a=answered) == (0, "0 of 1 answers differ, and 0 failed before or now\n")


def test_a_server_that_does_not_start_has_failed(script: Any, tmp_path: Path, capsys: Any) -> None:
    not_ready = {"server": {"status": 1, "failed": "not ready"}}
    assert script.compare("tiny", not_ready, tmp_path).num_failed == 1
    script.record("tiny", not_ready | {"a": {"status": 200}}, tmp_path)
    capsys.readouterr()
    assert script.compare("tiny", not_ready, tmp_path) == (0, 1)
    said = capsys.readouterr().out
    assert said == "tiny/server\n    failed before: not ready\ntiny/server\n    failed now: not ready\n"


def test_logs_of_steps_of_different_kinds_have_different_numbers(masks: Any) -> None:
    from recorded.plans import steps_of

    works = set()
    for name, options in (
        ("g4", {"cache.codec": "g4"}),
        ("kept", {"retain.budget": 0.5}),
        ("disk", {"tiers.disk": "x"}),
    ):
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
