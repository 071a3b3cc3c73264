"""An engine whose weights and cache are on a device and beside it, over random weights."""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import torch

from quire.config import EngineConfig
from quire.engine.build import assemble, resolve
from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.errors import ConfigError
from quire.models.decoder import build_model
from quire.models.image_folder import ImageSource
from quire.models.images import ImageSpec
from quire.models.layers import torch_dtype
from quire.models.shape import ModelShape
from quire.models.tokenizer import Tokenizer
from quire.offload.device import load_on_device
from quire.offload.hidden import HiddenStates, states_bytes
from quire.offload.host import HostMemory
from quire.offload.units import Share

from .engines import made_up_calibration
from .opt_paper import percents
from .tiny_models import BOS, EOS, RandomWeights, byte_tokenizer, tiny_shape

SHAPE = tiny_shape(num_layers=2, head_dim=16, hidden_size=64)
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def prompts_of(count: int) -> list[list[int]]:
    """Prompts of which all begin alike, and one fills a chunk while it is answered."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(256, (count, 190), generator=generator).tolist()
    return [numbers[0][:130] + row[130 : 133 + 29 * place] for place, row in enumerate(numbers)]


def image_wanted(shape: ModelShape) -> ImageSpec:
    """The image of random weights."""
    key = f"random {zlib.crc32(repr(shape).encode())}"
    num_bytes = 4 * sum(math.prod(size) for size in shape.tensor_shapes.values())
    return ImageSpec(ImageSource("random", key, key, (), "dequantized, gpu", "float32", 1), num_bytes)


def engine_beside(
    device: torch.device,
    near: int,
    *,
    disk: int = 0,
    far_states: float = 0.0,
    shape: ModelShape = SHAPE,
    overlaps: bool = True,
    **options: Any,
) -> Engine:
    """The device has the least memory for the cache. The other chunks lie on the host, and decoded tokens attend to
    them there.

    near, disk  percent of the weights on the device and on the disk
    far_states  share of the micro-batches whose activations lie on the host between layers
    """
    settings = {
        "model.dtype": "float32",
        "runtime.device": "cpu",
        "runtime.threads": 1,
        "offload.mode": "auto",
        "offload.cache": "16MiB",
        "offload.micro_batch": 2,
        "scheduler.max_running": 4,
        "scheduler.token_budget": 256,
        "cache.memory": 1000,
        **options,
    }
    wanted = EngineConfig.from_options(settings)
    calibration = made_up_calibration(shape, wanted) if wanted.cache.is_calibrated else None
    # As for a CPU, because there may be no GPU.
    config, fits = resolve(wanted, shape, None, calibration)
    config = dataclasses.replace(
        config,
        attention=dataclasses.replace(config.attention, backend="triton"),
        runtime=dataclasses.replace(config.runtime, device=device.type),
    )
    weights, dtype = RandomWeights(shape), torch_dtype(config.model.dtype)
    model = load_on_device(
        lambda ops: build_model(shape, weights, ops, dtype, device),
        percents(near, 100 - near - disk, disk),
        device,
        wanted=image_wanted(shape) if disk else None,
        overlaps=overlaps,
    )
    if far_states:
        room = states_bytes(shape, dtype, 256, 4)
        model.states = HiddenStates(HostMemory(room, device), Share(far_states), device)
    tokenizer = Tokenizer(byte_tokenizer(), None, BOS, EOS)
    try:
        engine = assemble(model, tokenizer, config, fits, "", calibration)
    except ConfigError as error:
        memory = int(str(error).split("at least ")[1].split()[0])
        config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, memory=memory))
        engine = assemble(model, tokenizer, config, fits, "", calibration)
    engine.scheduler.manager.table.arena.data.fill_(0xFF)
    return engine
