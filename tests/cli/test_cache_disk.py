"""`quire cache` for folders of disk tiers: looked at while engines write, cleared, and carried between machines."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.cli import main
from quire.cli.cache_disk import _folder
from quire.engine.params import SamplingParams
from quire.errors import ConfigError, ExtentError, QuireError
from quire.llm import LLM
from quire.load import load_engine
from quire.models.digest import combined, known_names
from quire.models.embedded import EMBEDDED, SMOLLM2
from quire.prefixes import importing as prefix_import
from quire.stores.archive import RunArchive, RunArchiveWriter
from quire.stores.disk import DiskStore
from quire.stores.folder_reader import FolderReader
from quire.stores.headers import RunHeader, encode_run_header
from quire.stores.signer import ExtentSigner
from tests.tiny_models import save_tiny

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
OPTIONS = {
    "model.dtype": "float32",
    "cache.memory": "8MiB",
    "cache.check": False,
    "runtime.threads": 1,
    "runtime.device": "cpu",
}
WORDS = ["--model.dtype", "float32", "--cache.memory", "8MiB", "--runtime.device", "cpu", "--runtime.threads", "1"]
WORDS += ["--cache.check", "false"]
SYSTEM = "All of us begin alike, with these very words, and only later do we differ from each other. " * 2
PROMPTS = [SYSTEM + "one " * 40, SYSTEM + "two " * 40, "something else " * 24]
NUM_CHUNKS = 2 + 3 + 3 + 5
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("other"), seed=1))


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk has is fetched, however fast a tiny model computes it."""
    monkeypatch.setattr("quire.cache.fetching.Fetching._pays", lambda *given: True)


def filled(model: str, disk: Path, prompts: list[str] = PROMPTS, salt: str = "", **options: object) -> list[list[int]]:
    """Lets a model answer prompts with a disk; the answers."""
    with LLM(model, OPTIONS | {"tiers.disk": f"{disk}:64MiB"} | options) as llm:
        outputs = [llm.generate([{"prompt": prompt, "cache_salt": salt}], GREEDY)[0] for prompt in prompts]
        assert llm.flush()
    return [output.outputs[0].token_ids for output in outputs]


def found(model: str, disk: Path, prompt: str, **options: object) -> tuple[dict[str, int], list[int]]:
    with LLM(model, OPTIONS | {"tiers.disk": f"{disk}:64MiB"} | options) as llm:
        (output,) = llm.generate([prompt], GREEDY)
    return output.cached_by_tier, output.outputs[0].token_ids


def cache(*words: object) -> int:
    return main(["cache", *map(str, words)])


def listed(capsys: pytest.CaptureFixture[str], disk: Path) -> dict:
    capsys.readouterr()
    assert cache("ls", "--disk", disk, "--json") == 0
    return json.loads(capsys.readouterr().out)


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


def test_a_parcel_has_no_mac_and_its_source_none_of_the_parcel(folder, tmp_path):
    here, file = tmp_path / "here", tmp_path / "file"
    filled(folder, here, PROMPTS[2:])
    assert cache("export", "--disk", here, file) == 0
    source = {each.header.run.names: each for each in FolderReader(here).runs()}
    with RunArchive(file) as archive:
        for each in archive.runs:
            mac = source[each.header.run.names].blob[48:80]
            assert any(mac) and mac not in file.read_bytes()
            for extent in archive.extents(each):
                assert not any(extent[48:80])


