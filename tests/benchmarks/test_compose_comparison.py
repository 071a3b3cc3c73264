"""The comparison of configurations: equal memory, and rows as they come."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError, QuireError
from quire.workload.slo import Slo
from tests.benchmark_scripts import benchmark
from tests.benchmarks.test_compose import LOAD, MIB, TINY, Recipe, Served, Stage, asked, systems
from tests.benchmarks.test_compose import model as model

runs, comparing = benchmark("run_systems"), benchmark("comparison")
Order, Reply, Comparison = runs.Order, runs.Reply, comparing.Comparison

pytestmark = pytest.mark.usefixtures("own_cache")


class Runs:
    """Stands for the processes. Notes the orders, and serves more the more systems there are."""

    def __init__(self, failing: str = "") -> None:
        self.orders: list[Any] = []
        self.failing = failing

    def __call__(self, order: Any) -> Any:
        order = Order.from_json(order.to_json())
        self.orders.append(order)
        engines = sum(order.instances.values()) or 1
        caches = engines * order.options["cache.memory"]
        if order.is_probe:
            assert "offload.cache" not in order.options, "a small cache has no room for frames"
            return Reply(pss=engines * 100 * MIB + caches)
        if self.failing == "refused" and order.instances:
            return Reply(refused="no instances here")
        if self.failing == "failed" and order.instances:
            raise QuireError("a run failed: killed")
        rate = 2 if order.options["cache.share"] else 1
        stages = [
            Stage(count, 10.0, tuple(Served(5.0 + place, 0.1, 0.01) for place in range(rate * count)), count, 0)
            for count in order.load.clients
        ]
        alone = [(0.02, 0.001), (0.01, 0.003), (0.03, 0.002)] if order.is_base else []
        return Reply("", engines * 100 * MIB + caches, stages, alone)


def comparison(model: str, names: list[str], runs: Runs, **more: Any) -> Any:
    chosen = [systems.systems_of(name) for name in names]
    return Comparison(model, LOAD, 300 * MIB, chosen, Recipe.of(TINY), run=runs, **more)


def test_every_configuration_gets_what_is_left_of_the_same_memory(model: str) -> None:
    runs = Runs()
    rows, slo = comparison(model, ["none", "sharing", "instances", "all five"], runs).measured()
    assert slo == Slo(comparing.SLO_FACTOR * 0.02, comparing.SLO_FACTOR * 0.002)
    assert [order.is_probe for order in runs.orders] == [True] * 3 + [False] * 4
    assert all(order.load == LOAD for order in runs.orders if not order.is_probe)
    caches = [order.options["cache.memory"] for order in runs.orders if not order.is_probe]
    assert caches == [200 * MIB - systems.RESERVE_BYTES] * 2 + [50 * MIB - systems.RESERVE_BYTES] * 2
    none, sharing, apart, five = rows
    assert not any(row.refused for row in rows)
    assert none.cache == sharing.cache == caches[0] and apart.cache == five.cache == 2 * caches[2]
    assert 2 * none.weights == apart.weights > five.weights > none.weights > 0, "two engines, and less of each"
    assert sharing.sequences > none.sequences > apart.sequences > 1 and five.sequences > apart.sequences
    told = sharing.told(none, slo)
    assert told["gain_goodput"] == pytest.approx(2.0) and told["clients"] == 3
    assert told["gain_sequences"] == sharing.sequences / none.sequences and told["ratio"] is None


def test_a_probe_fills_its_cache_whatever_the_load_is(model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [0]}\n' * 3)
    runs, load = Runs(), replace(LOAD, clients=(2,), trace=str(trace))
    Comparison(model, load, 300 * MIB, [()], Recipe.of(TINY), run=runs).measured()
    probe, run = runs.orders
    assert run.load == load and probe.is_probe
    assert [(len(each.prompt), each.num_out) for each in itertools.islice(asked(probe.load, 256), 2)] == [(300, 20)] * 2


def test_rows_are_told_as_they_come_and_a_short_text_before_anything_runs(model: str) -> None:
    told: list[tuple[int, float | None]] = []
    text = "Of all the mills on the river, the oldest made no flour. " * 10
    names = ["none", "sharing"]
    comparison(model, names, Runs(), text=text, windows=1).measured(
        on_rows=lambda rows, slo: told.append((len(rows), rows[0].ratio))
    )
    assert told == [(1, None), (2, None), (2, 1.0)]
    runs = Runs()
    with pytest.raises(ConfigError, match="fewer than a window of 300"):
        comparison(model, names, runs, text=text[:200]).measured()
    assert not runs.orders


@pytest.mark.parametrize("failing", ["refused", "failed"])
def test_a_configuration_that_cannot_run_is_told_with_the_reason(model: str, failing: str) -> None:
    rows, slo = comparison(model, ["none", "instances"], Runs(failing)).measured()
    reason = {"refused": "no instances here", "failed": "failed: a run failed: killed"}[failing]
    assert rows[1].refused == reason and rows[1].told(rows[0], slo)["refused"] == reason
    assert "goodput" not in rows[1].told(rows[0], slo)


def test_memory_that_processes_need_themselves_is_refused_with_what_is_enough(model: str) -> None:
    found = comparison(model, ["none"], Runs())
    with pytest.raises(ConfigError, match="--plan.memory is 90MiB, and processes and weights take 100MiB"):
        Comparison(model, found.load, 90 * MIB, found.configurations, found.recipe, run=Runs()).measured()


def test_quality_is_that_of_the_codec_and_of_retention(model: str) -> None:
    draw = random.Random(0)
    windows = [draw.choices(range(64, 128), k=300) for _ in range(2)]
    recipe = Recipe.of({**TINY, "retain.profile_rows": 32, "retain.budget": 0.4})
    found = comparing.quality(model, windows, recipe)
    assert found[False, False].ratio == 1.0 and len(found) == 4
    assert found[True, True].codec == "nuq3, retain.budget 0.4" and found[False, True].continuation == 37
    assert found[True, False].kl_mean and found[False, True].kl_mean
