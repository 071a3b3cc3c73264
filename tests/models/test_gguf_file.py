"""GGUF files: every quantization compared with gguf-py, the row order of llama files, and messages for damage."""

from __future__ import annotations

import re
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import ModelError
from quire.models.decoder import build_model
from quire.models.gguf_file import GgufFile
from quire.models.layers import TorchOps
from quire.models.weights import open_model
from tests.dense_plan import DensePlan
from tests.effort import tries
from tests.real_model import embedded_gguf
from tests.tiny_models import RandomWeights, tiny_shape, write_gguf

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")


def sized(architecture: str, kind: str) -> Any:
    """A shape whose rows are whole blocks of the quantization."""
    width = 256 if kind.endswith("_K") else 64
    return tiny_shape(architecture, hidden_size=width, ffn_size=2 * width, head_dim=width // 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_every_quantization_is_decoded_as_gguf_py_does(architecture: str, kind: str, tmp_path: Path) -> None:
    shape = sized(architecture, kind)
    expected = write_gguf(tmp_path / "model.gguf", shape, kind=kind)
    with open_model(tmp_path / "model.gguf") as checkpoint:
        assert checkpoint.shape.tensor_shapes == shape.tensor_shapes
        for name, values in expected.items():
            found = checkpoint.tensor(name, torch.float32)
            assert torch.equal(found, values), f"{name}: {(found - values).abs().max()}"
            rounded = checkpoint.tensor(name, torch.bfloat16)
            assert torch.equal(rounded, values.to(torch.bfloat16)), name


def test_the_shape_survives_the_file(tmp_path: Path) -> None:
    shape = tiny_shape("llama", tied_embeddings=True, norm_eps=2.0**-20, sliding_window=None, dtype="bfloat16")
    ids = {"tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257}
    write_gguf(tmp_path / "model.gguf", shape, extra=ids)
    assert open_model(tmp_path / "model.gguf").shape == shape


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_unquantized_tensors_come_in_their_own_dtype(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_shape(), kind=kind)
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[kind]
    assert open_model(tmp_path / "model.gguf").tensor("layers.0.o.weight").dtype == dtype


def test_a_llama_file_gives_the_logits_of_the_model_it_was_made_from(tmp_path: Path) -> None:
    shape = tiny_shape("llama")
    weights = RandomWeights(shape, seed=3)
    write_gguf(tmp_path / "model.gguf", shape, weights)
    tokens = torch.arange(20)
    logits = []
    with open_model(tmp_path / "model.gguf") as checkpoint:
        for source in (weights, checkpoint):
            model = build_model(source.shape, source, TorchOps(), torch.float32)
            plan = DensePlan(model.shape)
            logits.append(model.head(model.hidden(tokens, plan.step([(0, 20)]), plan)))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "Q2_K"])
