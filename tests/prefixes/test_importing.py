"""Prefixes that are imported from a file: checked, compared and stored, or refused."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.errors import ConfigError, ExtentError, QuireError
from quire.llm import LLM
from quire.load import load_engine
from quire.prefixes import importing as prefix_import
from quire.stores.archive import RunArchive, RunArchiveWriter
from quire.stores.disk import DiskStore
from quire.stores.headers import RunHeader, encode_run_header
from quire.stores.signer import ExtentSigner
from tests.disk_folders import OPTIONS, PROMPTS, WORDS, cache, filled, listed
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("fetched")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("other"), seed=1))


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


def with_sidecar(number: int, header: RunHeader, extents: list[bytearray]) -> RunHeader:
    """Exact first tokens, which a dense cache does not have. They take no bytes there."""
    object.__setattr__(header.run, "has_sidecar", np.arange(len(header.run.names)) == 0)
    return header


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_tokens, "its tokens have other keys"),
        (other_names, "its tokens have other keys"),
        (without_beginning, "the beginning of a prefix of 512 tokens is missing"),
        (other_layer, "stands in the place of layer 0"),
        (other_kind, "pages of another shape"),
        (with_sidecar, "pages of another shape"),
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
