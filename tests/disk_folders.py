"""Folders of disk tiers that a small model fills, and `quire cache` for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli import main
from quire.engine.params import SamplingParams
from quire.llm import LLM

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
OPTIONS = {
    "model.dtype": "float32",
    "cache.memory": "8MiB",
    "cache.check": False,
    "runtime.threads": 1,
    "runtime.device": "cpu",
}
WORDS = ["--model.dtype", "float32", "--cache.memory", "8MiB", "--runtime.device", "cpu", "--runtime.threads", "1"]
WORDS += ["--cache.check", "false"]
SYSTEM = "All of us begin alike, with these very words, and only later do we differ from each other. " * 2
PROMPTS = [SYSTEM + "one " * 40, SYSTEM + "two " * 40, "something else " * 24]
NUM_CHUNKS = 2 + 3 + 3 + 5
MIB = 1 << 20


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk has is fetched, however fast a tiny model computes it."""
    monkeypatch.setattr("quire.cache.fetching.Fetching._pays", lambda *given: True)


def filled(model: str, disk: Path, prompts: list[str] = PROMPTS, salt: str = "", **options: object) -> list[list[int]]:
    """Lets a model answer prompts with a disk; the answers."""
    with LLM(model, OPTIONS | {"tiers.disk": f"{disk}:64MiB"} | options) as llm:
        outputs = [llm.generate([{"prompt": prompt, "cache_salt": salt}], GREEDY)[0] for prompt in prompts]
        assert llm.flush()
    return [output.outputs[0].token_ids for output in outputs]


def found(model: str, disk: Path, prompt: str, **options: object) -> tuple[dict[str, int], list[int]]:
    with LLM(model, OPTIONS | {"tiers.disk": f"{disk}:64MiB"} | options) as llm:
        (output,) = llm.generate([prompt], GREEDY)
    return output.cached_by_tier, output.outputs[0].token_ids


def cache(*words: object) -> int:
    return main(["cache", *map(str, words)])


def listed(capsys: pytest.CaptureFixture[str], disk: Path) -> dict:
    capsys.readouterr()
    assert cache("ls", "--disk", disk, "--json") == 0
    return json.loads(capsys.readouterr().out)
