"""Small engines in memory, and their oracle: the same weights, dense attention, one sequence and one token at a
time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quire.calibrate import CalibrationSettings, calibrate
from quire.config import EngineConfig
from quire.engine.build import assemble, resolve
from quire.engine.calibration import Calibration
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.llm import merge_delta
from quire.models.cpu_ops import CpuOps
from quire.models.decoder import build_model
from quire.models.fingerprint import fingerprint
from quire.models.layers import TorchOps, torch_dtype
from quire.models.shape import ModelShape
from quire.models.tokenizer import Tokenizer
from quire.models.weights import Checkpoint

from .dense_plan import DensePlan
from .nuq_tables import random_tables
from .tiny_models import BOS, EOS, RandomWeights, byte_tokenizer, tiny_shape

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def chunk_bytes(shape: ModelShape, itemsize: int = 4) -> int:
    page = -(-2 * 64 * shape.head_dim * itemsize // 128) * 128
    return page * shape.num_layers * shape.num_kv_heads


def make_engine(
    shape: ModelShape | None = None,
    *,
    chunks: int = 64,
    seed: int = 0,
    weights: Checkpoint | None = None,
    model_id: str = "",
    **options: Any,
) -> Engine:
    """An engine over random weights in an arena of about so many chunks. Poisoned, so that reading what was not written
    cannot pass."""
    shape = shape or tiny_shape()
    settings = {
        "model.dtype": "float32",
        "runtime.device": "cpu",
        "runtime.threads": 1,
        "cache.memory": chunks * chunk_bytes(shape),
        "scheduler.max_running": 8,
        "scheduler.token_budget": 256,
        **options,
    }
    wanted = EngineConfig.from_options(settings)
    calibration = made_up_calibration(shape, wanted) if wanted.cache.is_calibrated else None
    config, fits = resolve(wanted, shape, None, calibration)
    ops = CpuOps() if config.attention.backend == "cpu" else TorchOps()
    model = build_model(shape, weights or RandomWeights(shape, seed), ops, torch_dtype(config.model.dtype))
    engine = assemble(model, Tokenizer(byte_tokenizer(), None, BOS, EOS), config, fits, model_id, calibration)
    engine.scheduler.manager.table.arena.data.fill_(0xFF)
    return engine


def made_up_calibration(shape: ModelShape, config: EngineConfig) -> Calibration:
    """Tables of every width and number of slots for a nuq codec, the same ones each time."""
    tables = random_tables(shape.num_layers, shape.num_kv_heads, shape.head_dim, seed=0, reach=1.0)
    return Calibration("", {config.cache.codec: tables}, {"outlier_slots": config.cache.outlier_slots}, {})


def keep_calibration(model: Path) -> None:
    """Calibrates a model on few tokens and keeps the file where engines look for it.

    An engine that finds none calibrates on eight windows as long as the model's context. That takes seconds.
    """
    settings = CalibrationSettings(num_windows=2, window_tokens=64)
    config = EngineConfig.from_options({"runtime.threads": 1, "runtime.device": "cpu"})
    text = "Of all the mills on the river, the oldest made no flour. " * 3
    calibrate(model, settings, settings.file(fingerprint(model)), text=text, config=config)


def drain(engine: Engine, collected: dict[str, RequestOutput] | None = None) -> dict[str, RequestOutput]:
    """Steps until nothing is left; proves after every step that nothing is lost."""
    collected = {} if collected is None else collected
    steps = 0
    while engine.has_work:
        steps += 1
        assert steps < 20_000, "the engine works and nothing ends"
        for delta in engine.step():
            merge_delta(collected, delta)
        engine.check()
    return collected


def generate(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Token ids of the first answer to each prompt."""
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, params)
    outputs = drain(engine)
    return [outputs[str(index)].outputs[0].token_ids for index in range(len(prompts))]


def oracle_logits(shape: ModelShape, token_ids: list[int], seed: int = 0) -> torch.Tensor:
    """Float32 logits [len(token_ids), V] of one sequence, through plain torch."""
    model = build_model(shape, RandomWeights(shape, seed), TorchOps(), torch.float32)
    plan = DensePlan(shape)
    positions = plan.step([(0, len(token_ids))])
    with torch.inference_mode():
        return model.head(model.hidden(torch.tensor(token_ids), positions, plan))


_answers: dict[str, list[int]] = {}
"""Of `oracle_greedy`, which several tests ask the same."""


def oracle_greedy(shape: ModelShape, prompt: list[int], count: int, seed: int = 0) -> list[int]:
    """Greedy continuation, token by token."""
    key = repr((shape, prompt, count, seed))
    if key in _answers:
        return [*_answers[key]]
    model = build_model(shape, RandomWeights(shape, seed), TorchOps(), torch.float32)
    plan = DensePlan(shape)
    tokens, out = prompt, []
    with torch.inference_mode():
        for _ in range(count):
            positions = plan.step([(0, len(tokens))])
            hidden = model.hidden(torch.tensor(tokens), positions, plan)
            tokens = [int(model.head(hidden[-1:]).argmax())]
            out += tokens
    _answers[key] = out
    return [*out]
