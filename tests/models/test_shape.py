"""Sizes and rotation tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quire.models.rope import Rope
from tests.tiny_models import RandomWeights, tiny_shape


def test_importing_shape_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys, quire.models.families; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm", "opt"])
def test_parameters_are_counted_from_the_tensors(family: str) -> None:
    shape = tiny_shape(family)
    weights = RandomWeights(shape)
    total = sum(weights.tensor(name).numel() for name in shape.tensor_shapes)
    assert shape.num_parameters == total
    assert shape.weight_bytes("bfloat16") == 2 * total and shape.weight_bytes("float32") == 4 * total


def test_cache_bytes_of_a_token() -> None:
    shape = tiny_shape(num_layers=3, num_kv_heads=2, num_q_heads=4, head_dim=12)
    assert shape.kv_bytes_per_token(2) == 3 * 2 * 2 * 12 * 2


def test_tables_are_the_cosines_and_sines_of_position_times_frequency() -> None:
    cos, sin = Rope(theta=10000.0, dim=8).tables(10_000)  # more than one block of rows
    assert cos.shape == sin.shape == (10_000, 4) and cos.dtype == np.float32
    for position in (0, 1, 4095, 4096, 9999):
        for pair in range(4):
            angle = position * 10000.0 ** (-2 * pair / 8)
            assert cos[position, pair] == np.float32(math.cos(angle))
            assert sin[position, pair] == np.float32(math.sin(angle))


def test_linear_rope_is_the_plain_one_at_a_fraction_of_the_position() -> None:
    plain, stretched = Rope(theta=100.0, dim=8), Rope(theta=100.0, dim=8, kind="linear", factor=4.0)
    np.testing.assert_allclose(stretched.tables(41)[0][40], plain.tables(11)[0][10], atol=1e-6)


def test_dynamic_rope_depends_on_the_engine_and_not_on_a_request() -> None:
    rope = Rope(theta=10000.0, dim=16, kind="dynamic", factor=2.0, original_context=64)
    plain = Rope(theta=10000.0, dim=16)
    np.testing.assert_array_equal(rope.frequencies(10), plain.frequencies(10))
    np.testing.assert_array_equal(rope.frequencies(64), plain.frequencies(64))
    beyond = rope.frequencies(128)
    assert beyond[0] == 1.0 and (beyond[1:] < plain.frequencies(0)[1:]).all()
    np.testing.assert_array_equal(rope.tables(128)[0][:64], np.cos(np.outer(np.arange(64), beyond)).astype(np.float32))


def test_llama3_frequencies_agree_with_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters = {**scaling, "rope_theta": 500000.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(
        hidden_size=4096, num_attention_heads=32, max_position_embeddings=131072, rope_parameters=parameters
    )
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    ours = Rope(
        theta=500000.0,
        dim=128,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context=8192,
    )
    assert attention_factor == 1.0
    np.testing.assert_allclose(ours.frequencies(0), theirs.numpy(), rtol=1e-6)


def test_frequency_factors_divide() -> None:
    rope = Rope(theta=100.0, dim=4, kind="factors", factors=(1.0, 8.0))
    np.testing.assert_allclose(rope.frequencies(0), [1.0, 100.0**-0.5 / 8])
