"""scripts/tests.py: what it tells pytest, and when it says that tests failed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "tests.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("tests_script", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "codes, status",
    [((0, 0), 0), ((0, 5), 0), ((5, 0), 0), ((5, 5), 5), ((1, 0), 1), ((5, 1), 1), ((0, -11), 11), ((-9, 5), 9)],
)
def test_a_group_that_failed_or_was_killed_is_a_failure_and_an_empty_one_is_not(
    script: ModuleType, codes: tuple[int, int], status: int
) -> None:
    assert script.exit_status(codes) == status


def test_both_groups_share_the_seconds(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now, commands = [1000.0], []

    def run(command: list[str], cwd: Path) -> SimpleNamespace:
        commands.append(command)
        now[0] += 90.0
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(script.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(script.subprocess, "run", run)
    for words, seconds in ((["--seconds", "100"], ["80", "10"]), (["--seconds=80"], ["64", "0"]), ([], [])):
        commands.clear()
        monkeypatch.setattr(script.sys, "argv", ["tests.py", "-k", "name", *words, "--seed", "3"])
        assert script.main() == 0
        given = [word.removeprefix("--seconds=") for command in commands for word in command if "--seconds" in word]
        assert given == seconds
        assert all(command[4:8] == ["-k", "name", "--seed", "3"] for command in commands)
        assert [word for command in commands for word in command if "--alone" in word] == [
            "--alone=without",
            "--alone=only",
        ]
