"""`quire plan auto`: the space of settings, the search with made-up numbers, and the command on a tiny model."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli import main, parse, plan_auto
from quire.cli.parser import CommandParser
from quire.config import ClusterConfig, EngineConfig, SloConfig
from quire.errors import ConfigError
from quire.evaluation import auto as planning
from quire.evaluation.auto import Fit, within
from quire.evaluation.auto_local import LocalPlanner
from quire.evaluation.curves import Quality, Text
from quire.evaluation.latency_bench import settings_of as speed_settings
from quire.evaluation.speeds import LEAST_SECONDS, Speeds
from quire.evaluation.trying import Parts, fresh_seeds
from quire.planning.auto import BATCH, NoPlanError, Rung, Search, Trial, is_open
from quire.planning.composed import grid
from quire.planning.curves import NOTHING, Curve, Loss
from quire.planning.fitted import fit
from quire.planning.goodput import Goodput, Verdict
from quire.planning.latency import LatencyModel, Origin, StepWork
from quire.planning.points import Found, Point, Room, Tried, Why, beats, covers
from quire.planning.space import RUNNING, Machine, Settings, Space
from quire.planning.workload import Arrival, Span, Workload
from quire.simulation.load import Load
from quire.simulation.setup import LINKS, LocalModel
from tests.benchmark_scripts import benchmark
from tests.tiny_models import save_tiny

SPACE = Space.of(Machine(cores=2, is_packed=True))
RUNGS = (Rung(10, 0.1, 16), Rung(20, 0.05, 8), Rung(40, 0.02, 4, confirms=True))
GIB = 1 << 30
TARGETS = ["--slo.ttft", "0.4", "--slo.tpot", "0.05"]


def chosen(*names: str, space: Space = SPACE) -> Settings:
    """The settings of `first`, but for some choices by their names."""
    choices = {choice.name: choice for tried in space.tried.values() for choice in tried}
    wanted = {choices[name].axis: choices[name] for name in names}
    return Settings(tuple(wanted.get(each.axis, each) for each in space.first.choices))


# ---- the space -------------------------------------------------------------------------------------------------------


def test_retention_is_never_covered_by_a_cache_that_keeps_everything() -> None:
    """The same steps take as long, but retention has fewer tokens in them."""
    all_tokens, half = point(seconds=1.0), point("budget 0.5", seconds=1.0)
    assert not covers(SPACE, all_tokens, half) and not covers(SPACE, half, all_tokens)
    assert covers(SPACE, all_tokens, point("g4", seconds=1.0))


# ---- latencies from parts --------------------------------------------------------------------------------------------


def latency(base: float, context: float = 0.0, rows: float = 0.0, **about: Any) -> LatencyModel:
    ranges = {
        "rows": (1.0, 512.0), "prompt_rows": (0.0, 512.0), "prompt_pairs": (0.0, 2e5), "decode_rows": (0.0, 64.0),
        "context": (0.0, 40000.0), "unique": (0.0, 40000.0), "num_prompts": (0.0, 4.0), "share": (0.1, 1.0),
    }  # fmt: skip
    coefficients = {"base": base, "context": context, "rows_from_1": rows}
    return LatencyModel(about, coefficients, (1,), {"within": 0.05}, ranges, counts={"prompt": 500, "decode": 500})


# ---- the search ------------------------------------------------------------------------------------------------------


def point(
    *names: str,
    loss: float = 0.0,
    error: float | None = 0.0,
    bound: float = 100.0,
    total: int = GIB,
    tokens: int = 1000,
    seconds: float | None = None,
    origin: Origin = Origin.MEASURED,
) -> Point:
    """A point. seconds: of all steps; None: points are not alike, and each is faster in some steps."""
    lost = Loss(math.log1p(loss), error, origin) if loss else NOTHING
    draw = random.Random(str(names)).uniform(1, 2)
    profile = (draw, 1 / draw) if seconds is None else (seconds, 2 * seconds)
    return Point(chosen(*names), Room(total // 2, total, tokens), lost, bound, profile)


class Fake:
    """A machine whose points serve what a table says. calls: points by rung; clock: a second for each trial."""

    def __init__(self, rates: Mapping[Settings, float], noise: float = 0.0) -> None:
        self.rates, self.noise, self.now = rates, noise, 0.0
        self.calls: list[tuple[int, list[Settings]]] = []

    def __call__(self, trials: Sequence[Trial], rung: Rung, end: float) -> list[Goodput | None]:
        self.calls.append((rung.requests, [trial.point.settings for trial in trials]))
        found: list[Goodput | None] = []
        for each, _, floor in trials:
            self.now += 1.0
            draw = random.Random(f"{SPACE.name(each.settings)} {rung.requests}").uniform(-1, 1)
            rate = self.rates[each.settings] * each.share**0.1 * (1 + self.noise * draw)
            is_late, is_slow = self.now > end, rate < floor
            none = Goodput(0.0, 0.5, Verdict.INFEASIBLE, confirmed=False)
            found.append(None if is_late else none if is_slow or not rate else Goodput(rate, 0.9))
        return found

    def tried(self, settings: Settings) -> int:
        return sum(asked.count(settings) for _, asked in self.calls)


class Flat(Fake):
    """A machine on which the size of the cache does not matter."""

    def __call__(self, trials: Sequence[Trial], rung: Rung, end: float) -> list[Goodput | None]:
        return [Goodput(self.rates[each.point.settings], 0.9) for each in trials]


def searched(points: Sequence[Point], rates: Mapping[Settings, float], **more: Any) -> Found:
    fake = more.pop("fake", None) or Fake(rates)
    settings = {"quality": 0.01, "rungs": RUNGS, "clock": lambda: fake.now, **more}
    return Search(SPACE, points, fake, **settings).run()


def rates_of(points: Sequence[Point], *rates: float) -> dict[Settings, float]:
    return {each.settings: rate for each, rate in zip(points, rates, strict=True)}


def test_the_most_is_served_by_what_loses_less_than_the_budget() -> None:
    points = [point(), point("nuq4", loss=0.004), point("nuq3", loss=0.02)]
    found = searched(points, rates_of(points, 1.0, 2.0, 3.0))
    assert found.chosen.point.settings == chosen("nuq4") and found.chosen.rate == 2.0
    assert [SPACE.name(each.point.settings) for each in found.frontier] == ["nuq3", "nuq4", "default"]
    assert found.baseline is not None and found.baseline.rate == 1.0


def test_an_error_that_reaches_beyond_the_budget_is_not_within_it() -> None:
    points = [point(), point("nuq4", loss=0.004, error=0.005)]
    assert searched(points, rates_of(points, 1.0, 2.0)).chosen.point.settings == chosen()


def test_a_loss_from_few_windows_leaves_one_from_many_and_is_measured_further() -> None:
    few = point("nuq3", loss=0.002, error=None, seconds=0.9)
    many = point("nuq4", loss=0.003, error=0.0005, seconds=1.0)
    points, rates = [point(seconds=2.0), few, many], {chosen(): 1.0, chosen("nuq3"): 3.0, chosen("nuq4"): 2.9}
    assert not covers(SPACE, few, many) and not beats(*(Tried(each, Goodput(3.0, 0.9), 10) for each in (few, many)))
    asked: list[Settings] = []

    def refine(given: Sequence[Point], **measured: float) -> list[Point | None]:
        asked.extend(each.settings for each in given if is_open(each.loss, 0.01))
        return [point("nuq3", seconds=0.9, **measured) if each.settings == few.settings else each for each in given]

    late = searched(points, rates)
    assert late.chosen.point.settings == chosen("nuq4"), "no window more was read"
    good = searched(points, rates, refine=lambda given: refine(given, loss=0.002, error=0.0005))
    assert good.chosen.point.settings == chosen("nuq3") and {*asked} == {chosen("nuq3")}
    bad = searched(points, rates, refine=lambda given: refine(given, loss=0.012, error=0.0005))
    assert bad.chosen.point.settings == chosen("nuq4")


def test_the_chosen_settings_wait_for_a_loss_that_may_be_within_the_budget() -> None:
    points = [point(), point("nuq4", loss=0.004), point("nuq3", loss=0.005, error=0.005)]
    num_asked = 0

    def refine(given: Sequence[Point]) -> list[Point | None]:
        nonlocal num_asked
        num_asked += 1
        # Before the last rung there was no time for it.
        return [point("nuq3", loss=0.006, error=0.001) if len(given) == 1 else each for each in given]

    found = searched(points, rates_of(points, 1.0, 2.0, 3.0), refine=refine)
    assert found.chosen.point.settings == chosen("nuq3") and num_asked == 2


def test_a_smaller_loss_that_is_less_sure_removes_no_other() -> None:
    unsure, sure = point("nuq3", loss=0.004, error=0.005, seconds=0.9), point("nuq4", loss=0.005, seconds=1.0)
    assert not covers(SPACE, unsure, sure)
    points = [point(seconds=2.0), unsure, sure]
    found = searched(points, rates_of(points, 1.0, 3.0, 2.0))
    assert found.chosen.point.settings == chosen("nuq4") and len(found.frontier) == 3


def test_what_loses_much_more_than_the_budget_is_not_tried() -> None:
    points = [point(), point("nuq2", loss=0.05), point("nuq3", loss=0.03)]
    fake = Fake(rates_of(points, 1.0, 9.0, 3.0))
    found = searched(points, {}, fake=fake)
    assert fake.tried(chosen("nuq2")) == 0 and fake.tried(chosen("nuq3")) > 0
    assert [(each.settings, each.why) for each in found.left] == [(chosen("nuq2"), Why.LOSSY)]


def test_of_equal_goodputs_the_one_with_less_memory_is_chosen() -> None:
    points = [point(), point("nuq4", loss=0.004, total=GIB)]
    small = {0.5: GIB // 2, 0.25: GIB // 4}

    def made(settings: Settings, share: float) -> Point | None:
        if share == 1:
            return None
        each = next(each for each in points if each.settings == settings)
        return Point(each.settings, Room(1, small[share], 10), each.loss, each.bound, each.profile, each.speed, share)

    rates = rates_of(points, 1.0, 1.5)
    found = searched(points, rates, made=made)
    # A quarter of the cache serves 0.25 ** 0.1 = 13 % less, half of it 7 % less: more than a tie.
    assert found.chosen.point.share == 1.0
    assert {each.point.share for each in found.frontier if each.point.settings == chosen("nuq4")} == {1.0, 0.5, 0.25}
    flat = searched(points, {}, made=made, fake=Flat(rates))
    assert (flat.chosen.point.settings, flat.chosen.point.share) == (chosen("nuq4"), 0.25)


def test_the_best_settings_are_tried_with_fewer_running_sequences() -> None:
    points = [point(), point("nuq4", loss=0.004), point("nuq3", loss=0.02)]
    fewer = {settings: 3.0 / number for number, settings in enumerate(SPACE.later(chosen("nuq4")), 1)}
    fake = Fake(
        {**dict.fromkeys(SPACE.later(chosen()), 0.5), **dict.fromkeys(SPACE.later(chosen("nuq3")), 1.0), **fewer}
    )
    fake.rates |= rates_of(points, 1.0, 2.0, 1.0)

    def made(settings: Settings, share: float) -> Point | None:
        loss = {each.settings.of("codec"): each.loss for each in points}[settings.of("codec")]
        return None if share < 1 else replace(points[0], settings=settings, loss=loss)

    found = searched(points, {}, fake=fake, made=made)
    assert found.chosen.point.settings == SPACE.later(chosen("nuq4"))[0] and found.chosen.rate == 3.0
    assert SPACE.name(found.chosen.point.settings) == f"nuq4, {RUNNING[1]} running"
    assert not any({*asked} & {*fewer} for requests, asked in fake.calls if requests == RUNGS[0].requests)


def test_a_modelled_loss_is_measured_before_its_settings_are_chosen() -> None:
    points = [
        point(), point("nuq4", loss=0.004), point("nuq4", "budget 0.75", loss=0.006, origin=Origin.MODELLED),
    ]  # fmt: skip
    asked: list[Settings] = []

    def refine(given: Sequence[Point], measured: float) -> list[Point | None]:
        asked.extend(each.settings for each in given)
        return [
            point("nuq4", "budget 0.75", loss=measured) if each.loss.origin is Origin.MODELLED else each
            for each in given
        ]

    rates = rates_of(points, 1.0, 2.0, 3.0)
    good = searched(points, rates, refine=lambda given: refine(given, 0.008))
    assert good.chosen.point.settings == points[2].settings and good.chosen.point.loss.origin is Origin.MEASURED
    assert points[2].settings in asked
    bad = searched(points, rates, refine=lambda given: refine(given, 0.012))
    assert bad.chosen.point.settings == chosen("nuq4")
    unknown = searched(points, rates)
    assert unknown.chosen.point.settings == points[2].settings
    assert any("modelled" in warning for warning in unknown.warnings)


def test_latencies_that_were_measured_meanwhile_are_simulated_again() -> None:
    points = [point(), point("nuq4", loss=0.004, origin=Origin.MODELLED)]
    fake = Fake(rates_of(points, 1.0, 2.0))
    num_asked = 0

    def refine(given: Sequence[Point]) -> list[Point | None]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:  # before the last rung there was no time
            return list(given)
        fake.rates = {chosen(): 1.0, chosen("nuq4"): 0.5}
        return [point("nuq4", loss=0.004, seconds=3.0)]

    found = searched(points, {}, fake=fake, refine=refine)
    assert found.chosen.point.settings == chosen() and num_asked == 2
    assert next(each.rate for each in found.finalists if each.point.settings == chosen("nuq4")) == 0.5


def test_a_bound_below_what_others_serve_excludes_without_a_trial() -> None:
    others = [point(codec, loss=0.001 * (number + 1)) for number, codec in enumerate(("nuq4", "nuq3", "nuq2"))]
    low = point("g4", loss=0.009, bound=1.5)
    points = [point(), *others, low]
    fake = Fake(rates_of(points, 2.0, 3.0, 3.0, 3.0, 1.4))
    found = searched(points, {}, fake=fake)
    assert fake.tried(chosen("g4")) == 0
    (left,) = (each for each in found.left if each.settings == chosen("g4"))
    assert left.why is Why.BOUND and "at most 1.5 requests/s" in left.reason
    assert len(fake.calls[0][1]) == BATCH


def test_what_serves_less_than_others_who_lose_no_more_costs_no_search() -> None:
    points = [point(), *(point(name, loss=0.002) for name in ("nuq4", "nuq3", "nuq2")), point("g4", loss=0.003)]
    fake = Fake(rates_of(points, 2.0, 3.0, 1.0, 1.0, 1.5))
    floors: dict[Settings, float] = {}

    class Noted(Fake):
        def __call__(self, trials: Sequence[Trial], rung: Rung, end: float) -> list[Goodput | None]:
            floors.update({each.point.settings: each.floor for each in trials if rung.requests == 10})
            return super().__call__(trials, rung, end)

    found = searched(points, {}, fake=Noted(fake.rates))
    assert floors[chosen()] == 0.0 and floors[chosen("g4")] == pytest.approx(0.9 * 3.0)
    (left,) = (each for each in found.left if each.settings == chosen("g4"))
    assert left.why is Why.SLOWER and "2.7 requests/s" in left.reason


def test_what_is_worse_in_all_that_is_known_is_covered() -> None:
    better, worse = point("nuq4", loss=0.002, seconds=0.9), point("nuq3", loss=0.004, seconds=1.0)
    assert covers(SPACE, better, worse) and not covers(SPACE, worse, better)
    assert covers(SPACE, better, point("nuq3", loss=0.004, seconds=0.9))
    for other in (
        point("nuq3", loss=0.004, seconds=1.0, tokens=2000),
        point("nuq3", loss=0.001, seconds=1.0),
        point("nuq3", loss=0.004, seconds=0.5),
        point("nuq3", loss=0.004, seconds=1.0, total=GIB // 2),
        point("nuq3", "budget 0.5", loss=0.004, seconds=1.0),  # who keeps fewer tokens has more room for others
        point("nuq3", "prefill + decode", loss=0.004, seconds=1.0),
    ):
        assert not covers(SPACE, better, other), other
    fake = Fake(rates_of([point(), better, worse], 1.0, 2.0, 2.0))
    found = searched([point(), better, worse], {}, fake=fake)
    assert fake.tried(worse.settings) == 0
    assert [(each.settings, each.why) for each in found.left] == [(worse.settings, Why.COVERED)]


def test_the_best_of_hundreds_survives_the_rungs_of_a_noisy_simulation() -> None:
    draw = random.Random(3)
    points = []
    for settings in SPACE.settings():
        names = [each.name for each in settings.choices if each not in SPACE.first.choices]
        loss = 0.0 if not SPACE.parts(settings) else draw.uniform(0.001, 0.03)
        points.append(point(*names, loss=loss, seconds=draw.uniform(0.5, 2), tokens=draw.randint(500, 2000)))
    rates = {each.settings: draw.uniform(1, 10) for each in points}
    fake = Fake(rates, noise=0.05)
    found = searched(points, {}, fake=fake)
    best = max(rates[each.settings] for each in points if each.loss.is_within(0.01))
    assert rates[found.chosen.point.settings] >= 0.9 * best
    counts = {rung: sum(len(asked) for number, asked in fake.calls if number == rung.requests) for rung in RUNGS}
    assert counts[RUNGS[2]] <= RUNGS[1].keep + 1 < counts[RUNGS[0]]


def test_points_beyond_the_budget_do_not_crowd_out_those_within_it() -> None:
    lossy = [(codec, budget) for codec in ("nuq3", "nuq2", "g4") for budget in ("budget 0.75", "budget 0.5")]
    points = [point(), point("nuq4", loss=0.005)]
    points += [point(*names, loss=0.02 + 0.001 * number) for number, names in enumerate(lossy)]
    rates = rates_of(points, 1.0, 2.0, *(3.0 + number for number in range(len(lossy))))
    found = searched(points, rates, rungs=(Rung(10, 0.1, 4), Rung(20, 0.05, 4)))
    assert found.chosen.point.settings == chosen("nuq4") and len(found.frontier) > 2


def test_two_loads_lead_to_different_settings() -> None:
    points = [point(), point("nuq4", loss=0.005), point("prefill + decode")]
    one, other = rates_of(points, 1.0, 3.0, 2.0), rates_of(points, 1.0, 2.0, 3.0)
    assert searched(points, one).chosen.point.settings != searched(points, other).chosen.point.settings


def test_the_order_of_points_does_not_matter() -> None:
    draw = random.Random(5)
    points = [point(), *(point(name, loss=0.001 * number) for number, name in enumerate(("nuq4", "nuq3", "g4"), 1))]
    rates = {each.settings: draw.uniform(1, 5) for each in points}
    results = {searched(draw.sample(points, len(points)), rates).chosen.point.settings for _ in range(6)}
    assert len(results) == 1


def test_when_the_time_is_over_something_is_known_and_the_rest_is_named() -> None:
    points = [point(), *(point(name, loss=0.002) for name in ("nuq4", "nuq3", "nuq2", "g4"))]
    fake = Fake(rates_of(points, 1.0, 2.0, 3.0, 4.0, 5.0))
    found = searched(points, {}, fake=fake, deadline=0.5)
    assert found.chosen.rate > 0 and found.chosen.requests == RUNGS[0].requests
    assert {each.why for each in found.left} == {Why.UNTRIED}
    assert any("raise --plan.seconds" in warning for warning in found.warnings)


def test_no_settings_that_meet_the_targets_is_an_error_with_the_best() -> None:
    points = [point(), point("nuq4", loss=0.002)]
    with pytest.raises(NoPlanError, match=r"no settings meet the latency targets; the best are default: 50.0%"):
        searched(points, rates_of(points, 0.0, 0.0))


def test_no_settings_within_the_budget_is_an_error_with_the_least_loss() -> None:
    points = [point("nuq4", loss=0.012), point("nuq3", loss=0.02)]
    with pytest.raises(NoPlanError, match=r"lose at most 1.00%; the least loss is that of nuq4: 1.20%"):
        searched(points, rates_of(points, 1.0, 2.0))


def test_neighbours_differ_in_one_thing_and_say_why_they_lost() -> None:
    points = [
        point(), point("nuq4", loss=0.004), point("nuq4", "budget 0.75", loss=0.006), point("nuq3", loss=0.02),
        point("nuq3", "budget 0.75", loss=0.03), point("nuq4", "prefill + decode", loss=0.004, bound=1.0),
    ]  # fmt: skip
    found = searched(points, rates_of(points, 1.0, 3.0, 2.0, 4.0, 4.0, 0.5))
    assert found.chosen.point.settings == chosen("nuq4")
    told = {SPACE.name(settings): reason for settings, _, reason in found.neighbours(SPACE)}
    assert {*told} == {"default", "nuq4, budget 0.75", "nuq3", "nuq4, prefill + decode"}
    assert "67% less" in told["default"]
    assert "loses 2.00%" in told["nuq3"]
    assert "requests/s" in told["nuq4, budget 0.75"] and "at most 1" in told["nuq4, prefill + decode"]


def test_points_that_are_equal_but_for_a_slab_do_not_beat_each_other() -> None:
    totals = {"nuq4": GIB, "g4": GIB + 999}
    one, other = (Tried(point(name, total=total), Goodput(2.0, 0.9), 10) for name, total in totals.items())
    assert not beats(one, other) and not beats(other, one)


def test_requests_longer_than_the_context_are_left_out_with_all_that_follow_them() -> None:
    load = Workload("w", [
        Arrival(0.0, (Span(1, 500),), 10), Arrival(1.0, (Span(0, 50),), 10),
        Arrival(0.0, (Span(2, 20),), 10, after=1, pause=1.0), Arrival(0.0, (Span(3, 5),), 1, after=0, pause=1.0),
        Arrival(0.0, (Span(4, 300),), 5, after=2, pause=1.0), Arrival(2.0, (Span(5, 9),), 9),
    ])  # fmt: skip
    found = within(load, 100)
    assert found is not None
    assert [(each.num_in, each.after) for each in found.arrivals] == [(50, -1), (20, 0), (9, -1)]
    assert within(load, 5) is None and within(load, 1000) is load


def test_the_measured_goodput_is_where_attainment_falls_to_the_target() -> None:
    script = benchmark("plan_auto")
    assert script.knee({"1.0": 0.99, "1.2": 0.95, "1.4": 0.85}, 0.9) == pytest.approx(1.3)
    assert script.knee({"1.0": 0.99}, 0.9) == 1.0 and script.knee({"1.0": 0.5}, 0.9) == 0.0
    planned = {
        name: {"settings": name, "goodput": {"rate": rate}} for name, rate in (("chosen", 3.0), ("default", 1.0))
    }  # fmt: skip
    others = [{"settings": f"{rate}", "goodput": {"rate": rate}} for rate in (0.5, 2.0, 2.5)]
    found = script.finalists({**planned, "finalists": [*others, *planned.values()]}, 4)
    assert [each["settings"] for each in found] == ["chosen", "default", "2.5", "2.0"]
    found = script.finalists({**planned, "default": None, "finalists": others}, 3)
    assert [each["settings"] for each in found] == ["chosen", "2.5", "2.0"]


def test_the_benchmark_plans_for_the_attainment_that_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, commands = benchmark("plan_auto"), []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(stdout="{}")

    monkeypatch.setattr(script.subprocess, "run", run)
    args = SimpleNamespace(
        model="m", memory="1GiB", quality="0.01", seconds="9", ttft=1.0, tpot=0.1, data=tmp_path, text="t", windows=1,
        processes=1, out=tmp_path, attainment=0.95, more=[],
    )  # fmt: skip
    assert script.plan(args, "conv", tmp_path / "trace.jsonl") == {}
    (command,) = commands
    assert command[command.index("--slo.attainment") + 1] == "0.95"


def test_gpus_that_are_not_here_are_planned_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "RUNGS", (Rung(20, 0.3, 3, confirms=True),))
    arrivals = [Arrival(0.05 * index, (Span(index, 400 + index),), 40) for index in range(40)]
    Workload("made", arrivals).write(tmp_path / "trace.jsonl")
    words = [
        "--hardware",
        "a100-80g",
        "--trace",
        str(tmp_path / "trace.jsonl"),
        *TARGETS,
        "--json",
        "--retain.budget",
        "off",
    ]
    file = tmp_path / "quire.toml"
    file.write_text("[cluster]\nprefill = 0\ndecode = 0\n")
    assert main(["plan", "auto", "llama-2-7b", *words, "--config", str(file), "--plan.seconds", "3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"]["steps"]["origin"] == told["chosen"]["goodput"]["origin"] == "modelled"
    assert told["chosen"]["loss"]["value"] == 0  # nothing lossy is known of a model in numbers
    names = {each["settings"] for each in (*told["finalists"], *told["left"])}
    assert any("tp 2" in name for name in names) and any("pp 2" in name for name in names)


def test_parts_of_a_trace_begin_elsewhere_for_each_seed_and_keep_their_gaps() -> None:
    load = Workload("w", [Arrival(float(index**2), (Span(index, 5),), 1) for index in range(10)])
    parts = Parts(load, 4)
    first, second = (parts.drawn(None, seed) for seed in (0, 1))
    assert [each.prompt[0].id for each in first.arrivals] == [0, 1, 2, 3]
    assert [each.prompt[0].id for each in second.arrivals] == [4, 5, 6, 7]
    assert [each.at for each in second.arrivals] == [0.0, 9.0, 20.0, 33.0]
    faster = parts.drawn(2 * second.rate, 1)
    assert [each.at for each in faster.arrivals] == [0.0, 4.5, 10.0, 16.5]
    assert len(Parts(load, 20).drawn(None, 3).arrivals) == 10


def test_fresh_seeds_draw_requests_that_no_other_seed_draws() -> None:
    def parts(num_requests: int, after: int = -1) -> Parts:
        arrivals = [Arrival(float(index), (Span(index, 5),), 1) for index in range(num_requests)]
        arrivals[-1] = replace(arrivals[-1], after=after)
        return Parts(Workload("w", arrivals), 4)

    for num_requests, seed, count in ((15, 0, 2), (12, 5, 2), (8, 1, 1), (7, 0, 0), (3, 0, 0)):
        load = parts(num_requests)
        fresh = fresh_seeds(load, seed)
        ids = [{each.prompt[0].id for each in load.drawn(3.0, each).arrivals} for each in (seed, *fresh)]
        assert len(fresh) == count and len(set.union(*ids)) == sum(map(len, ids)), (num_requests, ids)
    assert fresh_seeds(parts(15, after=3), 0) == (), "a conversation has no parts"
    whole = parts(20).workload
    assert fresh_seeds(Load(whole, 4), 0) == () and fresh_seeds(Load(whole, 4, fit(whole)), 3) == (4, 5)


def test_a_goodput_that_no_other_requests_confirm_says_so(words: list[str], known: Path) -> None:
    planner = planner_from(words)
    arrivals = [Arrival(10.0 * (index // 2) + 0.1 * (index % 2), (Span(index, 30),), 4) for index in range(120)]
    workload = Workload("pairs", arrivals)
    planner.goal = replace(planner.goal, load=Load(workload, 30, fit(workload)))
    assert not any("not confirmed" in told for told in planner._prepare())
    planner.goal = replace(planner.goal, load=Load(workload, 61, fit(workload)))
    assert any("the trace has no second 61" in told for told in planner._prepare())
    trial = Trial(planner._made(planner.space.first, 1.0), 1.0)
    (found,) = planner.evaluate([trial], Rung(61, 0.5, 1, confirms=True), math.inf)
    assert found is not None and found.rate > 0 and not found.confirmed


def test_a_cache_that_shortens_the_longest_request_is_a_doubt(
    words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = planner_from(words)
    assert isinstance(planner, LocalPlanner)
    point = planner._made(planner.space.first, 1.0)
    assert planner.doubts(point) == []
    monkeypatch.setattr(LocalPlanner, "context", 100 * planner.context)
    (told,) = planner.doubts(point)
    assert told.startswith("its cache has room for requests of ") and told.endswith(": longer ones are refused")


# ---- the command -----------------------------------------------------------------------------------------------------

TEXT = "It was the best of mills, it was the worst of mills. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a trace, a text, and a file that decides what would take long to simulate."""
    found = tmp_path_factory.mktemp("auto")
    save_tiny(found / "model", hidden_size=64)
    draw, at, arrivals = random.Random(0), 0.0, []
    for index in range(120):
        at += draw.expovariate(5)
        arrivals.append(Arrival(at, (Span(index, draw.randint(16, 120)),), draw.randint(2, 24)))
    Workload("made", arrivals).write(found / "trace.jsonl")
    (found / "text.txt").write_text(TEXT)
    (found / "quire.toml").write_text("[cluster]\nprefill = 0\ndecode = 0\n[runtime]\nthreads = 1\n")
    return found


