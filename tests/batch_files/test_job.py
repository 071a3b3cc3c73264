"""A run of a batch, as it is told while it runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.batch_files import job as job_module
from quire.batch_files.job import BatchJob
from quire.config import EngineConfig
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.engine.params import SamplingParams


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
