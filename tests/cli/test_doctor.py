"""`quire doctor`: what it prints, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import diagnosis
from quire.cli import main
from quire.diagnosis import Finding, examine
from quire.kernels.levels import supported_levels


def found() -> dict[str, Finding]:
    return {each.what: each for each in examine()}


def test_this_machine_can_run_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok", "note")) for line in lines)
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["what"] for each in told] == [line[6:].split("  ")[0] for line in lines]
    assert supported_levels()[0] in next(each["text"] for each in told if each["what"] == "processor")


def test_a_home_that_cannot_be_written_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(diagnosis.os, "access", lambda path, mode: not str(path).startswith("/proc"))
    assert found()["cache folder"].state == "fault"
    assert main(["doctor"]) == 1
    assert "FAIL  cache folder" in capsys.readouterr().out


def test_a_machine_without_a_home_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (fault,) = [line for line in lines if line.startswith("FAIL")]
    assert "there is no home: set XDG_CACHE_HOME" in fault and len(lines) > 3
