"""`quire cache` for folders of disk tiers: looked at while engines write, cleared, and carried between machines."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.cli.cache_disk import _folder
from quire.llm import LLM
from quire.models.digest import combined, known_names
from quire.models.embedded import EMBEDDED, SMOLLM2
from quire.stores.archive import RunArchiveWriter
from quire.stores.disk import DiskStore
from tests.disk_folders import GREEDY, MIB, NUM_CHUNKS, OPTIONS, PROMPTS, WORDS, cache, filled, found, listed
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("fetched")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("other"), seed=1))


def test_a_folder_is_listed_while_engines_write_to_it(folder, other, tmp_path, capsys):
    disk = tmp_path / "kv"
    filled(folder, disk, salt="a")
    filled(folder, disk, PROMPTS[:1], salt="b")
    with LLM(other, OPTIONS | {"tiers.disk": f"{disk}:64MiB", "cache.codec": "g4"}) as llm:
        llm.generate(PROMPTS[:1], GREEDY)
        assert llm.flush()
        before = {path: path.stat().st_mtime_ns for path in disk.rglob("*.runs")}
        facts = listed(capsys, disk)
        assert cache("ls", "--disk", f"{disk}:64MiB") == 0
        table = capsys.readouterr().out
        assert {path: path.stat().st_mtime_ns for path in disk.rglob("*.runs")} == before
        llm.engine.tiering.tiers.tiers[0].check()
    assert facts["cap_bytes"] == 64 * MIB and facts["problems"] == []
    assert [each["is_live"] for each in facts["writers"]] == [True]
    assert [(each["codec"], each["num_chunks"], each["num_salts"]) for each in facts["namespaces"]] == [
        ("g4", 5, 1),
        ("dense", NUM_CHUNKS + 5, 2),
    ]
    assert "engines that write to it now: 1" in table and "64MiB" in table
    assert all(each["model"][:12] in table for each in facts["namespaces"])


def test_a_start_says_what_takes_its_time_before_it_begins(folder, tmp_path, caplog, monkeypatch):
    """Hashing the weights, and measuring the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level("INFO", logger="quire")
    monkeypatch.setattr(DiskStore, "measure", lambda self: caplog.records.append(None) or 1e9)
    filled(folder, tmp_path / "kv", PROMPTS[:1])
    before = caplog.records[: caplog.records.index(None)]
    del caplog.records[len(before)]
    said = [each.getMessage() for each in before]
    assert said[-1] == "measuring the disk of tiers.disk, and how fast prompts are computed"
    assert any(line.startswith("hashing ") and line.endswith(" of weights, once") for line in said)


