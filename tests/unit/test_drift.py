"""When a placement is searched again."""

from __future__ import annotations

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.planning.drift import Load, Patience, Phase, Replanner, Seen, changes
from tests.effort import tries

PATIENCE = Patience(seconds=60.0, pause=600.0)
PLANNED = Load(2.0, 200.0, 100.0, 0.2)


def requests(rng: np.random.Generator, begun: float, seconds: float, load: Load) -> list[Seen]:
    """Poisson arrivals with exponential lengths."""
    count = rng.poisson(load.rate * seconds)
    found = []
    for at in np.sort(rng.uniform(begun, begun + seconds, count)).tolist():
        num_in = 1 + int(rng.exponential(load.mean_in - 1))
        found.append(Seen(at, num_in, 1 + int(rng.exponential(load.mean_out - 1)), rng.binomial(num_in, load.shared)))
    return found


def searches(replanner: Replanner, rng: np.random.Generator, begun: float, load: Load, windows: int) -> list[float]:
    """When searches began during some windows of a load."""
    found = []
    for number in range(windows):
        for each in requests(rng, begun + 60 * number, 60.0, load):
            replanner.note(each)
        now = begun + 60 * (number + 1)
        if replanner.tick(now):
            found.append(now)
            replanner.found(1.0, 1.0)
    return found


def test_a_longer_prompt_is_searched_for_after_three_windows_and_then_counts_as_planned() -> None:
    rng, replanner = np.random.default_rng(0), Replanner(PLANNED, PATIENCE, 0.0)
    assert not searches(replanner, rng, 0.0, PLANNED, 10)
    longer = Load(2.0, 2000.0, 100.0, 0.2)
    assert searches(replanner, rng, 600.0, longer, 3) == [780.0]
    assert replanner.planned.mean_in == pytest.approx(2000, rel=0.25) and replanner.phase is Phase.QUIET
    assert not searches(replanner, rng, 780.0, longer, 30), "nothing has changed since"


@pytest.mark.parametrize("seed", range(tries(5)))
@pytest.mark.parametrize("feature", ["rate", "mean_in", "mean_out", "shared"])
def test_a_tenth_more_or_less_in_turn_never_leads_to_a_search(feature: str, seed: int) -> None:
    rng, replanner = np.random.default_rng(seed), Replanner(PLANNED, PATIENCE, 0.0)
    for turn in range(20):
        share = 1 + (0.1 if turn % 2 else -0.1)
        values = {name: getattr(PLANNED, name) for name in ("rate", "mean_in", "mean_out", "shared")}
        values[feature] *= share
        assert not searches(replanner, rng, turn * 300.0, Load(**values), 5)


@pytest.mark.parametrize(
    "feature,value", [("rate", 4.0), ("rate", 0.9), ("mean_in", 600.0), ("mean_out", 30.0), ("shared", 0.7)]
)
def test_every_feature_is_watched(feature: str, value: float) -> None:
    rng, replanner = np.random.default_rng(1), Replanner(PLANNED, PATIENCE, 0.0)
    values = {name: getattr(PLANNED, name) for name in ("rate", "mean_in", "mean_out", "shared")} | {feature: value}
    assert len(searches(replanner, rng, 0.0, Load(**values), 4)) == 1


def test_a_burst_of_two_windows_is_forgotten() -> None:
    rng, replanner = np.random.default_rng(2), Replanner(PLANNED, PATIENCE, 0.0)
    for turn in range(6):
        begun = turn * 240.0
        assert not searches(replanner, rng, begun, Load(6.0, 200.0, 100.0, 0.2), 2)
        assert replanner.phase is Phase.SUSPECT and "requests/s" in str(replanner.reason[0])
        assert not searches(replanner, rng, begun + 120, PLANNED, 2) and replanner.phase is Phase.QUIET


def test_searches_keep_a_distance_whatever_happens() -> None:
    rng, replanner, found = np.random.default_rng(3), Replanner(PLANNED, PATIENCE, 0.0), list[float]()
    for turn in range(12):  # the load turns round as soon as it was searched for
        load = Load(2.0, 2000.0 if turn % 2 else 200.0, 100.0, 0.2)
        found += searches(replanner, rng, turn * 240.0, load, 4)
    assert len(found) > 2 and min(np.diff(found)) >= PATIENCE.pause


def test_a_switch_needs_a_gain_and_no_window_counts_meanwhile() -> None:
    replanner = Replanner(PLANNED, Patience(seconds=1.0, windows=1, pause=0.0, requests=2), 0.0)

    def search() -> None:
        for number in range(50):
            replanner.note(Seen(0.0, 900 + number, 100, 0))
        assert replanner.tick(replanner._window_begun + 1.0)

    search()
    assert not replanner.found(1.05, 1.0) and replanner.phase is Phase.QUIET
    replanner.planned = PLANNED
    search()
    assert not replanner.tick(1e9), "it searches"
    assert replanner.found(1.2, 1.0) and replanner.phase is Phase.SWITCH
    assert not replanner.tick(2e9), "it switches"
    replanner.switched()
    assert replanner.phase is Phase.QUIET and replanner.planned.mean_in == pytest.approx(924.5)


def test_a_window_waits_for_requests_but_not_for_ever() -> None:
    rng, replanner = np.random.default_rng(4), Replanner(Load(0.2, 200.0, 100.0, 0.2), PATIENCE, 0.0)
    found, busier = list[float](), Load(0.6, 200.0, 100.0, 0.2)
    for number in range(20):
        found += searches(replanner, rng, number * 60.0, busier, 1)
    assert found and found[0] >= 3 * 60, "three windows of fifty requests"
    silent = Replanner(PLANNED, PATIENCE, 0.0)
    silent.note(Seen(0.0, 5000, 10, 0))
    silent.note(Seen(1.0, 5000, 10, 0))
    assert not silent.tick(1100.0) and silent.phase is Phase.QUIET
    assert not silent.tick(1300.0) and silent.phase is Phase.SUSPECT, "hardly any requests in 20 windows is a change"


def test_few_requests_prove_nothing() -> None:
    seen = [Seen(0.0, 2000, 100, 0), Seen(1.0, 20, 100, 0)]
    now = Load.of(seen, 60.0)
    assert now is not None and not [each for each in changes(PLANNED, now, PATIENCE) if each.feature == "mean_in"]
    assert Load.of(seen[:1], 60.0) is None


def test_a_load_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="shared is 2"):
        Load(1.0, 1.0, 1.0, 2.0)
