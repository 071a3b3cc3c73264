"""The folder of layer images: their tables, damage, listing and removal."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quire.cli import main
from quire.kernels import load
from quire.kernels.memory import HugePageAllocator
from quire.models import cpu_panels, image_folder, images
from quire.models.cpu_ops import CpuOps
from quire.models.cpu_panels import KINDS, LAYOUT
from quire.models.decoder import build_model
from quire.models.image_folder import DRAFT_SUFFIX, SUFFIX, Image, read_image, table_bytes
from quire.models.loading import Form
from quire.models.quants import Blocks, block_bytes
from quire.models.weights import open_model
from tests.dense_plan import DensePlan
from tests.tiny_models import RandomWeights, save_tiny, save_tokenizer, tiny_shape, write_gguf

MIXED = {"": "Q4_K", "v": "Q6_K", "up": "Q6_K", "head": "Q6_K"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of images, below a cache of the test's own; tiny models have images here."""
    load()  # from the user's cache, before that is another one
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(images, "LEAST_BYTES", 1)
    yield tmp_path / "cache" / "quire" / "images"
    published()


def published() -> None:
    """Waits until what was written has its name."""
    for thread in threading.enumerate():
        if thread.name == "quire-image":
            thread.join()


def files(folder: Path) -> list[Path]:
    published()
    return sorted(folder.iterdir()) if folder.is_dir() else []


def the_image(folder: Path) -> Path:
    (path,) = files(folder)
    assert path.suffix == SUFFIX
    return path


def gguf(path: Path, family: str = "llama", kind: Any = "Q4_0", **changes: Any) -> Path:
    shape = tiny_shape(family, **{"hidden_size": 64, "head_dim": 16, "ffn_size": 96, **changes})
    write_gguf(path / "model.gguf", shape, RandomWeights(shape, seed=5), kind=kind)
    return path / "model.gguf"


class Case(NamedTuple):
    """A checkpoint and how it is held."""

    make: Callable[[Path], Path]
    form: Form = "native"
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "packed, order of llama": Case(gguf),
    "types mixed in a product": Case(lambda path: gguf(path, kind=MIXED, hidden_size=256, head_dim=64, ffn_size=256)),
    "dequantized": Case(gguf, "dequantized", torch.float16),
    "g4": Case(lambda path: gguf(path, "qwen2", "F16"), "g4"),
    "Q8_0 for a tied head": Case(lambda path: gguf(path, "qwen2", "BF16", hidden_size=96, num_q_heads=6), "g4"),
    "packed rows of float32": Case(gguf, "native", torch.float32),
    "16 bits, a head of its own": Case(lambda path: save_tiny(path / "llama", "llama")),
    "16 bits, tied, biases": Case(lambda path: save_tiny(path / "qwen2", "qwen2")),
    "opt": Case(lambda path: save_tiny(path / "opt", "opt")),
    "opt with projections": Case(lambda path: save_tiny(path / "opt", "opt-350m")),
}


def logits(path: Path, case: Case = CASES["dequantized"], *, with_image: bool = True) -> torch.Tensor:
    """Of a short prompt, computed by the CPU backend."""
    with open_model(path) as checkpoint:
        wanted = images.image_spec(checkpoint, case.dtype, case.form) if with_image else None

        def build(memory: Any) -> Any:
            return build_model(checkpoint.shape, checkpoint, CpuOps(memory), case.dtype, form=case.form)

        model = images.load(wanted, build)
    published()
    plan = DensePlan(model.shape)
    with torch.inference_mode():
        found: torch.Tensor = model.head(model.hidden(torch.arange(20), plan.step([(0, 20)]), plan))
    return found


def test_a_section_is_a_layer_and_everything_is_aligned(tmp_path: Path, folder: Path) -> None:
    logits(gguf(tmp_path))
    image = read_image(the_image(folder))
    assert [section.name for section in image.sections] == ["layers.0", "layers.1", "head"]
    assert all(section.offset % 4096 == 0 for section in image.sections)
    assert all(entry.offset % 128 == 0 for section in image.sections for entry in section.entries)
    assert [entry.name for entry in image.sections[0].entries] == [
        "layers.0.q.weight+layers.0.k.weight+layers.0.v.weight torch.float16",
        "layers.0.o.weight torch.float16",
        "layers.0.gate.weight+layers.0.up.weight torch.float16 gated",
        "layers.0.down.weight torch.float16",
    ]
    assert folder.stat().st_mode & 0o777 == 0o700


def rewrite(path: Path, change: Callable[[Image], Any]) -> None:
    """Gives an image a table of other contents with a checksum that is right."""
    image = read_image(path)
    start = int.from_bytes(path.read_bytes()[-16:-8], "little")
    data = path.read_bytes()[:start]
    changed = change(image)
    path.write_bytes(data + table_bytes(changed.origin, changed.sections, start))


