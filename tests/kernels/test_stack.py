"""All layers in one call give exactly the result of the decoder layer by layer, because they use the same kernels."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.attention.cpu import CpuAttention
from quire.engine.params import SamplingParams
from quire.kernels import runtime
from quire.models.decoder import Decoder
from quire.models.ffn.plain import PlainShape
from quire.models.weights import Checkpoint, open_model
from tests.engines import drain, make_engine
from tests.kernels.harness import Shape, make_spec
from tests.kernels.profiling import Prompts
from tests.tiny_models import OF_KINDS, save_tiny, tiny_shape, write_gguf

PARAMS = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=2)


def answers(shape: Any, stacked: bool, weights: Checkpoint | None = None) -> list[tuple[list[int], list[float]]]:
    engine = make_engine(shape, weights=weights, **{"model.dtype": "bfloat16", "scheduler.token_budget": 128})
    model = engine.runner.model
    assert isinstance(model, Decoder) and model._stack is not None
    if not stacked:
        model._stack = None
    for index, length in enumerate((1, 63, 64, 65, 200)):
        engine.add(str(index), [(7 * at + index) % 250 for at in range(length)], PARAMS)
    outputs = [output.outputs[0] for output in drain(engine).values()]
    return [
        (
            each.token_ids,
            [place[token].logprob for place, token in zip(each.logprobs or [], each.token_ids, strict=True)],
        )
        for each in outputs
    ]


@pytest.mark.alone
def test_any_number_of_threads_computes_the_same() -> None:
    """More than there are cores, too: whoever waits for another gives its core away."""
    shape = tiny_shape("llama", head_dim=16, hidden_size=48, ffn_size=40)
    threads = runtime.num_threads()
    try:
        found = []
        for count in (1, 2, 3, 5):
            runtime.set_num_threads(count)
            found.append(answers(shape, stacked=True))
    finally:
        runtime.set_num_threads(threads)
    assert all(each == found[0] for each in found)


@pytest.mark.alone
def test_a_thread_count_that_changes_meanwhile_changes_nothing() -> None:
    """As when another engine is built: what a region shares may not depend on the count any more."""
    shape = tiny_shape("llama", head_dim=16, hidden_size=512, ffn_size=40)
    expected = answers(shape, stacked=True)
    threads, done = runtime.num_threads(), threading.Event()

    def change() -> None:
        for number in itertools.count():
            if done.is_set():
                return
            runtime.kernels().quire_threads(*runtime._openmp(), 2 + number % 3)
            time.sleep(0.0003)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        assert [answers(shape, stacked=True) for _ in range(5)] == [expected] * 5
    finally:
        done.set()
        changing.join()
        runtime.set_num_threads(threads)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {"o_bias": True, "bias": True, "tied_embeddings": False}),
        ("mistral", {"sliding_window": 70}),
        ("opt", {"sums": True, "final_norm": False}),
    ],
)
def test_the_stack_equals_the_layers_one_by_one(family: str, changes: dict[str, Any]) -> None:
    shape = tiny_shape(family, head_dim=16, hidden_size=48, ffn_size=40, **changes)
    assert answers(shape, stacked=True) == answers(shape, stacked=False)


def test_the_stack_squares_activations() -> None:
    shape = tiny_shape("opt", head_dim=16, hidden_size=48, ffn_size=40)
    squared = PlainShape(ffn_size=40, activation="relu-squared", bias=True)
    shape = replace(shape, layers=tuple(replace(layer, ffn=squared) for layer in shape.layers))
    assert answers(shape, stacked=True) == answers(shape, stacked=False)


@pytest.mark.parametrize("family", [*OF_KINDS, "opt"])
def test_the_stack_equals_the_layers_of_every_kind(family: str, tmp_path: Path) -> None:
    with open_model(save_tiny(tmp_path, family)) as weights:
        found = [answers(weights.shape, stacked, weights) for stacked in (True, False)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "kind",
    [
        "Q4_K",
        {"": "Q4_K", "v": "Q6_K", "down": "Q6_K", "embed": "Q8_0"},
        {"": "Q5_0", "up": "Q8_0", "k": "BF16", "o": "Q4_1"},
    ],
    ids=["same", "mixed", "gates apart"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_stack_equals_the_layers_of_packed_weights(family: str, kind: str | dict[str, str], tmp_path: Path) -> None:
    """Files whose types mix within a product, and whose gates are stored otherwise than what they let through."""
    shape = tiny_shape(family, head_dim=64, hidden_size=256, ffn_size=512, tied_embeddings=False)
    write_gguf(tmp_path / "model.gguf", shape, kind=kind)
    with open_model(tmp_path / "model.gguf") as weights:
        found = [answers(weights.shape, stacked, weights) for stacked in (True, False)]
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_stack_profiles_like_the_layers_one_by_one(family: str) -> None:
    shape = tiny_shape(family, head_dim=16, hidden_size=48, ffn_size=40)
    model = make_engine(shape, **{"model.dtype": "bfloat16"}).runner.model
    assert isinstance(model, Decoder) and model._stack is not None
    heads, group = shape.num_kv_heads, shape.num_q_heads // shape.num_kv_heads
    found = []
    for stack in (model._stack, None):
        model._stack = stack
        spec = make_spec(Shape(heads, group, 16, torch.bfloat16, shape.num_layers), 8, sums=True)
        prompts, backend = Prompts(spec), CpuAttention(spec)
        for step in ([(0, 130, None)], [(1, 1, None), (0, 70, 66)]):
            plan = backend.plan(prompts.step(step))
            rows = sum(count for _, count, _ in step)
            model.hidden(torch.arange(rows) % 250, torch.arange(rows), plan)
        words = np.full((shape.num_layers, heads, 4), 0x5555_5555_5555_5555, np.uint64)
        found.append((prompts.of(0), plan.recovered(1, words, np.full((shape.num_layers, heads), 9))))
    assert all(np.array_equal(*each) for each in zip(*found, strict=True))
    assert np.abs(found[0][0].sum(-1) - 70).max() < 0.1 and 0.4 < found[0][1].mean() < 0.7
