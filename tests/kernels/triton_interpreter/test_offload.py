"""Weights and cache beside a device: the kernels of a GPU, interpreted, and memory that takes the place of a GPU's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.engine import offloading
from quire.errors import ConfigError
from quire.models.decoder import build_model
from quire.models.images import device_image_spec
from quire.models.layers import Ops
from quire.models.plan import Model
from quire.models.triton_ops import TritonOps
from quire.models.weights import Checkpoint, open_model
from quire.offload.device import load_on_device

from ...device_offload import PARAMS, SHAPE, engine_beside, prompts_of
from ...effort import combine
from ...engines import generate, make_engine
from ...opt_paper import percents
from ...tiny_models import RandomWeights, save_tiny, tiny_shape, write_gguf

CPU = torch.device("cpu")
CODECS: dict[str, dict[str, Any]] = {
    "dense": {},
    "g4 sinks": {"cache.codec": "g4", "cache.sink_tokens": 1},
    "nuq3": {"cache.codec": "nuq3", "cache.check": False},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels import load

    load()  # from the user's cache, before that is another one
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@combine(
    strength=1,
    codec=[*CODECS],
    near=[40, 0, 100],
    disk=[30, 0, 100],
    far_states=[1.0, 0.0, 0.5],
    overlaps=[True, False],
)
def test_tokens_are_those_of_a_cpu(codec: str, near: int, disk: int, far_states: float, overlaps: bool) -> None:
    prompts, disk = prompts_of(3), min(disk, 100 - near)
    expected = generate(make_engine(SHAPE, **CODECS[codec]), prompts, PARAMS)
    engine = engine_beside(CPU, near, disk=disk, far_states=far_states, overlaps=overlaps, **CODECS[codec])
    table: Any = engine.scheduler.manager.table
    assert generate(engine, prompts, PARAMS) == expected
    assert table.host.memory.bytes_crossed > 0 and table.num_layers_stored > 0
    found = engine.offloaded()
    assert found["weights_near"] == pytest.approx(near / 100, abs=0.25)
    assert (found["weights_bytes_from_disk"] > 0) == (disk > 0)
    assert (found["hidden_bytes_read"] > 0) == (far_states > 0)


@pytest.mark.parametrize("form", ["native", "g4", "dequantized"])
def test_packed_weights_are_copied_as_they_are(tmp_path: Path, form: Any) -> None:
    shape = tiny_shape(hidden_size=256, head_dim=64, ffn_size=512, num_layers=5)
    kinds = {"": "Q4_K", "v": "Q6_K", "down": "Q5_0"}
    write_gguf(tmp_path / "model.gguf", shape, RandomWeights(shape, seed=5), kind=kinds)
    with open_model(tmp_path / "model.gguf") as checkpoint:

        def build(ops: Ops) -> Model:
            return build_model(shape, checkpoint, ops, torch.float32, CPU, form)

        wanted = device_image_spec(checkpoint, torch.float32, form, TritonOps.kinds)
        whole, parted = build(TritonOps()), load_on_device(build, percents(20, 30, 50), CPU, wanted=wanted)
        again = load_on_device(build, percents(0, 0, 100), CPU, wanted=wanted)  # from the same image
    assert parted.weights.split.shares == pytest.approx((0.2, 0.3, 0.5), abs=0.15)
    for model in (parted, again, again):
        model.stream.begin()
        for layer in range(shape.num_layers):
            model.stream.take(layer)
            for found, expected in zip(tensors_of(model._model, layer), tensors_of(whole, layer), strict=True):
                assert found.dtype == expected.dtype and torch.equal(found, expected)
            model.stream.give(layer)
    assert 0 < parted.stream.bytes_from_disk < again.stream.bytes_from_disk


def test_the_disk_has_what_the_host_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny(tmp_path / "model", num_hidden_layers=6, hidden_size=128, intermediate_size=256)
    options = {"offload.mode": "auto", "attention.backend": "triton", "runtime.device": "cpu", "model.dtype": "float32"}
    with open_model(path) as checkpoint:

        def split_with(free: int, **more: Any) -> tuple[float, ...]:
            config = EngineConfig.from_options({**options, "offload.memory": "1MiB", **more})
            monkeypatch.setattr(offloading, "available_memory", lambda device: free)

            def build(ops: Ops) -> Model:
                return build_model(checkpoint.shape, checkpoint, ops, torch.float32, CPU)

            model = offloading.load_beside_device(checkpoint, config, TritonOps.kinds, build)
            return model.weights.requested.shares

        near, host, disk = split_with(1 << 40)
        assert 0 < near < 1 and host == 1 - near and disk == 0
        near, host, disk = split_with(1 << 20)
        assert pytest.approx(host * layer_bytes(checkpoint), rel=0.01) == 0.9 * (1 << 20)
        assert disk == pytest.approx(1 - near - host) and disk > 0.1
        assert split_with(1 << 20, **{"offload.cache": "1MiB"})[1:] == (0, 1 - near)
        with pytest.raises(ConfigError, match="no weights are on the disk"):
            split_with(1 << 40, **{"offload.disk_bandwidth": "100MiB"})


def tensors_of(model: Any, layer: int) -> list[torch.Tensor]:
    """The tensors of a layer's products."""
    of = model._layers[layer]
    return [
        tensor
        for product in (of.mixer.qkv, of.mixer.o, of.ffn.gate_up.linear, of.ffn.down)
        for tensor in product.tensors
    ]


def layer_bytes(checkpoint: Checkpoint) -> int:
    shapes = checkpoint.shape.tensor_shapes.items()
    return sum(4 * math.prod(size) for name, size in shapes if name.startswith("layers.") and len(size) == 2)
