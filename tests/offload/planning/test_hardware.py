"""Measurements of a machine: a throttle, layers, attention and copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.models.layers import TorchOps
from quire.models.weights import open_model
from quire.offload.planning import hardware, quiet
from tests.offload.planning.test_profile import MIB
from tests.tiny_models import save_tiny


def test_a_throttle_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "FILE_BYTES", 8 * MIB)
    monkeypatch.setattr(hardware, "READ_SIZES", (256 << 10,))
    monkeypatch.setattr(hardware, "READ_THREADS", (1, 2))
    monkeypatch.setattr(quiet, "MOST_TRIES", 1)
    found = hardware.measure_disk(tmp_path, 32e6, 1)
    assert [(read.request_bytes, read.threads) for read in found.reads] == [(256 << 10, 1), (256 << 10, 2)]
    for rate in (found.streamed, found.writes, *(read.rate for read in found.reads)):
        # A throttle lets 0.05 s more pass, and a busy machine wakes late.
        assert 8e6 < rate.bandwidth < 45e6
    assert not list(tmp_path.iterdir()) and 0 < found.request_seconds < 1


def test_the_quietest_samples_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "QUIET_CORES", 0.1)
    monkeypatch.setattr(quiet.torch, "get_num_threads", lambda: 1000)
    loads = iter([1.5, 0.0, 0.3, 0.05, 2.0])
    values = iter([9.0, 1.0, 5.0, 2.0, 9.0])

    class Load:
        def cores(self) -> float:
            return next(loads)

    monkeypatch.setattr(quiet, "OtherLoad", Load)
    assert quiet.quietest(lambda: next(values), 2) == [1.0, 2.0]
    loads, values = iter([0.5, 0.4, 0.3, 0.2]), iter([4.0, 3.0, 2.0, 1.0])
    assert quiet.quietest(lambda: next(values), 1) == [1.0]


@pytest.mark.parametrize(("family", "ops"), [("llama", None), ("qwen3", None), ("opt", None), ("llama", TorchOps())])
def test_layers_of_every_family_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, ops: Any
) -> None:
    """ops: those of a device, beside those that offloading has on a CPU."""
    monkeypatch.setattr(hardware, "COLD_BYTES", 0)
    dtype = torch.bfloat16 if ops is None else torch.float32
    with open_model(save_tiny(tmp_path / "model", family, num_hidden_layers=3)) as checkpoint:
        timer = hardware.LayerTimer(checkpoint, dtype, "native", 1e6, ops=ops)
        assert timer.num_layers == 2 < checkpoint.shape.num_layers
    assert timer.products(5) > 0 and timer.head(3) > 0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time is that of one call."""
    monkeypatch.setattr(hardware, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(quiet, "MOST_TRIES", 1)


@pytest.mark.parametrize("codec", ["dense", "g4"])
def test_attention_is_timed_on_the_engine_s_pages(tmp_path: Path, codec: str, short: None) -> None:
    """And on the host, where the engine's own memory has a device's place, with what crosses."""
    model = save_tiny(tmp_path / "model", head_dim=64, max_position_embeddings=600)
    options = {"cache.memory": "64MiB", "cache.codec": codec, "cache.check": False}
    with LLM(str(model), options) as llm:
        free = llm.stats()["cache"]["bytes_free"]
        attention: Any = llm.engine.runner.attention
        spec = attention.spec
        timer = hardware.AttentionTimer(attention.clone(), spec, 600)
        assert timer.decode(3, 200) > 0 and timer.prompt(130) > 0
        assert timer.decoding(1).contexts == (32, 480) and timer.prompts(1).counts == (32, 112, 480)
        assert llm.stats()["cache"]["bytes_free"] == free
        llm.engine.scheduler.manager.check()
        far = hardware.host_timer(spec, 600, 48 * MIB)
        assert far.decode(3, 200) > 0
        beside: Any = far._beside
        heads = 3 * spec.num_layers * spec.layers[0].num_kv_heads * spec.layers[0].group_size
        there, back = spec.layers[0].head_dim * spec.dtype.itemsize, spec.layers[0].head_dim * spec.dtype.itemsize + 4
        assert beside.bytes_crossed == heads * (there + back), "queries; outputs and their log-sum-exp"
        assert far.decoding(1).contexts == (32, 480)


def test_copies_to_a_device_are_timed_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "COPY_BYTES", MIB)
    monkeypatch.setattr(quiet, "MOST_TRIES", 1)
    assert all(rate.bandwidth > 1e6 for rate in hardware.measure_bus(torch.device("cpu"), 1))