def in_section(image: Image, index: int, **changes: Any) -> Image:
    sections = list(image.sections)
    sections[index] = dataclasses.replace(sections[index], **changes)
    return dataclasses.replace(image, sections=tuple(sections))


def with_entry(image: Image, **changes: Any) -> Image:
    """Its second matrix changed."""
    entries = list(image.sections[0].entries)
    entries[1] = dataclasses.replace(entries[1], **changes)
    return in_section(image, 0, entries=tuple(entries))


def of(image: Image, **changes: Any) -> Image:
    return dataclasses.replace(image, origin=dataclasses.replace(image.origin, **changes))


def without_last(image: Image) -> Image:
    return dataclasses.replace(image, sections=image.sections[:-1])


def swapped(image: Image) -> Image:
    """Two layers under each other's names; their matrices have the same sizes."""
    first, second = image.sections[:2]
    sections = (
        dataclasses.replace(first, entries=renamed(first.entries, second.entries)),
        dataclasses.replace(second, entries=renamed(second.entries, first.entries)),
        *image.sections[2:],
    )
    return dataclasses.replace(image, sections=sections)


def renamed(entries: Any, names: Any) -> tuple[Any, ...]:
    return tuple(dataclasses.replace(entry, name=other.name) for entry, other in zip(entries, names, strict=True))


