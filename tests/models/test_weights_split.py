"""Models in several GGUF files: any part opens all of them, and a part that is missing or foreign is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.cli import main
from quire.engine.sampling_defaults import read_sampling_defaults
from quire.errors import ModelError
from quire.models.digest import digest_of
from quire.models.fingerprint import fingerprint
from quire.models.images import full_image_spec
from quire.models.resolve import resolve_model
from quire.models.tokenizer import load_tokenizer
from quire.models.weights import open_model
from tests.tiny_models import tiny_shape, write_gguf

VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [chr(33 + number) for number in range(90)] + ["ab"] * 168,
    "tokenizer.ggml.merges": [],
    "general.sampling.temp": 0.25,
}
SHAPE = tiny_shape("qwen2")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model of 26 tensors in three files."""
    write_gguf(tmp_path / "model.gguf", SHAPE, extra=VOCABULARY, split_tensors=9)
    return sorted(tmp_path.glob("model-*.gguf"))


def test_any_part_opens_the_whole_model(parts: list[Path], tmp_path: Path) -> None:
    assert [part.name for part in parts] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    expected = write_gguf(tmp_path / "whole.gguf", SHAPE, extra=VOCABULARY)
    for part in parts:
        with open_model(part) as checkpoint:
            assert checkpoint.shape.tensor_shapes == SHAPE.tensor_shapes
            assert (checkpoint.path, checkpoint.files) == (parts[0], tuple(parts))
            for name, values in expected.items():
                assert torch.equal(checkpoint.tensor(name, torch.float32), values), name


def test_the_first_part_may_have_metadata_alone(tmp_path: Path) -> None:
    shape = tiny_shape("qwen2", hidden_size=64, ffn_size=128, head_dim=16)
    expected = write_gguf(tmp_path / "model.gguf", shape, kind="Q4_0", split_tensors=13, small_first=True)
    with open_model(tmp_path / "model-00002-of-00003.gguf") as checkpoint:
        assert all(torch.equal(checkpoint.tensor(name), values) for name, values in expected.items())
        assert checkpoint.kind("embed.weight") == "Q4_0"


def test_everything_beside_the_weights_is_read_from_any_part(parts: list[Path]) -> None:
    for part in parts:
        assert resolve_model(str(part)) == parts[0]
        assert load_tokenizer(part).decode([0, 1]) == '!"'
        assert read_sampling_defaults(part).values == {"temperature": 0.25}


def test_names_for_contents_cover_all_parts(parts: list[Path]) -> None:
    """Digest, fingerprint and the key of a layer image change with the last part, and not with the part given."""

    def names(part: Path) -> tuple[str, str, str]:
        with open_model(part) as checkpoint:
            key = full_image_spec(checkpoint, torch.bfloat16, "checkpoint").origin.key
            return digest_of(checkpoint).digest, fingerprint(part), key

    before = {names(part) for part in parts}
    assert len(before) == 1
    with parts[2].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    after = {names(part) for part in parts}
    assert len(after) == 1
    assert all(one != other for one, other in zip(*before, *after, strict=True))


def test_parts_that_are_links_are_found_by_the_names_of_the_links(parts: list[Path], tmp_path: Path) -> None:
    """As in the hub's cache, where the files themselves are named by their contents."""
    links = tmp_path / "links"
    links.mkdir()
    for number, part in enumerate(parts):
        (links / part.name).symlink_to(part.rename(tmp_path / f"blob{number}"))
    with open_model(links / parts[1].name) as checkpoint:
        assert full_image_spec(checkpoint, torch.bfloat16, "checkpoint").origin.fingerprint == fingerprint(
            links / parts[0].name
        )


def test_inspect_counts_all_parts(parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "whole.gguf", SHAPE, extra=VOCABULARY)
    found = []
    for path in (tmp_path / "whole.gguf", parts[1]):
        assert main(["inspect", str(path), "--json", "--cache.memory", "1MiB"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["weight_bytes"] == found[1]["weight_bytes"]


@pytest.mark.parametrize("given", [0, 1, 2])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(given: int, missing: int, parts: list[Path]) -> None:
    parts[missing].unlink()
    for opened in (open_model, load_tokenizer, fingerprint):
        with pytest.raises((ModelError, OSError)) as caught:
            opened(parts[given])
        assert str(parts[missing]) in str(caught.value) and "\n" not in str(caught.value)
    if given != missing:
        with pytest.raises(ModelError, match=f"{parts[missing].name}: this part of the model is missing"):
            resolve_model(str(parts[given]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda parts: shutil.copy(parts[1], parts[2]), "00003-of-00003.gguf: is not part 3 of 3"),
        (lambda parts: parts[1].write_bytes(parts[1].read_bytes()[:-100]), "00002-of-00003.gguf: truncated"),
        (lambda parts: parts[2].write_bytes(b"no model" * 10), "00003-of-00003.gguf: not a GGUF file"),
        (lambda parts: shutil.move(parts[0], parts[0].with_name("renamed.gguf")), "NAME-00001-of-00003.gguf"),
    ],
    ids=["another part in its place", "truncated", "no GGUF", "renamed"],
)
def test_a_part_that_cannot_be_used_is_named(
    damage: Callable[[list[Path]], object], message: str, parts: list[Path]
) -> None:
    damage(parts)
    given = next(each for each in (parts[0].with_name("renamed.gguf"), parts[0]) if each.exists())
    with pytest.raises(ModelError) as caught:
        open_model(given)
    assert message in str(caught.value)


def test_parts_of_two_models_are_not_mixed(parts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(other / "model.gguf", tiny_shape("qwen2", num_layers=1), split_tensors=5)
    shutil.copy(other / "model-00003-of-00003.gguf", parts[2])
    with pytest.raises(ModelError, match=r"tensors|is in part"):
        open_model(parts[0])


def test_a_whole_model_may_be_named_like_a_part(tmp_path: Path) -> None:
    path = tmp_path / "model-00002-of-00003.gguf"
    write_gguf(path, SHAPE)
    assert open_model(path).files == (path,)
