"""`quire doctor`: what it finds, and what it says of machines that lack something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import diagnosis
from quire.cli import main
from quire.diagnosis import Finding, examine
from quire.kernels import build
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


def test_a_file_where_the_cache_folder_should_be_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert found()["cache folder"].state == "fault"

    def refused(path: object) -> object:
        raise PermissionError(path)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda path: refused(path))
    assert next(diagnosis._folders()).state == "fault"


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


def test_what_is_missing_is_named_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = diagnosis.importlib.util.find_spec
    monkeypatch.setattr(diagnosis.importlib.util, "find_spec", lambda name: None if name == "ray" else real(name))
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setattr(diagnosis.os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    findings = found()
    cluster = findings["cluster"]
    assert cluster.state == "note" and "pip install -c constraints.txt '.[cluster]'" in cluster.text
    assert "for instances on several machines, and not needed for those of one" in cluster.text
    assert "no C++ compiler" in findings["kernels"].text
    assert findings["cores"].state == "note" and "the load average is 1000.0" in findings["cores"].text


def test_machines_without_vectors_are_told_what_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kernels.levels.supported_levels", lambda: ("v2",))
    (processor, _) = diagnosis._processor()
    assert processor.state == "note" and "slower without AVX2" in processor.text