@pytest.mark.parametrize("trust", [[], ["--trust"]])
def test_a_part_of_a_folder_is_exported(folder, tmp_path, capsys, trust):
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "file"
    filled(folder, here, [SYSTEM, *PROMPTS])
    with LLM(folder, OPTIONS | {"tiers.disk": f"{here}:64MiB"}) as llm:
        key = llm.prefix_key(PROMPTS[1])
    assert cache("export", "--disk", here, file, "--key", key) == 0
    with RunArchive(file) as archive:
        assert sum(len(each.header.run.names) for each in archive.runs) == 5
    words = ["--model", folder, *WORDS, *trust]
    assert cache("import", "--disk", f"{there}:64MiB", file, *words) == 0
    assert ("computed 1 chunks again" in capsys.readouterr().out) != bool(trust)
    assert found(folder, there, PROMPTS[1])[0] == {"disk": 320}
    assert found(folder, there, PROMPTS[2])[0] == {}
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"prompt": PROMPTS[2]}) + "\n" + json.dumps({"prompt": SYSTEM}))
    by_prompt = ["--prompt-file", lines, "--model", folder]
    assert cache("export", "--disk", here, tmp_path / "second", *by_prompt) == 0
    with RunArchive(tmp_path / "second") as archive:
        assert sum(len(each.header.run.names) for each in archive.runs) == 7
    lines.write_text("text")
    assert cache("export", "--disk", here, tmp_path / "third", *by_prompt) == 2
    assert f"--prompt-file {lines}, line 1: not JSON" in capsys.readouterr().err
    assert cache("import", "--disk", there, tmp_path / "second", *words) == 0
    assert found(folder, there, PROMPTS[2])[0] == {"disk": 320}


def test_a_run_without_its_beginning_is_left_out(folder, tmp_path, capsys):
    here, file = tmp_path / "here", tmp_path / "file"
    with LLM(folder, OPTIONS | {"tiers.disk": f"{here}:64MiB"}) as llm:
        for prompt in (SYSTEM, PROMPTS[0]):
            llm.generate([prompt], GREEDY)
            assert llm.flush()
        store = llm.engine.tiering.tiers.tiers[0]
        first = next(run for run in store.stored() if run.start == 0)
        store.drop(first.names)
        assert store.flush(5)
    assert cache("export", "--disk", here, file) == 2
    captured = capsys.readouterr()
    assert "1 runs are left out: the folder has no longer" in captured.out and "nothing to export" in captured.err
    assert not file.exists()


def rewritten(source: Path, target: Path, change) -> None:
    """A parcel whose head or extents were changed by somebody who can compute checksums."""
    signer = ExtentSigner(bytes(32))
    with RunArchive(source) as archive, RunArchiveWriter(target) as writer:
        for number, each in enumerate(archive.runs):
            header, extents = each.header, [bytearray(extent) for extent in archive.extents(each)]
            header = change(number, header, extents) or header
            for extent in extents:
                signer.sign(b"".join(header.run.names), memoryview(extent))
            writer.add(encode_run_header(header, signer), [memoryview(extent) for extent in extents])


