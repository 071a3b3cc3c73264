"""Placements: what a file asks for, the way from what runs to what is wanted, and clusters that go it while they serve.

No request fails by a switch, and every answer has the tokens of one engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import LLM
from quire.cluster.cluster import Cluster
from quire.cluster.instance import LaunchConfig
from quire.cluster.placements import (
    SHARED,
    Action,
    Add,
    InstanceSettings,
    InstanceSpec,
    MachineCapacity,
    Remove,
    Restart,
    ServedModel,
    SetRole,
    cache_sizes,
    check_instances,
    core_counts,
    covers_both_phases,
    plan_switch,
    shared_options,
    specs_of,
)
from quire.config import ClusterConfig, EngineConfig
from quire.engine.params import SamplingParams
from quire.errors import ConfigError, EngineStoppedError, ModelError, RequestError
from quire.placement.placement_file import Gpus, Instances, Placement, Predicted

from ..clusters import SECONDS, SMALL, RunningCluster, ThreadedInstances
from ..effort import examples

PREDICTED = Predicted(3.5, 2.0, "GPU", 1.75, 0.9)
MIB = 1 << 20


def placement(*instances: tuple[str, int] | tuple[str, int, dict[str, Any]], name: str = "plan.json") -> Placement:
    """One with instances by role and number, and options of the role."""
    return Placement(
        tuple(Instances(role, count, options=dict(*options)) for role, count, *options in instances),
        PREDICTED,
        made={"name": name},
    )


def model(config_file: Path | None = None, **options: Any) -> ServedModel:
    """Of 100 MiB, beside which one engine alone would have a cache of 800 MiB."""
    keys = {key.replace("__", "."): value for key, value in options.items()}
    config = EngineConfig.from_options(keys, config_file)
    return ServedModel("tiny", keys, config_file, config, 100 * MIB, 800 * MIB)


def options_of(spec: InstanceSpec) -> dict[str, Any]:
    return dict(spec.settings.options)


# ---- what a placement wants ------------------------------------------------------------------------------------------


def test_instances_get_the_options_of_their_role_and_the_others_in_common() -> None:
    wanted = placement(
        ("prefill", 2, {"scheduler.token_budget": 2048, "cache.memory": "64MiB"}),
        ("decode", 1, {"scheduler.max_running": "12", "scheduler.token_budget": 512}),
    )
    specs = specs_of(wanted.instances, model(cache__memory="32MiB", scheduler__token_budget="512"), 3)
    assert [spec.role for spec in specs] == ["prefill", "prefill", "decode"] and specs[0] == specs[1]
    assert options_of(specs[0]) == {
        "scheduler.token_budget": 2048, "cache.memory": 64 * MIB, "runtime.threads": 1,
    }  # fmt: skip
    assert options_of(specs[2]) == {"scheduler.max_running": 12, "runtime.threads": 1}, "what all have is left out"
    assert [spec.settings.memory for spec in specs] == [164 * MIB, 164 * MIB, 132 * MIB]


def test_equal_options_written_in_other_ways_are_equal_builds() -> None:
    first, second = (
        specs_of(placement(("mixed", 1, {"cache.memory": size, "runtime.threads": threads})).instances, model(), 4)
        for size, threads in (("1GiB", "2"), (1 << 30, 2))
    )
    assert first == second


@pytest.mark.parametrize(
    ("threads", "cores", "counts"),
    [
        ([3, 3, 2], 8, [3, 3, 2]),
        ([3, 3, 2], 16, [3, 3, 2]),
        ([None, None, None], 8, [2, 3, 3]),
        ([4, None, None], 9, [4, 2, 3]),
        ([None, 1], 2, [1, 1]),
        ([None, None, None], 2, [0, 0, 0]),
    ],
)
def test_threads_are_cores_and_the_rest_is_divided(threads: list[int | None], cores: int, counts: list[int]) -> None:
    assert core_counts(threads, cores) == counts


def test_more_cores_than_there_are_are_refused_with_the_numbers() -> None:
    wanted = placement(("prefill", 2, {"runtime.threads": 3}), ("decode", 1, {"runtime.threads": 4}))
    with pytest.raises(ConfigError, match=r"takes 10 cores .*this process may use 8; lower runtime\.threads or count"):
        specs_of(wanted.instances, model(), 8)
    assert [spec.settings.cores for spec in specs_of(wanted.instances, model(), 10)] == [3, 3, 4]
    with pytest.raises(ConfigError, match="takes 8 cores .* and 1 more instances need a core each, .* may use 8"):
        core_counts([4, 4, None], 8)


def test_an_automatic_cache_gets_a_part_of_the_memory_that_others_leave() -> None:
    # 900 MiB in all: 700 are left beside the first one's 200, 350 for each of the others, 100 of them for weights.
    assert cache_sizes([100 * MIB, None, None], model()) == [100 * MIB, 250 * MIB, 250 * MIB]
    assert cache_sizes([None, None], model()) == [350 * MIB] * 2, "as without a placement"
    assert cache_sizes([None] * 20, model()) == [10 * MIB] * 20, "at least a quarter of a 20th"
    (mixed,) = {*specs_of(placement(("mixed", 2)).instances, model(), 4)}
    assert options_of(mixed) == {"runtime.threads": 2, "cache.memory": 350 * MIB}
    assert mixed.settings == InstanceSettings(mixed.settings.options, 2, 450 * MIB)


OTHERS = {
    "model.dtype": ("float32", "bfloat16"), "model.weights": ("g4", "native"), "cache.codec": ("g4", "dense"),
    "cache.sink_tokens": (2, 3), "cache.outlier_slots": (1, 2), "retain.budget": (0.5, 0.25),
    "cache.share": (True, False), "scheduler.max_queue": (1, 2), "runtime.device": ("cpu", "cuda"),
}  # fmt: skip


@pytest.mark.parametrize("key", OTHERS)
def test_what_all_must_share_may_be_in_a_placement_only_if_it_is_equal(key: str) -> None:
    ours, other = OTHERS[key]
    assert key in SHARED
    same = placement(("prefill", 1, {key: ours}), ("decode", 1, {key: ours}))
    options = shared_options(same.instances, {"scheduler.max_running": "4"}, None)
    assert options == {"scheduler.max_running": "4", key: ours}, "it applies to all"
    running = model(**{name.replace(".", "__"): value for name, value in options.items()})
    assert key not in options_of(specs_of(same.instances, running, 4)[0])
    different = placement(("prefill", 1, {key: ours}), ("decode", 1, {key: other}))
    with pytest.raises(ConfigError, match=rf"the placement has {key} .* for prefill and .* for decode; .*--{key}"):
        shared_options(different.instances, {}, None)
    with pytest.raises(ConfigError, match=rf"has {key} .* and the server was started with .*: start the server with"):
        specs_of(placement(("mixed", 1, {key: other})).instances, running, 4)


def test_what_only_one_role_names_must_be_what_the_others_have() -> None:
    wanted = placement(("prefill", 1, {"cache.codec": "g4"}), ("decode", 1))
    with pytest.raises(ConfigError, match="cache.codec 'g4' for prefill and 'dense' for decode; instances exchange"):
        shared_options(wanted.instances, {}, None)
    assert shared_options(wanted.instances, {"cache.codec": "g4"}, None) == {"cache.codec": "g4"}


def test_a_wrong_option_is_refused_with_its_role() -> None:
    wanted = placement(("prefill", 1, {"cache.codec": "nuq4"}), ("decode", 1))
    with pytest.raises(ConfigError, match="instances with the role decode: cache.calibration is for nuq4"):
        shared_options(wanted.instances, {"cache.calibration": "file"}, None)


@pytest.mark.parametrize(("tp", "pp", "count"), [(2, 1, 6), (1, 3, 9), (2, 2, 12)])
def test_several_gpus_of_an_instance_are_refused_with_what_works(tp: int, pp: int, count: int) -> None:
    divided = Placement((Instances("mixed", 3, tp, pp),), PREDICTED)
    with pytest.raises(ConfigError, match=f"tp is {tp} and pp is {pp}, .* has tp 1, pp 1 and count {count}"):
        check_instances(divided)


def test_a_placement_for_gpus_is_refused_whatever_its_instances() -> None:
    planned = Placement((Instances("mixed", 2),), PREDICTED, gpus=Gpus("a100-80g", 80 << 30, 8))
    with pytest.raises(ConfigError, match=r"is for GPUs \(a100-80g\), and no server gives instances a GPU each yet"):
        check_instances(planned)


def test_too_many_instances_are_refused_before_they_are_listed() -> None:
    with pytest.raises(ConfigError, match="has 1000000001 instances; a cluster has at most 1024"):
        check_instances(placement(("prefill", 1), ("decode", 10**9)))


# ---- settings --------------------------------------------------------------------------------------------------------


def test_a_file_stands_in_place_of_the_numbers() -> None:
    config = ClusterConfig(placement="plan.json")
    assert config.is_on and config.placement_file == Path("plan.json")
    assert ClusterConfig(placement="plan.json", address="auto", prefill_labels="zone=a").is_on
    for word in ("pack", "spread", "pairs"):
        found = ClusterConfig(mixed=1, address="auto", placement=word)
        assert found.placement_file is None and found.is_on
    assert not ClusterConfig().is_on


@pytest.mark.parametrize("name", ["prefill", "decode", "mixed"])
def test_numbers_beside_a_file_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'plan.json', a file .* and cluster.{name} is 2; leave one of them out"):
        ClusterConfig(placement="plan.json", **{name: 2})


def test_a_placement_that_is_no_file_is_refused_with_the_words(model: Path) -> None:
    with pytest.raises(ConfigError, match="cluster.placement is 'pakc'; it must be pack, spread, pairs, or a file"):
        Cluster(str(model), SMALL, settings=ClusterConfig(placement="pakc"))


# ---- the way there ---------------------------------------------------------------------------------------------------


A, B, BIG = (
    InstanceSettings((("cache.memory", 1),), 1, 1),
    InstanceSettings((("cache.memory", 2),), 1, 1),
    InstanceSettings((), 4, 4),
)
WIDE = MachineCapacity(100, 100)


def pieces(**counts: int) -> list[InstanceSpec]:
    """Instances of one build, by role."""
    return [InstanceSpec(role, A) for role, count in counts.items() for _ in range(count)]


def at_places(specs: Sequence[InstanceSpec]) -> dict[str, InstanceSpec]:
    return {f"{spec.role}-{index}": spec for index, spec in enumerate(specs)}


def test_roles_alone_need_no_start() -> None:
    actions = plan_switch(at_places(pieces(prefill=1, decode=1)), pieces(mixed=2), WIDE)
    assert actions == [SetRole("prefill-0", "mixed"), SetRole("decode-1", "mixed")]
    assert plan_switch(at_places(pieces(prefill=2, decode=1)), pieces(decode=1, prefill=2), WIDE) == []


def test_an_instance_that_does_both_steps_in_where_roles_are_exchanged() -> None:
    present = {"prefill-0": InstanceSpec("prefill", A), "decode-0": InstanceSpec("decode", B)}
    actions = plan_switch(present, [InstanceSpec("decode", A), InstanceSpec("prefill", B)], WIDE)
    assert actions == [SetRole("prefill-0", "mixed"), SetRole("decode-0", "prefill"), SetRole("prefill-0", "decode")]


def test_where_there_is_room_a_new_instance_starts_before_the_old_one_ends() -> None:
    present, wanted = {"mixed-0": InstanceSpec("mixed", A)}, [InstanceSpec("mixed", B)]
    assert plan_switch(present, wanted, MachineCapacity(2, 2)) == [Add("mixed-1", wanted[0]), Remove("mixed-0")]


def test_without_room_instances_restart_one_after_the_other_and_help_each_other() -> None:
    present = {"prefill-0": InstanceSpec("prefill", A), "decode-0": InstanceSpec("decode", A)}
    wanted = [InstanceSpec("prefill", B), InstanceSpec("decode", B)]
    assert plan_switch(present, wanted, MachineCapacity(2, 2)) == [
        SetRole("decode-0", "mixed"),
        Restart("prefill-0", wanted[0]),
        SetRole("prefill-0", "mixed"),
        Restart("decode-0", wanted[1]),
        SetRole("prefill-0", "prefill"),
    ]


def test_an_added_instance_waits_until_a_removed_one_has_ended() -> None:
    present = {
        "mixed-0": InstanceSpec("mixed", A),
        "mixed-1": InstanceSpec("mixed", A),
        "mixed-2": InstanceSpec("mixed", B),
    }
    actions = plan_switch(
        present, [InstanceSpec("mixed", B), InstanceSpec("mixed", InstanceSettings((), 2, 2))], MachineCapacity(3, 3)
    )
    assert actions == [Remove("mixed-0"), Restart("mixed-1", InstanceSpec("mixed", InstanceSettings((), 2, 2)))]


def test_who_makes_room_for_a_new_instance_ends_before_others() -> None:
    three = InstanceSettings((("cache.memory", 3),), 3, 3)
    present = {
        "mixed-0": InstanceSpec("mixed", A),
        "mixed-1": InstanceSpec("mixed", B),
        "mixed-2": InstanceSpec("mixed", InstanceSettings((), 3, 3)),
    }
    actions = plan_switch(present, [InstanceSpec("mixed", A), InstanceSpec("mixed", three)], MachineCapacity(5, 5))
    assert actions == [Restart("mixed-2", InstanceSpec("mixed", three)), Remove("mixed-1")]


def test_an_instance_that_stays_does_the_work_of_one_that_leaves() -> None:
    old, new = (
        InstanceSpec("prefill", InstanceSettings((), 3, 3)),
        InstanceSpec("prefill", InstanceSettings((("cache.memory", 3),), 3, 3)),
    )
    present = {"decode-0": InstanceSpec("decode", B), "prefill-0": old, "decode-1": InstanceSpec("decode", A)}
    assert plan_switch(present, [new, present["decode-1"]], MachineCapacity(5, 5)) == [
        SetRole("decode-1", "mixed"), Restart("prefill-0", new), Remove("decode-0"), SetRole("decode-1", "decode"),
    ]  # fmt: skip
    present = {
        "prefill-0": InstanceSpec("prefill", B),
        "decode-0": InstanceSpec("decode", A),
        "decode-1": InstanceSpec("decode", A),
    }
    actions = plan_switch(present, [InstanceSpec("prefill", A), InstanceSpec("decode", A)], WIDE)
    assert actions == [SetRole("decode-1", "prefill"), Remove("prefill-0")], "it gets its role at once"


def test_a_pause_is_refused_unless_it_is_allowed() -> None:
    present, wanted = (
        {"prefill-0": InstanceSpec("prefill", A), "decode-0": InstanceSpec("decode", A)},
        [InstanceSpec("mixed", BIG)],
    )
    with pytest.raises(ConfigError, match="needs a pause: 4 cores and 4B, .* 1 core and 1B, .* into 4 cores"):
        plan_switch(present, wanted, MachineCapacity(4, 4))
    actions = plan_switch(present, wanted, MachineCapacity(4, 4), may_pause=True)
    assert actions == [
        SetRole("decode-0", "mixed"), Remove("prefill-0"), Restart("decode-0", wanted[0], pauses=True),
    ]  # fmt: skip
    assert not any(
        getattr(each, "pauses", False) for each in plan_switch(present, wanted, MachineCapacity(5, 5), may_pause=True)
    )


def test_what_the_machine_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room: 2 instances with 8 cores and 8B are needed, and there are 7 cores"):
        plan_switch({}, [InstanceSpec("mixed", BIG)] * 2, MachineCapacity(7, 9))


def test_on_places_that_are_reserved_instances_come_only_there() -> None:
    capacity = MachineCapacity(0, 0, ("prefill-0", "decode-0", "decode-1"))
    spec = InstanceSpec("prefill", InstanceSettings())
    present = {"prefill-0": spec, "decode-0": spec._replace(role="decode")}
    (added,) = plan_switch(present, [*present.values(), spec], capacity)
    assert added == Add("decode-1", spec)
    with pytest.raises(ConfigError, match="no room: 4 instances are needed, and there are 3 places"):
        plan_switch(present, [*present.values(), spec, spec], capacity)


def test_instances_that_do_not_serve_are_ended_first() -> None:
    present = {"prefill-0": InstanceSpec("prefill", A), "mixed-0": InstanceSpec("mixed", A)}
    actions = plan_switch(present, [InstanceSpec("mixed", A)] * 2, MachineCapacity(2, 2), down=["prefill-0"])
    assert actions == [Remove("prefill-0"), Add("mixed-1", InstanceSpec("mixed", A))]
    present = {"mixed-0": InstanceSpec("mixed", A)}
    assert plan_switch(present, [InstanceSpec("mixed", B)], MachineCapacity(1, 1), down=["mixed-0"]) == [
        Remove("mixed-0"), Add("mixed-0", InstanceSpec("mixed", B)),
    ]  # fmt: skip


class Followed:
    """What runs while actions are done, one after the other, and whether it may."""

    def __init__(self, present: Mapping[str, InstanceSpec], capacity: MachineCapacity, down: Collection[str]) -> None:
        self.here, self.down, self.capacity = dict(present), {*down}, capacity
        self.num_starts, self.pauses, self.is_covered = 0, False, covers_both_phases(self._roles())
        assert self._holds(), "the example begins with too many"

    def do(self, action: Action) -> None:
        """Does it, with asserts."""
        match action:
            case SetRole(place, role):
                assert self.here[place].role != role, "nothing changes"
                self.here[place] = self.here[place]._replace(role=role)
            case Remove(place):
                self._remove(place, pauses=False)
            case Add(place, spec):
                assert place not in self.here, "taken"
                self._start(place, spec)
            case Restart(place, spec, pauses):
                self._remove(place, pauses=pauses)
                self._start(place, spec)
        self.is_covered |= covers_both_phases(self._roles())
        assert covers_both_phases(self._roles()) or self.pauses or not self.is_covered, f"{self.here} after {action}"

    def _remove(self, place: str, *, pauses: bool) -> None:
        served = place not in self.down
        del self.here[place]
        self.down.discard(place)
        assert pauses == (served and not self._roles()), f"{place} leaves {self.here}"
        self.pauses |= pauses
        assert not served or covers_both_phases(self._roles()) or self.pauses, f"{place} leaves {self.here}"

    def _start(self, place: str, spec: InstanceSpec) -> None:
        self.num_starts += 1
        self.here[place] = spec
        assert self._holds(), f"no room for {place}"
        assert self.capacity.places is None or place in self.capacity.places

    def _roles(self) -> list[str]:
        return [spec.role for place, spec in self.here.items() if place not in self.down]

    def _holds(self) -> bool:
        builds = [spec.settings for spec in self.here.values()]
        cores, memory = sum(each.cores for each in builds), sum(each.memory for each in builds)
        places = self.capacity.places or self.here
        return cores <= self.capacity.cores and memory <= self.capacity.memory and len(builds) <= len(places)


def must_pause(
    leaving: Sequence[InstanceSettings], coming: Sequence[InstanceSettings], capacity: MachineCapacity, stays: bool
) -> bool:
    """Whether every order of ends and starts leaves nobody at some moment, by trying all of them."""
    if stays or not leaving:
        return False
    todo, seen = [(frozenset(range(len(leaving))), frozenset[int]())], set()
    while todo:
        left, came = state = todo.pop()
        if not left and len(came) == len(coming):
            return False
        if state in seen:
            continue
        seen.add(state)
        steps = [(left - {each}, came) for each in left]
        steps += [(left, came | {each}) for each in range(len(coming)) if each not in came]
        todo += [
            (some, others)
            for some, others in steps
            if some | others and capacity.fits([*(leaving[each] for each in some), *(coming[each] for each in others)])
        ]
    return True


BUILDS = st.builds(
    InstanceSettings, st.sampled_from([(), (("cache.memory", 1),)]), st.integers(0, 4), st.integers(1, 4)
) | st.sampled_from([A, B])
SPECS = st.lists(
    st.builds(InstanceSpec, st.sampled_from(["prefill", "decode", "mixed"]), BUILDS), min_size=1, max_size=4
)
COVERING = SPECS.filter(lambda specs: covers_both_phases([spec.role for spec in specs]))


@given(present=SPECS, wanted=COVERING, slack=st.integers(0, 5), reserves=st.booleans(), data=st.data())
@examples(150, deadline=None)
def test_every_switch_reaches_its_goal_and_always_serves_within_the_room(
    present: list[InstanceSpec], wanted: list[InstanceSpec], slack: int, reserves: bool, data: st.DataObject
) -> None:
    cores, memory = (
        max(sum(getattr(spec.settings, name) for spec in specs) for specs in (present, wanted)) + slack
        for name in ("cores", "memory")
    )
    begin = at_places(present)
    down = data.draw(st.sets(st.sampled_from(sorted(begin)), max_size=len(begin)))
    places = tuple(begin) + tuple(f"more-{index}" for index in range(len(wanted) - len(begin)))
    capacity = MachineCapacity(cores, memory, places if reserves else None)
    before, after = (
        Counter(begin[each].settings for each in begin.keys() - down),
        Counter(spec.settings for spec in wanted),
    )
    paused = must_pause(
        [*(before - after).elements()], [*(after - before).elements()], capacity, stays=bool(before & after)
    )
    if paused:
        with pytest.raises(ConfigError, match="needs a pause"):
            plan_switch(begin, wanted, capacity, down=down)
    actions = plan_switch(begin, wanted, capacity, down=down, may_pause=paused)
    followed = Followed(begin, capacity, down)
    for action in actions:
        followed.do(action)
    assert Counter(followed.here.values()) == Counter(wanted), "the goal"
    assert followed.pauses == paused
    assert followed.num_starts == len(wanted) - (before & after).total(), "as many go on as can"
    kept_roles = (Counter(begin[each] for each in begin.keys() - down) & Counter(wanted)).total()
    assert sum(followed.here.get(each) == begin[each] for each in begin.keys() - down) >= kept_roles or not kept_roles


# ---- clusters --------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3 + (7 * each + place) % 200 for place in range(40 + 45 * each)]} for each in range(6)]
SEEDED = [dataclasses.replace(PARAMS, seed=each) for each in range(len(PROMPTS))]
ONE = {"runtime.threads": 1}


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> int:
    """This process may use 4 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    return 4


