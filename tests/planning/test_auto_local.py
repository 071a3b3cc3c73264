"""Plans for this machine: its memory, and weights that instances share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.engine.footprint import footprint
from quire.errors import ConfigError
from quire.planning.auto import Fit
from quire.planning.auto_local import LocalPlanner
from quire.planning.space import SearchLimits, Settings, Space
from tests.planning.test_auto import folder as folder
from tests.planning.test_auto import known as known
from tests.planning.test_auto import planner_from
from tests.planning.test_auto import words as words
from tests.planning.test_halving import chosen


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
        "quire.planning.auto_local.engine_image_spec", lambda checkpoint, config: SimpleNamespace(num_bytes=weights)
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
    assert {each.of("weights").name for each in planner._accepted(planner._possible(), planner.fit)} == {"g4 weights"}


def test_memory_is_divided_among_processes_weights_and_caches(words: list[str], known: Path) -> None:
    planner = planner_from([*words, "--plan.memory", "1GiB"])
    one = planner.fit(planner.space.first)
    assert one.room.total <= 1 << 30 and one.room.total > 0.98 * (1 << 30)
    _, sizes, _ = planner._model.resolved(one.config)
    taken = footprint(planner._model.shape, one.config, sizes)
    assert taken.total == pytest.approx(one.room.total, rel=0.01) and taken.step > 0, "what a server says that it takes"
    assert planner.fit(planner.space.first, 0.5).room.cache == pytest.approx(one.room.cache / 2, rel=0.01)
    apart = chosen("prefill + decode", space=Space.of(SearchLimits(cores=2)))
    two = planner.fit(apart)
    assert 2 * two.room.cache == pytest.approx(one.room.cache - 2 * planner.process_bytes, rel=0.02)
    planner.goal = type(planner.goal)(**{**vars(planner.goal), "memory": 200 << 20})
    planner._fits.clear()
    with pytest.raises(ConfigError, match="one process|1 process need"):
        planner.fit(planner.space.first)
