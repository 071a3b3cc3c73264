"""Runs of a configuration: their memory, errors and answers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from quire.errors import QuireError
from tests.benchmark_scripts import benchmark
from tests.benchmarks.test_compose import LOAD, MIB, TINY, Recipe
from tests.benchmarks.test_compose import model as model

runs = benchmark("run_systems")
Order, Reply = runs.Order, runs.Reply

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_memory_of_a_process_and_its_children_is_counted_and_that_of_others_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert {os.getpid(), child.pid} <= {*runs.family(os.getpid())} and [*runs.family(child.pid)] == [child.pid]
        assert runs.proportional_bytes(os.getpid()) > 10 * MIB and runs.proportional_bytes(child.pid) > 0
        assert child.stdin is not None
        child.stdin.close()
    assert child.pid not in runs.family(os.getpid()) and runs.proportional_bytes(child.pid) == 0


def test_a_run_that_ends_with_an_error_says_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        assert Order.from_json(more["input"]).load == LOAD and more["timeout"] > LOAD.seconds
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nMemoryError: no more\n")

    monkeypatch.setattr(runs.subprocess, "run", failed)
    with pytest.raises(QuireError, match="a run failed: MemoryError: no more"):
        runs.start(Order("model", {}, {}, LOAD))


def test_a_run_tells_latencies_memory_and_every_answer(model: str) -> None:
    options = Recipe.of(TINY).options(("sharing",), LOAD, 8 * MIB, 0)
    reply = asyncio.run(runs.run(Order(model, options, {}, LOAD, is_base=True)))
    assert Reply.from_json(reply.to_json()) == reply and reply.refused == ""
    assert reply.pss > 50 * MIB and len(reply.alone) == runs.ALONE
    assert [each.clients for each in reply.stages] == [2, 3]
    for each in reply.stages:
        assert each.served and 1.0 <= each.seconds < 5.0 and 1 <= each.running <= each.clients
        ends = [one.end for one in each.served]
        assert ends == sorted(ends) and all(one.ttft > 0 < one.tpot for one in each.served)
    refused = asyncio.run(runs.run(Order(model, {**options, "cache.memory": 1000}, {}, LOAD)))
    assert "cache.memory of 1000B" in refused.refused and not refused.stages