@pytest.fixture(scope="module")
def right(single_engine: LLM) -> list[list[int]]:
    """The tokens of one engine."""
    return [each.outputs[0].token_ids for each in single_engine.generate(PROMPTS, SEEDED)]


@pytest.fixture
def running(model: Path, cores: int) -> Iterator[RunningCluster]:
    """One instance computes prompts and one decodes."""
    with RunningCluster(model, SMALL, ThreadedInstances(), "shm") as found:
        yield found


def started_with(model: Path, file: Path, found: Placement, **settings: Any) -> RunningCluster:
    found.write(file)
    return RunningCluster(model, SMALL, ThreadedInstances(), "shm", mixed=0, placement=str(file), **settings)


def roles(running: RunningCluster) -> dict[str, str]:
    return {each["place"]: each["role"] for each in running.cluster.operations.state()["instances"]}


def names(running: RunningCluster) -> set[str]:
    return {each["name"] for each in running.cluster.operations.state()["instances"]}


def switch_to(running: RunningCluster, found: Placement, **more: Any) -> None:
    running.call(running.cluster.operations.switch(found, **more))


def engine_of(running: RunningCluster, place: str) -> Any:
    """The engine at a place."""
    assert isinstance(running.processes, ThreadedInstances)
    name = next(
        each["name"] for each in running.cluster.operations.state()["instances"] if each["place"] == place
    )  # fmt: skip
    return running.processes.instances[name].engine


