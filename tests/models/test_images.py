"""Layer images: written once, mapped by later starts, and without leftovers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels import runtime
from quire.models import cpu_panels, image_folder, images
from quire.models.weights import Checkpoint, GgufCheckpoint, SafetensorsCheckpoint, open_model
from tests.models.test_image_folder import CASES, Case, assert_in_memory, files, gguf, logits, the_image
from tests.models.test_image_folder import folder as folder
from tests.tiny_models import RandomWeights, save_tiny

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", CASES)
def test_a_second_start_neither_reads_nor_packs_and_computes_the_same(
    name: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    path = case.make(tmp_path)
    expected = logits(path, case, with_image=False)
    assert not files(folder)
    assert torch.equal(logits(path, case), expected)
    written = the_image(folder).read_bytes()

    def unwanted(*_: Any) -> None:
        raise AssertionError("packed again")

    seen: list[str] = []
    for kind in (GgufCheckpoint, SafetensorsCheckpoint):
        original = kind.tensor

        def spied(self: Checkpoint, name: str, dtype: Any = None, original: Any = original) -> Any:
            seen.append(name)
            return original(self, name, dtype)

        monkeypatch.setattr(kind, "tensor", spied)
    monkeypatch.setattr(GgufCheckpoint, "blocks", unwanted)
    monkeypatch.setattr(cpu_panels, "_pack", unwanted)
    assert torch.equal(logits(path, case), expected)
    shape = open_model(path).shape
    read = {each for each in seen if len(shape.tensor_shapes[each]) == 2} - {"positions.weight"}
    assert read <= ({"embed.weight"} if not shape.tied_embeddings else set()), "a plain table is no product"
    assert the_image(folder).read_bytes() == written


def test_what_an_image_takes_is_known_before(tmp_path: Path, folder: Path) -> None:
    for case in (CASES["packed, order of llama"], CASES["types mixed in a product"], CASES["16 bits, tied, biases"]):
        path = case.make(tmp_path)
        logits(path, case)
        wanted = images.image_spec(open_model(path), case.dtype, case.form)
        image = image_folder.open_image(wanted.origin) if wanted is not None and files(folder) else None
        assert wanted is not None and image is not None
        held = sum(entry.num_bytes for section in image.sections for entry in section.entries)
        assert 0.8 * wanted.num_bytes < held <= wanted.num_bytes


def test_small_models_and_plain_numbers_have_none(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf(tmp_path)
    with open_model(path) as checkpoint:
        assert images.image_spec(checkpoint, torch.float32, "dequantized") is None
        assert images.image_spec(RandomWeights(checkpoint.shape), torch.bfloat16, "native") is None
        monkeypatch.setattr(images, "LEAST_BYTES", 384 << 20)
        assert images.image_spec(checkpoint, torch.bfloat16, "native") is None


def test_without_a_folder_weights_are_packed_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert_in_memory(gguf(tmp_path), "Not a directory", caplog)


def test_a_disk_with_too_little_room_gets_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = gguf(tmp_path)
    wanted = images.image_spec(open_model(path), torch.float16, "dequantized")
    assert wanted is not None
    statvfs = os.statvfs

    def nearly_full(where: Any) -> Any:
        found = list(statvfs(where))
        found[0:5] = [1, 1, 1 << 40, 1 << 40, int(wanted.num_bytes * 1.04)]
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    assert_in_memory(path, "free, and it needs", caplog)
    assert not files(folder)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "last pwrite", "ftruncate", "flock"])
def test_a_disk_that_becomes_full_leaves_nothing(
    call: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import fcntl

    path = gguf(tmp_path)
    # Eight matrices of two layers, the head and the table are written.
    allowed = {"pwrite": 3, "last pwrite": 9}.get(call, 0)
    module: Any = fcntl if call == "flock" else os
    name = call.removeprefix("last ")
    original = getattr(module, name)

    def full(*arguments: Any) -> Any:
        nonlocal allowed
        allowed -= 1
        if allowed < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(module, name, full)
    assert_in_memory(path, "No space left on device", caplog)
    assert not files(folder)


@pytest.mark.parametrize("call", ["fdatasync", "replace"])
def test_an_image_that_the_disk_does_not_take_gets_no_name(
    call: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = gguf(tmp_path)
    expected = logits(path, with_image=False)

    def failed(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, failed)
    assert torch.equal(logits(path), expected), "it runs from the file that has no name"
    assert not files(folder)
    assert "Input/output error" in caplog.text


def test_a_load_that_fails_leaves_nothing(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf(tmp_path)

    def failed(self: Any, name: str, dtype: Any = None) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(GgufCheckpoint, "tensor", failed)
    with pytest.raises(KeyboardInterrupt):
        logits(path)
    assert not files(folder)


@pytest.mark.slow
def test_two_processes_at_once(tmp_path: Path, folder: Path) -> None:
    path = gguf(tmp_path)
    expected = logits(path, with_image=False)
    code = """
import sys, torch
from pathlib import Path
from quire.models import images
images.LEAST_BYTES = 1
from tests.models.test_image_folder import logits
torch.save(logits(Path(sys.argv[1])), sys.argv[2])
"""
    kernels = tmp_path / "cache" / "quire" / "kernels"
    kernels.parent.mkdir(parents=True, exist_ok=True)
    kernels.symlink_to(Path(runtime.kernels()._name).parents[1])
    outs = [tmp_path / f"{index}.pt" for index in range(2)]
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), str(out)], cwd=ROOT) for out in outs]
    assert [process.wait(60) for process in running] == [0, 0]
    assert all(torch.equal(torch.load(out), expected) for out in outs)
    image = the_image(folder)
    assert torch.equal(logits(path), expected) and the_image(folder) == image


def test_an_engine_writes_one_unless_model_images_is_false(tmp_path: Path, folder: Path) -> None:
    path = save_tiny(tmp_path / "model")
    options = {"cache.memory": "4MiB", "runtime.device": "cpu", "runtime.threads": 1, "model.dtype": "bfloat16"}
    answers = []
    for change in ({"model.images": False}, {"attention.backend": "reference"}, {}, {}):
        llm = LLM(str(path), options={**options, **change})
        answers.append(
            llm.generate(["Once upon"], SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0].token_ids
        )
        llm.close()
        assert bool(files(folder)) == (not change)
    assert answers[0] == answers[2] == answers[3]


def test_images_that_were_written_for_trials_are_removed(tmp_path: Path, folder: Path) -> None:
    """Those from before stay, and those that are kept; also if the trials fail."""
    path = gguf(tmp_path)
    logits(path, Case(gguf, "native"))
    (before,) = files(folder)
    with images.temporary_images() as kept:
        logits(path, Case(gguf, "native"))
        logits(path, Case(gguf, "dequantized"))
        kept |= set(files(folder)) - {before}
        logits(path, Case(gguf, "g4"))
        assert len(files(folder)) == 3
    assert set(files(folder)) == {before, *kept} and len(kept) == 1
    with pytest.raises(ValueError, match="a trial"), images.temporary_images():
        logits(path, Case(gguf, "g4"))
        raise ValueError("a trial")
    assert set(files(folder)) == {before, *kept}
