"""`quire generate`: one prompt streamed, progress, and signals."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.cli import main
from tests.generating import generate, read_all, write

ROOT = Path(__file__).parents[2]


def test_a_prompt_that_fails_says_why_and_exits_with_one(failing, capsys):
    assert main(["generate", "fake", "abcx"]) == 1
    assert capsys.readouterr() == ("a\n", "quire: NaN in the logits\n")


def test_a_prompt_streams_to_stdout(fake, capsys):
    assert main(["generate", "fake", "Ünï 🌍"]) == 0
    assert capsys.readouterr().out == "Ünï 🌍\n"
    assert main(["generate", "fake", "hi", "--chat"]) == 0
    assert capsys.readouterr().out == "user: hi\nassistant:\n"


def test_a_prompt_comes_from_stdin(fake, capsys, stdin):
    stdin(b"piped")
    assert main(["generate", "fake", "-", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "pipe\n"
    stdin(b"piped")
    assert main(["generate", "fake", "--max-tokens", "4", "-"]) == 0
    assert capsys.readouterr().out == "pipe\n"


def test_what_stdin_cannot_give_is_told(fake, capsys, stdin, monkeypatch):
    stdin(b"\xff")
    assert main(["generate", "fake", "-"]) == 2
    assert "stdin is not UTF-8" in capsys.readouterr().err
    stdin(b"\xff")
    assert main(["generate", "fake", "--input", "-"]) == 2
    assert capsys.readouterr().err == "quire: stdin:1: invalid UTF-8: byte 1 is 0xff\n"
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", "fake", "-"]) == main(["generate", "fake", "--input", "-"]) == 2
    assert capsys.readouterr().err.count("closed") == 2


PROGRESS = r"quire: [0-5]/5 done, \d+ tokens/s(, \d+ s left)?"


def test_without_a_terminal_progress_is_a_line_now_and_then(fake, files, capsys, monkeypatch):
    write(files[0], *({"prompt": "abcd"} for _ in range(5)))
    assert generate(files) == 0
    assert capsys.readouterr().err.count("\n") == 1, "a short run needs no progress"
    files[1].unlink()
    monkeypatch.setattr("quire.cli.shared.PLAIN_SECONDS", 0.02)
    fake.config = type(fake.config).from_options({"scheduler.max_running": 1})
    fake.step_seconds = 0.01
    assert generate(files) == 0
    *progress, summary = capsys.readouterr().err.splitlines()
    assert len(progress) >= 3 and all(re.fullmatch(PROGRESS, line) for line in progress)
    assert summary.startswith("5 done")


SCRIPT = """
import sys
from contextlib import asynccontextmanager
from quire.cli import main, shared
from tests.server.fake_engine import FakeEngine

@asynccontextmanager
async def loaded(_, options=None):
    yield FakeEngine(step_seconds=0.01)

shared.engine = loaded
sys.exit(main(["generate", "fake", "--input", sys.argv[1], "--output", sys.argv[2]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_to_the_process_leaves_whole_lines(fake, files, number):
    write(files[0], *({"id": each, "prompt": "abcdefgh"} for each in range(100)))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *map(str, files)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until = time.monotonic() + 30
    while not (files[1].exists() and files[1].read_bytes().count(b"\n")) and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(number)
    error = process.communicate(timeout=30)[1].decode()
    assert process.returncode == (130 if number == signal.SIGINT else -number), error
    kept = files[1].read_bytes()
    assert kept.endswith(b"\n")
    num_kept = len(read_all(files[1]))
    assert 1 <= num_kept < 100
    assert generate(files) == 0
    assert files[1].read_bytes().startswith(kept)
    assert sorted(each["id"] for each in read_all(files[1])) == list(range(100))
    assert fake.started == 100 - num_kept