async def under_load(running: RunningCluster, right: list[list[int]], work: Callable[[], Awaitable[None]]) -> int:
    """Does some work while streams run all the time, and checks each of them. Returns their number."""
    doing, count = asyncio.ensure_future(work()), 0

    async def stream(index: int) -> None:
        nonlocal count
        while True:
            found = [token for each in await running._one(PROMPTS[index], SEEDED[index]) for token in _tokens(each)]
            assert found == right[index], f"stream {index}"
            count += 1
            if doing.done():
                return

    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*(stream(index) for index in range(len(PROMPTS))))
    await doing
    return count


def _tokens(output: Any) -> list[int]:
    found: list[int] = output.outputs[0].token_ids
    return found


def test_a_cluster_takes_four_placements_while_it_serves(
    model: Path, cores: int, tmp_path: Path, right: list[list[int]]
) -> None:
    begin = placement(("prefill", 1, ONE), ("decode", 1, ONE))
    budget = {**ONE, "scheduler.token_budget": 96, "scheduler.max_running": 6}
    seen: list[tuple[dict[str, str], set[str]]] = []
    with started_with(model, tmp_path / "plan.json", begin) as running:
        operations = running.cluster.operations
        assert roles(running) == {"prefill-0": "prefill", "decode-0": "decode"}
        seen.append((roles(running), names(running)))

        async def work() -> None:
            for wanted in (
                placement(("mixed", 2, ONE)),
                placement(("prefill", 2, budget), ("decode", 1, ONE)),
                placement(("mixed", 1, ONE), name="last"),
            ):
                await operations.switch(wanted)
                seen.append((roles(running), names(running)))
                await asyncio.sleep(0.1)

        assert running.call(under_load(running, right, work)) >= len(PROMPTS)
        assert running.cluster.router.counts["failed"] == running.cluster.router.counts["again"] == 0
        first, mixed, apart, one = seen
        assert mixed == ({"prefill-0": "mixed", "decode-0": "mixed"}, first[1]), "nobody was started"
        assert Counter(apart[0].values()) == {"prefill": 2, "decode": 1} and len(apart[1] & first[1]) == 1
        assert one[0].keys() <= apart[0].keys() and [*one[0].values()] == ["mixed"]
        assert one[1] <= first[1], "the one that had these settings all the time goes on"
        assert operations.state()["placement"]["name"] == "last"
        running.settle()


