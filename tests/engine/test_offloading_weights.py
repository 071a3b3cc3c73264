"""An engine whose weights are partly on the disk: the same tokens, and settings and policies that are refused."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.offloading import policy_of
from quire.errors import ConfigError
from quire.models.image_folder import DRAFT_SUFFIX, image_folder, image_path, lock_draft
from quire.models.images import full_image_spec
from quire.models.weights import open_model
from quire.offload.policy import OffloadPolicy, policy_text, read_policy
from quire.offload.units import Share, Split
from tests.engines import keep_calibration
from tests.opt_paper import percents
from tests.tiny_models import save_tiny


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels import load

    load()  # from the user's cache, before that is another one
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


PROMPTS = ["The cache is shared by every request that begins like this one. " * 4 + end for end in ("A", "B")] + ["x"]


def answers(path: Path, options: dict[str, Any]) -> list[list[int]]:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with LLM(str(path), options={"model.dtype": "float32", "cache.memory": "8MiB", **options}) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def told_percent(caplog: pytest.LogCaptureFixture) -> float:
    """The realised share of weights in memory, as the log tells it."""
    (told,) = [record.getMessage() for record in caplog.records if "of the layers in memory" in record.getMessage()]
    return float(told.split()[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return save_tiny(path, num_hidden_layers=6, hidden_size=128, intermediate_size=256, num_attention_heads=4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache.share": False, "scheduler.token_budget": 96, "scheduler.max_running": 8},
        {"cache.codec": "g4", "cache.sink_tokens": 1},
        {"retain.budget": 0.5, "retain.profile_rows": 8},
        {"cache.codec": "g4", "retain.threshold": 0.9, "retain.profile_rows": 8},
        {"model.dtype": "bfloat16"},
        {"model.weights": "g4"},
        {"cache.codec": "nuq3", "cache.check": False},
    ],
    ids=lambda options: " ".join(map(str, options.values())) or "default",
)
def test_tokens_are_the_same_with_offloading(
    model: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if options.get("cache.codec") == "nuq3":
        keep_calibration(model)
    caplog.set_level("INFO", logger="quire")
    memory = "464KiB" if "model.weights" in options else "928KiB" if "model.dtype" in options else "1792KiB"
    assert answers(model, options | {"offload.mode": "auto", "offload.memory": memory}) == answers(model, options)
    assert 5 < told_percent(caplog) < 95


def test_a_policy_s_file_is_what_runs(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    half = Split((Share(0.5), Share(0.5)))
    memory = Split((Share(1.0), Share(0.0)))
    policy = OffloadPolicy(4, 1, half, memory, memory)
    file = tmp_path / "policy.json"
    file.write_text(policy_text(policy, ("cpu", "disk")))
    assert read_policy(file, ("cpu", "disk")) == policy
    caplog.set_level("INFO", logger="quire")
    assert answers(model, {"offload.mode": str(file)}) == answers(model, {})
    assert 45 < told_percent(caplog) < 55 and "(requested 50 %)" in caplog.text


def test_a_policy_that_cannot_be_followed_is_refused(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(
        policy_text(OffloadPolicy(4, 1, percents(50, 50), percents(50, 50), percents(100, 0)), ("cpu", "disk"))
    )
    for options, message in (
        ({"tiers.disk": f"{tmp_path}:64MiB"}, f"the policy {file}.* has no other tiers"),
        ({"cache.memory": "1MiB"}, "an offloaded cache needs at least"),
    ):
        with pytest.raises(ConfigError, match=message):
            answers(model, {"offload.mode": str(file), **options})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a policy that can be read"),
        ("[" * 100_000, "not a policy that can be read"),
        ("[]", "not a policy of format 1"),
        ('{"format": 2}', "not a policy of format 1"),
        ('{"format": 1, "tiers": ["gpu", "cpu", "disk"]}', "made for tiers"),
        ('{"format": 1, "tiers": ["cpu", "disk"], "micro_batch": 0}', "micro_batch is 0"),
        ('{"format": 1, "tiers": ["cpu", "disk"], "micro_batch": 1, "num_batches": 1, "weights": 3}', "weights is 3"),
        (
            '{"format": 1, "tiers": ["cpu", "disk"], "micro_batch": 1, "num_batches": 1, "weights": {"cpu": 50}}',
            "weights: shares 50, 0 add up to 50",
        ),
        ('{"format": 1, "wight": 1}', "unknown field 'wight'"),
    ],
)
def test_a_policy_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "policy.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"{file}: .*{message}"):
        read_policy(file, ("cpu", "disk"))


def test_settings_that_cannot_be_are_refused_with_the_reason(model: Path) -> None:
    for options, message in (
        ({"offload.memory": "1MiB"}, "offload.memory has no effect with offload.mode off"),
        ({"offload.mode": "p.json", "offload.memory": "1MiB"}, "offload.memory is for offload.mode auto"),
        ({"offload.mode": "auto", "offload.disk_bandwidth": "1KiB"}, "it must be at least 1MiB"),
        ({"offload.mode": "auto", "attention.backend": "reference"}, "needs attention.backend cpu"),
        ({"offload.mode": "auto", "model.images": False}, "set model.images true"),
        ({"offload.mode": "auto", "offload.memory": "100KiB"}, "two layers of this model need"),
        ({"offload.mode": "/nowhere/policy.json"}, "neither off nor auto, and there is no such file"),
        ({"offload.mode": "auto", "offload.cache": 1}, "offload.cache of 1B holds 0 chunks"),
        ({"offload.mode": "auto", "offload.cache": "900TiB"}, "the cache on the disk may take .*; lower offload.cache"),
        ({"offload.mode": "auto", "offload.profile": "machine.json"}, "plans the lines of quire generate --input"),
    ):
        with pytest.raises(ConfigError, match=message):
            answers(model, options)


@pytest.mark.parametrize(
    ("tiers", "changes", "message"),
    [
        (("cpu", "disk"), {"attended": Share(0.5)}, "attended is for a GPU"),
        (("gpu", "cpu", "disk"), {"cache": percents(0, 99, 1)}, "beside a GPU only weights are on the disk"),
        (("gpu", "cpu", "disk"), {"hidden": percents(0, 99, 1)}, "beside a GPU only weights are on the disk"),
    ],
)
def test_a_policy_has_only_what_the_machine_does(
    tmp_path: Path, tiers: tuple[str, ...], changes: dict[str, Any], message: str
) -> None:
    near = percents(100, *[0] * (len(tiers) - 1))
    policy = replace(OffloadPolicy(4, 1, near, near, near), **changes)
    file = tmp_path / "policy.json"
    file.write_text(policy_text(policy, tiers))
    backend = "triton" if "gpu" in tiers else "cpu"
    config = EngineConfig.from_options({"offload.mode": str(file), "attention.backend": backend})
    with pytest.raises(ConfigError, match=message):
        policy_of(config)
    file.write_text(policy_text(OffloadPolicy(4, 1, near, near, near), tiers))
    assert policy_of(config) == OffloadPolicy(4, 1, near, near, near)


def test_weights_that_fit_are_not_offloaded(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="quire")
    answers(model, {"offload.mode": "auto", "offload.memory": "1GiB"})
    assert any("fit into memory" in record.getMessage() for record in caplog.records)
    assert not any(thread.name.startswith("quire-weights") for thread in threading.enumerate())


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_has_the_matrices_that_are_not_in_the_image(tmp_path: Path, dtype: str, is_tied: bool) -> None:
    """An embedding of plain numbers, and in float32 the head beside it."""
    path = save_tiny(tmp_path / "model", num_hidden_layers=6, hidden_size=128, tie_word_embeddings=is_tied)
    options = {"model.dtype": dtype, "cache.memory": "8MiB", "offload.mode": "auto", "offload.memory": "900KiB"}
    with LLM(str(path), options) as llm:
        assert llm._loaded is not None
        model: Any = llm._loaded.engine.runner.model
        embedding = llm._loaded.shape.vocab_size * 128 * (4 if dtype == "float32" else 2)
        assert model.weights.unpacked == embedding * (2 if dtype == "float32" else not is_tied)
        assert model.weights.memory_bytes <= 900 << 10


def test_too_little_memory_is_refused_before_the_image_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="two layers of this model need"):
        answers(model, {"offload.mode": "auto", "offload.memory": "100KiB"})
    assert not list(tmp_path.rglob("*.image"))


def test_an_image_in_a_folder_that_cannot_be_written_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"offload.mode": "auto", "offload.memory": "1792KiB"}
    expected, opened = answers(model, options), os.open

    def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY) and Path(path).parent == image_folder():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    assert answers(model, options) == expected


def test_a_start_waits_while_another_process_writes_the_image(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {"offload.mode": "auto", "offload.memory": "1792KiB"}
    with open_model(model) as checkpoint:
        draft = image_path(full_image_spec(checkpoint, torch.float32, "native").origin).with_suffix(DRAFT_SUFFIX)
    draft.parent.mkdir(parents=True)
    with lock_draft(draft, create=True):
        thread = threading.Thread(target=lambda: answers(model, options))
        thread.start()
        thread.join(1.0)
        assert thread.is_alive(), "it did not wait"
    thread.join(30.0)
    assert not thread.is_alive() and list(tmp_path.rglob("*.image"))


def test_a_closed_model_leaves_no_threads(model: Path) -> None:
    answers(model, {"offload.mode": "auto", "offload.memory": "1792KiB"})
    gc.collect()
    assert not any(thread.name.startswith("quire-weights") for thread in threading.enumerate())


OPTIONS = {"model.dtype": "bfloat16", "cache.memory": "8MiB", "runtime.threads": 1}
RESIDENT = f"""
import sys
from quire import LLM, SamplingParams
options = {OPTIONS}
if sys.argv[2] != "all":
    options |= {{"offload.mode": "auto", "offload.memory": sys.argv[2]}}
