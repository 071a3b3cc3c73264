"""Folders of safetensors: reading them, and messages for each kind of damage."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelError
from quire.models import weights
from quire.models.decoder import build_model
from quire.models.layers import TorchOps, torch_dtype
from quire.models.weights import open_model
from tests.dense_plan import DensePlan
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def test_tensors_come_under_canonical_names(llama: Path) -> None:
    stored = load_file(llama / "model.safetensors")
    with open_model(llama) as checkpoint:
        assert torch.equal(checkpoint.tensor("layers.1.gate.weight"), stored["model.layers.1.mlp.gate_proj.weight"])
        assert torch.equal(checkpoint.tensor("head.weight"), stored["lm_head.weight"])
        assert checkpoint.tensor("norm.weight", torch.bfloat16).dtype == torch.bfloat16
        assert checkpoint.blocks("layers.1.gate.weight") is None


def test_tensors_stay_valid_after_the_checkpoint_is_closed(llama: Path) -> None:
    checkpoint = open_model(llama)
    tensor = checkpoint.tensor("embed.weight")
    before = tensor.clone()
    checkpoint.close()
    assert torch.equal(tensor, before)


def test_a_same_dtype_tensor_is_a_view_of_the_file(llama: Path) -> None:
    with open_model(llama) as checkpoint:
        assert checkpoint.tensor("embed.weight").data_ptr() == checkpoint.tensor("embed.weight").data_ptr()


def test_shards_are_one_model(tmp_path: Path) -> None:
    import transformers

    whole = save_tiny(tmp_path / "whole", seed=5)
    model = transformers.AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    with open_model(whole) as one, open_model(tmp_path / "shards") as many:
        assert one.shape == many.shape
        for name in one.shape.tensor_shapes:
            assert torch.equal(one.tensor(name), many.tensor(name)), name


def test_files_are_reopened_so_that_read_pages_can_leave(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.models.weights._REOPEN_BYTES", 1)
    with open_model(llama) as checkpoint:
        first = checkpoint.tensor("embed.weight")
        assert torch.equal(first, checkpoint.tensor("embed.weight"))


def test_names_without_the_model_prefix_are_understood(copy: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    with open_model(copy) as checkpoint:
        expected = checkpoint.tensor("layers.0.q.weight").clone()
    edit_tensors(copy, strip)
    with open_model(copy) as checkpoint:
        assert torch.equal(checkpoint.tensor("layers.0.q.weight"), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_builds(llama: Path, dtype: str) -> None:
    with open_model(llama) as checkpoint:
        model = build_model(checkpoint.shape, checkpoint, TorchOps(), torch_dtype(dtype))
    assert model.head(torch.zeros(1, 48, dtype=torch_dtype(dtype))).dtype == torch.float32


def test_the_checkpoints_own_dtype_is_known(copy: Path) -> None:
    edit_config(copy, dtype="bfloat16")
    assert open_model(copy).shape.dtype == "bfloat16"
    edit_config(copy, dtype=None)
    assert open_model(copy).shape.dtype == "float32"
    edit_tensors(copy, lambda tensors: tensors.update({name: tensor.half() for name, tensor in tensors.items()}))
    assert open_model(copy).shape.dtype == "float16"


def test_a_tied_model_may_carry_its_head_twice(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tie_word_embeddings=True)
    edit_tensors(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert open_model(folder).shape.tied_embeddings


@pytest.mark.parametrize("change", ["all", "last number"])
def test_a_head_that_differs_from_a_tied_embedding_is_used_and_said(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers 5."""
    import transformers

    folder = save_tiny(tmp_path, tie_word_embeddings=True)

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[slice(None) if change == "all" else (-1, -1)] += 1
        tensors["lm_head.weight"] = head

    edit_tensors(folder, add_head)
    tokens = torch.arange(20)
    with open_model(folder) as checkpoint:
        assert not checkpoint.shape.tied_embeddings
        model = build_model(checkpoint.shape, checkpoint, TorchOps(), torch.float32)
        plan = DensePlan(model.shape)
        found = model.head(model.hidden(tokens, plan.step([(0, 20)]), plan))
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens[None]).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert "lm_head.weight differs from model.embed_tokens.weight: the head is used" in caplog.text