def refusal(folder: str, file: Path, there: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What an import of a file says that is refused; the folder must have nothing of it."""
    capsys.readouterr()
    assert cache("import", "--disk", f"{there}:64MiB", file, "--model", folder, *WORDS, *words) == 2
    assert not list(there.rglob("*.runs")), "a part of a refused file was imported"
    return capsys.readouterr().err


@pytest.fixture
def archive(folder, tmp_path) -> Path:
    filled(folder, tmp_path / "here", PROMPTS[2:])
    file = tmp_path / "file"
    assert cache("export", "--disk", tmp_path / "here", file) == 0
    return file


@pytest.mark.parametrize("codec", ["dense", "g4"])
def test_pages_that_the_model_does_not_compute_are_refused(folder, tmp_path, codec, capsys, monkeypatch):
    """The pages of the first chunk stand in the places of all others, in one head of the last layer."""

    def change(number: int, header: RunHeader, extents: list[bytearray]) -> None:
        extent = extents[-1]
        page = {"dense": 2 * 64 * 12 * 4, "g4": page_bytes}[codec]
        start = len(extent) - len(header.run.names) * 2 * page
        for row in range(1, len(header.run.names)):
            extent[start + row * 2 * page : start + row * 2 * page + page] = extent[start : start + page]

    options = {"cache.codec": codec, "cache.sink_tokens": 0}
    words = ["--cache.codec", codec, *(["--cache.sink_tokens", "0"] if codec == "g4" else [])]
    with LLM(folder, OPTIONS | (options if codec == "g4" else {})) as llm:
        page_bytes = llm.engine.scheduler.manager.table.sealed_codec.page_bytes
    filled(folder, tmp_path / "here", PROMPTS[2:], **(options if codec == "g4" else {}))
    assert cache("export", "--disk", tmp_path / "here", tmp_path / "file") == 0
    bad, there = tmp_path / "bad", tmp_path / "there"
    rewritten(tmp_path / "file", bad, change)
    monkeypatch.setattr(prefix_import, "CHUNKS_PER_CHECK", 2)  # three of five: at least two of them are wrong
    assert "are not what the model computes" in refusal(folder, bad, there, capsys, *words)
    assert cache("import", "--disk", f"{there}:64MiB", bad, "--model", folder, *WORDS, *words, "--trust") == 0


@pytest.mark.parametrize("where", range(5))
def test_one_wrong_token_is_seen_where_it_is_looked_for(folder, tmp_path, archive, capsys, monkeypatch, where):
    """A single token's value in one head, and its chunk is computed again."""

    def change(number: int, header: RunHeader, extents: list[bytearray]) -> None:
        body = np.frombuffer(extents[0], np.float32, offset=len(extents[0]) - 5 * 2 * 2 * 64 * 12 * 4)
        body = body.reshape(5, 2, 2, 64, 12)
        assert np.isfinite(body).all()
        body[where, 1, 1, 33] = body[where, 1, 1, 34]

    bad = tmp_path / "bad"
    rewritten(archive, bad, change)
    monkeypatch.setattr(prefix_import, "CHUNKS_PER_CHECK", 1)
    start = where * 64
    assert f"tokens {start} to {start + 64} are not" in refusal(folder, bad, tmp_path / "there", capsys)


def other_tokens(number: int, header: RunHeader, extents: list[bytearray]) -> RunHeader:
    header.run.tokens[70] += 1
    return header


def other_names(number: int, header: RunHeader, extents: list[bytearray]) -> RunHeader:
    object.__setattr__(header.run, "names", tuple(name[::-1] for name in header.run.names))
    return header


def without_beginning(number: int, header: RunHeader, extents: list[bytearray]) -> RunHeader:
    object.__setattr__(header.run, "start", 3)
    return header


def other_layer(number: int, header: RunHeader, extents: list[bytearray]) -> None:
    extents.reverse()


def other_kind(number: int, header: RunHeader, extents: list[bytearray]) -> RunHeader:
    object.__setattr__(header.run, "kinds", header.run.kinds + 1)
    return header


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_tokens, "its tokens have other keys"),
        (other_names, "its tokens have other keys"),
        (without_beginning, "the beginning of a prefix of 512 tokens is missing"),
        (other_layer, "stands in the place of layer 0"),
        (other_kind, "pages of another shape"),
    ],
)
@pytest.mark.parametrize("trust", [[], ["--trust"]])
def test_a_made_up_file_is_refused(folder, tmp_path, archive, capsys, change, said, trust):
    rewritten(archive, tmp_path / "bad", change)
    assert said in refusal(folder, tmp_path / "bad", tmp_path / "there", capsys, *trust)


def test_a_damaged_file_is_refused_wherever_it_is_damaged(folder, tmp_path, archive):
    whole, bad = archive.read_bytes(), tmp_path / "bad"
    rng = random.Random(0)
    for _ in range(60):
        content = bytearray(whole)
        if rng.random() < 0.5:
            del content[rng.randrange(len(content)) :]
        else:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        bad.write_bytes(content)
        with pytest.raises(ExtentError):
            RunArchive(bad)
    bad.write_bytes(whole + b"x")
    with pytest.raises(ExtentError):
        RunArchive(bad)


def test_a_file_of_another_model_or_codec_names_the_difference(folder, other, tmp_path, archive, capsys):
    there = tmp_path / "there"
    assert "of another model (digest)" in refusal(other, archive, there, capsys)
    assert "of another codec (cache.codec" in refusal(folder, archive, there, capsys, "--cache.codec", "g4")
    assert "of another kind of weights" in refusal(folder, archive, there, capsys, "--model.weights", "g4")


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


