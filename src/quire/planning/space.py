"""The space that `quire plan auto` searches: one row of AXES for everything that can be set, and the settings that are
one choice of each. A new codec is a row of the registry of codecs; a new axis is a row here.

Knows keys and values of settings, and nothing of what they do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from quire.cache.codecs import CODECS, DENSE
from quire.config import ClusterConfig, EngineConfig, SchedulerConfig

Value = str | int | float | bool | None

BUDGETS = (0.75, 0.5, 0.25)
"""Shares of a sequence's bytes that retention keeps."""

SLOTS = (1, 0, 2)
"""Elements of a vector that calibrated codecs store exactly; the default comes first."""

RUNNING = (SchedulerConfig.max_running, SchedulerConfig.max_running // 4, SchedulerConfig.max_running // 16)
"""Most sequences at once. Fewer decode faster and wait longer."""

NOT_OF_ENGINES = ("cluster.", "parallel.")
"""Beginnings of keys that are not settings of an engine."""

DIVISIONS = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (8, 1))
"""GPUs that share a layer, and stages."""


@dataclass(frozen=True)
class SearchLimits:
    """What decides which choices there are.

    cores       that all instances may use; 0: instances compute on GPUs
    gpus        of a machine; 0: none, so that instances are processes with some cores
    is_packed   whether the checkpoint has weights in less than 16 bits
    disk        a folder and its size, as tiers.disk has them; empty: none
    memory      bytes beside the cache of a GPU, as tiers.memory has them; 0: none
    given       settings that the user has decided, by key
    """

    cores: int = 1
    gpus: int = 0
    is_packed: bool = False
    disk: str = ""
    memory: int = 0
    given: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """A value of an axis.

    name     in tables
    options  settings by key
    loses    whether it may cost quality
    like     name that it shares with choices that take about as long; empty: there are none
    """

    axis: str
    name: str
    options: tuple[tuple[str, Value], ...] = ()
    loses: bool = True
    like: str = ""


class Effect(StrEnum):
    """What a choice does to the seconds of a step, beside the plain one.

    NONE    nothing that the features of a step do not say
    ADDS    seconds more or less
    SCALES  a multiple of them
    """

    NONE = "none"
    ADDS = "adds"
    SCALES = "scales"


def _nothing(choice: Choice, others: Mapping[str, Choice]) -> str:
    return ""


@dataclass(frozen=True)
class Axis:
    """Something that can be set.

    keys        settings that it decides: who gives one of them has decided it
    choices     of a machine. The first one is plain: it loses nothing
    refuses     why a choice cannot be together with those of the axes before it; empty: it can
    part        of the quality that it belongs to; empty: it does not change quality
    effect      on the seconds of steps
    is_ordered  whether each choice loses at least as much as the one before it
    decodes     whether the loss shows in decoded tokens alone, and not in those of a prompt
    is_late     whether choices other than the first one are tried with the best settings alone
    """

    name: str
    keys: tuple[str, ...]
    choices: Callable[[SearchLimits], Sequence[Choice]]
    refuses: Callable[[Choice, Mapping[str, Choice]], str] = _nothing
    part: str = ""
    effect: Effect = Effect.NONE
    is_ordered: bool = False
    decodes: bool = False
    is_late: bool = False


def _weights(machine: SearchLimits) -> list[Choice]:
    forms = ["native", *(["dequantized"] if machine.is_packed else []), "g4"]
    lossless = ("native", "dequantized")
    return [Choice("weights", f"{form} weights", (("model.weights", form),), form not in lossless) for form in forms]


def _codecs(machine: SearchLimits) -> list[Choice]:
    # A calibration belongs to calibrated codecs alone, and the configuration refuses it with others.
    has_file = "cache.calibration" in machine.given
    return [
        Choice(
            "codec", name,
            (("cache.codec", name), *((("cache.calibration", None),) if has_file and not row.is_calibrated else ())),
            name != DENSE, row.place.partition(":")[0],
        )
        for name, row in CODECS.items()
    ]  # fmt: skip


def _slots(machine: SearchLimits) -> list[Choice]:
    return [Choice("outliers", f"{count} slots", (("cache.outlier_slots", count),), like="slots") for count in SLOTS]


def _needs_calibrated(choice: Choice, others: Mapping[str, Choice]) -> str:
    codec = str(dict(others["codec"].options).get("cache.codec", DENSE))
    is_plain = dict(choice.options).get("cache.outlier_slots") == SLOTS[0]
    return "" if is_plain or codec not in CODECS or CODECS[codec].is_calibrated else f"{codec} has no outlier slots"


def _retention(machine: SearchLimits) -> list[Choice]:
    kept = [Choice("retention", f"budget {share:g}", (("retain.budget", share),), like="budget") for share in BUDGETS]
    return [Choice("retention", "all tokens", (("retain.budget", "off"),), loses=False), *kept]