def test_options_by_role_are_in_effect(model: Path, cores: int, tmp_path: Path, right: list[list[int]]) -> None:
    begin = placement(
        ("prefill", 1, {"runtime.threads": 2, "scheduler.token_budget": 96, "cache.memory": "2MiB"}),
        ("decode", 1, {"scheduler.max_running": 5}),
    )
    with started_with(model, tmp_path / "plan.json", begin) as running:
        prefill, decode = running.cluster.operations.state()["instances"]
        assert (prefill["cores"], decode["cores"]) == ([0, 1], [2, 3])
        assert (prefill["cache_bytes"], decode["cache_bytes"]) == (2 * MIB, 4 * MIB)
        assert engine_of(running, "prefill-0").scheduler.policy.token_budget == 96
        assert engine_of(running, "decode-0").scheduler.policy.max_running == 5
        found = running.generate(PROMPTS, SEEDED)
        assert [each.outputs[0].token_ids for each in found] == right
        switch_to(running, placement(("prefill", 1, {"cache.memory": "3MiB", **ONE}), ("decode", 1, ONE)))
        states = {each["role"]: each for each in running.cluster.operations.state()["instances"]}
        assert states["prefill"]["cache_bytes"] == 3 * MIB and states["decode"]["cache_bytes"] == 4 * MIB
        taken = [core for each in states.values() for core in each["cores"]]
        assert len(taken) == len({*taken}) == 2
        assert running.instance("prefill").launch_config.options["cache.memory"] == 3 * MIB
        found = running.generate(PROMPTS, SEEDED)
        assert [each.outputs[0].token_ids for each in found] == right


