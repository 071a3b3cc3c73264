"""Computes the instances of a placement, and the actions that lead from the running instances to them. Pure: the
supervisor carries out the actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from quire.config import EngineConfig, RetainConfig, format_bytes
from quire.engine.pins import Pin
from quire.errors import ConfigError
from quire.placement.placement_file import Instances, Placement

_CACHES = "instances exchange caches"
_SERVER = "the server itself uses it"
_RAY = "Ray reserves the same for every instance"

SHARED = {
    **dict.fromkeys(
        ("model.dtype", "model.weights", "cache.codec", "cache.calibration", "cache.outlier_slots", "cache.sink_tokens",
         "cache.strict", *(f"retain.{each.name}" for each in fields(RetainConfig))), _CACHES,
    ),
    **dict.fromkeys(
        ("model.name", "model.tokenizer", "model.chat_template", "cache.share", "cache.pin", "scheduler.max_queue"),
        _SERVER,
    ),
    "runtime.device": "instances divide the memory of one device",
}  # fmt: skip
"""Settings that must be equal for all instances, each with the reason."""

SHARED_ON_RAY = {"cache.memory": _RAY, "runtime.threads": _RAY}
"""Further such settings on a Ray cluster."""


MOST_INSTANCES = 1024
"""Maximum number of instances of a placement."""

NAME_CHARS = 100
"""Maximum number of shown characters of a placement's name."""


class ServedModel(NamedTuple):
    """The model and the settings with which every instance starts.

    name, options, config_file  as for `LLM`
    config                      the configuration that results from them
    weight_bytes, cache_bytes   bytes of one engine that has the machine alone
    pins, salts                 prefixes that every instance pins, for each of the salts
    available_bytes             memory of the machine for all instances together
    check                       raises ConfigError for settings with which the model cannot be loaded
    """

    name: str
    options: Mapping[str, Any]
    config_file: Path | None
    config: EngineConfig
    weight_bytes: int
    cache_bytes: int
    pins: tuple[Pin, ...] = ()
    salts: tuple[str, ...] = ("",)
    available_bytes: int = 0
    check: Callable[[EngineConfig], object] = lambda config: None


# ---- the instances of a placement ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InstanceSettings:
    """The settings of an instance. Instances with equal settings differ only in their roles.

    options  settings that override those of all instances: pairs of key and value
    cores    number of cores of this machine reserved for it; 0: the system divides the cores
    memory   bytes of its weights and its cache on this machine
    """

    options: tuple[tuple[str, Any], ...] = ()
    cores: int = 0
    memory: int = 0


class InstanceSpec(NamedTuple):
    """An instance."""

    role: str
    settings: InstanceSettings


def check_instances(placement: Placement) -> None:
    """Raises ConfigError for a placement that no server starts: with several GPUs or stages to an instance, on machines
    with GPUs, or with too many instances.
    """
    if (count := sum(each.count for each in placement.instances)) > MOST_INSTANCES:
        raise ConfigError(f"the placement has {count} instances; a cluster has at most {MOST_INSTANCES}")
    for each in placement.instances:
        if each.tp * each.pp > 1:
            raise ConfigError(
                f"the placement divides an instance with the role {each.role}: tp is {each.tp} and pp is {each.pp}, but"
                " an instance is one process with one GPU or some cores; the nearest placement that works has tp 1, pp"
                f" 1 and count {each.count * each.tp * each.pp}"
            )
    if placement.gpus is not None:
        raise ConfigError(
            f"the placement is for GPUs ({placement.gpus.device}), and no server gives instances a GPU each yet; plan"
            " for machines without GPUs, or simulate it with quire simulate"
        )


def shared_options(
    instances: Sequence[Instances], options: Mapping[str, Any], file: Path | None, *, is_local: bool = True
) -> dict[str, Any]:
    """Options of all instances: the given ones, and those of the placement that must be equal and are.

    Raises ConfigError if an option must be equal and differs between instances.
    """
    found, configs = dict(options), [_config_of(each, options, file).to_options() for each in instances]
    for key, reason in _shared(is_local).items():
        values = {each.role: config[key] for each, config in zip(instances, configs, strict=True)}
        if any(config[key] != configs[0][key] for config in configs):
            listed = " and ".join(f"{value!r} for {role}" for role, value in values.items())
            raise ConfigError(
                f"the placement has {key} {listed}; {reason}, so all must have the same: give it once for all, as"
                f" --{key}, or alike for each role"
            )
        if any(key in each.options for each in instances):
            found[key] = configs[0][key]
    return found


