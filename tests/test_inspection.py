"""What a model needs, as `quire inspect` shows it."""

import json

import pytest

from quire.cli import main
from tests.tiny_models import save_tiny, tiny_shape, write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


def test_inspect_prints_what_fits(folder, capsys):
    assert main(["inspect", folder, "--cache.memory", "1MiB", "--model.dtype", "float32", "--length", "64", "200"]) == 0
    text = capsys.readouterr().out
    for said in ("bytes per token", "tokens that fit", "sequences of 64", "sequences of 200", "weights", "fails first"):
        assert said in text
    assert (
        main(["inspect", folder, "--cache.memory", "1MiB", "--model.dtype", "float32", "--length", "64", "--json"]) == 0
    )
    facts = json.loads(capsys.readouterr().out)
    # 2 layers, 2 kv heads of 12, keys and values of 4 bytes: 384 bytes a token.
    assert facts["bytes_per_token"] == 2 * 2 * 12 * 2 * 4
    assert facts["sequences"]["64"] == facts["num_chunks"] == facts["tokens"] // 64
    assert facts["cache_bytes"] <= 2**20


def test_inspect_says_that_a_length_is_too_long(folder, capsys):
    words = ["inspect", folder, "--cache.memory", "1MiB", "--length", "64", "99999999"]
    assert main(words) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "99,999,999" in line]
    assert row[3] == "0" and " ".join(row[4:]) == "the longest request has 512 tokens"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequences"]["99999999"] == 0


@pytest.mark.parametrize(("how", "share"), [("budget", 0.5), ("threshold", 0.9)])
def test_inspect_says_that_its_numbers_are_without_retention(folder, capsys, how, share):
    words = ["inspect", folder, "--cache.memory", "1MiB", f"--retain.{how}", str(share)]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f" retention {how} {share} shrinks sequences after their prompt; not counted here " in printed
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["retain"][how] == share


def test_inspect_shows_the_calibration_below_the_cache(tmp_path, capsys):
    folder = save_tiny(tmp_path, head_dim=64)
    assert main(["inspect", str(folder), "--cache.memory", "4MiB", "--cache.codec", "nuq3"]) == 0
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names[names.index("cache") + 1] == "calibration"


def test_inspect_shows_weights_by_type(tmp_path, capsys):
    shape = tiny_shape("llama", hidden_size=256, head_dim=64, ffn_size=256, vocab_size=272, tied_embeddings=False)
    write_gguf(tmp_path / "mixed.gguf", shape, kind={"": "Q4_K", "v": "Q6_K", "embed": "Q2_K"})
    vectors, head = ("F32", "bfloat16"), ("Q4_K", "Q4_K")
    for weights, held in (
        ("native", {head, ("Q6_K", "Q6_K"), ("Q2_K", "bfloat16"), vectors}),
        ("g4", {head, ("Q4_K", "G4"), ("Q6_K", "G4"), ("Q2_K", "Q8_0"), vectors}),
    ):
        words = ["inspect", str(tmp_path / "mixed.gguf"), "--cache.memory", "4MiB", "--model.weights", weights]
        assert main([*words, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        parts = facts["weights"]
        assert {(part["stored"], part["held"]) for part in parts} == held
        assert sum(part["numbers"] for part in parts) == facts["num_parameters"]
        assert sum(part["num_bytes"] for part in parts) == facts["weight_bytes"]
        assert [part["num_bytes"] for part in parts] == sorted((part["num_bytes"] for part in parts), reverse=True)
        assert {part["tensors"] for part in parts if part["stored"] == "Q6_K"} == {shape.num_layers}
        assert main(words) == 0
        text = capsys.readouterr().out
        assert "Q6_K" in text and "M numbers in" in text


def test_inspect_refuses_a_cache_that_holds_nothing(folder, capsys):
    assert main(["inspect", folder, "--cache.memory", "1KiB"]) == 2
    assert "cache.memory" in capsys.readouterr().err