def test_a_tied_head_of_another_size_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tie_word_embeddings=True)
    edit_tensors(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"][:5].clone()})
    )
    assert "lm_head.weight has shape [5, 48], expected [258, 48]" in refusal(folder)


def test_a_missing_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "tensor model.layers.1.mlp.up_proj.weight is missing" in refusal(copy)


def test_a_wrong_shape_is_named(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    assert "tensor model.norm.weight has shape [47], expected [48]" in refusal(copy)


def test_a_tensor_the_decoder_would_ignore_is_refused(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}))
    assert "tensor model.layers.0.self_attn.q_proj.bias is not part of a llama model" in refusal(copy)


def test_an_unreadable_dtype_is_named(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)}))
    assert "tensor model.norm.weight has dtype I32" in refusal(copy)


@pytest.mark.parametrize("kept", [0, 4, 200, 5000])
def test_a_truncated_file_is_named(copy: Path, kept: int) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert "model.safetensors: truncated or not a safetensors file" in refusal(copy)


def test_a_missing_shard_is_named(copy: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors is missing" in refusal(copy)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/{}", "a/../../x.safetensors", "", "a\0b"])
def test_a_shard_outside_the_folder_is_not_opened(copy: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = copy.parent / "other"
    outside.mkdir()
    (copy / "model.safetensors").rename(outside / "model.safetensors")
    name = name.format(outside / "model.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    monkeypatch.setattr(weights, "_File", lambda path: pytest.fail(f"{path} was opened"))
    message = refusal(copy)
    assert "which is not a file in the model's folder" in message and "model.safetensors.index.json" in message


def test_a_shard_in_the_folder_may_be_a_link_as_in_the_hubs_cache(copy: Path) -> None:
    blob = copy.parent / "blob"
    (copy / "model.safetensors").rename(blob)
    (copy / "model-1.safetensors").symlink_to("../blob")
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_model(copy) as checkpoint:
        assert checkpoint.tensor("norm.weight") is not None


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "setting weight_map names no file"),
        ({"weight_map": None}, "setting weight_map names no file"),
        ({"weight_map": []}, r"setting weight_map is \[\]; it must be an object"),
        ({"weight_map": {"a": 5}}, "setting weight_map.a is 5; it must be text"),
        ({"weight_map": {"a": None}}, "setting weight_map.a is missing"),
        ({"weight_map": {"a": "\ud800"}}, r"setting weight_map.a is '\\ud800'; it must be text"),
        ({"weight_map": {"a": "x" * 5000}}, "cannot be read"),
        ({"weight_map": {"a": "two\nlines"}}, r"two\\nlines is missing"),
    ],
)
def test_a_damaged_index_is_named(copy: Path, index: Any, message: str) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert re.search(message, refusal(copy))


def test_a_number_of_layers_beyond_the_tensors_is_refused_before_their_names_are_listed(copy: Path) -> None:
    edit_config(copy, num_hidden_layers=6e4)
    start = time.process_time()
    assert re.search("60000 layers, but only [0-9]+ tensors", refusal(copy))
    assert time.process_time() - start < 5


def test_a_generation_config_of_the_wrong_type_is_named(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [None]}))
    assert "generation_config.json: setting eos_token_id" in refusal(copy)


def test_a_refusal_is_one_line_whatever_the_names_in_the_file(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({"first\nsecond": torch.ones(48)}))
    assert r"tensor first\nsecond is not part of a llama model" in refusal(copy)
    edit_config(copy, model_type="x" * 10_000)
    assert len(refusal(copy)) < 1100


def test_pickles_are_never_loaded(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "no .safetensors file" in refusal(copy)
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    assert "only pickled weights (pytorch_model.bin)" in refusal(copy)


def test_an_unknown_architecture_is_named(copy: Path) -> None:
    edit_config(copy, model_type="rwkv")
    assert "architecture 'rwkv' is not supported" in refusal(copy)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_a_broken_config_is_named(copy: Path, content: str) -> None:
    (copy / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json" in refusal(copy)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert refusal(tmp_path).endswith("config.json is missing; the folder has a.gguf: give that file's path")


def test_paths_that_are_no_models_are_named(tmp_path: Path) -> None:
    other = tmp_path / "model.bin"
    other.write_bytes(b"")
    assert "neither a folder" in refusal(other)
    assert "no such file or folder" in refusal(tmp_path / "absent")
    assert "cannot be read" in refusal(tmp_path / ("x" * 300))
