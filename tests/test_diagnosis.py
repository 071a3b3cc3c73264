"""What this machine has, and what is said of machines that lack something."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import diagnosis
from quire.diagnosis import Finding, examine
from quire.kernels import build


def found() -> dict[str, Finding]:
    return {each.what: each for each in examine()}


def test_a_file_where_the_cache_folder_should_be_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert found()["cache folder"].state == "fault"

    def refused(path: object) -> object:
        raise PermissionError(path)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda path: refused(path))
    assert next(diagnosis._folders()).state == "fault"


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
