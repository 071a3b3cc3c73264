"""`quire plan offload`: a policy for a machine that nobody here has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.models.families import shape_from_config
from quire.offload.planning.sizes import sizes_of
from quire.offload.policy import read_policy
from quire.offload.units import TIERS
from tests.cli.commands import printed, refused
from tests.opt_paper import OPT_30B

CONFIG = {
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 7168,
    "ffn_dim": 28672,
    "num_hidden_layers": 48,
    "num_attention_heads": 56,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 7168,
    "torch_dtype": "float16",
    "eos_token_id": 2,
    "bos_token_id": 2,
}
T4 = ["--hardware", "t4"]
ROOM = [*T4, "--plan.gpu", "16GiB", "--plan.cpu", "200GiB", "--plan.disk", "1500GiB"]
ONE = ["--micro-batch", "1", "--num-batches", "1"]
"""The block that needs least: without one, all blocks are tried before none is found to fit."""
BLOCK = ["--micro-batch", "48", "--num-batches", "3"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return printed(capsys, "plan", "offload", *words)


def test_a_model_s_numbers_are_the_paper_s() -> None:
    """But for biases and norms, and with the exact numbers of heads."""
    shape = shape_from_config(CONFIG, {})

    def plain(name: str, size: tuple[int, ...]) -> float:
        numbers = 2.0
        for each in size:
            numbers *= each
        return numbers

    sizes = sizes_of(shape, "float16", plain, 4.0 * 7168)
    assert OPT_30B.layer_bytes < sizes.layer_bytes < 1.001 * OPT_30B.layer_bytes
    assert sizes.layer_flops == OPT_30B.layer_bytes  # 2 operations and 2 bytes per weight
    assert sizes.pair_flops == 4 * 7168 and sizes.hidden_bytes == 2 * 7168
    assert sizes.fixed_bytes == pytest.approx(2.0 * (50272 + 2050) * 7168, rel=1e-3)


def test_opt_30b_on_a_t4_is_near_the_golden_value_and_the_file_is_its_policy(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.json"
    found = planned(capsys, config, *ROOM, *BLOCK, "--output", str(file))
    assert found["throughput"] == pytest.approx(6.974, rel=0.01)
    assert found["attended"] == pytest.approx(1) and found["cache"]["cpu"] == pytest.approx(1)
    policy = read_policy(file, TIERS)
    assert (policy.micro_batch, policy.num_batches) == (48, 3)
    assert policy.weights.named(TIERS) == found["weights"]


def test_a_machine_is_named_and_not_assumed(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "offload", config]) == 2
    told = capsys.readouterr()
    assert "needs --hardware FILE, which quire plan hardware makes" in told.err and not told.out


def test_stages_that_all_overlap_are_faster(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    sums, most = (planned(capsys, config, *ROOM, *BLOCK, "--form", form) for form in ("sums", "max"))
    assert most["throughput"] > sums["throughput"]


def test_packed_weights_and_cache_need_less(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = [*T4, "--plan.gpu", "16GiB", "--plan.cpu", "24GiB", "--plan.disk", "1GiB", *ONE]
    assert main(["plan", "offload", config, *small]) == 2
    told = capsys.readouterr().err
    assert "no placement fits" in told and " lacks " in told and "--model.weights g4" in told
    found = planned(capsys, config, *small, "--model.weights", "g4", "--cache.codec", "g4")
    assert found["throughput"] > 0


def test_people_get_percent_and_what_limits_and_one_thing_is_one(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "offload", config, *ROOM, *BLOCK]) == 0
    told = capsys.readouterr().out
    assert "3 micro-batches of 48" in told and "90.76 %" in told and "limited by prefill: compute" in told
    assert main(["plan", "offload", config, *ROOM, *ONE]) == 0
    assert "blocks of 1 sequence: 1 micro-batch of 1\n" in capsys.readouterr().out


def test_a_shared_beginning_and_retention_raise_throughput(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = planned(capsys, config, *ROOM, *BLOCK)
    for more in (["--shared-tokens", "256"], ["--retain.budget", "0.5"]):
        assert planned(capsys, config, *ROOM, *BLOCK, *more)["throughput"] > plain["throughput"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hardware", "h100"], "--hardware is 'h100'"),
        (["--slack", "1.5"], "--slack is 1.5"),
        (["--retain.threshold", "0.9"], "plan with retain.budget"),
        (["--shared-tokens", "512"], "--shared-tokens is 512"),
        (["--plot", "x.gif"], "cannot draw x.gif"),
        (["--plan.cpu", "16GiB", "--plan.disk", "0", *ONE], "lacks"),
        (["--output", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
    ],
)
def test_wrong_arguments_are_one_line(
    config: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, ["plan", "offload", config, *T4, *words], message)


def test_throughput_is_drawn(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    planned(capsys, config, *ROOM, "--micro-batch", "48", "--plot", str(file))
    assert "<svg" in file.read_text()