def test_shared_options_of_a_file_apply_to_the_server_too(model: Path, cores: int, tmp_path: Path) -> None:
    both = {"scheduler.max_queue": 7, "cache.codec": "g4", "cache.check": False}
    begin = placement(("prefill", 1, both | ONE), ("decode", 1, both | ONE))
    with started_with(model, tmp_path / "plan.json", begin) as running:
        assert running.cluster.config.scheduler.max_queue == 7 and running.cluster.config.cache.codec == "g4"
        assert not running.instance("prefill").launch_config.options["cache.check"]
        with pytest.raises(ConfigError, match="'dense' for mixed, and the server was started with 'g4'"):
            switch_to(running, placement(("mixed", 1, {"cache.codec": "dense"})))
        switch_to(running, placement(("mixed", 1, {"cache.check": False, **ONE})))  # what it does not name stays
        assert running.cluster.operations.state()["switch"] is None


class Failing(ThreadedInstances):
    """Instances with a cache of 3 MiB do not start."""

    def start(self, launch_config: LaunchConfig) -> None:
        """See Processes."""
        if launch_config.options["cache.memory"] == 3 * MIB:
            launch_config = dataclasses.replace(
                launch_config, options={**launch_config.options, "model.tokenizer": "missing"}
            )
        super().start(launch_config)


