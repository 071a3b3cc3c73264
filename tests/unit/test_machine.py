"""Engines on one machine, which slow each other down."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cli import main
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.planning.candidates import Candidate, Role
from quire.planning.cluster_file import ClusterSpec, Nodes
from quire.planning.latency import LatencyModel, StepWork
from quire.planning.latency_fit import fit
from quire.planning.placement_file import Instances, Placement, Predicted
from quire.planning.workload import Arrival, Span, Workload
from quire.simulation.events import Events
from quire.simulation.load import run_of
from quire.simulation.machine import Machine
from quire.simulation.search import OnCores
from quire.simulation.setup import LocalModel, Setup
from tests.tiny_models import save_tiny

CONFIG = EngineConfig.from_options({"runtime.device": "cpu", "runtime.threads": 1})


def ends(*steps: tuple[float, float, float]) -> list[float]:
    """When steps end on one machine: each with its begin, its seconds alone, and by how much others slow it down."""
    events, found = Events(), [0.0] * len(steps)
    machine = Machine(events)
    for index, (begin, seconds, slower) in enumerate(steps):
        after = machine.place(slower)

        def ended(index: int = index) -> None:
            found[index] = events.now

        events.at(begin, lambda after=after, seconds=seconds, ended=ended: after(seconds, ended))  # type: ignore[misc]
    events.run(lambda: False)
    return found


def test_a_step_takes_longer_only_while_others_run() -> None:
    assert ends((0.0, 2.0, 0.5)) == [2.0]
    assert ends((0.0, 2.0, 0.5), (2.5, 1.0, 0.5)) == [2.0, 3.5]
    # From 1 on both run: the first has 1 s left, which takes 1.5 s. The second has had 1 s of its 3 by then.
    assert ends((0.0, 2.0, 0.5), (1.0, 3.0, 0.5)) == pytest.approx([2.5, 4.5])
    # Each is slowed down as it says: the second one not at all.
    assert ends((0.0, 2.0, 1.0), (0.0, 1.0, 0.0)) == pytest.approx([2.5, 1.0])
    # Three: 2 others at first.
    assert ends((0.0, 1.0, 0.5), (0.0, 1.0, 0.5), (0.0, 2.0, 0.5)) == pytest.approx([2.0, 2.0, 3.0])


def test_of_random_steps_the_seconds_alone_come_back() -> None:
    """Each step is integrated over the numbers of steps that ran meanwhile."""
    rng = random.Random(3)
    steps = [(rng.uniform(0, 5), rng.uniform(0.1, 2), rng.choice([0.0, 0.3, 0.8])) for _ in range(12)]
    found = ends(*steps)
    moments = sorted({*(begin for begin, _, _ in steps), *found})
    for (begin, seconds, slower), end in zip(steps, found, strict=True):
        alone = 0.0
        for low, high in itertools.pairwise(moments):
            if begin <= low and high <= end:
                count = sum(each <= low and high <= until for (each, _, _), until in zip(steps, found, strict=True))
                alone += (high - low) / (1 + slower * (count - 1))
        assert alone == pytest.approx(seconds)


def test_the_fit_finds_by_how_much_others_slow_down() -> None:
    true = LatencyModel({}, {"base": 0.004, "rows_from_1": 1e-3, "context": 2e-6}, (1,), {}, {})
    rng = np.random.default_rng(5)
    works = [StepWork(0, 0.0, int(rows), 100.0 * rows, 100.0 * rows) for rows in rng.integers(1, 20, 400)]
    beside = rng.uniform(0, 1, len(works)) * (rng.uniform(size=len(works)) < 0.7)
    noise = np.exp(0.05 * rng.standard_normal(len(works)))
    records = [
        (work, true.seconds(work) * (1 + 0.35 * n) * each)
        for work, n, each in zip(works, beside.tolist(), noise.tolist(), strict=True)
    ]
    found = fit(records, {}, beside=beside.tolist())
    assert found.beside == pytest.approx(0.35, abs=0.03)
    for rows in (1, 5, 15):
        work = StepWork(0, 0.0, rows, 100.0 * rows, 100.0 * rows)
        assert found.seconds(work) == pytest.approx(true.seconds(work), rel=0.05)
        assert found.crowded(2).seconds(work) == pytest.approx(found.seconds(work) * (1 + 2 * found.beside))
    assert LatencyModel.from_json(found.to_json()) == found
    assert fit(records, {}).beside == 0.0
    lonely = [(work, seconds / (1 + 0.35 * n)) for (work, seconds), n in zip(records, beside.tolist(), strict=True)]
    assert fit(lonely, {}, beside=beside.tolist()).beside < 0.03
    with pytest.raises(ConfigError, match="beside is -1"):
        dataclasses.replace(found, beside=-1.0)


def setup(folder: Path, cores: int | None, slower: float, count: int = 2, **more: Any) -> Setup:
    latency = LatencyModel({}, {"base": 0.01, "rows_from_1": 1e-3}, (1,), {}, {}, beside=slower)
    model = LocalModel(str(folder), {"runtime.threads": 1}, None, lambda role, config, model_id: latency)
    return Setup((model.replicas("mixed", {}, count),), fetches=False, cores=cores, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_tiny(found := tmp_path_factory.mktemp("machine"), tokenizer=False)
    return found


def test_instances_of_one_machine_slow_each_other_down(folder: Path) -> None:
    """Two requests at once, one for each instance: on one machine each step takes 1.5 times as long."""
    load = Workload("two", [Arrival(0.0, (Span(n, 40),), 50) for n in range(2)])
    times = {
        (cores, slower): run_of(setup(folder, cores, slower), load, 0).tpot.mean()
        for cores, slower in ((2, 0.5), (2, 0.0), (1, 0.5), (None, 0.5))
    }
    alone = times.pop((2, 0.0))
    assert times == pytest.approx({(2, 0.5): 1.5 * alone, (1, 0.5): alone, (None, 0.5): alone}, rel=0.01)


def test_machines_are_filled(folder: Path) -> None:
    assert setup(folder, 2, 0.5, 5)._machines == {f"mixed-{n}": n // 2 for n in range(5)}
    assert setup(folder, 2, 0.5, 2).is_crowded and not setup(folder, 1, 0.5, 2).is_crowded
    assert not setup(folder, 2, 0.0, 2).is_crowded and not setup(folder, None, 0.5, 2).is_crowded
    pairs = setup(folder, 2, 0.5)
    plan = dataclasses.replace(pairs.replicas[0], role="prefill"), dataclasses.replace(pairs.replicas[0], role="decode")
    found = dataclasses.replace(pairs, replicas=plan, in_pairs=True)._machines
    assert found == {"prefill-0": 0, "decode-0": 0, "prefill-1": 1, "decode-1": 1}


def test_an_instance_is_tried_beside_others_that_always_compute(folder: Path) -> None:
    """On four cores one of two cores has a neighbour, one of a core has three. The whole is simulated as it is."""
    latency = LatencyModel({}, {"base": 0.01, "rows_from_1": 1e-3}, (1,), {}, {}, beside=0.5)
    model = LocalModel(str(folder), {}, None, lambda role, config, model_id: latency)
    maker = OnCores(model, ClusterSpec(Nodes(cores=4, memory=4 << 30)), 64)
    work = StepWork(0, 0.0, 4, 100.0, 100.0)
    found = [maker.replicas(Candidate(Role.DECODE, cores=cores)).plan.latency.seconds(work) for cores in (1, 2, 4)]
    assert found == pytest.approx([latency.seconds(work) * slower for slower in (2.5, 1.5, 1.0)])
    placed = tuple(Instances(role, 1, options={"runtime.threads": 2}) for role in ("prefill", "decode"))
    whole = maker.setup(Placement(placed, Predicted(1.0, 1.0, "machine", 1.0, 0.9)))
    assert whole.cores == 4 and whole.is_crowded
    assert all(each.plan.latency is latency for each in whole.replicas)


def test_a_log_of_others_needs_the_log_of_an_instance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "smollm2", "--beside", str(tmp_path / "x.log")]) == 2
    assert "give --steps, too" in capsys.readouterr().err


def test_the_command_fits_it_from_logs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from quire.models.fingerprint import fingerprint

    head = json.dumps({"model": fingerprint(folder), "options": CONFIG.to_options()})
    rng, own, other, now = random.Random(1), [head], [head], 0.0
    for _ in range(200):
        rows, slow = rng.randint(1, 8), rng.random() < 0.5
        seconds = (0.004 + 0.002 * rows) * (1.4 if slow else 1.0)
        own.append(json.dumps([0, 0.0, rows, 50.0 * rows, 50.0 * rows, 0, seconds, None, now]))
        if slow:
            other.append(json.dumps([30, 450.0, 0, 0.0, 0.0, 1, seconds, None, now]))
        now += seconds
    (tmp_path / "own.log").write_text("\n".join(own) + "\n")
    (tmp_path / "other.log").write_text("\n".join(other) + "\n")
    output = tmp_path / "latency.json"
    words = ["--steps", str(tmp_path / "own.log"), "--beside", str(tmp_path / "other.log"), "--output", str(output)]
    assert main(["bench", "latency", str(folder), *words]) == 0
    assert "a step takes 40% longer" in capsys.readouterr().out
    assert LatencyModel.read(output).beside == pytest.approx(0.4, abs=0.01)