def _disk(machine: SearchLimits) -> list[Choice]:
    none = Choice("disk", "no disk", (("tiers.disk", None), ("tiers.disk_bandwidth", None)), loses=False)
    if not machine.disk:
        return [none]
    limit = machine.given.get("tiers.disk_bandwidth")
    return [none, Choice("disk", "disk", (("tiers.disk", machine.disk), ("tiers.disk_bandwidth", limit)), loses=False)]


def _memory(machine: SearchLimits) -> list[Choice]:
    none = Choice("memory", "no memory tier", (("tiers.memory", None),), loses=False)
    tier = Choice("memory", "memory tier", (("tiers.memory", machine.memory),), loses=False)
    return [none, tier] if machine.memory else [none]


def _running(machine: SearchLimits) -> list[Choice]:
    return [
        Choice("running", f"{count} running", (("scheduler.max_running", count),), loses=False) for count in RUNNING
    ]


def _roles(machine: SearchLimits) -> list[Choice]:
    one = Choice("roles", "one engine", (("cluster.prefill", 0), ("cluster.decode", 0)), loses=False)
    apart = Choice("roles", "prefill + decode", (("cluster.prefill", 1), ("cluster.decode", 1)), loses=False)
    return [one, apart] if machine.gpus or machine.cores > 1 else [one]


def _parallel(machine: SearchLimits) -> list[Choice]:
    return [
        Choice("parallel", f"tp {tp} pp {pp}", (("parallel.tp", tp), ("parallel.pp", pp)), loses=False)
        for tp, pp in DIVISIONS
        if tp * pp <= max(1, machine.gpus)
    ]


AXES = (
    Axis("weights", ("model.weights",), _weights, part="weights", effect=Effect.ADDS),
    Axis("codec", ("cache.codec",), _codecs, part="codec", effect=Effect.ADDS),
    Axis("outliers", ("cache.outlier_slots",), _slots, _needs_calibrated, part="codec", effect=Effect.ADDS),
    Axis(
        "retention", ("retain.budget", "retain.threshold"), _retention, part="retention", effect=Effect.ADDS,
        is_ordered=True, decodes=True,
    ),
    Axis("disk", (), _disk),
    Axis("memory", (), _memory),
    Axis(
        "roles", ("cluster.prefill", "cluster.decode", "cluster.mixed", "cluster.placement"), _roles,
        effect=Effect.SCALES,
    ),
    Axis("parallel", (), _parallel),
    Axis("running", ("scheduler.max_running",), _running, is_late=True),
)  # fmt: skip
"""Of retention, features of a step say what it saves: sequences attend to fewer tokens. What it costs is measured:
profiles of prompts, and pages that each sequence reads through its own mask. Roles divide the threads.
"""


@dataclass(frozen=True)
class Settings:
    """One choice of each axis, in their order."""

    choices: tuple[Choice, ...]

    @property
    def options(self) -> dict[str, Value]:
        """Settings by key."""
        return {key: value for choice in self.choices for key, value in choice.options}

    def engine(self, base: EngineConfig) -> EngineConfig:
        """An engine's configuration with these settings. Raises ConfigError."""
        own = {key: value for key, value in self.options.items() if not key.startswith(NOT_OF_ENGINES)}
        return base.with_options(own)

    def cluster(self, base: ClusterConfig) -> ClusterConfig:
        """The instances with these settings. Raises ConfigError."""
        return base.with_options(self.options)

    @property
    def num_instances(self) -> int:
        """Engines."""
        return max(1, sum(int(self.options.get(f"cluster.{role}") or 0) for role in ("prefill", "decode", "mixed")))

    @property
    def division(self) -> tuple[int, int]:
        """GPUs of an instance that share a stage, and stages."""
        return int(self.options.get("parallel.tp") or 1), int(self.options.get("parallel.pp") or 1)

    def of(self, axis: str) -> Choice:
        """The choice of an axis."""
        return next(choice for choice in self.choices if choice.axis == axis)

    def differs(self, other: Settings) -> list[str]:
        """The axes in which it differs from another one."""
        return [mine.axis for mine, its in zip(self.choices, other.choices, strict=True) if mine != its]