@pytest.mark.parametrize("roomy", [False, True], ids=["in their place", "beside them"])
def test_a_switch_ends_at_an_instance_that_does_not_start_and_the_cluster_serves_on(
    model: Path, cores: int, tmp_path: Path, right: list[list[int]], roomy: bool
) -> None:
    threads = {"runtime.threads": 1 if roomy else 2}
    good, bad = {**threads, "cache.memory": "5MiB"}, {**threads, "cache.memory": "3MiB"}
    file = tmp_path / "plan.json"
    placement(("prefill", 1, threads), ("decode", 1, threads)).write(file)
    with RunningCluster(model, SMALL, Failing(), "shm", mixed=0, placement=str(file)) as running:
        operations = running.cluster.operations

        async def work() -> None:
            with pytest.raises(ModelError, match="to bad ended after .* did not start.*; the cluster goes on"):
                await operations.switch(placement(("prefill", 1, good), ("decode", 1, bad), name="bad"))

        assert running.call(under_load(running, right, work)) >= len(PROMPTS)
        assert running.cluster.router.counts["failed"] == 0
        state = operations.state()
        assert "ended after" in state["switch"]["error"] and state["switch"]["now"] == "" and not state["placement"]
        assert any(each["cache_bytes"] == 5 * MIB for each in state["instances"]), "what was done stays"
        # The one that did not start gets the settings of before, and the next switch finds it.
        switch_to(running, placement(("mixed", 2, threads), name="good"))
        assert operations.state()["switch"] is None and [*roles(running).values()] == ["mixed", "mixed"]
        found = running.generate(PROMPTS, SEEDED)
        assert [each.outputs[0].token_ids for each in found] == right


