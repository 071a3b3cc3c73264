"""`quire calibrate`, and automatic calibration: files, resuming, refusals, tables and JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.calibrate import CalibrationSettings, calibrate, samples
from quire.calibrate.text import generate_windows, windows_from_text
from quire.cli import main
from quire.config import CacheConfig, EngineConfig
from quire.engine.build import resolve
from quire.engine.calibration import Calibration
from quire.engine.params import SamplingParams
from quire.errors import ConfigError
from quire.evaluation import perplexity
from quire.kernels import runtime
from quire.llm import LLM
from quire.load import calibration_for, find_calibration, load_engine
from quire.models.fingerprint import fingerprint
from quire.models.tokenizer import Tokenizer

from ..effort import full_only, whole
from ..engines import make_engine
from ..real_model import embedded_gguf
from ..tiny_models import BOS, EOS, byte_tokenizer, save_tiny, tiny_shape

run_module = importlib.import_module("quire.calibrate.run")

TEXT = "Of all the mills on the river, the oldest made no flour. " * 20
CONTEXT = 256
"""Tokens of the longest request of the models, and of a window of a calibration."""
SMALL = CalibrationSettings(num_windows=3, window_tokens=64)
CONFIG = EngineConfig.from_options({"runtime.threads": 1, "runtime.device": "cpu"})
FLAGS = ("--runtime.threads", "1", "--runtime.device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), head_dim=16, max_position_embeddings=CONTEXT)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where calibrations are kept during a test."""
    runtime.kernels()
    monkeypatch.setattr("quire.calibrate.settings.cache_folder", lambda: tmp_path / "cache" / "models")
    return tmp_path / "cache" / "calibrations"


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The windows that are gathered from now on."""
    found: list[list[int]] = []
    original = samples.gather

    def gather(model: Any, tokens: torch.Tensor, *given: Any) -> Iterator[Any]:
        found.append(tokens.tolist())
        yield from original(model, tokens, *given)

    monkeypatch.setattr(samples, "gather", gather)
    return found


def nuq(**cache: Any) -> EngineConfig:
    return dataclasses.replace(CONFIG, cache=CacheConfig(**{"codec": "nuq3", "memory": 4 << 20, **cache}))


def run(folder: Path, file: Path, settings: CalibrationSettings = SMALL, **given: Any) -> Calibration:
    return calibrate(folder, settings, file, config=CONFIG, **{"text": TEXT, **given})


# The file


def test_the_same_inputs_make_the_same_calibration(folder: Path, tmp_path: Path) -> None:
    first, second = (run(folder, tmp_path / name) for name in ("a", "b"))
    assert first.hash == second.hash
    assert first.hash != run(folder, tmp_path / "c", text=TEXT[1:] + "x").hash
    assert first.settings["dtype"] == "float32" and first.settings["bits"] == [2, 3, 4]


def test_a_calibration_comes_back_as_it_was(folder: Path, tmp_path: Path) -> None:
    made = run(folder, tmp_path / "made")
    found = Calibration.load(tmp_path / "made", fingerprint(folder))
    assert found.hash == made.hash and found.settings == made.settings and found.report == made.report
    assert set(found.tables) == {"nuq2", "nuq3", "nuq4"}
    for codec, tables in made.tables.items():
        for field in dataclasses.fields(tables):
            assert torch.equal(getattr(found.tables[codec], field.name), getattr(tables, field.name))


def damaged(content: bytes) -> bytes:
    return content[:-40] + bytes([content[-40] ^ 1]) + content[-39:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (damaged, "damaged: it does not have the hash it says"),
        (lambda content: content.replace(b'\\"seed', b'\\"need').replace(b"sha256", b"sha255"), "damaged"),
        (lambda content: content[: len(content) // 2], "not a calibration that can be read"),
        (lambda content: b"", "not a calibration that can be read"),
        (lambda content: content.replace(b'"format":"1"', b'"format":"0"'), "not a calibration of this version"),
        (lambda content: content.replace(b"nuq3.key_books", b"nuq3.key_looks"), "damaged .*key_books"),
    ],
)
def test_a_damaged_file_is_refused(change: Callable[[bytes], bytes], said: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "made"
    run(folder, file)
    content = change(file.read_bytes())
    assert content != file.read_bytes()
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as refused:
        Calibration.load(file, fingerprint(folder))
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="not a calibration that can be read"):
        Calibration.load(tmp_path / "none", fingerprint(folder))


def test_a_calibration_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "made"
    made = run(folder, file, dataclasses.replace(SMALL, bits=(3,)))
    other = save_tiny(tmp_path / "other", head_dim=16, seed=1)
    for path, cache, said in (
        (other, {}, "made for another model"),
        (folder, {"codec": "nuq4"}, "the calibration is for nuq3, not for nuq4; .*--bits 4"),
        (folder, {"outlier_slots": 2}, "made with cache.outlier_slots 1, not 2; .*--outlier-slots 2"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_engine(str(path), nuq(calibration=str(file), **cache))
    for changes, said in (
        ({"num_layers": 3}, "a model with 3 layers, 2 kv heads and head size 16"),
        ({"num_kv_heads": 1}, "a model with 2 layers, 1 kv heads"),
        ({"head_dim": 32}, "head size 32"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve(nuq(), tiny_shape(**{"head_dim": 16, **changes}), None, made)
    resolve(nuq(), tiny_shape(head_dim=16), None, made)


# Gathering


def test_an_interruption_loses_no_window(
    folder: Path, tmp_path: Path, kept: Path, gathered: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(folder, tmp_path / "whole")
    windows = gathered.copy()
    assert len(windows) == 3
    gathered.clear()
    counted = samples.gather

    def interrupted(model: Any, tokens: torch.Tensor, *given: Any) -> Iterator[Any]:
        for item in counted(model, tokens, *given):
            if len(gathered) == 3:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(samples, "gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "made")
    assert gathered == windows and not (tmp_path / "made").exists()
    assert any(kept.iterdir())
    gathered.clear()
    monkeypatch.setattr(samples, "gather", counted)
    # Other settings of the fit read the same samples; another text does not.
    other = run(folder, tmp_path / "other", dataclasses.replace(SMALL, window_tokens=65))
    assert len(gathered) == 3 and other.hash != whole.hash
    gathered.clear()
    assert run(folder, tmp_path / "made").hash == whole.hash
    assert gathered == windows[2:]
    assert [path.name for path in kept.iterdir()] == [f".{fingerprint(folder)[:16]}.lock"]


@pytest.mark.parametrize("name", ["window-0.safetensors", "tokens.safetensors"])
def test_what_a_crash_left_damaged_is_gathered_again(
    name: str, folder: Path, tmp_path: Path, kept: Path, gathered: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(folder, tmp_path / "whole", text=None)
    gathered.clear()
    counted = samples.gather

    def interrupted(model: Any, tokens: torch.Tensor, *given: Any) -> Iterator[Any]:
        if gathered:
            raise KeyboardInterrupt
        yield from counted(model, tokens, *given)

    monkeypatch.setattr(samples, "gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "made", text=None)
    monkeypatch.setattr(samples, "gather", counted)
    (left,) = kept.rglob(name)
    left.write_bytes(left.read_bytes()[:100])
    gathered.clear()
    assert run(folder, tmp_path / "made", text=None).hash == whole.hash
    assert len(gathered) == (3 if name.startswith("window") else 2)


def test_what_the_model_wrote_is_not_written_again(
    folder: Path, tmp_path: Path, gathered: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[tuple[str, int, int]] = []
    whole = run(folder, tmp_path / "whole", text=None, progress=lambda *report: phases.append(report))
    names = ["writing a text", "gathering", "fitting"]
    assert list(dict.fromkeys(name for name, _, _ in phases)) == names
    for name in names:
        done = [(count, total) for phase, count, total in phases if phase == name]
        assert done == sorted(done) and done[-1][0] == done[-1][1]
    assert whole.settings["text"] == {"written by the model": 0} and len(gathered) == 3
    assert all(len(window) == 64 and window[0] == 256 for window in gathered)

    counted = samples.gather

    def stop(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(samples, "gather", stop)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "made", text=None)
    monkeypatch.setattr(samples, "gather", counted)
    monkeypatch.setattr("quire.calibrate.run.generate_windows", stop)
    assert run(folder, tmp_path / "made", text=None).hash == whole.hash
    assert gathered[3:] == gathered[:3]


def test_one_window_in_four_is_held_out(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, ...]] = []
    original = run_module.fit_layer

    def fit(gathered: Any, num_held_out: int, slots: int, **given: Any) -> Any:
        found.append((len(gathered.keys), num_held_out, slots))
        return original(gathered, num_held_out, slots, **given)

    monkeypatch.setattr(run_module, "fit_layer", fit)
    for windows, sinks in ((3, 1), (8, 4)):
        run(folder, tmp_path / "made", CalibrationSettings(num_windows=windows, window_tokens=64, sink_tokens=sinks))
    assert found == [(3 * 63, 63, 1)] * 2 + [(8 * 60, 2 * 60, 1)] * 2


def test_who_waited_for_another_takes_what_that_one_made(folder: Path, tmp_path: Path, kept: Path) -> None:
    made: dict[str, Any] = {}
    inside, go_on = threading.Event(), threading.Event()

    def progress(what: str, done: int, total: int) -> None:
        if what == "fitting" and not inside.is_set():
            inside.set()
            assert go_on.wait(60)

    def unless() -> Calibration | None:
        made["asked"] = "after" if go_on.is_set() else "before"
        found = Calibration.load(tmp_path / "made", fingerprint(folder))
        return dataclasses.replace(found, report={"made by": "the first"})

    def start(name: str, **given: Any) -> threading.Thread:
        def work() -> None:
            made[name] = run(folder, tmp_path / "made", **given)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    told: list[str] = []
    first = start("first", progress=progress)
    assert inside.wait(60)
    second = start("second", unless=unless, progress=lambda what, done, total: told.append(what))
    second.join(0.3)
    assert second.is_alive() and not made
    assert set(told) == {"waiting for another calibration of this model"}
    # Nobody is waited for with a text that is too short, and who waits may give up.
    with pytest.raises(ConfigError, match="the text has"):
        calibrate(folder, SMALL, tmp_path / "made", text="ab", config=CONFIG)

    def give_up(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "made", progress=give_up)
    go_on.set()
    first.join(60)
    second.join(60)
    assert made["asked"] == "after" and made["first"].hash == made["second"].hash
    assert made["second"].report == {"made by": "the first"}


def test_float16_is_gathered_in_float32(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "half", head_dim=16, dtype="float16")
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("float32", "float16"))
    assert run(folder, tmp_path / "made").settings["dtype"] == "float32"
    config = EngineConfig.from_options({**CONFIG.to_options(), "model.dtype": "bfloat16"})
    made = calibrate(folder, SMALL, tmp_path / "made", text=TEXT, config=config)
    assert made.settings["dtype"] == "bfloat16"


# Text


def test_windows_are_spread_over_a_text() -> None:
    plain = Tokenizer(byte_tokenizer(), None, BOS, EOS)
    text = bytes(range(97, 117)).decode()
    assert windows_from_text(plain, text, 3, 4).tolist() == [
        [97, 98, 99, 100],
        [105, 106, 107, 108],
        [113, 114, 115, 116],
    ]
    assert windows_from_text(plain, text, 5, 4).flatten().tolist() == list(text.encode())
    with pytest.raises(ConfigError, match="the text has 20 tokens, but 3 windows of 7 need 21; give a longer text"):
        windows_from_text(plain, text, 3, 7)
    begins: Any = SimpleNamespace(
        bos_id=256, encode=lambda text, add_special=True: [256] * add_special + list(text.encode())
    )
    assert windows_from_text(begins, text, 2, 5).tolist() == [[256, 97, 98, 99, 100], [256, 113, 114, 115, 116]]


def test_a_model_writes_the_same_again_and_goes_past_the_end_of_text() -> None:
    engine = make_engine(tiny_shape(head_dim=16), **{"model.max_context": 128})
    with_bos, without = (Tokenizer(byte_tokenizer(), None, bos, EOS) for bos in (BOS, None))
    seen: list[tuple[int, int]] = []
    first = generate_windows(engine, with_bos, 3, 128, 7, lambda done, total: seen.append((done, total)))
    assert first.shape == (3, 128) and (first[:, 0] == 256).all()
    assert seen[-1] == (384, 384) and seen == sorted(seen)
    assert torch.equal(generate_windows(engine, with_bos, 3, 128, 7, lambda done, total: None), first)
    other = generate_windows(engine, without, 3, 128, 8, lambda done, total: None)
    assert (other[:, 0] < 256).all() and len(other[:, 0].unique()) > 1
    assert len(first.unique()) > 50, "drawn, not the best token"
    assert (generate_windows(engine, with_bos, 8, 128, 9, lambda done, total: None)[:, 1:-1] == 257).any()
    engine.check()


# Settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": (5,)}, "bits are 5; they must be some of 2, 3, 4"),
        ({"bits": ()}, "bits are none"),
        ({"kinds": ("own", "ours")}, "books are own, ours; they must be some of uniform, plain"),
        ({"outlier_slots": 3}, "outlier_slots is 3; it must be from 0 to 2"),
        ({"sink_tokens": -3}, "sink_tokens is -3; it must be from 0 to 64"),
        ({"num_windows": 1}, "there are 1 windows; at least 2 are needed"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CalibrationSettings(**changes)


def test_the_name_of_a_file_says_what_the_tables_are(kept: Path) -> None:
    usual = CalibrationSettings()
    name = usual.file("0123456789abcdef0123")
    assert name == kept / "0123456789abcdef-slots1-sinks1.safetensors"
    assert CalibrationSettings(num_windows=3, window_tokens=9, seed=5, bits=(4, 3, 2)).file("0123456789abcdef0") == name
    others = [
        {"bits": (3,)}, {"outlier_slots": 0}, {"sink_tokens": 4}, {"kinds": ("own",)}, {"spends": False},
        {"q_norm": True},
    ]  # fmt: skip
    names = {dataclasses.replace(usual, **other).file("0123456789abcdef") for other in others}
    assert len(names | {name}) == 7
    assert CalibrationSettings.of(CacheConfig(codec="nuq2", sink_tokens=4)).skipped == 4
    assert CalibrationSettings.of(CacheConfig(codec="nuq2", sink_tokens=0)).skipped == 1


@pytest.mark.parametrize(
    ("parameters", "context", "tokens"),
    [(0.13e9, 8192, 1024), (0.13e9, 512, 512), (0.4e9, 8192, 1024), (1.54e9, 32768, 256), (70e9, 8192, 256)],
)
def test_larger_models_read_shorter_windows(parameters: float, context: int, tokens: int) -> None:
    shape: Any = SimpleNamespace(num_parameters=int(parameters), max_context=context)
    assert CalibrationSettings().tokens_of(shape) == tokens
    assert CalibrationSettings(window_tokens=96).tokens_of(shape) == 96


# Without asking


def test_an_engine_calibrates_once(
    folder: Path, gathered: list[list[int]], kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_calibration(folder, nuq()) is None
    loaded = load_engine(str(folder), nuq())
    (line,) = [record.message for record in caplog.records if "calibration" in record.message]
    (file,) = kept.glob("*.safetensors")
    assert "making it once" in line and str(file) in line
    assert len(gathered) == 8 and len(gathered[0]) == CONTEXT, "as long as the model's context"
    made = find_calibration(folder, nuq())
    assert made is not None and loaded.engine.namespace.calibration == made.hash
    for codec in ("nuq2", "nuq3", "nuq4"):
        with LLM(str(folder), nuq(codec=codec).to_options()) as llm:
            assert llm.engine.namespace.calibration == made.hash
            output = llm.generate([list(range(100))], SamplingParams(max_tokens=40, ignore_eos=True))[0]
            assert len(output.outputs[0].token_ids) == 40
    assert len(gathered) == 8
    assert calibration_for(folder, nuq(codec="dense")) is None


def test_a_damaged_calibration_that_was_kept_is_made_again(
    folder: Path, gathered: list[list[int]], kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = CalibrationSettings().file(fingerprint(folder))
    file.parent.mkdir(parents=True)
    file.write_bytes(b"what is this")
    assert find_calibration(folder, nuq()) is None
    assert "not a calibration that can be read" in caplog.text
    made = calibration_for(folder, nuq())
    assert made is not None and len(gathered) == 8
    assert Calibration.load(file, fingerprint(folder)).hash == made.hash


def test_settings_are_refused_before_anything_is_calibrated(
    folder: Path, gathered: list[list[int]], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"cache.memory of 1000B holds 0 chunks"):
        load_engine(str(folder), nuq(memory=1000))
    with pytest.raises(ConfigError, match="heads whose size is a multiple of 16 up to 256, not 12"):
        load_engine(str(save_tiny(tmp_path / "twelve")), nuq())
    assert not gathered


def test_evaluations_calibrate_once_for_all_codecs(folder: Path, gathered: list[list[int]]) -> None:
    found = perplexity(str(folder), TEXT, config=CONFIG, codecs=["dense", "nuq4", "nuq2"], context=200)
    assert [each.codec for each in found] == ["dense", "nuq4", "nuq2"] and len(gathered) == 8
    dense, four, two = found
    assert four.ratio is not None and two.kl_mean is not None and four.kl_mean is not None
    assert 0 < four.kl_mean < two.kl_mean and dense.bytes_per_token > four.bytes_per_token > two.bytes_per_token


def test_a_head_size_of_128_stays_inside_its_bits(tmp_path: Path) -> None:
    """Counted by the allocator, padding and sidecars included, with the default slots and one sink."""
    folder = save_tiny(tmp_path / "wide", head_dim=128)
    run(folder, CalibrationSettings().file(fingerprint(folder)))
    codecs = {"nuq4": 4.6, "nuq3": 3.6, "nuq2": 2.6}
    config = CONFIG.with_options({"model.dtype": "bfloat16"})
    for each in perplexity(str(folder), TEXT, config=config, codecs=list(codecs), context=512, kl=False):
        print(each.codec, each.bits_per_element)
        assert each.bits_per_element is not None and each.bits_per_element <= codecs[each.codec]


def test_inspect_shows_the_sizes_that_are_known(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", str(folder), "--cache.codec", "nuq3", "--cache.memory", "4MiB", *FLAGS]
    assert main(words) == 0
    assert "none yet" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    nominal = json.loads(capsys.readouterr().out)
    assert nominal["calibration"] is None
    made = calibration_for(folder, nuq())
    assert made is not None
    assert main([*words, "--json"]) == 0
    real = json.loads(capsys.readouterr().out)
    assert real["calibration"] == made.hash and real["chunk_bytes"] <= nominal["chunk_bytes"]
    assert main(words) == 0
    assert made.hash[:12] in capsys.readouterr().out


def test_inspect_tells_the_longest_request_from_the_models_own_limit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(folder), "--cache.memory", "4MiB", "--model.max_context", "200", *FLAGS]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("longest request")]
    own = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    assert line.split()[2:] == f"200 tokens the model's own limit is {own:,}".split() and own != 200


# The command


def command(folder: Path, *words: str) -> int:
    return main(["calibrate", str(folder), "--windows", "3", "--window", "64", *FLAGS, *words])


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return str(file)


def test_the_command_makes_the_file_that_engines_look_for(
    folder: Path, text: str, kept: Path, capsys: pytest.CaptureFixture[str], gathered: list[list[int]]
) -> None:
    assert command(folder, "--text", text) == 0
    out = capsys.readouterr().out
    made = find_calibration(folder, nuq())
    assert made is not None and made.hash in out and len(gathered) == 3
    (file,) = kept.glob("*.safetensors")
    assert f"file: {file}\n" in out and f"use:  quire serve {folder} --cache.codec nuq4\n" in out
    lines = out.splitlines()
    assert len(lines) == 1 + 3 * 2 + 4 and max(map(len, lines[:7])) <= 100
    for codec, report in made.report.items():
        (line,) = [line for line in lines if line.startswith(codec)]
        ratio = report["held_out_cost"]["chosen"] / report["held_out_cost"]["same bits everywhere"]
        assert f"{report['bits_per_element']:.2f}" in line and f"{ratio:.0%}" in line and "keys" in line
    # The next one takes its place.
    assert command(folder) == 0
    again = find_calibration(folder, nuq())
    assert again is not None and again.hash != made.hash


def test_the_command_for_ablations(
    folder: Path, text: str, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--text", text, "--json", "--bits", "2", "--books", "uniform", "--same-bits", "--q-norm")
    assert command(folder, *words, "--outlier-slots", "0") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["codecs"]) == {"nuq2"} and found["codecs"]["nuq2"]["key_books"] == {"uniform": 2}
    said = found["settings"]
    assert (said["books"], said["same_bits"], said["q_norm"], said["outlier_slots"]) == (["uniform"], True, True, 0)
    made = Calibration.load(Path(found["file"]), fingerprint(folder))
    assert made.hash == found["hash"] and (made.tables["nuq2"].key_bits == 2).all()
    assert find_calibration(folder, nuq(outlier_slots=0)) is None, "what was asked for once is not for all"
    settings = tmp_path / "quire.toml"
    settings.write_text("[cache]\noutlier_slots = 2\nsink_tokens = 3\n")
    file = tmp_path / "here.safetensors"
    assert command(folder, "--text", text, "--config", str(settings), "--bits", "3,4", "-o", str(file)) == 0
    use = f"--cache.codec nuq4 --cache.outlier_slots 2 --cache.sink_tokens 3 --cache.calibration {file}"
    assert use in capsys.readouterr().out
    options = {"cache.codec": "nuq3", "cache.outlier_slots": 2, "cache.sink_tokens": 3, "cache.calibration": str(file)}
    with LLM(str(folder), {**CONFIG.to_options(), **options, "cache.memory": "4MiB"}) as llm:
        assert llm.generate("The mill")[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--windows", "99"], "the text has 1,140 tokens, but 99 windows of 64 need 6,336"),
        (["--window", "4096"], "windows of 4,096 tokens exceed the model's context of 256"),
        (["--sink-tokens", "63"], "windows of 64 tokens leave too few after the first 63"),
        (["--bits", "1,2"], "bits are 1, 2; they must be some of 2, 3, 4"),
        (["--books", "mine"], "books are mine; they must be"),
        (["--text", "/no/such/text"], "cannot read the text /no/such/text"),
        (["-o", "/no/such/folder/x"], "cannot write /no/such/folder/x"),
    ],
)
def test_the_command_refuses_in_one_line(
    words: list[str], said: str, folder: Path, text: str, gathered: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(folder, "--text", text, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quire: ") and said in line
    assert not gathered


def test_a_folder_that_cannot_be_written_is_told(
    folder: Path, text: str, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept.parent.mkdir()
    kept.write_text("a file in the way")
    assert command(folder, "--text", text) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(kept) in line and "cannot be written" in line and "XDG_CACHE_HOME" in line


@pytest.mark.parametrize("kept_windows", [0, 2])
def test_an_interrupted_command_says_what_it_keeps(
    kept_windows: int,
    folder: Path,
    text: str,
    kept: Path,
    gathered: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted = samples.gather

    def interrupted(model: Any, tokens: torch.Tensor, *given: Any) -> Iterator[Any]:
        if len(gathered) == kept_windows:
            raise KeyboardInterrupt
        yield from counted(model, tokens, *given)

    monkeypatch.setattr(samples, "gather", interrupted)
    assert command(folder, "--text", text) == 130
    assert capsys.readouterr().err == "quire: interrupted\n"
    few, *said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert few == "192 tokens are too few for a good calibration: the codecs may lose more than g4, which needs none"
    assert len(said) == (kept_windows > 0)
    assert not said or f"resumes with {kept_windows} of 3 windows, kept in {kept}" in said[0]
    monkeypatch.setattr(samples, "gather", counted)
    caplog.clear()
    assert command(folder, "--text", text) == 0
    resumed = [each.getMessage() for each in caplog.records if "resuming" in each.getMessage()]
    assert len(resumed) == (kept_windows > 0)
    assert not resumed or f"resuming the calibration with {kept_windows} of 3 windows, kept in {kept}" in resumed[0]


SERVE = """
import sys
from pathlib import Path
from quire.calibrate import run, settings
from quire.cli import main
run.folder = settings.folder = lambda: Path(sys.argv[1])
sys.exit(main(["serve", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("presses", whole([1, 2], 1))
def test_ctrl_c_while_a_server_calibrates_leaves_the_terminal_and_the_windows(presses: int, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", head_dim=16, num_hidden_layers=12, max_position_embeddings=128)
    cache = ("--cache.codec", "nuq2", "--cache.memory", "8MiB", "--calibrate.when", "start")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path / "kept"), str(folder), "--port", "0", *FLAGS, *cache],
        stdout=subprocess.PIPE,
        stderr=slave,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(slave)
    shown = b""
    try:
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while part := os.read(master, 4096):
                if b"fitting" in part and b"fitting" not in shown:
                    for _ in range(presses):
                        process.send_signal(signal.SIGINT)
                        time.sleep(0.01)
                shown += part
        # Where the first one was quick, the second may meet a process that ends.
        assert process.wait(30) in (130, -signal.SIGINT)[:presses], shown
    finally:
        process.kill()
        process.communicate()
        os.close(master)
    hidden, visible = shown.rfind(b"\x1b[?25l"), shown.rfind(b"\x1b[?25h")
    assert -1 < hidden < visible, shown
    assert shown.endswith(b"quire: interrupted\r\n") or (presses > 1 and b"terminate" not in shown), shown
    if presses == 1:
        assert b"the calibration is interrupted; the next one resumes with 8 of 8 windows, kept in " in shown
    assert list((tmp_path / "kept").rglob("tokens.safetensors"))


@pytest.mark.timeout(400)
@pytest.mark.slow
@full_only("a quarter of a minute; its parts have tests of their own")
def test_the_embedded_model_is_quantized_well_by_little(tmp_path: Path, data_dir: Path) -> None:
    path = embedded_gguf()
    settings = CalibrationSettings(num_windows=2, window_tokens=256, bits=(3,), kinds=("own",))
    calibrate(path, settings, tmp_path / "made", text=(data_dir / "text" / "war_and_peace.txt").read_text()[:5000])
    text = (data_dir / "text" / "wiki.test.raw").read_text()[:2500]
    config = EngineConfig.from_options({"cache.codec": "nuq3", "cache.calibration": str(tmp_path / "made")})
    dense, three = perplexity("smollm2", text, config=config, context=400, max_windows=1)
    assert dense.ratio == 1 and three.ratio is not None and three.ratio < 1.06
    assert three.bits_per_element is not None and three.bits_per_element < 3.7


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import safetensors.torch

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    text = tmp_path / "text"
    text.write_text(TEXT)
    words = ("--text", str(text), "--windows", "2", "--window", "64")
    assert main(["calibrate", str(folder), *words, *FLAGS]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "calibration:" not in line]
    assert "window-0.safetensors: cannot be written" in said and "No space left on device" in said
    assert not [each for each in (tmp_path / "cache").rglob("*") if each.is_file() and each.suffix != ".lock"]