@dataclass(frozen=True)
class Space:
    """All settings of a machine.

    plain  choices that lose nothing, by axis, whether they are tried or not
    tried  choices that are tried, by axis: one where the user has decided
    """

    axes: tuple[Axis, ...]
    plain: Mapping[str, Choice]
    tried: Mapping[str, tuple[Choice, ...]]

    @classmethod
    def of(cls, machine: SearchLimits, axes: tuple[Axis, ...] = AXES) -> Space:
        """The space of a machine."""
        plain, tried = {}, {}
        for axis in axes:
            choices = tuple(axis.choices(machine))
            plain[axis.name] = choices[0]
            decided = _decided(axis, choices, machine.given)
            tried[axis.name] = choices if decided is None else (decided,)
        return cls(axes, plain, tried)

    @property
    def first(self) -> Settings:
        """What is set without a plan: the plain choices, and those that the user has decided."""
        return Settings(tuple(self._usual(axis.name) for axis in self.axes))

    def name(self, settings: Settings) -> str:
        """The choices that are not those of `first`, and what the user has not decided, in words."""
        told = [choice.name for choice in settings.choices if choice != self._usual(choice.axis)]
        return ", ".join(told) or "default"

    def settings(self) -> list[Settings]:
        """All that can be with the first choices of late axes, the plainest first. What an axis refuses to be with
        others is no settings of its own.
        """
        found = []
        for choices in itertools.product(*(self.tried[axis.name][: 1 if axis.is_late else None] for axis in self.axes)):
            others: dict[str, Choice] = {}
            for axis, choice in zip(self.axes, choices, strict=True):
                # What the user has decided has no effect on choices that do not have it.
                if len(self.tried[axis.name]) > 1 and axis.refuses(choice, others):
                    break
                others[axis.name] = choice
            else:
                found.append(Settings(choices))
        return sorted(found, key=lambda each: len(each.differs(self.first)))

    def later(self, settings: Settings) -> list[Settings]:
        """The same settings with another choice of a late axis."""
        return [
            Settings(tuple(choice if own.axis == axis.name else own for own in settings.choices))
            for axis in self.axes
            if axis.is_late
            for choice in self.tried[axis.name]
            if choice != settings.of(axis.name)
        ]

    def only(self, settings: Settings, axes: Iterable[str]) -> Settings:
        """The choices of some axes, and plain ones of all others."""
        return self._changed(axes, settings)

    def parts(self, settings: Settings) -> dict[str, Settings]:
        """The parts of the settings that may cost quality, each without the others: by the name of the part."""
        found: dict[str, list[str]] = {}
        for axis in self.axes:
            if axis.part:
                found.setdefault(axis.part, []).append(axis.name)
        return {
            part: self.only(settings, names)
            for part, names in found.items()
            if any(settings.of(name).loses and settings.of(name) != self.plain[name] for name in names)
        }

    def lossy(self, settings: Settings) -> Settings:
        """What of the settings may cost quality, all of it together."""
        return self.only(
            settings, [each.axis for each in settings.choices if self._axis(each.axis).part and each.loses]
        )

    def decodes(self, settings: Settings) -> bool:
        """Whether some of the loss shows in decoded tokens alone."""
        return any(
            self._axis(each.axis).decodes and each.loses and each != self.plain[each.axis] for each in settings.choices
        )

    def timed(self, settings: Settings) -> Settings:
        """What of the settings decides the seconds of a step."""
        return self._changed([each.name for each in self.axes if each.effect is not Effect.NONE], settings)

    def effects(self, settings: Settings) -> dict[Effect, list[Settings]]:
        """What makes `timed` differ from that of `first`, part by part: `first` with the choices of a part alone. Axes
        of one part of the quality are one, because outliers are those of a codec.
        """
        found: dict[Effect, list[Settings]] = {Effect.ADDS: [], Effect.SCALES: []}
        groups: dict[tuple[Effect, str], list[str]] = {}
        for axis in self.axes:
            if axis.effect is not Effect.NONE:
                groups.setdefault((axis.effect, axis.part or axis.name), []).append(axis.name)
        for (effect, _), names in groups.items():
            if any(settings.of(name) != self.first.of(name) for name in names):
                found[effect].append(self.timed(self._changed(names, settings, self.first)))
        return found

    def alike(self, settings: Settings) -> list[Settings]:
        """Settings whose steps take about as long, the nearest first: with choices that are like the own ones."""
        near: list[list[tuple[int, Choice]]] = []
        for choice in settings.choices:
            tried = self.tried[choice.axis]
            place = tried.index(choice) if choice in tried else 0
            same = [(abs(index - place), each) for index, each in enumerate(tried) if each.like == choice.like != ""]
            near.append([(0, choice), *((distance, each) for distance, each in same if each != choice)])
        found = sorted(
            itertools.product(*near), key=lambda pairs: sum(distance + (distance > 0) for distance, _ in pairs)
        )
        return [Settings(tuple(choice for _, choice in pairs)) for pairs in found[1:]]

    def _changed(self, axes: Iterable[str], settings: Settings, base: Settings | None = None) -> Settings:
        """The base with some choices of other settings. base: None: all plain."""
        wanted = {*axes}
        rest = self.plain if base is None else {each.axis: each for each in base.choices}
        return Settings(tuple(each if each.axis in wanted else rest[each.axis] for each in settings.choices))

    def _axis(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def _usual(self, name: str) -> Choice:
        plain, tried = self.plain[name], self.tried[name]
        return plain if plain in tried else tried[0]


def _decided(axis: Axis, choices: Sequence[Choice], given: Mapping[str, Value]) -> Choice | None:
    """The choice that the user has made; None: the axis is open."""
    own = {key: given[key] for key in axis.keys if key in given}
    if not own:
        return None
    same = [each for each in choices if all(str(dict(each.options).get(key)) == str(own[key]) for key in own)]
    if same:
        return same[0]
    name = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in own.items())
    return Choice(axis.name, name, tuple(own.items()), loses=bool(axis.part))