@pytest.fixture
def known(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, with what an earlier plan has measured: dense is slower than g4, which loses 0.1 %."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, options = str(folder / "model"), {"runtime.threads": 1}
    space = Space.of(Machine(cores=1))
    kept = tmp_path / "quire" / "latency"
    kept.mkdir(parents=True)
    for codec, base in (("dense", 0.012), ("g4", 0.006)):
        own = {**options, "cache.memory": "4MiB", "cache.codec": codec}
        local = LocalModel(model, own, None, lambda *_: latency(1.0))
        about = speed_settings(local.model_id, local.config)
        latency(base, 1e-7, 5e-5, **about).write(kept / f"{codec}.json")
    quality = Quality(model, options, None, space, Text("text.txt", TEXT))
    for name, losses in (("default", (2.0, 2.1)), ("g4", (2.001, 2.1012))):
        settings = chosen(*([] if name == "default" else [name]), space=space)
        way = quality.losses.scoring_of(settings)
        assert way is not None
        quality.losses.curves.keep(
            Curve(quality.model_id, dict(quality.key_of(settings)), way.text, "text.txt", way.context, None, losses)
        )
    monkeypatch.setattr(planning, "RUNGS", (Rung(24, 0.3, 8, until=0.5), Rung(30, 0.2, 4, confirms=True)))
    return tmp_path


@pytest.fixture
def words(folder: Path) -> list[str]:
    """A command that works without measuring anything."""
    return [
        "plan", "auto", str(folder / "model"), "--config", str(folder / "quire.toml"), "--trace",
        str(folder / "trace.jsonl"), *TARGETS, "--plan.memory", "300MiB", "--model.weights", "native",
        "--retain.budget", "off", "--plan.seconds", "60",
    ]  # fmt: skip


def test_a_plan_is_printed_written_and_read_back(
    words: list[str], known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "planned.toml"
    assert main([*words, "--output", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    best, default = told["chosen"], told["default"]
    assert best["options"]["cache.codec"] == "g4" and default["options"]["cache.codec"] == "dense"
    assert best["goodput"]["rate"] > 1.1 * default["goodput"]["rate"]
    assert best["loss"]["origin"] == "measured" and 0 < best["loss"]["most"] < 0.01
    assert best["steps"]["origin"] == best["goodput"]["origin"] == "fitted"
    assert best["memory"]["total"] <= 300 << 20 and told["frontier"]
    assert {each["why"] for each in told["left"]} <= {"unfit", "covered", "bound", "slower"}
    config, cluster = EngineConfig.from_options({}, file), ClusterConfig.from_options({}, file)
    assert (config.cache.codec, config.cache.memory) == ("g4", best["memory"]["cache"])
    assert config.runtime.threads == 1 and not cluster.is_on
    slo = SloConfig.from_options({}, file)
    assert (slo.ttft, slo.tpot) == (0.4, 0.05)
    text = file.read_text()
    assert "# Predicted: goodput (fitted):" in text and "# planned" in text and "# Quality lost: 0.1" in text


def test_people_get_a_frontier_with_the_origin_of_every_number(
    words: list[str], known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    told = capsys.readouterr().out
    parts = ("frontier within 300MiB", "chosen: g4", "(measured)", "(fitted)", "modelled", "differ from the chosen")
    assert [part for part in parts if part not in told] == []
    (row,) = (line for line in told.splitlines() if line.startswith("default "))
    assert row.split().count("fitted") == 2 and "measured" in row and "modelled" in row


def test_a_plan_without_a_text_or_curves_keeps_what_loses_nothing(
    words: list[str], folder: Path, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (known / "quire" / "curves").rglob("*.json"):
        file.unlink()
    planner = planner_from(words)
    lacking = planner.quality.measure_all(planner._possible(), 0.01, math.inf)  # type: ignore[union-attr]
    assert {"give --text FILE" in reason for reason in lacking.values() if "calibration" not in reason} == {True}
    known_ones = planner._known(planner._possible(), lacking)
    assert [planner.space.name(each) for each in known_ones] == ["default"]


@pytest.mark.parametrize(("budget", "is_measured"), [(0.01, False), (0.0012, True), (0.0001, False)])
def test_losses_that_too_few_windows_leave_open_are_measured_further(
    budget: float, is_measured: bool, words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = planner_from([*words, "--plan.quality", str(budget)])
    asked: list[Settings] = []
    monkeypatch.setattr(planner.quality, "measure", lambda settings, *_: asked.append(settings))
    g4 = next(each for each in planner.space.settings() if planner.space.name(each) == "g4")
    (found,) = planner.refine([planner._made(g4, 1.0)])
    assert found.loss.value == pytest.approx(0.0011, rel=0.01) and asked == [g4] * is_measured


def planner_from(words: list[str]) -> Any:
    return plan_auto.planner_of(parse(words))


def test_latencies_are_kept_ones_or_follow_from_their_parts(words: list[str], known: Path) -> None:
    speeds = planner_from(words).speeds
    dense = speeds.of(speeds.space.first)
    assert dense.origin is Origin.FITTED and dense.model.coefficients["base"] == 0.012
    both = chosen("g4 weights", "g4", space=Space.of(Machine(cores=2)))
    assert speeds.of(both) is None  # nothing says what these weights save
    assert speeds.needed([both]) == [chosen("g4 weights", space=Space.of(Machine(cores=2)))]
    about = {**speeds.wanted(chosen("g4 weights", space=Space.of(Machine(cores=2))))}
    speeds.models.append(latency(0.008, 1e-7, 5e-5, **about))
    found = speeds.of(both)
    assert found.origin is Origin.MODELLED and found.how == "from the steps of g4 weights and of g4"
    assert found.model.seconds(StepWork(1)) == pytest.approx(0.008 + 0.006 - 0.012, rel=0.05)


def test_a_measurement_without_steps_that_decode_tells_nothing_and_is_not_kept(
    words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If time was over before the first one, a fit would give them the seconds of prompts, or none."""
    speeds, part = planner_from(words).speeds, chosen("nuq4", space=Space.of(Machine(cores=2)))
    prompts = [(StepWork(rows, rows * rows / 2, 0, 0.0, 0.0, 1), 0.01 * rows) for rows in (64, 128, 256)]
    decoding = [(StepWork(0, 0.0, rows, 100.0 * rows, 100.0 * rows, 0), 0.01) for rows in (1, 2, 4)]
    before = sorted(path.name for path in speeds._folder.iterdir())
    for records, said in ((prompts, "no steps that decode were measured within 7 s"), (prompts + decoding, "")):
        monkeypatch.setattr(Speeds, "_steps", lambda self, timed, *_, found=records: (found, self.wanted(timed)))
        reason = speeds.measure(part, 7.0)
        assert reason.startswith(said) and bool(reason) == bool(said) == (speeds.exact(part) is None)
        assert (sorted(path.name for path in speeds._folder.iterdir()) == before) == bool(said)
    # Files of this kind that earlier versions have kept are not read.
    (path,) = (each for each in speeds._folder.iterdir() if each.name not in before)
    replace(speeds.exact(part), counts={"prompt": 3}).write(path)
    assert planner_from(words).speeds.exact(part) is None


def test_a_codec_that_was_not_measured_is_as_fast_as_one_like_it(words: list[str], known: Path) -> None:
    space = Space.of(Machine(cores=2))
    speeds = planner_from(words).speeds
    speeds.models.append(latency(0.007, **speeds.wanted(chosen("nuq4", space=space))))
    assert speeds.of(chosen("nuq4", space=space)).origin is Origin.FITTED
    assert speeds.exact(chosen("nuq4", "2 slots", space=space)) is None
    quick = replace(latency(0.02, **speeds.wanted(chosen("nuq4", space=space))), counts={"decode": 120})
    speeds.models.insert(0, quick)
    assert speeds.exact(chosen("nuq4", space=space)) is speeds.models[-1], "it has more steps"
    found = speeds.of(chosen("nuq3", "0 slots", space=space))
    assert found.origin is Origin.MODELLED and found.how == "from the steps of nuq3, 0 slots as nuq4"
    assert not found.is_poor
    wanted = [chosen(name, space=space) for name in ("nuq4", "nuq3", "nuq2")]
    assert speeds.needed(wanted) == wanted[1:]
    # A sum of parts is as little known as the part that was measured least.
    speeds.models = [
        replace(each, counts={"decode": 9}) if each is speeds.models[-1] else each for each in speeds.models
    ]
    speeds.models.remove(quick)
    speeds._composed.clear()
    poor = speeds.of(chosen("nuq3", "0 slots", space=space))
    assert poor.is_poor and poor.origin is Origin.MODELLED


def test_steps_are_measured_once_and_kept(words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Settings, float]] = []

    def steps(self: Speeds, timed: Settings, seconds: float, progress: Any) -> Any:
        asked.append((timed, seconds))
        model = latency(0.02, 1e-7, 5e-5)
        return [(work, model.seconds(work)) for work in grid(model)], {**self.wanted(timed)}

    monkeypatch.setattr(Speeds, "_steps", steps)
    space = Space.of(Machine(cores=2))
    weights, nuq4, nuq3 = (chosen(name, space=space) for name in ("g4 weights", "nuq4", "nuq3"))
    speeds = planner_from(words).speeds
    assert speeds.measure_all([weights], time.monotonic() + 100) == {} and len(asked) == 1
    assert planner_from(words).speeds.of(weights).origin is Origin.FITTED
    assert speeds.measure_all([weights], time.monotonic() + 100) == {} and len(asked) == 1
    told = speeds.measure_all([nuq4, nuq3], time.monotonic() + LEAST_SECONDS)
    assert told == {nuq3: "the time was over before its steps were measured"}
    assert asked[1] == (nuq4, LEAST_SECONDS)


def test_what_all_settings_need_is_measured_again_for_longer_if_nothing_came_of_it(
    words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a large model may take longer than the seconds that each of many parts gets."""
    asked: list[float] = []

    def steps(self: Speeds, timed: Settings, seconds: float, progress: Any) -> Any:
        asked.append(seconds)
        model = latency(0.02, 1e-7, 5e-5)
        return [(work, model.seconds(work)) for work in grid(model)] if seconds > 30 else [], self.wanted(timed)

    monkeypatch.setattr(Speeds, "_steps", steps)
    for path in (known / "quire" / "latency").iterdir():
        path.unlink()
    speeds = planner_from(words).speeds
    nuq4 = chosen("nuq4", space=Space.of(Machine(cores=2)))
    now = time.monotonic()
    assert speeds.measure_all([nuq4], now + 20, last=now + 30)[speeds.space.first].startswith("no steps were measured")
    told = speeds.measure_all([nuq4], now + 20, last=now + 300)
    assert told == {nuq4: "the time was over before its steps were measured"}
    assert asked[-1] == pytest.approx(4 * asked[-2]) and asked[-1] > 30, "and no other part gets less"


def test_a_plan_that_cannot_be_made_says_what_decides(
    words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the commonest reason: that of the default settings. With a flag that exists."""
    monkeypatch.setattr(Speeds, "_steps", lambda self, timed, *_: ([], self.wanted(timed)))
    for path in (known / "quire" / "latency").iterdir():
        path.unlink()
    words = [word for word in words if word not in ("--model.weights", "native")]
    assert main([*words, "--plan.seconds", "5"]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "no settings can be tried" in line]
    assert error == (
        "quire: no settings can be tried; default: no steps were measured within 5 s; raise --plan.seconds"
    )
    assert "--plan.seconds" in CommandParser("plan", "auto").flags


def test_codecs_without_a_calibration_are_said_before_anything_is_measured(
    words: list[str], known: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(words) == 0
    (said,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert (
        "settings with nuq4, nuq3, nuq2 are left out: there is no calibration with 1 outlier slots; make it with"
        in said
    )
    assert "quire calibrate" in said and f"note: {said}" in capsys.readouterr().out


def test_a_disk_that_is_allowed_is_tried_with_its_measured_speed(words: list[str], known: Path, tmp_path: Path) -> None:
    planner = planner_from([*words, "--tiers.disk", f"{tmp_path / 'disk'}:64MiB"])
    assert [choice.name for choice in planner.space.tried["disk"]] == ["no disk", "disk"]
    settings = next(each for each in planner.space.settings() if planner.space.name(each) == "disk")
    planner.measure_latencies([settings], 0.0)
    trial = Trial(planner._made(settings, 1.0), 5.0)
    (tier,) = planner.maker(trial.point).setup().replicas[0].tiers
    assert (tier.name, tier.cap) == ("disk", 64 << 20) and tier.link.bytes_per_second != LINKS["disk"].bytes_per_second
    (found,) = planner.evaluate([trial], Rung(20, 0.3, 1), math.inf)
    assert found is not None and found.rate > 0 and trial.point.cost > 1
    assert not (tmp_path / "disk").exists()  # a plan leaves nothing there


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing(
    words: list[str], known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for processes in ("1", "2"):
        assert main([*words, "--json", "--processes", processes]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1]


def test_weights_that_instances_map_are_counted_once(
    words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = planner_from([*words, "--plan.memory", "2GiB"])
    monkeypatch.setattr(type(planner), "_counts", lambda self, settings: (2, 3))
    settings = planner.space.first
    weights = 64 << 20
    planner._weights = lambda form: weights
    planner._fits.clear()
    apart = planner.fit(settings).room
    monkeypatch.setattr(
        "quire.evaluation.auto_local.engine_image_spec", lambda checkpoint, config: SimpleNamespace(num_bytes=weights)
    )
    planner._shared.cache_clear()
    planner._fits.clear()
    mapped = planner.fit(settings).room
    assert 2 * (mapped.cache - apart.cache) == pytest.approx(weights, abs=4 << 20)


@pytest.mark.parametrize("weights", ["g4", ""])
def test_a_plan_is_made_where_only_packed_weights_fit(
    words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    """And refused with the reason of the plain settings where no weights fit."""
    original = LocalPlanner.fit

    def fit(self: LocalPlanner, settings: Settings, share: float = 1.0) -> Fit:
        if settings.options["model.weights"] != weights:
            raise ConfigError(f"{settings.options['model.weights']} weights need 1.25GiB")
        return original(self, settings, share)

    monkeypatch.setattr(LocalPlanner, "fit", fit)
    words = [word for word in words if word not in ("--model.weights", "native")]
    if not weights:
        with pytest.raises(ConfigError, match=r"native weights need 1\.25GiB"):
            planner_from(words)
        return
    planner = planner_from(words)
    assert {each.of("weights").name for each in planner._fitting(planner._possible())} == {"g4 weights"}


def test_memory_is_divided_among_processes_weights_and_caches(words: list[str], known: Path) -> None:
    planner = planner_from([*words, "--plan.memory", "1GiB"])
    one = planner.fit(planner.space.first)
    assert one.room.total <= 1 << 30 and one.room.total > 0.98 * (1 << 30)
    assert planner.fit(planner.space.first, 0.5).room.cache == pytest.approx(one.room.cache / 2, rel=0.01)
    apart = chosen("prefill + decode", space=Space.of(Machine(cores=2)))
    two = planner.fit(apart)
    assert 2 * two.room.cache == pytest.approx(one.room.cache - 2 * planner.process_bytes, rel=0.02)
    planner.goal = type(planner.goal)(**{**vars(planner.goal), "memory": 200 << 20})
    planner._fits.clear()
    with pytest.raises(ConfigError, match="one process|1 process need"):
        planner.fit(planner.space.first)