def test_a_switch_whose_first_instance_does_not_start_leaves_the_placement(
    model: Path, cores: int, tmp_path: Path
) -> None:
    """Replanning goes on then, because the instances are still those that were planned."""
    threads, file = {"runtime.threads": 1}, tmp_path / "plan.json"
    bad = {**threads, "cache.memory": "3MiB"}
    placement(("prefill", 1, threads), ("decode", 1, threads), name="good").write(file)
    with RunningCluster(model, SMALL, Failing(), "shm", mixed=0, placement=str(file)) as running:
        operations = running.cluster.operations
        with pytest.raises(ModelError, match="after 0 of"):
            running.call(operations.switch(placement(("prefill", 1, bad), ("decode", 1, bad), name="bad")))
        state = operations.state()
        assert state["placement"]["name"] == "good" and "after 0 of" in state["switch"]["error"]
        assert operations.placement is not None and len(roles(running)) == 2


def test_after_a_pause_an_instance_that_does_not_start_gets_its_settings_back(
    model: Path, cores: int, right: list[list[int]]
) -> None:
    with RunningCluster(model, SMALL, Failing(), "shm") as running:
        operations = running.cluster.operations
        bad = placement(("mixed", 1, {"runtime.threads": 4, "cache.memory": "3MiB"}))

        async def work() -> None:
            with pytest.raises(ModelError, match=r"3 actions, at 'restart decode-0 as mixed': .* decode-0 \(mixed\)"):
                await operations.switch(bad, may_pause=True)

        assert running.call(under_load(running, right, work)) >= len(PROMPTS)
        assert running.cluster.router.counts["failed"] == 0
        (left,) = operations.state()["instances"]
        assert (left["place"], left["role"], left["cache_bytes"]) == ("decode-0", "mixed", 4 * MIB)


def test_requests_wait_through_a_pause_that_is_allowed(
    running: RunningCluster, cores: int, right: list[list[int]]
) -> None:
    operations = running.cluster.operations
    big = placement(("mixed", 1, {"runtime.threads": 4}))
    with pytest.raises(ConfigError, match="needs a pause.*allow a pause"):
        switch_to(running, big)
    assert operations.state()["switch"] is None and len(roles(running)) == 2

    async def work() -> None:
        await operations.switch(big, may_pause=True)

    assert running.call(under_load(running, right, work)) >= len(PROMPTS)
    assert running.cluster.router.counts["failed"] == 0
    (only,) = operations.state()["instances"]
    assert (only["role"], only["cores"]) == ("mixed", [0, 1, 2, 3])


def test_while_a_switch_is_under_way_another_one_is_refused_and_drains_wait(running: RunningCluster) -> None:
    operations, wanted = running.cluster.operations, placement(("mixed", 2), name="second")

    async def scenario() -> None:
        first = asyncio.ensure_future(operations.switch(placement(("mixed", 3, ONE), name="first")))
        while (switch := operations.state()["switch"]) is None or not switch["now"]:
            await asyncio.sleep(0.001)
        assert (switch["to"], switch["error"]) == ("first", "") and switch["num_done"] < switch["num_all"] > 2
        with pytest.raises(RequestError, match="a switch to first is under way"):
            await operations.switch(wanted)
        restart = asyncio.ensure_future(operations.restart())
        with pytest.raises(RequestError, match="a switch to first is under way"):
            operations.set_role("decode-0", "mixed")
        await first
        assert not restart.done() and operations.state()["switch"] is None
        await restart

    running.call(scenario())
    assert [*roles(running).values()] == ["mixed"] * 3
    switch_to(running, wanted)
    operations.set_role(next(iter(roles(running))), "prefill")
    assert operations.state()["placement"] is None, "it is not what was planned any more"


