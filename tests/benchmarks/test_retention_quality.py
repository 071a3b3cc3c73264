"""`benchmarks/retention_quality.py`: the input of other engines' runners, and the evaluation of their results."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import benchmark

quality = benchmark("retention_quality")
runners = benchmark("tasks")


def row(method: str, kept: float, nll: list[float], **further: Any) -> Any:
    surprise = {"wiki": [each * quality.CONTINUATION for each in nll]}
    agreeing = [quality.CONTINUATION // 2] * len(nll)
    return quality.Row("kvpress", "1", method, kept, "same", surprise=surprise, agreeing=agreeing, **further)


def given(**further: Any) -> argparse.Namespace:
    return argparse.Namespace(markdown=False, prompts=2, windows=2, engines=["openvino"], tasks="same", **further)


def test_windows_lie_apart_within_the_text() -> None:
    starts = quality.spread_starts(1000, 90, 10)
    assert len(starts) == 10 and starts[0] > 0 and starts[-1] + 90 <= 1000
    assert all(after - before >= 90 for before, after in pairwise(starts))


def test_windows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="12 windows of 90 tokens do not fit into 1000"):
        quality.spread_starts(1000, 90, 12)


def test_the_question_is_the_last_one() -> None:
    assert quality.find_last([7, 8, 1, 7, 8, 2], [7, 8]) == 3


def test_a_ratio_is_to_the_full_cache_of_the_same_windows() -> None:
    rows = [row("full", 1.0, [2.0, 3.0]), row("SnapKV", 0.5, [2.1, 3.3], found={"filler 1024": [True, False]})]
    text = quality.report(rows, given())
    retrieved, lost = (line.split() for line in text.splitlines() if "SnapKV" in line)
    assert retrieved[-1] == "1/2"
    assert float(lost[6]) == pytest.approx(math.exp(0.2), abs=1e-4)
    assert float(lost[7]) == pytest.approx(math.exp(0.2) * 0.1, abs=1e-4)
    assert lost[-2:] == ["50.0%", "-"]


def test_earlier_rows_are_of_the_same_tasks_and_other_engines(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    same = {"benchmark": "retention_quality", **asdict(row("SnapKV", 0.5, [2.0]))}
    records = [same, {**same, "tasks": "other"}, {**same, "engine": "openvino"}, {**same, "resident": 0.5}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    (found,) = quality.earlier(file, given())
    assert (found.engine, found.tasks, found.resident) == ("kvpress", "same", 0.5)


def test_a_runner_does_not_do_again_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["first", "second", "third"]
    tasks, results = tmp_path / "tasks.json", tmp_path / "results.jsonl"
    fields = {"prompt": [1], "later": [], "kept": [0.5], "continuation": [], "answer_tokens": 1, "stop": []}
    tasks.write_text(json.dumps([{"name": name, **fields} for name in names]))
    done: list[str] = []

    def run(task: Any) -> Iterator[Any]:
        if task.name == "second" and "second" not in done:
            done.append("second")
            yield runners.Result("full", 1.0, 1.0, answer=[0])
            raise KeyboardInterrupt
        done.append(task.name)
        yield runners.Result("full", 1.0, 1.0, answer=[2])

    monkeypatch.setattr(runners, "end_with_parent", lambda: None)
    arguments = ["--model", "", "--tasks", str(tasks), "--results", str(results), "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["runner", *arguments])
    with pytest.raises(KeyboardInterrupt):
        runners.work(lambda _: runners.Engine("1", run))
    runners.work(lambda _: runners.Engine("1", run))
    assert done == ["first", "second", "second", "third"]
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(line["task"], line["answer"]) for line in lines if "task" in line] == [(name, [2]) for name in names]