def test_a_relative_folder_is_taken_everywhere(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    filled(folder, Path("kv"), PROMPTS[:1])
    assert [each["num_chunks"] for each in listed(capsys, Path("kv"))["namespaces"]] == [5]
    assert cache("export", "--disk", "kv", "prefixes.quire") == 0
    assert cache("import", "--disk", "there:64MiB", "prefixes.quire", "--model", folder, "--trust", *WORDS) == 0
    assert cache("ls", "--disk", "./there/../there") == 0
    assert cache("clear", "--disk", "kv") == 0
    assert listed(capsys, Path("kv"))["namespaces"] == []


def test_a_model_is_listed_by_its_name_where_it_is_known_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    disk, model = tmp_path / "kv", save_tiny(tmp_path / "tiny")
    for path in model.iterdir():
        os.utime(path, (1e9, 1e9))  # the hash of a file that has just changed is not remembered
    filled(str(model), disk, PROMPTS[:1])
    assert listed(capsys, disk)["namespaces"][0]["name"] is None
    image = SimpleNamespace(origin=SimpleNamespace(model="my-model", path=str(model)))
    monkeypatch.setattr("quire.models.image_folder.list_images", lambda: [image])
    assert listed(capsys, disk)["namespaces"][0]["name"] == "my-model"
    assert cache("ls", "--disk", disk) == 0
    assert "my-model" in capsys.readouterr().out
    digest = listed(capsys, disk)["namespaces"][0]["model"]
    shutil.rmtree(tmp_path / "cache")
    assert listed(capsys, disk)["namespaces"][0]["name"] is None, "nothing is hashed for a name"
    embedded = dataclasses.replace(SMOLLM2, sha256="ab" * 32)
    monkeypatch.setitem(EMBEDDED, "smollm2", embedded)
    assert combined([embedded.sha256]) in known_names({digest})


def test_what_is_unreadable_or_foreign_is_named(folder, tmp_path, capsys):
    disk = tmp_path / "kv"
    filled(folder, disk)
    (disk / "v9").mkdir()
    (disk / "v1" / "notes.txt").write_text("mine")
    (disk / "v1" / "0" / "77.runs").write_bytes(b"x")
    (disk / "v1" / "1").mkdir()
    (disk / "v1" / "1" / "index.db").write_bytes(b"no database" * 1000)
    facts = listed(capsys, disk)
    assert len(facts["problems"]) == 4
    for name in ("v9", "notes.txt", "77.runs", "1/index.db"):
        assert sum(name in problem for problem in facts["problems"]) == 1, name
    assert facts["namespaces"][0]["num_chunks"] == NUM_CHUNKS


def test_only_folders_without_a_live_writer_are_cleared(folder, other, tmp_path, capsys):
    disk = tmp_path / "kv"
    filled(folder, disk)
    with LLM(other, OPTIONS | {"tiers.disk": f"{disk}:64MiB"}) as llm:
        llm.generate(PROMPTS[:1], GREEDY)
        assert llm.flush()
        assert cache("clear", "--disk", disk) == 1
        assert "an engine writes to it" in capsys.readouterr().out
        assert len(listed(capsys, disk)["namespaces"]) == 2
    assert cache("clear", "--disk", disk) == 0
    assert "freed" in capsys.readouterr().out
    assert listed(capsys, disk)["namespaces"] == [] and not list(disk.rglob("*.runs"))
    assert found(folder, disk, PROMPTS[0])[0] == {}


def test_one_model_is_cleared_by_its_name_or_digest(folder, other, tmp_path, capsys):
    disk = tmp_path / "kv"
    filled(folder, disk)
    filled(other, disk)
    assert len(listed(capsys, disk)["namespaces"]) == 2
    assert cache("clear", "--disk", disk, "--model", folder) == 0
    (left,) = listed(capsys, disk)["namespaces"]
    assert found(other, disk, PROMPTS[2])[0] == {"disk": 320}
    assert cache("clear", "--disk", disk, "--model", folder) == 2
    assert f"models there: {left['model'][:12]}" in capsys.readouterr().err
    command = ["cache", "clear", "--disk", str(disk), "--model", left["model"][:8]]
    code = "import sys; from quire.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("\n0 False\n"), done
    assert listed(capsys, disk)["namespaces"] == []


@pytest.mark.parametrize("codec", ["dense", "g4"])
def test_a_prefix_is_carried_to_another_machine(folder, tmp_path, codec, capsys):
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "file"
    answers = filled(folder, here, **{"cache.codec": codec})
    assert cache("export", "--disk", here, file) == 0
    assert f"{NUM_CHUNKS * 64:,} tokens" in capsys.readouterr().out
    assert file.stat().st_mode & 0o777 == 0o600
    words = ["--model", folder, "--cache.codec", codec, *WORDS]
    assert cache("import", "--disk", f"{there}:64MiB", file, *words) == 0
    out = capsys.readouterr().out
    # Prefixes have 5 chunks of their own, 3, and 5; each has one checked.
    assert "computed 3 chunks again" in out and f"{NUM_CHUNKS * 64:,} tokens" in out
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tiers, ids = found(folder, there, prompt, **{"cache.codec": codec})
        assert tiers["disk"] == 320 and ids == answer
    secrets = [(each / "v1" / "secret").read_bytes() for each in (here, there)]
    assert secrets[0] != secrets[1] and not any(secret in file.read_bytes() for secret in secrets)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", "name"], "takes no names"),
        (["ls", "--disk", "{nowhere}"], "has no disk tier"),
        (["clear", "--disk", "{nowhere}"], "has no disk tier"),
        (["clear", "--model", "x"], "--model is for clear --disk"),
        (["clear", "--disk", "{nowhere}", "x"], "name a model by --model"),
        (["export", "x"], "needs --disk DIR and one FILE"),
        (["export", "--disk", "{nowhere}"], "needs --disk DIR and one FILE"),
        (["export", "--disk", "{nowhere}", "x", "--key", "1", "--prompt-file", "y"], "not both"),
        (["export", "--disk", "{nowhere}", "x", "--prompt-file", "y"], "--prompt-file needs --model"),
        (["export", "--disk", "{nowhere}", "x", "--trust"], "are for quire cache import"),
        (["export", "--disk", "{nowhere}", "-"], "quire cache export needs a FILE, not -"),
        (["import", "--disk", "{nowhere}", "x"], "needs --model MODEL"),
        (["import", "--disk", "{nowhere}", "x", "--model", "y"], "cannot read x"),
        (["clear", "--disk", "{nowhere}", "--key", "1"], "are for quire cache export"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_two(words, said, tmp_path, capsys):
    assert cache(*[word.format(nowhere=tmp_path / "nowhere") for word in words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_without_a_tier_of_this_version_says_what_is_there(tmp_path, capsys):
    (tmp_path / "v2").mkdir()
    assert cache("ls", "--disk", tmp_path) == 2
    assert "has no disk tier of this version; in it are v2" in capsys.readouterr().err
    (tmp_path / "v1" / "0").mkdir(parents=True)
    assert cache("ls", "--disk", tmp_path) == 2
    assert f"{tmp_path / 'v1' / 'secret'} is missing" in capsys.readouterr().err


def test_a_folder_may_come_with_its_size():
    assert _folder("/a/b:20GiB") == (Path("/a/b"), 20 << 30)
    assert _folder("/a/b") == (Path("/a/b"), None)
    assert _folder("/a:b") == (Path("/a:b"), None)


def test_an_export_that_cannot_be_finished_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quire.stores.archive.os.fsync", full)
    with pytest.raises(OSError, match="No space"), RunArchiveWriter(tmp_path / "parcel"):
        pass
    assert not list(tmp_path.iterdir())
