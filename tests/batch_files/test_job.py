"""A run of a batch: its lines, their answers and failures, and what is told while it runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.batch_files import job as job_module
from quire.batch_files.job import BatchJob
from quire.cli import main
from quire.config import EngineConfig
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.engine.params import SamplingParams
from tests.generating import generate, read, read_all, write
from tests.server.fake_engine import FakeEngine


def test_every_kind_of_line_is_answered(fake, files, capsys):
    write(
        files[0],
        {"prompt": "abc"},
        {"id": "chat", "messages": [{"role": "user", "content": "hé 🌍"}]},
        {"id": 7, "prompt_token_ids": [104, 105], "max_tokens": 3, "ignore_eos": True},
        {"id": "two", "prompt": "xyz", "n": 2, "max_tokens": 2},
        {"id": "scored", "prompt": "q", "logprobs": 1, "max_tokens": 1},
    )
    assert generate(files) == 0
    answers = read(files[1])
    assert answers[1] == {
        "id": 1,
        "text": "abc",
        "token_ids": [97, 98, 99, 257],
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 4,
            "cached_tokens": 3,
            "cached_tokens_by_tier": {"arena": 1, "disk": 2},
        },
    }
    assert answers["chat"]["text"] == "user: hé 🌍\nassistant:"
    assert (answers[7]["text"], answers[7]["finish_reason"]) == ("hih", "length")
    assert [choice["text"] for choice in answers["two"]["choices"]] == ["xy", "yz"]
    assert answers["scored"]["logprobs"] == [{"113": -0.5, "114": -1.5}]
    assert "5 done" in capsys.readouterr().err


def test_a_line_says_what_retention_kept_of_its_prompt(fake, files, monkeypatch):
    """Once it has decided: not yet with the first items."""
    original = fake._generate

    async def generate_retaining(ids, params, request_id):
        number = 0
        async for item in original(ids, params, request_id):
            item.kept_fraction = None if number == 0 else 0.43219
            number += 1
            yield item

    monkeypatch.setattr(fake, "_generate", generate_retaining)
    write(files[0], {"prompt": "abc"})
    assert generate(files) == 0
    assert read(files[1])[1]["usage"]["kept_fraction"] == 0.4322


def test_an_interruption_keeps_what_is_done(fake, files, monkeypatch):
    write(files[0], *({"id": number, "prompt": "x" * number} for number in range(1, 30)))
    original, calls = fake._generate, 0

    def interrupted(*args):
        nonlocal calls
        calls += 1
        if calls > 20:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(fake, "_generate", interrupted)
    fake.config = type(fake.config).from_options({"scheduler.max_running": 4})
    assert generate(files) == 130
    monkeypatch.undo()
    done = read(files[1])
    assert 1 < len(done) <= 20 and all(answer["text"] == "x" * line for line, answer in done.items())


def test_a_line_that_cannot_run_fails_alone(fake, files, capsys):
    write(files[0], {"prompt": "x" * 300}, {"prompt": "ok"}, {"messages": [{"role": "user", "content": "a"}] * 2})
    assert generate(files) == 1
    answers = read(files[1])
    assert "too long" in answers[1]["error"] and answers[2]["text"] == "ok" and "alternate" in answers[3]["error"]
    assert "2 of them failed" in capsys.readouterr().err


def test_a_line_that_fails_says_why_and_is_tried_again(failing, fake, files, capsys):
    # U+2028 and U+0085 end lines for Python's text, not for JSON lines.
    write(files[0], {"prompt": "x"}, {"prompt": "ab\u2028\u0085"}, {"id": "c", "prompt": "xyz"}, {"prompt": "q"})
    assert generate(files) == 1
    answers = read_all(files[1])
    assert {line["id"] for line in answers if line.get("error") == "NaN in the logits"} == {1, "c"}
    good = [raw for raw in files[1].read_bytes().split(b"\n") if raw and b"error" not in raw]
    assert "2 of them failed" in capsys.readouterr().err

    assert generate(files) == 1, "what still fails is no success"
    assert fake.started == 4 + 2 and "failed lines, tried again: 2" in capsys.readouterr().err
    assert len(read_all(files[1])) == 4

    failing()
    files[1].chmod(0o640)
    assert generate(files) == 0
    assert fake.started == 4 + 2 + 2 and fake.loads == 3
    answers = read_all(files[1])
    assert {line["id"]: line["text"] for line in answers} == {1: "x", 2: "ab\u2028\u0085", "c": "xyz", 4: "q"}
    assert len(answers) == 4 and files[1].read_bytes().split(b"\n")[: len(good)] == good
    assert files[1].stat().st_mode & 0o777 == 0o640
    assert sorted(files[1].parent.iterdir()) == sorted(files), "something else is left"
    assert generate(files) == 0 and fake.loads == 3


def test_a_full_queue_is_waited_for(fake, files):
    fake.queue_limit = 1
    fake.retry_after = 0.001
    write(files[0], *({"prompt": "abc"} for _ in range(5)))
    assert generate(files) == 0
    assert len(read(files[1])) == 5


def test_input_and_output_must_differ(fake, files, capsys):
    write(files[0], {"prompt": "a"})
    assert main(["generate", "fake", "--input", str(files[0]), "--output", str(files[0])]) == 2


def test_with_offloading_prompts_that_begin_alike_are_neighbours(fake, files):
    prompts = ["the cat", "a dog", "the cow", "a dove", "the cat sat", "zebra"]
    write(files[0], {"prompt_token_ids": [1], "id": "ids"}, *({"prompt": prompt} for prompt in prompts))
    fake.config = type(fake.config).from_options({"offload.mode": "auto", "scheduler.max_running": 100})
    assert generate(files) == 0
    given = [prompt["prompt_token_ids"] for prompt in fake.prompts]
    assert given == sorted(given) and len(given) == 7
    assert {read(files[1])[n]["text"] for n in range(1, 8) if n > 1} == set(prompts)


class Interrupted(FakeEngine):
    """Sends this process a signal once so many tokens are decoded, as a user's Ctrl-C would."""

    at = 1000

    async def _generate(self, ids, params, request_id):
        async for item in super()._generate(ids, params, request_id):
            if self.decoded == self.at:
                os.kill(os.getpid(), signal.SIGINT)
            yield item