def specs_of(
    instances: Sequence[Instances], model: ServedModel, num_cores: int, *, is_local: bool = True
) -> list[InstanceSpec]:
    """The instances of a placement, by role.

    model      model with the shared options
    num_cores  cores of this machine, for all instances
    is_local   whether instances run on this machine
    Raises ConfigError for invalid settings, for a shared setting that differs from the model's, and for more cores than
    there are. On this machine, an automatic cache gets a part of the memory, and an instance without a number of
    threads gets a part of the cores.
    """
    common, each_of = model.config.to_options(), [each for each in instances for _ in range(each.count)]
    overrides: list[dict[str, Any]] = []
    for each in each_of:
        config = _config_of(each, model.options, model.config_file)
        own = config.to_options()
        for key, reason in _shared(is_local).items():
            if own[key] != common[key]:
                raise ConfigError(
                    f"the placement has {key} {own[key]!r} for {each.role}, and the server was started with"
                    f" {common[key]!r}; {reason}: start the server with that placement"
                )
        overrides.append({key: value for key, value in own.items() if value != common[key]})
    all_settings = [InstanceSettings(tuple(own.items())) for own in overrides]
    if is_local:
        given = [each.options.get("runtime.threads") for each in each_of]
        counts = core_counts([None if value in (None, "auto") else int(value) for value in given], num_cores)
        caches = [own.get("cache.memory", model.config.cache.memory) for own in overrides]
        sizes = cache_sizes([None if value == "auto" else value for value in caches], model)
        all_settings = [_settings_of(*each, model) for each in zip(overrides, counts, caches, sizes, strict=True)]
    return [InstanceSpec(each.role, settings) for each, settings in zip(each_of, all_settings, strict=True)]


