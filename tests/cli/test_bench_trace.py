"""`quire bench trace`: flags and traces that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cli import main
from tests.tiny_models import save_tiny
from tests.trace_cases import FORKS, write

FLAGS = ["--model.dtype", "float32", "--runtime.device", "cpu", "--runtime.threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "needs --trace FILE"),
        (["--trace", "/nowhere"], "cannot read the trace /nowhere"),
        (["--trace", "EMPTY"], "has no requests"),
        (["--trace", "TRACE", "--block-tokens", "30"], "--block-tokens is 30; it must be a multiple of 4"),
        (["--trace", "TRACE", "--speed", "0"], "--speed is 0.0"),
        (["--trace", "TRACE", "--output-tokens", "0"], "--output-tokens is 0"),
        (["--trace", "TRACE", "--batch", "1"], "--batch is for quire bench throughput, not for trace"),
        (["--trace", "TRACE", "--cache.share", "false"], "cache.share is false"),
        (["--trace", "TRACE", "--block-tokens", "1024"], "line 7: 7992 prompt tokens and 1024 output tokens exceed"),
        (["--trace", "TRACE", "--json", "/"], "cannot write /"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(
    folder: str, flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "EMPTY").write_text("\n")
    write(tmp_path / "TRACE", FORKS)
    words = [str(tmp_path / word) if word.isupper() else word for word in flags]
    assert main(["bench", "trace", folder, *words, *FLAGS]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_flags_of_the_trace_are_not_for_throughput(folder: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "throughput", folder, "--requests", "5"]) == 2
    assert "--requests is for quire bench trace, not for throughput" in capsys.readouterr().err
