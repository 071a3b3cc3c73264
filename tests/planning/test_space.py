"""The space of settings that are searched."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cache.codecs import CODECS
from quire.config import ClusterConfig, EngineConfig
from quire.planning.auto_hardware import machine_of as machine_with_gpus
from quire.planning.space import BUDGETS, RUNNING, SLOTS, Effect, SearchLimits, Space
from tests.codecs import TOY
from tests.planning.test_halving import GIB, SPACE, chosen

NUM_CODECS = sum(len(SLOTS) if row.is_calibrated else 1 for row in CODECS.values())
"""With every number of outlier slots that a codec has."""


def test_every_codec_of_the_registry_is_searched(toy_codec: None) -> None:
    names = [choice.name for choice in Space.of(SearchLimits()).tried["codec"]]
    assert names == [*CODECS] and TOY.name in names


def test_only_calibrated_codecs_have_outlier_slots() -> None:
    found = {(each.of("codec").name, each.of("outliers").name) for each in SPACE.settings()}
    calibrated = {name for name, row in CODECS.items() if row.is_calibrated}
    assert {codec for codec, slots in found if slots != f"{SLOTS[0]} slots"} == calibrated
    assert len(found) == NUM_CODECS


def test_the_space_is_the_product_of_what_can_be_together() -> None:
    assert len(SPACE.settings()) == 3 * NUM_CODECS * (1 + len(BUDGETS)) * 2
    assert SPACE.settings()[0] == SPACE.first and SPACE.name(SPACE.first) == "default"
    with_disk = Space.of(SearchLimits(cores=2, is_packed=True, disk="d:1GiB", given={"tiers.disk": "d:1GiB"}))
    assert len(with_disk.settings()) == 2 * len(SPACE.settings())


def test_memory_beside_the_cache_is_searched_if_it_may_be_used() -> None:
    assert [each.name for each in SPACE.tried["memory"]] == ["no memory tier"]
    space = Space.of(machine_with_gpus({"tiers.memory": GIB}))
    assert [dict(each.options)["tiers.memory"] for each in space.tried["memory"]] == [None, GIB]
    assert space.first.options["tiers.memory"] is None


def test_the_most_running_sequences_are_varied_after_all_else() -> None:
    assert {each.options["scheduler.max_running"] for each in SPACE.settings()} == {RUNNING[0]}
    settings = chosen("nuq4", "prefill + decode")
    later = SPACE.later(settings)
    assert [each.options["scheduler.max_running"] for each in later] == [*RUNNING[1:]]
    assert all(each.differs(settings) == ["running"] and SPACE.timed(each) == SPACE.timed(settings) for each in later)
    assert SPACE.later(later[0])[0] == settings and EngineConfig().scheduler.max_running == RUNNING[0]
    decided = Space.of(SearchLimits(given={"scheduler.max_running": 7}))
    assert decided.first.options["scheduler.max_running"] == 7 and not decided.later(decided.first)


def test_roles_need_two_cores_and_16_bit_checkpoints_have_nothing_to_dequantize() -> None:
    small = Space.of(SearchLimits(cores=1))
    assert [each.name for each in small.tried["roles"]] == ["one engine"]
    assert [each.name for each in small.tried["weights"]] == ["native weights", "g4 weights"]


def test_parallelism_is_for_gpus_alone() -> None:
    assert len(SPACE.tried["parallel"]) == 1
    assert {each.options for each in Space.of(SearchLimits(gpus=2)).tried["parallel"]} == {
        (("parallel.tp", 1), ("parallel.pp", 1)), (("parallel.tp", 2), ("parallel.pp", 1)),
        (("parallel.tp", 1), ("parallel.pp", 2)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "axis", "name"),
    [
        ("model.weights", "g4", "weights", "g4 weights"),
        ("cache.codec", "nuq3", "codec", "nuq3"),
        ("cache.outlier_slots", 2, "outliers", "2 slots"),
        ("retain.budget", 0.6, "retention", "budget 0.6"),
        ("cluster.mixed", 2, "roles", "mixed 2"),
    ],
)
def test_what_the_user_has_decided_is_not_searched(key: str, value: Any, axis: str, name: str) -> None:
    space = Space.of(SearchLimits(cores=2, given={key: value}))
    (only,) = space.tried[axis]
    assert only.name == name and dict(only.options)[key] == value
    assert space.first.options[key] == value
    assert space.plain[axis] == SPACE.plain[axis]  # what quality is compared with


def test_options_are_valid_and_complete() -> None:
    for settings in SPACE.settings():
        options = settings.options
        engine = {key: value for key, value in options.items() if not key.startswith(("cluster.", "parallel."))}
        EngineConfig.from_options(engine)
        ClusterConfig.from_options({key: value for key, value in options.items() if key.startswith("cluster.")})
        assert {"model.weights", "cache.codec", "retain.budget", "cluster.prefill"} <= {*options}


def test_parts_are_what_may_lose_quality_each_alone() -> None:
    assert SPACE.parts(chosen("dequantized weights", "prefill + decode")) == {}
    found = SPACE.parts(chosen("g4 weights", "nuq3", "0 slots", "budget 0.5", "prefill + decode"))
    assert found == {
        "weights": chosen("g4 weights"), "codec": chosen("nuq3", "0 slots"), "retention": chosen("budget 0.5"),
    }  # fmt: skip


def test_a_codec_without_outlier_slots_is_searched_whatever_their_number_is() -> None:
    space = Space.of(SearchLimits(cores=1, given={"cache.outlier_slots": 2}))
    assert {each.of("codec").name for each in space.settings()} == {*CODECS}
    assert space.settings()[0] == space.first and space.first.of("codec").name == "dense"
    for settings in space.settings():
        EngineConfig.from_options({key: settings.options[key] for key in ("cache.codec", "cache.outlier_slots")})
    only = Space.of(SearchLimits(cores=1, given={"cache.outlier_slots": 2, "cache.codec": "g4"}))
    assert only.settings()


def test_steps_depend_on_weights_codec_retention_and_threads() -> None:
    settings = chosen("g4 weights", "nuq3", "0 slots", "budget 0.5", "prefill + decode")
    assert SPACE.timed(settings) == settings
    assert SPACE.effects(settings) == {
        Effect.ADDS: [chosen("g4 weights"), chosen("nuq3", "0 slots"), chosen("budget 0.5")],
        Effect.SCALES: [chosen("prefill + decode")],
    }
    more_running = Space.of(SearchLimits(cores=2, is_packed=True)).later(settings)[0]
    assert SPACE.timed(more_running) == settings
    assert SPACE.effects(SPACE.first) == {Effect.ADDS: [], Effect.SCALES: []}


def test_settings_that_are_about_as_fast_are_the_nearest_first() -> None:
    found = SPACE.alike(chosen("nuq2", "0 slots"))
    assert found[0] in (chosen("nuq2"), chosen("nuq3", "0 slots"))
    assert chosen("nuq4") in found and chosen("g4") not in found and chosen("nuq2", "0 slots") not in found
    assert SPACE.alike(chosen("g4 weights"))[0].of("weights").name == "g4 weights"
