"""Runs `quire generate` with a fake engine: what tests of batch files and of the command have in common."""

import io
import json
from contextlib import asynccontextmanager

import pytest

from quire.cli import main
from quire.engine.outputs import CompletionOutput
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def fake(monkeypatch):
    """The fake engine in place of a model; its `loads` counts how often one was loaded."""
    engine = FakeEngine(max_context=200)
    engine.loads = 0

    @asynccontextmanager
    async def loaded(_, options=None):
        engine.loads += 1
        yield engine

    monkeypatch.setattr("quire.cli.shared.engine", loaded)
    yield engine
    assert not engine.live


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path, *lines):
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_bytes(text.encode("utf-8", "backslashreplace"))


def read(path):
    return {line["id"]: line for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def read_all(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def generate(files, *words):
    return main(["generate", "fake", "--input", str(files[0]), "--output", str(files[1]), *words])


@pytest.fixture
def failing(fake, monkeypatch):
    """Prompts that hold an x end in an error after two tokens, as numbers that are not finite do."""
    original = fake._generate

    async def generate(ids, params, request_id):
        step = 0
        async for item in original(ids, params, request_id):
            if b"x"[0] in ids and step == 1:
                item.outputs, item.finished = [CompletionOutput(0, "", [], None, "error", "NaN in the logits")], True
            step += 1
            yield item
            if item.finished:
                return

    def repair():
        monkeypatch.setattr(fake, "_generate", original)

    monkeypatch.setattr(fake, "_generate", generate)
    return repair


@pytest.fixture
def stdin(monkeypatch):
    """Gives the command bytes to read."""
    return lambda content: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
