"""The first start of a codec with a model: a text is read, a destructive codec is refused, and the result is stored."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire import codec_check as module
from quire.cli import main
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.measure.engines import load_engines
from quire.models.decoder import Decoder
from quire.models.loading import WeightSource

from .tiny_models import byte_tokenizer, save_tiny

OPTIONS: dict[str, Any] = {"cache.memory": "16MiB", "runtime.threads": 1, "cache.codec": "g4"}


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys have a huge constant in each head, in a channel that does not turn; its answers are sure."""
    from safetensors.torch import load_file, save_file

    folder = save_tiny(
        tmp_path_factory.mktemp("biased"),
        "qwen2",
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
    )
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            tensor.view(2, -1)[:, -1] += 150
        if name.endswith(("k_proj.weight", "v_proj.weight", "embed_tokens.weight")):
            tensor *= 3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results are kept, for this test alone."""
    monkeypatch.setattr("quire.calibrate.settings.cache_folder", lambda: tmp_path / "cache" / "models")
    return tmp_path / "cache" / "checks"


@pytest.fixture
def destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """g4 as it was: keys are stored with their bias."""
    monkeypatch.setattr(WeightSource, "key_bias", lambda self, shape: None)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The codecs that were measured."""
    found: list[str] = []
    measure = module.measure_divergence

    def counted(model: Any, tokenizer: Any, config: Any, *more: Any) -> Any:
        found.append(config.cache.codec)
        return measure(model, tokenizer, config, *more)

    monkeypatch.setattr(module, "measure_divergence", counted)
    return found


def start(folder: Path, **options: Any) -> None:
    with LLM(str(folder), OPTIONS | {key.replace("_", ".", 1): value for key, value in options.items()}) as llm:
        assert llm.generate("a b", SamplingParams(max_tokens=2, temperature=0.0))[0].outputs[0].token_ids


@pytest.mark.usefixtures("destroyed")
def test_a_codec_that_destroys_the_model_is_refused_with_the_number(biased: Path, kept: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cache.codec g4 does not work on this model: .* [\d.]+ nats .* limit is 0.5 nats"
    ):
        start(biased)
    assert not list(kept.glob("*")), "a refusal is not remembered"
    start(biased, cache_check=False)


def test_a_codec_that_works_is_told_once_and_remembered(
    biased: Path, kept: Path, measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "quire"):
        start(biased)
    said = [record.getMessage() for record in caplog.records]
    (line,) = [each for each in said if "checked" in each]
    (before,) = [each for each in said if "first run of this model with cache.codec g4: checking it" in each]
    assert said.index(before) < said.index(line), "a large model reads for minutes"
    assert re.search(r"g4 checked on this model: over 255 tokens 0\.[0-4]\d+ nats .*, limit 0\.5; \d", line)
    (file,) = kept.iterdir()
    assert 0 < json.loads(file.read_text())["kl"] < 0.5
    caplog.clear()
    with caplog.at_level(logging.INFO, "quire"):
        start(biased)
    assert measured == ["g4"]
    assert not any("checked" in record.getMessage() for record in caplog.records)


def test_what_changes_pages_or_kernels_is_checked_again(biased: Path, tmp_path: Path, measured: list[str]) -> None:
    start(biased)
    start(biased, cache_memory="8MiB", scheduler_max_running=3, retain_budget=0.5)
    assert measured == ["g4"], "neither memory nor retention is the codec's"
    start(biased, model_dtype="bfloat16")
    start(biased, attention_backend="reference")
    start(save_tiny(tmp_path / "other", "llama", head_dim=16))
    assert measured == ["g4"] * 4


def test_a_disk_tier_has_no_part_in_the_check(biased: Path, tmp_path: Path, measured: list[str]) -> None:
    """Which once refused to start: the check shares nothing, and tiers need sharing."""
    with LLM(str(biased), OPTIONS | {"tiers.disk": f"{tmp_path / 'kv'}:64MiB"}) as llm:
        assert llm.known_prefixes() == []
    assert len(measured) == 1


def test_a_cache_on_the_disk_has_no_part_in_the_check(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small caches of the check have no room for two buffers of the longest sequence."""
    from quire.kernels import load

    load()  # from the user's cache, before that is another one
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = save_tiny(tmp_path / "long", "llama", head_dim=16, max_position_embeddings=4096)
    LLM(str(path), OPTIONS | {"offload.mode": "auto", "offload.cache": "64MiB", "scheduler.max_running": 4}).close()
    assert len(measured) == 1


def test_another_tokenizer_reads_another_text_and_is_checked_again(
    biased: Path, tmp_path: Path, measured: list[str]
) -> None:
    from tokenizers import normalizers

    start(biased)
    for normalizer, times in ((None, 1), (normalizers.Lowercase(), 2)):
        tokenizer = byte_tokenizer()
        tokenizer.normalizer = normalizer
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        start(biased, model_tokenizer=str(tmp_path / "tokenizer.json"))
        assert len(measured) == times


def test_neither_dense_caches_nor_evaluations_are_checked(biased: Path, measured: list[str]) -> None:
    start(biased, cache_codec="dense")
    load_engines(str(biased), EngineConfig.from_options(OPTIONS), 256, ("dense", "g4"))
    assert measured == []


def test_retention_and_loose_prefill_do_not_hide_what_a_codec_does(biased: Path, destroyed: None) -> None:
    with pytest.raises(ConfigError, match="does not work on this model"):
        start(biased, cache_strict=False, retain_budget=0.5)


def test_numbers_that_are_not_finite_are_refused(biased: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, calls = Decoder.head, [0]

    def broken(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        # Behind a token that each of the caches has sampled, and the dense one's first rows.
        calls[0] += 1
        return head(self, hidden) * (torch.nan if calls[0] == 4 else 1)

    monkeypatch.setattr(Decoder, "head", broken)
    with pytest.raises(ConfigError, match="nan nats"):
        start(biased)


def test_a_context_too_short_to_read_anything_encoded_is_not_checked(tmp_path: Path, kept: Path) -> None:
    start(save_tiny(tmp_path / "short", "llama", head_dim=16, max_position_embeddings=128))
    assert not kept.exists()


def test_a_result_that_cannot_be_kept_is_told(biased: Path, kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept.parent.mkdir(parents=True)
    kept.write_text("a file where the folder belongs")
    start(biased)
    assert any("the next start checks again" in record.getMessage() for record in caplog.records)


def test_a_folder_that_may_not_be_looked_into_only_forgets(
    biased: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No system looks up a name of 300 characters, whoever asks: as a home folder of somebody else's."""
    monkeypatch.setattr("quire.calibrate.settings.cache_folder", lambda: tmp_path / ("x" * 300) / "models")
    start(biased)
    assert any("the next start checks again" in record.getMessage() for record in caplog.records)


@pytest.mark.usefixtures("destroyed")
def test_the_command_line_says_it_in_one_line(biased: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    flags = [word for key, value in OPTIONS.items() for word in (f"--{key}", str(value))]
    words = ["generate", str(biased), "--input", str(prompts), "--output", str(tmp_path / "out.jsonl"), *flags]
    assert main(words) != 0
    assert [line for line in capsys.readouterr().err.splitlines() if "does not work on this model" in line]