def test_early_interrupts_leave_whole_lines_and_the_next_run_goes_on_with_the_others(files, monkeypatch, capsys):
    """600 lines of 10 tokens: 256 begun together would have no line finished after 1,000 tokens."""
    engine = Interrupted()

    @asynccontextmanager
    async def loaded(_, options=None):
        yield engine

    monkeypatch.setattr("quire.cli.shared.engine", loaded)
    write(files[0], *({"prompt": f"line {number:03}x"[:9], "max_tokens": 10} for number in range(600)))
    num_before = 0
    for _ in range(2):
        engine.decoded = 0
        assert generate(files) == 130
        assert files[1].read_bytes().endswith(b"\n")
        num_kept = len(read_all(files[1]))
        assert num_kept >= num_before + 8
        assert f"{600 - num_kept} not done; the same command resumes" in capsys.readouterr().err
        num_before = num_kept
    engine.at = None
    assert generate(files) == 0
    assert sorted(each["id"] for each in read_all(files[1])) == list(range(1, 601))
    assert engine.started <= 600 + 2 * 256, "an interrupt costs no more than the lines under way"


def test_as_many_lines_run_at_once_as_the_engine_takes_after_the_first_ones(fake, files, monkeypatch):
    running = most = 0
    original = fake._generate

    async def watched(ids, params, request_id):
        nonlocal running, most
        running += 1
        most = max(most, running)
        async for item in original(ids, params, request_id):
            running -= item.finished
            yield item

    monkeypatch.setattr(fake, "_generate", watched)
    monkeypatch.setattr(fake, "config", EngineConfig.from_options({"scheduler.max_running": 50}))
    write(files[0], *({"prompt": "abc"} for _ in range(150)))
    assert generate(files) == 0
    assert most == 50


def test_a_planned_block_runs_at_once_wherever_it_is(fake, files, monkeypatch):
    """With its cache and weights in memory, too: its seconds were predicted for the whole block."""
    begun, original = [], fake._generate

    async def watched(ids, params, request_id):
        begun.append(request_id)
        async for item in original(ids, params, request_id):
            begun.extend(["end"] * item.finished)
            yield item

    @contextmanager
    def planned(model, config, batch):
        yield SimpleNamespace(options=None, plan=True, announcement=lambda: None, report=lambda batch, stats: [])

    monkeypatch.setattr(fake, "_generate", watched)
    monkeypatch.setattr("quire.batch_files.placement.planned", planned)
    fake.config = EngineConfig.from_options({"scheduler.max_running": 20})
    write(files[0], *({"prompt": "abc"} for _ in range(30)))
    assert generate(files) == 0
    assert begun.index("end") == 20


class CachingEngine:
    """Answers with two tokens, one by one. All but ten tokens of each prompt were cached."""

    config = EngineConfig()

    async def generate(self, prompt: dict[str, Any], params: SamplingParams) -> AsyncIterator[RequestOutput]:
        ids = prompt["prompt_token_ids"]
        for reason in (None, "length"):
            output = CompletionOutput(0, "a", [97], None, reason)  # type: ignore[arg-type]
            yield RequestOutput("r", None, ids, None, [output], reason is not None, len(ids) - 10)


class Notes:
    """A forecast that keeps what it is told, and knows nothing."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []

    def note(self, seconds: float, prompt_tokens: int, tokens: int) -> None:
        self.noted.append((prompt_tokens, tokens))

    def remaining_seconds(self, prompt_tokens: float, tokens: float) -> None:
        return None


def test_what_was_cached_of_prompts_is_no_work_that_a_forecast_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, lines = Notes(), tmp_path / "in.jsonl"
    monkeypatch.setattr(job_module, "Forecast", lambda: notes)
    lines.write_text("".join(json.dumps({"prompt_token_ids": [number] * 100}) + "\n" for number in range(1, 5)))
    with BatchJob(str(lines), str(tmp_path / "out.jsonl"), {}) as batch:
        asyncio.run(batch.run(CachingEngine()))  # type: ignore[arg-type]
        assert batch.speed().endswith("tokens/s")
    assert notes.noted == [(4 * 10, 4 * 2)]