def test_plain_numbers_and_rare_formats_have_no_blocks(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", sized("llama", kind), kind=kind)
    assert open_model(tmp_path / "model.gguf").blocks("layers.0.q.weight") is None


def test_a_rare_format_is_left_to_the_gguf_package(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf", sized("llama", "Q2_K"), kind="Q2_K")
    assert torch.equal(
        open_model(tmp_path / "model.gguf").tensor("layers.0.q.weight", torch.float32), expected["layers.0.q.weight"]
    )


def write_with_factors(path: Path, factors: np.ndarray, **extra: Any) -> None:
    import gguf

    original = gguf.GGUFWriter.write_header_to_file

    def with_factors(self: Any, *args: Any, **kwargs: Any) -> None:
        self.add_tensor("rope_freqs.weight", factors)
        original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        write_gguf(path, tiny_shape(), extra=extra)


def test_frequency_factors_in_the_file_stretch_the_rotation(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_with_factors(path, np.arange(1, 7, dtype=np.float32))
    rope = open_model(path).shape.first.rope
    assert rope is not None and rope.kind == "factors" and rope.factors == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


@pytest.mark.parametrize(
    ("factors", "extra", "message"),
    [
        (np.ones(0, np.float32), {}, r"rope_freqs.weight has shape \[0\]"),
        (np.ones((2, 3), np.float32), {}, r"rope_freqs.weight has shape \[2, 3\]"),
        (np.ones(7, np.float32), {}, "7 frequency factors for 6 channel pairs"),
        (np.zeros(6, np.float32), {}, "a frequency factor that is not a positive number"),
        (np.ones(6, np.int32), {}, "GGUF type I32 is not supported"),
        (np.ones(6, np.float32), {"llama.rope.scaling.factor": 4.0}, "scaled both by rope_freqs.weight and by"),
    ],
)
def test_unusable_frequency_factors_are_named(
    factors: np.ndarray, extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_with_factors(path, factors, **extra)
    assert re.search(message, refusal(path, path.read_bytes()))


def test_linear_scaling_and_window_in_the_metadata(tmp_path: Path) -> None:
    scaling = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.attention.sliding_window": 32,
    }
    write_gguf(tmp_path / "model.gguf", tiny_shape(), extra=scaling)
    shape = open_model(tmp_path / "model.gguf").shape
    assert shape.first.rope is not None and shape.first.rope.kind == "linear" and shape.first.rope.factor == 4.0
    assert shape.sliding_window == 32


def test_the_old_name_of_the_linear_factor_is_read(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_shape(), extra={"llama.rope.scale_linear": 4.0})
    rope = open_model(tmp_path / "model.gguf").shape.first.rope
    assert rope is not None and rope.kind == "linear" and rope.factor == 4.0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.eos_token_id", "x", "setting tokenizer.ggml.eos_token_id is 'x'"),
        ("llama.rope.freq_base", float("nan"), "setting llama.rope.freq_base is nan"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, "layer_norm_rms_epsilon is -1.0; it must be at least 0"),
        ("llama.block_count", 60_000, "60000 layers, but only"),
    ],
)
def test_settings_that_cannot_be_are_named(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_shape(), extra={key: value})
    start = time.process_time()
    assert message in refusal(path, path.read_bytes())
    assert time.process_time() - start < 5


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, tiny_shape(), extra={"tokenizer.ggml.tokens": ["a", "b"]})
    return path.read_bytes()


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        open_model(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def test_a_file_cut_short_is_named(good: bytes, tmp_path: Path) -> None:
    assert "truncated: tensor" in refusal(tmp_path / "model.gguf", good[:-100])


def test_special_tokens_outside_the_vocabulary_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """4294967295 is -1 in 32 bits without a sign."""
    ids = {"tokenizer.ggml.eos_token_id": 2**32 - 1, "tokenizer.ggml.bos_token_id": 258}
    write_gguf(tmp_path / "model.gguf", tiny_shape(), extra={**ids, "tokenizer.ggml.eot_token_id": 257})
    shape = open_model(tmp_path / "model.gguf").shape
    assert (shape.bos_token_id, shape.eos_token_ids) == (None, (257,))
    assert "bos_token_id is 258, outside the vocabulary of 258 tokens" in caplog.text
    assert "eos_token_id is 4294967295, outside the vocabulary of 258 tokens; it ends no answer" in caplog.text


def test_a_header_cut_anywhere_is_named(good: bytes, tmp_path: Path) -> None:
    header = good.index(b"output_norm.weight")
    for size in range(0, header, 37):
        refusal(tmp_path / "model.gguf", good[:size])
    assert "the header is truncated (24 bytes)" in refusal(tmp_path / "model.gguf", good[:24])


def test_a_header_with_random_damage_never_escapes_as_another_error(good: bytes, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    header = good.index(b"output_norm.weight")
    path = tmp_path / "model.gguf"
    for _ in range(tries(300)):
        damaged = bytearray(good)
        for position in rng.integers(0, header, 3):
            damaged[position] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            open_model(path)
        except ModelError as error:
            assert "\n" not in str(error)


def test_other_files_are_no_gguf(tmp_path: Path) -> None:
    assert "not a GGUF file" in refusal(tmp_path / "model.gguf", b"")
    assert "not a GGUF file" in refusal(tmp_path / "model.gguf", b"PK\x03\x04" * 10)


def test_old_and_big_endian_files_are_named(good: bytes, tmp_path: Path) -> None:
    assert "version 1 is not supported" in refusal(tmp_path / "model.gguf", good[:4] + struct.pack("<I", 1) + good[8:])
    assert "is not supported" in refusal(tmp_path / "model.gguf", good[:4] + struct.pack(">I", 3) + good[8:])


def test_a_missing_tensor_is_named(good: bytes, tmp_path: Path) -> None:
    renamed = good.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    assert "tensor blk.1.ffn_up.weight is missing" in refusal(tmp_path / "model.gguf", renamed)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_shape(), extra={"llama.feed_forward_length": 81})
    with pytest.raises(ModelError, match=r"tensor blk.0.ffn_gate.weight has shape \[80, 48\], expected \[81, 48\]"):
        open_model(path)


@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"])
def test_a_number_for_each_layer_is_taken_if_all_are_the_same(key: str, tmp_path: Path) -> None:
    shape = tiny_shape("llama")
    numbers = {"attention.head_count": 4, "attention.head_count_kv": 2, "feed_forward_length": 80}
    write_gguf(tmp_path / "model.gguf", shape, extra={f"llama.{key}": [numbers[key]] * 2})
    assert open_model(tmp_path / "model.gguf").shape.tensor_shapes == shape.tensor_shapes
    for wrong in ([numbers[key], 1], [numbers[key]] * 3):
        write_gguf(tmp_path / "other.gguf", shape, extra={f"llama.{key}": wrong})
        with pytest.raises(ModelError, match=rf"setting llama\.{key} is .* the same number for every layer"):
            open_model(tmp_path / "other.gguf")


def test_an_unknown_architecture_is_named(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_shape(), extra={"general.architecture": "mamba"})
    with pytest.raises(ModelError, match="GGUF architecture 'mamba' is not supported"):
        open_model(path)


def test_the_embedded_model_decodes_as_gguf_py_does() -> None:
    import gguf

    path = embedded_gguf()
    file = GgufFile(path)
    checkpoint = open_model(path)
    for name, stored_name in (
        ("embed.weight", "token_embd.weight"),
        ("layers.29.down.weight", "blk.29.ffn_down.weight"),
    ):
        stored = file.header.tensors[stored_name]
        raw = file.bytes_of(stored).numpy().reshape(stored.shape[0], -1)
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[stored.kind])
        assert np.array_equal(checkpoint.tensor(name, torch.float32).numpy(), expected), name


def test_the_embedded_model_is_what_its_card_says() -> None:
    shape = open_model(embedded_gguf()).shape
    assert shape.num_parameters == 134_515_008
    assert (shape.num_layers, shape.num_q_heads, shape.num_kv_heads, shape.head_dim) == (30, 9, 3, 64)
    assert shape.max_context == 8192 and shape.tied_embeddings and shape.eos_token_ids == (2,)
    assert shape.kv_bytes_per_token(2) == 23_040