LIES: dict[str, Callable[[Image], Any]] = {
    "an offset too far": lambda image: with_entry(image, offset=1 << 50),
    "a negative offset": lambda image: with_entry(image, offset=-4096),
    "an offset of the next matrix": lambda image: with_entry(image, offset=image.sections[0].entries[2].offset),
    "more bytes": lambda image: with_entry(image, num_bytes=image.sections[0].entries[1].num_bytes + 128),
    "fewer bytes": lambda image: with_entry(image, num_bytes=image.sections[0].entries[1].num_bytes - 1),
    "no bytes": lambda image: with_entry(image, num_bytes=0),
    "another name": lambda image: with_entry(image, name="layers.0.p.weight torch.float16"),
    "layers swapped": swapped,
    "a section elsewhere": lambda image: in_section(image, 1, offset=image.sections[1].offset + 4096),
    "a section of other bytes": lambda image: in_section(image, 1, num_bytes=7),
    "the head is missing": without_last,
    "everything is missing": lambda image: dataclasses.replace(image, sections=()),
    "another byte order": lambda image: of(image, byte_order="big"),
    "another layout": lambda image: of(image, layout=LAYOUT + 1),
    "another checkpoint": lambda image: of(image, fingerprint="0" * 32),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_lies_is_not_believed(lie: str, tmp_path: Path, folder: Path) -> None:
    path = gguf(tmp_path)
    expected = logits(path)
    image = the_image(folder)
    whole = image.read_bytes()
    rewrite(image, LIES[lie])
    assert torch.equal(logits(path), expected)
    assert the_image(folder).read_bytes() == whole, "it is written again"


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: b"Q",
    "a byte short": lambda data: data[:-1],
    "a byte long": lambda data: data + b"\0",
    "half": lambda data: data[: len(data) // 2],
    "without its first page": lambda data: data[4096:],
    "zeros": lambda data: bytes(len(data)),
    "noise": lambda data: bytes(index * 73 % 251 for index in range(len(data))),
    "another version": lambda data: data[:-24] + b"\2\0\0\0" + data[-20:],
    "a table that begins elsewhere": lambda data: data[:-16] + b"\0" * 8 + data[-8:],
    "a table of no length": lambda data: data[:-8] + b"\0" * 8,
    "a table of great length": lambda data: data[:-8] + b"\xff" * 8,
    "a letter changed": lambda data: data.replace(b"layers.1.o", b"layers.2.o"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_image_is_written_again(damage: str, tmp_path: Path, folder: Path) -> None:
    path = gguf(tmp_path)
    expected = logits(path)
    image = the_image(folder)
    whole = image.read_bytes()
    image.write_bytes(DAMAGE[damage](whole))
    assert torch.equal(logits(path), expected)
    assert the_image(folder).read_bytes() == whole


@pytest.mark.parametrize("table", ["[]", "{}", '{"origin": {}, "sections": []}', "[" * 100_000, "\0", "NaN"])
def test_a_table_of_another_form_is_damage(table: str, tmp_path: Path) -> None:
    import struct
    import zlib

    path = tmp_path / "some.image"
    data = table.encode()
    path.write_bytes(data + struct.pack("<8sIIQQ", b"QuireImg", 1, zlib.crc32(data), 0, len(data)))
    with pytest.raises(image_folder.ImageError, match="damaged"):
        read_image(path)


def test_a_checkpoint_that_changed_or_moved_has_its_image_written_again(tmp_path: Path, folder: Path) -> None:
    path = gguf(tmp_path)
    expected = logits(path)
    os.utime(path, ns=(1, 1))
    for name in ("model.gguf", "other.gguf"):
        path = path.rename(tmp_path / name)
        assert torch.equal(logits(path), expected)
        origin = read_image(the_image(folder)).origin
        assert origin.files == ((path.stat().st_size, 1),) and origin.model == name


def test_a_checkpoint_is_the_same_by_every_path(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link, a relative path, a copy as a container mounts it."""
    path = gguf(tmp_path)
    expected = logits(path)
    image = the_image(folder)
    written = image.stat().st_ino
    (tmp_path / "link.gguf").symlink_to(path)
    (tmp_path / "mount").mkdir()
    shutil.copy2(path, tmp_path / "mount" / "copy.gguf")
    monkeypatch.chdir(tmp_path)
    for name in ("link.gguf", path.name, "mount/copy.gguf"):
        assert torch.equal(logits(Path(name)), expected)
        assert the_image(folder).stat().st_ino == written


def test_other_contents_take_the_place_of_an_image(tmp_path: Path, folder: Path) -> None:
    path = gguf(tmp_path)
    first = logits(path)
    shape = open_model(path).shape
    write_gguf(path, shape, RandomWeights(shape, seed=6), kind="Q4_0")
    second = logits(path)
    assert not torch.equal(first, second)
    assert the_image(folder)
    assert torch.equal(logits(path), second)


def assert_in_memory(path: Path, why: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(path, with_image=False)
    caplog.clear()
    with caplog.at_level(logging.INFO, "quire"):
        assert torch.equal(logits(path), expected)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "packing the weights in memory" in line and why in line and "\n" not in line


def test_a_short_write_is_gone_on_with(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf(tmp_path)
    expected = logits(path, with_image=False)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:1000], offset))
    for _ in range(2):
        assert torch.equal(logits(path), expected)
        assert the_image(folder)


def test_leftovers_go_and_drafts_of_others_stay(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = gguf(tmp_path)
    folder.mkdir(parents=True)
    dead, alive = folder / f"dead{DRAFT_SUFFIX}", folder / f"alive{DRAFT_SUFFIX}"
    dead.write_bytes(b"x" * 5000)
    with image_folder.lock_draft(alive, create=True):
        logits(path)
        published()
        assert {each.suffix for each in files(folder)} == {SUFFIX, DRAFT_SUFFIX}
        assert alive.exists() and not dead.exists()
        dead.write_bytes(b"x" * 5000)
        assert image_folder.clear([]) >= 5000 and alive.exists() and not dead.exists()
    assert image_folder.clear([]) == 0 and not alive.exists()
    assert the_image(folder)
    wanted = images.image_spec(open_model(path), torch.float16, "dequantized")
    assert wanted is not None
    own = image_folder.image_path(wanted.origin)
    own.unlink()
    with image_folder.lock_draft(own.with_suffix(DRAFT_SUFFIX), create=True):
        assert_in_memory(path, "another process is writing it", caplog)
    own.with_suffix(DRAFT_SUFFIX).write_bytes(b"of a killed process")
    logits(path)
    assert the_image(folder) == own


def test_cache_ls_and_clear(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out == f"no packed layers in {folder}\n"
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "freed 0B\n"
    first = gguf(tmp_path).rename(tmp_path / "first.gguf")
    logits(first)
    second = gguf(tmp_path, kind="Q8_0").rename(tmp_path / "second.gguf")
    logits(second)
    logits(second, CASES["packed, order of llama"])
    published()
    os.utime(image_folder.list_images()[-1].path, (1, 1))
    logits(first)
    (folder / f"broken{SUFFIX}").write_bytes(b"broken")
    assert main(["cache", "ls", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts) == 3 and {each["model"] for each in facts} == {"first.gguf", "second.gguf"}
    assert facts[0]["model"] == "first.gguf", "used last"
    assert {(each["form"], each["dtype"]) for each in facts} == {("dequantized", "float16"), ("native", "bfloat16")}
    assert all(Path(each["path"]).stat().st_size == each["num_bytes"] for each in facts)
    assert main(["cache", "ls"]) == 0
    shown = capsys.readouterr().out
    assert str(first) in shown and str(second) in shown and "in total" in shown and "no longer" not in shown
    second.rename(tmp_path / "moved.gguf")
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out.count("(no longer exists)") == 2
    (tmp_path / "moved.gguf").rename(second)
    assert main(["cache", "clear", "third"]) == 2
    said = capsys.readouterr().err
    assert said == "quire: no packed layers of 'third'; models with packed layers: first.gguf, second.gguf\n"
    assert main(["cache", "clear", facts[0]["key"]]) == 0
    assert len(files(folder)) == 3
    monkeypatch.chdir(tmp_path.parent)
    assert main(["cache", "clear", f"{tmp_path.name}/second.gguf"]) == 0
    assert files(folder) == [folder / f"broken{SUFFIX}"]
    assert main(["cache", "clear"]) == 0
    assert not files(folder)
    assert main(["cache", "ls", "name"]) == main(["cache", "clear", "--json"]) == 2
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "no", "that")))
    logits(first)
    published()
    capsys.readouterr()
    assert main(["cache", "clear"]) == 2
    assert capsys.readouterr().err == "quire: that: cannot be removed (no)\n"
    monkeypatch.setattr(Path, "iterdir", lambda _: (_ for _ in ()).throw(PermissionError(13, "no", "there")))
    assert main(["cache", "ls"]) == 2
    assert capsys.readouterr().err == "quire: there: cannot be read (no)\n"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert main(["cache", "ls"]) == 2
    assert "no cache folder" in capsys.readouterr().err


def test_cache_ls_shows_drafts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, alive = folder / f"left{DRAFT_SUFFIX}", folder / f"alive{DRAFT_SUFFIX}"
    folder.mkdir(parents=True, exist_ok=True)
    left.write_bytes(bytes(8192))
    with image_folder.lock_draft(alive, create=True):
        assert main(["cache", "ls"]) == 0
        first, second, rest = capsys.readouterr().out.splitlines()
        assert first == f"{alive}: 0B, being written"
        assert second == f"{left}: 8KiB, draft of a process that ended; quire cache clear removes it"
        assert rest.startswith("no packed layers in ")
        # What this process writes goes with it, where it ends without unwinding.
        image_folder.drop_drafts()
        assert not alive.exists() and left.exists()
    assert main(["cache", "clear"]) == 0 and not left.exists()


def test_inspect_tells_whether_there_is_one(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = gguf(tmp_path)
    save_tokenizer(tmp_path)
    words = ["inspect", str(path), "--cache.memory", "4MiB", "--runtime.device", "cpu"]

    def facts(*more: str) -> Any:
        assert main([*words, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["image"]

    before = facts()
    assert not before["written"] and not files(folder)
    logits(path, CASES["packed, order of llama"])
    after = facts()
    assert after == {"path": str(the_image(folder)), "num_bytes": the_image(folder).stat().st_size, "written": True}
    assert before["path"] == after["path"] and 0.5 < before["num_bytes"] / after["num_bytes"] < 1.1
    assert facts("--model.images", "false") is None
    assert main(words) == 0
    assert "layer image" in capsys.readouterr().out


PACKED = {
    "G4": "7d6df9a1cb0a1aaa",
    "Q4_0": "c2bb3f6fb40dcaef",
    "Q4_1": "71f6d1f22dfd0e13",
    "Q4_K": "fd81d2f42b22fc1d",
    "Q5_0": "5319fb0596d9ed7b",
    "Q5_1": "65547fb8c1dd2d67",
    "Q5_K": "f2fc7bd9a7f80814",
    "Q6_K": "ece2845f57d1f922",
    "Q8_0": "379a25b71a687ee9",
    "bfloat16": "1b6b9c7ab7d208b9",
    "float16": "1b6b9c7ab7d208b9",
}
"""Of packed bytes: of each type 40 outputs, then 20 gated ones."""


def bytes_of(count: int) -> torch.Tensor:
    return ((torch.arange(count) * 2654435761 >> 13) & 255).to(torch.uint8)


@pytest.mark.parametrize("kind", [*sorted(KINDS), "bfloat16", "float16"])
def test_packed_bytes_are_those_of_this_layout(kind: str) -> None:
    digest = hashlib.blake2b(digest_size=8)
    for outputs, gated in ((40, None), (20, "silu")):
        inputs = 512 if kind in KINDS else 70
        weight: Any
        if kind in KINDS:
            row = block_bytes(kind, inputs)
            weight = Blocks(kind, bytes_of(40 * row).view(40, row), inputs)
        else:
            weight = bytes_of(40 * 2 * inputs).view(getattr(torch, kind)).view(40, inputs)
        dtype = weight.dtype if isinstance(weight, torch.Tensor) else torch.bfloat16
        product = cpu_panels.Panels([weight], None, dtype, HugePageAllocator(), gated=gated)
        assert product.shape == (outputs, inputs)
        digest.update(bytes(product._panels[0].tolist()))
    assert LAYOUT == 1 and digest.hexdigest() == PACKED[kind], (
        f"packing makes {digest.hexdigest()}: raise LAYOUT in models/cpu_panels.py, so that images on users' disks are"
        " written again, and put the new digest here"
    )
