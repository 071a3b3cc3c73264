"""The digest of a checkpoint: the differences it detects, and when it is stored."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.cli import main, shared
from quire.errors import ModelError
from quire.models.digest import Digest, combined, digest_of
from quire.models.fingerprint import HEAD_BYTES, SAMPLE_BYTES, fingerprint
from quire.models.weights import Checkpoint, open_model
from tests.tiny_models import save_tiny, tiny_shape, write_gguf

LONG_AGO = time.time_ns() - 3600 * 10**9


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the records, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "digests"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 4 MB in one file, larger than what the fingerprint reads in full."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), tokenizer=False, vocab_size=20_000)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that was changed long ago."""
    copy = shutil.copytree(saved, tmp_path / "model")
    age(*copy.iterdir())
    return copy


def age(*paths: Path, ns: int = LONG_AGO) -> None:
    for path in paths:
        os.utime(path, ns=(ns, ns))


def found(path: Path) -> Digest:
    with open_model(path) as checkpoint:
        return digest_of(checkpoint)


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_the_digest_is_that_of_its_definition(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    hashed = hashlib.sha256(weights(folder).read_bytes()).hexdigest()
    text = json.dumps({"version": 1, "files": [hashed], "config": config}, sort_keys=True, separators=(",", ":"))
    expected = hashlib.sha256(text.encode()).hexdigest()
    size = weights(folder).stat().st_size
    for num_hashed in (size, 0):
        again = found(folder)
        assert (again.digest, again.num_bytes, again.num_bytes_hashed) == (expected, size, num_hashed)


def test_the_same_content_elsewhere_has_the_same_digest(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "another" / "name")
    # Settings in another order, with spaces, and a file that says nothing of the computation.
    config = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    (other / "notes.json").write_text("{}")
    assert found(other).digest == found(folder).digest
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert found(other).digest != found(folder).digest


def test_a_gguf_has_a_digest_whatever_its_name(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.gguf", "b.gguf")]
    for file in files:
        write_gguf(file, tiny_shape())
    first, second = map(found, files)
    assert first.digest == second.digest == combined([hashlib.sha256(files[0].read_bytes()).hexdigest()])
    flip(files[1], files[1].stat().st_size - 5)
    assert found(files[1]).digest != first.digest


def test_a_byte_that_the_fingerprint_does_not_sample_changes_the_digest(folder: Path) -> None:
    path = weights(folder)
    before, cheap = found(folder).digest, fingerprint(folder)
    flip(path, HEAD_BYTES + SAMPLE_BYTES + 1000)
    assert fingerprint(folder) == cheap
    assert found(folder).digest != before


def test_shards_are_hashed_apart_and_remembered_apart(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "shards"
    folder.mkdir()
    shutil.copy(saved / "config.json", folder)
    tensors = load_file(saved / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, folder / file)
        age(folder / file)
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = found(folder)
    assert whole.num_bytes_hashed == whole.num_bytes == sum((folder / file).stat().st_size for file in parts)
    age(folder / "b.safetensors", ns=LONG_AGO + 1)
    again = found(folder)
    assert again.digest == whole.digest and again.num_bytes_hashed == (folder / "b.safetensors").stat().st_size


def test_another_time_of_change_computes_it_again(folder: Path) -> None:
    first = found(folder)
    assert not found(folder).num_bytes_hashed
    age(weights(folder), ns=LONG_AGO + 1)
    again = found(folder)
    assert again.digest == first.digest and again.num_bytes_hashed == first.num_bytes
    assert not found(folder).num_bytes_hashed


def test_another_file_of_the_same_size_and_time_is_seen(folder: Path, tmp_path: Path) -> None:
    path, other = weights(folder), tmp_path / "other"
    first = found(folder)
    shutil.copy(path, other)
    flip(other, HEAD_BYTES + SAMPLE_BYTES + 1000)
    age(other)
    before = path.stat()
    os.replace(other, path)
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    again = found(folder)
    assert again.digest != first.digest and again.num_bytes_hashed == first.num_bytes


def test_a_file_that_has_just_changed_is_not_remembered(folder: Path, cache: Path) -> None:
    for ns in (time.time_ns(), time.time_ns() + 3600 * 10**9):
        age(weights(folder), ns=ns)
        assert found(folder).num_bytes_hashed and not cache.exists()


DAMAGE = {
    "empty": lambda text: "",
    "cut short": lambda text: text[:-9],
    "no JSON": lambda text: "[" * 100_000,
    "no text": lambda text: "\udcff",
    "another hash": lambda text: re.sub('"sha256": "(.)', lambda m: m[0][:-1] + "01"[m[1] == "0"], text),
    "another size": lambda text: re.sub('("size": )', r"\g<1>1", text),
    "another version": lambda text: text.replace('"version": 1', '"version": 2'),
    "no object": lambda text: "[1]",
    "fields that do not belong": lambda text: text.replace('"device"', '"devise"'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_told_once_and_replaced(
    damage: str, folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = found(folder)
    (record,) = cache.iterdir()
    whole = record.read_text()
    record.write_text(DAMAGE[damage](whole), errors="surrogateescape")
    assert record.read_bytes() != whole.encode()
    with caplog.at_level(logging.WARNING, "quire"):
        again = found(folder)
        assert (again.digest, again.num_bytes_hashed) == (first.digest, first.num_bytes)
        assert not found(folder).num_bytes_hashed
    assert len(caplog.records) == 1
    assert record.read_text() == whole and list(cache.iterdir()) == [record]


def test_without_a_folder_for_records_it_is_computed_each_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    first = found(folder)
    assert found(folder).num_bytes_hashed == first.num_bytes
    assert "is not remembered" in caplog.text


def test_a_file_that_changes_while_it_is_read_is_refused(folder: Path, cache: Path) -> None:
    with open_model(folder) as checkpoint:
        changed = False

        def change(done: int, total: int) -> None:
            nonlocal changed
            if not changed:
                changed = True
                flip(weights(folder), total - 1)

        with pytest.raises(ModelError, match=r"model\.safetensors: changed while it was read"):
            digest_of(checkpoint, change)
    assert not cache.exists()


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    with open_model(folder) as checkpoint:
        weights(folder).unlink()
        with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read \(No such file"):
            digest_of(checkpoint)


def test_progress_counts_all_bytes_that_are_hashed(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    with open_model(folder) as checkpoint:
        size = digest_of(checkpoint, lambda done, total: told.append((done, total))).num_bytes
        assert [done for done, _ in told] == sorted({done for done, _ in told})
        assert told[-1] == (size, size) and {total for _, total in told} == {size}
        told.clear()
        digest_of(checkpoint, lambda done, total: told.append((done, total)))
    assert not told


def test_processes_that_compute_it_at_once_agree(folder: Path, cache: Path) -> None:
    code = (
        "import sys; from types import SimpleNamespace; from pathlib import Path; from quire.models import digest\n"
        "path = Path(sys.argv[1])\n"
        "given = SimpleNamespace(path=path, files=(path / 'model.safetensors',))\n"
        "print({digest.digest_of(given).digest for _ in range(20) if not [each.unlink(missing_ok=True) for each in"
        " digest.user_cache().glob('digests/*.json')]})"
    )
    command = [sys.executable, "-c", code, str(folder)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=120) for process in running]
    assert said == [(f"{{'{found(folder).digest}'}}\n", "")] * 4
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_computing_it_needs_no_torch() -> None:
    code = "import sys, quire.models.digest; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_inspect_prints_it_and_what_it_cost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", str(folder), "--cache.memory", "4MiB", "--runtime.device", "cpu"]
    lines = []
    for _ in range(2):
        assert main([*words, "--digest"]) == 0
        lines.append(capsys.readouterr().out.splitlines()[-1])
    name = found(folder).digest
    assert re.fullmatch(rf"digest: {name} \([\d.]+MiB hashed in [\d.]+ s\)", lines[0])
    assert lines[1] == f"digest: {name} (remembered)"
    for more, expected in (([], None), (["--digest"], name)):
        assert main([*words, "--json", *more]) == 0
        facts = json.loads(capsys.readouterr().out)
        keys = [*facts]
        digest = facts["digest"]
        assert (digest and digest["digest"]) == expected
        assert keys[keys.index("weights") :][:4] == ["weights", "image", "digest", "architecture"]
        assert keys[-4:] == ["process_bytes", "sequences", "retain", "fails_first"]
    assert main(["inspect", "--tree", "http://127.0.0.1:1", "--digest"]) == 2
    assert "no --digest" in capsys.readouterr().err


def test_a_model_that_is_inspected_and_hashed_is_opened_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[Path] = []

    def counted(path: Path) -> Checkpoint:
        opened.append(path)
        return open_model(path)

    for module in ("quire.inspection", "quire.models.weights"):
        monkeypatch.setattr(f"{module}.open_model", counted)
    assert main(["inspect", str(folder), "--cache.memory", "4MiB", "--runtime.device", "cpu", "--digest"]) == 0
    assert len(opened) == 1 and "digest: " in capsys.readouterr().out


def test_names_of_embedded_models_are_known_without_torch() -> None:
    code = """
import sys
from quire.models.digest import known_names
print(sorted(known_names(set()).values()), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("] False\n") and "smollm2" in done.stdout


def test_a_long_hash_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shared, "PLAIN_SECONDS", 0.0)
    with shared.byte_progress("hashing") as report:
        report(1 << 30, 3 << 30)
    assert capsys.readouterr().err == "quire: hashing, 1GiB of 3GiB done\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for terminal in ("xterm", "dumb"):
        monkeypatch.setenv("TERM", terminal)
        with shared.byte_progress("hashing"):
            pass
        assert capsys.readouterr().err == ""
    with shared.byte_progress("hashing") as report:
        report(1 << 30, 3 << 30)
    assert "hashing" in capsys.readouterr().err