def test_a_switch_waits_for_a_drain(running: RunningCluster, right: list[list[int]]) -> None:
    """And does not kill the instance that drains, whose requests would begin again elsewhere."""
    operations, waited = running.cluster.operations, []

    async def work() -> None:
        for number in range(4):
            (place, *_) = roles(running)
            drain = asyncio.ensure_future(operations.drain(place))
            await asyncio.sleep(0)
            switch = asyncio.ensure_future(operations.switch(placement(("mixed", 2 + number % 2, ONE), name="first")))
            await asyncio.sleep(0)
            while not drain.done():
                waited.append(operations.state()["switch"]["num_all"])
                await asyncio.sleep(0.001)
            await drain
            await switch

    running.call(under_load(running, right, work))
    assert waited and not any(waited), "it begins when the drain has ended"
    assert running.cluster.router.counts["failed"] == 0 == running.cluster.router.counts["again"]


def test_an_impossible_placement_changes_nothing(running: RunningCluster) -> None:
    before = names(running)
    for wanted, reason in (
        (placement(("mixed", 1, {"runtime.threads": 5})), "takes 5 cores .* may use 4"),
        (placement(("mixed", 1, {"scheduler.token_budget": 1})), "role mixed: scheduler.token_budget is 1"),
        (placement(("mixed", 1, {"cache.memory": "1KiB"})), "role mixed: cache.memory of 1KiB holds"),
        (Placement((Instances("mixed", 1, tp=2),), PREDICTED), "the nearest placement that works"),
    ):
        with pytest.raises(ConfigError, match=reason):
            switch_to(running, wanted)
    assert names(running) == before and running.cluster.operations.state()["switch"] is None


def test_a_switch_ends_with_the_cluster(running: RunningCluster) -> None:
    operations = running.cluster.operations
    long = dataclasses.replace(PARAMS, max_tokens=600)

    async def scenario() -> None:
        asked = asyncio.ensure_future(running._one(PROMPTS[0], long))
        while not running.cluster.router.num_running:
            await asyncio.sleep(0.001)
        wanted = placement(("prefill", 1), ("decode", 1, {"scheduler.max_running": 3}))
        switch = asyncio.ensure_future(operations.switch(wanted))
        while "draining" not in [each["health"] for each in operations.state()["instances"]]:
            await asyncio.sleep(0.001)
        await running.cluster.close()
        for each in (switch, asked):
            with pytest.raises(EngineStoppedError, match="the cluster is closed"):
                await each

    running.call(scenario())


class Elsewhere(ThreadedInstances):
    """Instances that are not on this machine, as on a Ray cluster."""

    is_local = False


def test_elsewhere_roles_and_options_change_at_the_places_that_are_reserved(
    model: Path, tmp_path: Path, right: list[list[int]]
) -> None:
    file = tmp_path / "plan.json"
    placement(("prefill", 1, {"scheduler.max_running": 6}), ("decode", 2)).write(file)
    with RunningCluster(model, SMALL, Elsewhere(), "shm", mixed=0, placement=str(file)) as running:
        assert engine_of(running, "prefill-0").scheduler.policy.max_running == 6
        assert all(not each["cores"] for each in running.cluster.operations.state()["instances"])
        switch_to(running, placement(("mixed", 1)))
        switch_to(running, placement(("mixed", 3, {"scheduler.max_running": 5})))
        assert roles(running).keys() == {"prefill-0", "decode-0", "decode-1"}
        found = running.generate(PROMPTS, SEEDED)
        assert [each.outputs[0].token_ids for each in found] == right
        with pytest.raises(ConfigError, match="and there are 3 places"):
            switch_to(running, placement(("mixed", 4)))
        for key, value in (("cache.memory", "8MiB"), ("runtime.threads", 2)):
            with pytest.raises(ConfigError, match=f"has {key} .*; Ray reserves the same for every instance"):
                switch_to(running, placement(("mixed", 1, {key: value})))


def test_a_file_that_is_written_is_a_file_that_is_started(model: Path, cores: int, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    found = dataclasses.replace(placement(("mixed", 1)), made={})
    with started_with(model, file, found) as running:
        state = running.cluster.operations.state()["placement"]
        assert state == {"name": "plan.json", "rate": 3.5, "cost": 2.0, "unit": "GPU", "attainment": 0.9}
        assert running.cluster.operations.state()["switch"] is None
    file.write_text(json.dumps({"version": 1}))
    with pytest.raises(ConfigError, match=r"plan.json: .* is missing"):
        Cluster(str(model), SMALL, settings=ClusterConfig(placement=str(file)))
