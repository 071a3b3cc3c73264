"""`quire bench throughput`: tokens per second, of whole answers only."""

import pytest

from quire.cli import main
from tests.tiny_models import save_broken, save_tiny

SMALL = ["--cache.memory", "4MiB", "--runtime.device", "cpu", "--runtime.threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    return str(save_broken(tmp_path_factory.mktemp("broken")))


def test_bench_measures(folder, tmp_path, capsys):
    out = tmp_path / "bench.jsonl"
    words = ["--batch", "2", "--prefill", "64", "--input-tokens", "16", "--output-tokens", "256", "--repeats", "3"]
    assert main(["bench", "throughput", folder, *words, *SMALL, "--json", str(out)]) == 0
    assert capsys.readouterr().out.count("tokens/s") == 2
    assert [line.split('"')[3] for line in out.read_text().splitlines()] == ["prefill", "decode"]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_bench_measures_no_answer_that_is_cut_short(folder, phase, tmp_path, capsys):
    out = tmp_path / "bench.jsonl"
    # 4 MiB hold more than the model's context of 512 tokens.
    words = ["--prefill"] if phase == "decode" else ["--batch", "--prefill", "600"]
    lengths = ["--input-tokens", "400", "--output-tokens", "200", "--repeats", "1"]
    assert main(["bench", "throughput", folder, *words, *lengths, *SMALL, "--json", str(out)]) == 2
    error = capsys.readouterr().err
    assert "512" in error and error.count("\n") == 1 and not out.exists()


def test_bench_measures_no_model_that_fails(broken, tmp_path, capsys):
    out = tmp_path / "bench.jsonl"
    assert main(["bench", "throughput", broken, "--repeats", "1", *SMALL, "--json", str(out)]) == 2
    found = capsys.readouterr()
    assert "NaN" in found.err and "tokens/s" not in found.out and not out.exists()