def core_counts(threads: Sequence[int | None], num_cores: int) -> list[int]:
    """The number of cores of each instance. Raises ConfigError if there are too few.

    threads  threads of each instance in the placement, and thus its cores; None: an equal part of the remaining cores
    returns  0 for all if no threads are given and there are fewer cores than instances: the system divides the cores
    """
    given, count = sum(each or 0 for each in threads), threads.count(None)
    if given + count > num_cores:
        if not given:
            return [0] * len(threads)
        others = f", and {count} more instances need a core each" if count else ""
        raise ConfigError(
            f"the placement takes {given} cores (runtime.threads times count){others}, but this process may use"
            f" {num_cores}; lower runtime.threads or count"
        )
    rest = num_cores - given
    parts = iter([(index + 1) * rest // count - index * rest // count for index in range(count)])
    return [next(parts) if each is None else each for each in threads]


def cache_sizes(given: Sequence[int | None], model: ServedModel) -> list[int]:
    """Bytes of the cache of each instance. None: an equal part of the memory that the others leave of what one engine
    would take, but at least a quarter of an equal part of one engine's cache.
    """
    count, (weights, alone) = given.count(None), (model.weight_bytes, model.cache_bytes)
    rest = weights + alone - sum(weights + each for each in given if each is not None)
    part = max(alone // (4 * len(given)), rest // max(1, count) - weights)
    return [part if each is None else each for each in given]


def placement_name(placement: Placement) -> str:
    """The placement's name for people, without control characters."""
    name = "".join(each for each in str(placement.made.get("name", "")) if each.isprintable())
    return name[:NAME_CHARS] or "placement"


def _settings_of(
    own: Mapping[str, Any], cores: int, cache: int | str, size: int, model: ServedModel
) -> InstanceSettings:
    options = dict(own)
    if cores and options.get("runtime.threads", model.config.runtime.threads) is None:
        options["runtime.threads"] = cores
    if cache == "auto":
        options["cache.memory"] = size
    return InstanceSettings(tuple(options.items()), cores, model.weight_bytes + size)


def _config_of(each: Instances, options: Mapping[str, Any], file: Path | None) -> EngineConfig:
    try:
        return EngineConfig.from_options({**options, **each.options}, file)
    except ConfigError as error:
        raise ConfigError(f"the placement's instances with the role {each.role}: {error}") from None


def _shared(is_local: bool) -> dict[str, str]:
    return SHARED if is_local else SHARED | SHARED_ON_RAY


# ---- the switch to a placement ---------------------------------------------------------------------------------------


class SetRole(NamedTuple):
    """Changes the role of an instance. Its attempts continue."""

    place: str
    role: str

    def __str__(self) -> str:
        return f"make {self.place} {self.role}"


class Remove(NamedTuple):
    """Drains an instance and ends it."""

    place: str

    def __str__(self) -> str:
        return f"end {self.place}"


class Add(NamedTuple):
    """Starts an instance."""

    place: str
    spec: InstanceSpec

    def __str__(self) -> str:
        return f"start {self.place} as {self.spec.role}"


class Restart(NamedTuple):
    """Drains and ends an instance, then starts another one in its place. pauses: no instance serves in between."""

    place: str
    spec: InstanceSpec
    pauses: bool = False

    def __str__(self) -> str:
        return f"restart {self.place} as {self.spec.role}"


Action = SetRole | Remove | Add | Restart


@dataclass(frozen=True)
class MachineCapacity:
    """The resources for all instances together.

    cores, memory  of this machine
    places         the only possible places of instances; None: any
    """

    cores: int
    memory: int
    places: tuple[str, ...] | None = None

    def fits(self, all_settings: Iterable[InstanceSettings]) -> bool:
        """Whether instances with these settings may run at the same time."""
        found = list(all_settings)
        return (
            sum(each.cores for each in found) <= self.cores
            and sum(each.memory for each in found) <= self.memory
            and (self.places is None or len(found) <= len(self.places))
        )

    def __str__(self) -> str:
        if self.places is not None:
            return f"{len(self.places)} places"
        return f"{self.cores} cores and {format_bytes(self.memory)}"


def covers_both_phases(roles: Collection[str]) -> bool:
    """Whether instances with these roles cover both prefill and decoding."""
    return "mixed" in roles or {"prefill", "decode"} <= {*roles}


def match_instances(
    present: Mapping[str, InstanceSpec], wanted: Sequence[InstanceSpec]
) -> tuple[dict[str, str], list[InstanceSpec]]:
    """The places whose instances stay, each with its new role, and the instances that must be started.

    As many as possible stay, and of these as many as possible keep their roles.
    """
    free, pending, kept = dict(present), list(wanted), dict[str, str]()
    for keeps_role in (True, False):
        for spec in list(pending):
            for place, each in free.items():
                if each.settings == spec.settings and (each.role == spec.role or not keeps_role):
                    kept[place] = spec.role
                    del free[place]
                    pending.remove(spec)
                    break
    return kept, pending


def plan_switch(
    present: Mapping[str, InstanceSpec],
    wanted: Sequence[InstanceSpec],
    capacity: MachineCapacity,
    *,
    down: Collection[str] = (),
    may_pause: bool = False,
) -> list[Action]:
    """The actions that bring a cluster from the present instances to the wanted ones, with the fewest starts.

    At every moment, serving instances cover prefill and decoding, and all running instances have room. A new instance
    starts before another one ends, if there is room for both. Roles change in between to cover both phases.

    present    running instances by place
    down       places whose instances do not serve; they are ended first
    may_pause  whether no instance may serve for a while if there is no other way; the action is then marked
    Raises ConfigError if the wanted instances have no room, or need a pause that is not allowed.
    """
    if not capacity.fits(each.settings for each in wanted):
        raise ConfigError(f"the placement has no room: {_total(wanted)} are needed, and there are {capacity}")
    way = _SwitchPlanner(present, wanted, capacity, down, may_pause)
    return list(way.actions())


@dataclass
class _SwitchPlanner:
    """Plans a switch, action by action.

    here   serving instances, by place
    goal   final roles of the instances that stay
    """

    present: Mapping[str, InstanceSpec]
    wanted: Sequence[InstanceSpec]
    capacity: MachineCapacity
    down: Collection[str]
    may_pause: bool
    here: dict[str, InstanceSpec] = field(init=False)
    goal: dict[str, str] = field(init=False)
    pending: list[InstanceSpec] = field(init=False)

    def __post_init__(self) -> None:
        self.here = {place: spec for place, spec in self.present.items() if place not in self.down}
        self.goal, self.pending = match_instances(self.here, self.wanted)

    def actions(self) -> Iterator[Action]:
        """Yields the actions. The state already includes an action's effect when the next one is planned."""
        yield from (Remove(place) for place in self.present if place in self.down)
        while self.pending or self._leaving():
            spec = self._first_that_fits(self.here.values())
            if spec is not None:
                place = self._free_place(spec.role)
                self._start(spec, place)
                yield Add(place, spec)
            else:
                yield from self._one_leaves()
        yield from self._settling()

    def _one_leaves(self) -> Iterator[Action]:
        leaves = self._next_to_leave()
        rest = self._without(leaves)
        yield from self._covering(rest)
        role = self.here.pop(leaves).role
        spec = self._first_that_fits(rest.values(), role)
        if spec is None:
            assert rest, f"{self.pending} have no room alone"
            yield Remove(leaves)
        else:
            self._start(spec, leaves)
            yield Restart(leaves, spec, pauses=not rest)

    def _leaving(self) -> list[str]:
        return [place for place in self.here if place not in self.goal]

    def _without(self, place: str) -> dict[str, InstanceSpec]:
        return {each: spec for each, spec in self.here.items() if each != place}

    def _fits(self, spec: InstanceSpec, beside: Iterable[InstanceSpec]) -> bool:
        return self.capacity.fits([spec.settings, *(each.settings for each in beside)])

    def _first_that_fits(self, beside: Iterable[InstanceSpec], role: str = "") -> InstanceSpec | None:
        """The first instance to start that fits; instances with `role` come first."""
        found = [spec for spec in self.pending if self._fits(spec, beside)]
        return min(found, key=lambda spec: spec.role != role, default=None)

    def _start(self, spec: InstanceSpec, place: str) -> None:
        self.pending.remove(spec)
        self.here[place], self.goal[place] = spec, spec.role

    def _free_place(self, role: str) -> str:
        names = self.capacity.places
        if names is None:
            names = tuple(f"{role}-{index}" for index in range(len(self.here) + 1))
        free = [name for name in names if name not in self.here]
        return min(free, key=lambda name: name.rpartition("-")[0] != role)

    def _next_to_leave(self) -> str:
        """The place that ends next: its room should fit a new instance, preferably of the same role."""
        leaving = self._leaving()
        safe = [place for place in leaving if self._is_safe(place)]
        if not safe and not self.may_pause:
            raise ConfigError(
                f"the placement needs a pause: {_smallest(self.pending)}, the smallest new instance, and"
                f" {_smallest(self.here.values())}, the smallest that serves, do not fit into {self.capacity} together;"
                " allow a pause, in which requests wait (quire cluster place --pause)"
            )
        numbers = Counter(spec.role for spec in self.here.values())

        def merit(place: str) -> tuple[bool, bool, int]:
            role = self.here[place].role
            follows = self._first_that_fits(self._without(place).values(), role)
            return follows is not None, follows is not None and follows.role == role, numbers[role]

        return max(safe or leaving, key=merit)

    def _is_safe(self, place: str) -> bool:
        """Whether some instance serves from then on until the end of the switch."""
        rest = self._without(place)
        if any(each in self.goal for each in rest):
            return True
        return any(self._fits(spec, [last]) for last in rest.values() for spec in self.pending)

    def _covering(self, rest: Mapping[str, InstanceSpec]) -> Iterator[Action]:
        """Changes a role among the remaining instances if these alone would only do prompts or only decode."""
        roles = [spec.role for spec in rest.values()]
        if not rest or covers_both_phases(roles):
            return
        others = roles[1:]  # all have the same role
        place = next(
            (each for each in rest if each in self.goal and covers_both_phases([self.goal[each], *others])), None
        )
        if place is not None:
            yield self._with_role(place, self.goal[place])
        else:
            yield self._with_role(min(rest, key=lambda each: each not in self.goal), "mixed")

    def _settling(self) -> Iterator[Action]:
        """Gives instances their final roles. If no single change keeps both phases covered, one is mixed at first."""
        while changing := [place for place, spec in self.here.items() if spec.role != self.goal[place]]:
            for place in changing:
                if covers_both_phases([self.goal[place], *(spec.role for spec in self._without(place).values())]):
                    yield self._with_role(place, self.goal[place])
                    break
            else:
                yield self._with_role(changing[0], "mixed")

    def _with_role(self, place: str, role: str) -> SetRole:
        self.here[place] = self.here[place]._replace(role=role)
        return SetRole(place, role)


def _smallest(specs: Iterable[InstanceSpec]) -> str:
    return _total([min(specs, key=lambda spec: (spec.settings.cores, spec.settings.memory))])


def _total(specs: Sequence[InstanceSpec]) -> str:
    cores, memory = (sum(getattr(spec.settings, name) for spec in specs) for name in ("cores", "memory"))
    needs = f"{cores} core{'s' * (cores != 1)} and {format_bytes(memory)}"
    return needs if len(specs) == 1 else f"{len(specs)} instances" + f" with {needs}" * bool(cores or memory)