with LLM(sys.argv[1], options) as llm:
    llm.generate(["The disk is no second memory."], SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False)
    lines = open("/proc/self/status").read().splitlines()
print(*(int(next(line for line in lines if line.startswith(name)).split()[1]) for name in ("RssAnon", "RssFile")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_disk_is_no_second_memory(tmp_path: Path) -> None:
    """81 MB of weights in 24 MiB: at least 50 MB less of the process's own memory, and none of it as a mapped file."""
    shapes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 10}
    path = save_tiny(tmp_path / "large", **shapes)

    def resident(memory: str) -> tuple[int, int]:
        told = subprocess.run(
            [sys.executable, "-c", RESIDENT, str(path), memory], capture_output=True, text=True, check=True
        )
        own, mapped = map(int, told.stdout.split()[-2:])
        return own << 10, mapped << 10

    with LLM(str(path), {**OPTIONS, "offload.mode": "auto", "offload.memory": "24MiB"}):
        pass  # writes the image
    (own, mapped), (own_of_all, mapped_of_all) = resident("24MiB"), resident("all")
    assert own_of_all - own > 50e6, f"{own} bytes instead of {own_of_all}"
    assert mapped - mapped_of_all < 10e6, f"{mapped} mapped bytes, {mapped_of_all} without offloading"