def test_a_partial_import_says_what_is_there_and_what_is_left_out(folder, tmp_path, capsys, monkeypatch):
    """A store that has removed the last run by the end, to make room."""
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "file"
    filled(folder, here, PROMPTS[1:])
    assert cache("export", "--disk", here, file) == 0
    with RunArchive(file) as archive:
        num_runs, lost = len(archive.runs), archive.runs[-1].header.run
    flush = DiskStore.flush

    def flush_and_lose(store, seconds):
        store.drop(lost.names)
        return flush(store, seconds)

    monkeypatch.setattr(DiskStore, "flush", flush_and_lose)
    capsys.readouterr()
    assert cache("import", "--disk", f"{there}:64MiB", file, "--model", folder, *WORDS, "--trust") == 1
    out, num_lost = capsys.readouterr().out, len(lost.tokens)
    assert f"1 of {num_runs} runs found no room" in out and f"{num_lost} of 640 tokens are left out" in out
    assert f"{640 - num_lost} tokens in {num_runs - 1} runs" in out
    assert listed(capsys, there)["namespaces"][0]["num_chunks"] == (640 - num_lost) // 64


def test_runs_are_stored_after_their_check_is_told_and_its_engine_is_freed(
    folder, tmp_path, archive, capsys, monkeypatch
):
    engines, alive = [], []

    def load(*given, **more):
        loaded = load_engine(*given, **more)
        engines.append(weakref.ref(loaded.engine))
        return loaded

    def fail(*_):
        gc.collect()
        alive.extend(each() for each in engines)
        raise QuireError("the disk takes no more")

    monkeypatch.setattr(prefix_import, "load_engine", load)
    monkeypatch.setattr(prefix_import, "store_runs", fail)
    capsys.readouterr()
    assert cache("import", "--disk", f"{tmp_path / 'there'}:64MiB", archive, "--model", folder, *WORDS) == 2
    out, error = capsys.readouterr()
    assert alive == [None]
    assert "computed" in out and "chunks again" in out and "the disk takes no more" in error


def test_a_size_of_nothing_is_not_the_size_that_is_known(folder, tmp_path, archive, capsys):
    words = [archive, "--model", folder, *WORDS, "--trust"]
    assert cache("import", "--disk", f"{tmp_path / 'there'}:64MiB", *words) == 0
    capsys.readouterr()
    assert cache("import", "--disk", f"{tmp_path / 'there'}:0", *words) == 2
    assert "a disk tier of 0 bytes is too small" in capsys.readouterr().err


def test_a_new_folder_needs_a_size_and_a_file_is_not_overwritten(folder, tmp_path, archive, capsys):
    assert cache("import", "--disk", tmp_path / "new", archive, "--model", folder, *WORDS) == 2
    assert "has no size yet" in capsys.readouterr().err
    assert cache("export", "--disk", tmp_path / "here", archive) == 2
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        RunArchiveWriter(archive)


def test_an_export_that_cannot_be_finished_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quire.stores.archive.os.fsync", full)
    with pytest.raises(OSError, match="No space"), RunArchiveWriter(tmp_path / "parcel"):
        pass
    assert not list(tmp_path.iterdir())


def test_the_difference_is_relative_to_the_variation_of_tokens():
    mine = torch.randn(2, 2, 2, 64, 12, generator=torch.Generator().manual_seed(0))
    assert prefix_import.difference(mine, mine) == 0
    theirs = mine.clone()
    theirs[1, 0, 1, 63] = mine[1, 0, 1, 62]
    assert 0.5 < prefix_import.difference(mine, theirs) < 3
    assert prefix_import.difference(mine + 100, theirs + 100) == pytest.approx(
        prefix_import.difference(mine, theirs), rel=1e-2
    )
    assert prefix_import.difference(mine, theirs, of_pages=True) == pytest.approx(
        prefix_import.difference(mine, theirs) / 8, rel=1e-3
    )
    assert 1 < prefix_import.difference(mine, mine.roll(1, 3), of_pages=True) < 2
    theirs[0, 0, 0, 0, 0] = torch.nan
    assert not prefix_import.difference(mine, theirs) <= 1e9
