"""The five systems together: the configurations that are compared, and what each one gets of the same memory.

    sharing     ChunkAttention: prompts with the same beginning have it once
    codec       KVQuant: sealed chunks take few bits
    retention   FastGen: heads keep a part of a prompt
    offload     FlexGen: some of the weights, and of the cache, are on the disk
    instances   DistServe: one process computes prompts, another one decodes

A configuration is a set of them. Its engines have the options of its systems on top of those of all configurations, and
a cache of what the weights and the processes leave of the memory. Knows options and bytes, neither engines nor
processes; `compose_run` has these.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.cache.codecs import DENSE
from quire.cache.ledger import PAGE_TOKENS
from quire.config import format_bytes
from quire.errors import ConfigError
from quire.planning.slo import Slo


class System(NamedTuple):
    """One of the five. page: for its users, below docs/."""

    name: str
    paper: str
    page: str


SHARING, CODEC, RETENTION, OFFLOAD, INSTANCES = "sharing", "codec", "retention", "offload", "instances"

SYSTEMS = (
    System(SHARING, "ChunkAttention", "guide/prefixes.md"),
    System(CODEC, "KVQuant", "reference/codecs.md"),
    System(RETENTION, "FastGen", "design/retention.md"),
    System(OFFLOAD, "FlexGen", "guide/larger-than-memory.md"),
    System(INSTANCES, "DistServe", "guide/machines.md"),
)
NAMES = tuple(each.name for each in SYSTEMS)

Systems = tuple[str, ...]
"""Names of systems, in the order of SYSTEMS."""

PAIRS: tuple[Systems, ...] = tuple(itertools.combinations(NAMES, 2))
CONFIGURATIONS: tuple[Systems, ...] = ((), *((name,) for name in NAMES), *PAIRS, NAMES)

NONE, ALL = "none", "all five"

ROLES = {"prefill": 1, "decode": 1}
"""The instances: the least that keep prompts and decoding apart."""

DEFAULT_CODEC, DEFAULT_BUDGET = "nuq3", 0.75

WEIGHTS_NEAR = 0.75
"""Share of the weights that offloading leaves in memory, unless offload.memory is given."""

CACHE_ROOM = 2
"""Room of an offloaded cache, relative to cache.memory, unless offload.cache is given."""

RESERVE_BYTES = 40 << 20
"""Of each engine beside its cache, for batches larger than those of the probe."""

SET_HERE = {"cache.share": "--only", "cache.memory": "--plan.memory"}
"""Settings that the benchmark sets, and the flags that decide them."""

CODEC_KEYS = ("codec", "calibration", "outlier_slots", "sink_tokens", "strict")
"""Settings of the section `cache` that belong to the codec."""

IN_INSTANCES = "the cache stays in memory: an instance cannot hand over a cache that leaves it"


def name_of(systems: Systems) -> str:
    """What tables call a configuration."""
    return ALL if systems == NAMES else " + ".join(systems) or NONE


def systems_of(name: str) -> Systems:
    """The configuration of a name. Raises ConfigError for an unknown one."""
    for systems in CONFIGURATIONS:
        if name_of(systems) == name.strip():
            return systems
    raise ConfigError(f"there is no configuration {name!r}; there are {', '.join(map(name_of, CONFIGURATIONS))}")


@dataclass(frozen=True)
class Load:
    """The requests of all configurations: `clients` at once, each of which asks again as soon as it has its answer.

    prompt    tokens of a prompt
    shared    of them, first tokens that it has in common with every prompt that begins with the same prefix; not of a
              trace
    prefixes  number of different prefixes, which take turns
    output    tokens of an answer
    clients   numbers of clients, one after the other
    seconds   of each number
    trace     file that has prompts and answers instead; those longer than prompt + output are left out
    """

    prompt: int
    shared: int
    prefixes: int
    output: int
    clients: tuple[int, ...]
    seconds: float
    trace: str | None = None

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 2 or self.prefixes < 1 or not self.clients or min(self.clients) < 1:
            raise ConfigError(
                "quire bench compose needs prompts, prefixes and clients of at least 1, and --output-tokens of at least"
                " 2"
            )
        if self.trace is None and not 0 <= self.shared < self.prompt:
            raise ConfigError(f"--shared-tokens is {self.shared}; it must be below --input-tokens, {self.prompt}")
        if not self.seconds > 0:
            raise ConfigError(f"--seconds is {self.seconds:g}; it must be above 0")

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.prompt + self.output


@dataclass(frozen=True)
class Recipe:
    """The options of each system, and those of all configurations, by key."""

    base: Mapping[str, Any]
    codec: Mapping[str, Any]
    retention: Mapping[str, Any]
    offload: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Recipe:
        """Sorts the given options by the systems that they belong to, and adds defaults. Raises ConfigError for those
        that the benchmark sets.
        """
        for key in (key for key in SET_HERE if key in given):
            raise ConfigError(f"{key} is set by quire bench compose; use {SET_HERE[key]}")
        parts: dict[str, dict[str, Any]] = {"base": {}, "codec": {}, "retention": {}, "offload": {}}
        owners = {f"cache.{name}": "codec" for name in CODEC_KEYS}
        for key, value in given.items():
            section = {"retain": "retention", "offload": "offload"}.get(key.partition(".")[0], "base")
            parts[owners.get(key, section)][key] = value
        if parts["base"].setdefault("runtime.device", "cpu") != "cpu":
            raise ConfigError("runtime.device must be cpu: quire bench compose counts the memory of processes")
        if parts["codec"].setdefault("cache.codec", DEFAULT_CODEC) == DENSE:
            raise ConfigError(f"cache.codec is {DENSE}, which the others are compared with; give another codec")
        if not {"retain.budget", "retain.threshold"} & parts["retention"].keys():
            parts["retention"]["retain.budget"] = DEFAULT_BUDGET
        parts["offload"].setdefault("offload.mode", "auto")
        return cls(**parts)

    def options(self, systems: Systems, load: Load, cache: int, weights: int) -> dict[str, Any]:
        """The options of a configuration's engines. cache: bytes of each one's; weights: all bytes of one's weights."""
        found = {
            "cache.check": False, "scheduler.max_running": max(load.clients), "model.max_context": load.longest,
            "cache.share": SHARING in systems, "cache.memory": cache, **self.base,
        }  # fmt: skip
        if CODEC in systems:
            found |= self.codec
        if RETENTION in systems:
            found |= self.retention
        if OFFLOAD in systems:
            found |= {
                "offload.memory": int(WEIGHTS_NEAR * weights),
                "offload.cache": CACHE_ROOM * cache,
                **self.offload,
            }
            if INSTANCES in systems:
                del found["offload.cache"]
            if found["offload.mode"] != "auto":  # a policy has shares of its own
                found = {key: value for key, value in found.items() if key not in ("offload.memory", "offload.cache")}
        return found


def roles_of(systems: Systems) -> dict[str, int]:
    """The instances of a configuration; empty: one engine."""
    return dict(ROLES) if INSTANCES in systems else {}


def num_engines(systems: Systems) -> int:
    """Engines that divide the memory."""
    return sum(ROLES.values()) if INSTANCES in systems else 1


def note_of(systems: Systems) -> str:
    """What a configuration leaves out of its systems, and why; empty: nothing."""
    return IN_INSTANCES if {OFFLOAD, INSTANCES} <= {*systems} else ""


@dataclass(frozen=True)
class Kind:
    """Configurations whose processes and weights take the same memory."""

    has_instances: bool
    has_offload: bool

    @classmethod
    def of(cls, systems: Systems) -> Kind:
        """The kind of a configuration."""
        return cls(INSTANCES in systems, OFFLOAD in systems)

    @property
    def systems(self) -> Systems:
        """Its configuration with the fewest systems."""
        return (*((OFFLOAD,) if self.has_offload else ()), *((INSTANCES,) if self.has_instances else ()))


def cache_of(systems: Systems, memory: int, beside: int) -> int:
    """Bytes of the cache of each engine. beside: what processes and weights take of the memory, as a probe found.

    Raises ConfigError if nothing is left.
    """
    engines = num_engines(systems)
    left = (memory - beside) // engines - RESERVE_BYTES
    if left <= 0:
        raise ConfigError(
            f"--plan.memory is {format_bytes(memory)}, and processes and weights take {format_bytes(beside)} of it"
            f" ({name_of(systems)}); give at least {format_bytes(beside + 4 * engines * RESERVE_BYTES)}"
        )
    return left


def probe_cache(load: Load, chunk_bytes: int) -> int:
    """Bytes of a cache that two of the longest requests fill. Some more, because admission leaves them room to grow."""
    return (2 * -(-load.longest // PAGE_TOKENS) + 4) * chunk_bytes


# ---- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """An answer: when it ended, seconds from the beginning of its stage, and its latencies."""

    end: float
    ttft: float
    tpot: float


FEW_ANSWERS = 20
"""Answers of a stage from which its goodput is known to about a tenth."""

WARM_UP = 0.4
"""Share of a stage that does not count: the first prompts come all at once."""


@dataclass(frozen=True)
class Stage:
    """What some clients got, all of which asked at once in the beginning.

    running      most sequences in engines at once
    preemptions  sequences that had to give their memory back
    """

    clients: int
    seconds: float
    served: tuple[Served, ...]
    running: int
    preemptions: int

    @property
    def counted(self) -> list[Served]:
        """Answers that ended after the warm-up."""
        return [each for each in self.served if each.end > WARM_UP * self.seconds]

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.counted) / (self.seconds * (1 - WARM_UP))

    def goodput(self, slo: Slo) -> float:
        """Answers a second that met both targets."""
        met = sum(each.ttft <= slo.ttft and each.tpot <= slo.tpot for each in self.counted)
        return met / (self.seconds * (1 - WARM_UP))

    def told(self, slo: Slo) -> dict[str, Any]:
        """For a report."""
        counted = self.counted
        times = {
            f"{name}_{label}": quantile([getattr(each, name) for each in counted], share)
            for name in ("ttft", "tpot")
            for label, share in (("p50", 0.5), ("p90", 0.9))
        }
        rates = {"rate": self.rate, "goodput": self.goodput(slo)}
        counts = {"clients": self.clients, "answers": len(counted)}
        return counts | rates | times | {"running": self.running, "preemptions": self.preemptions}


def best(stages: Sequence[Stage], slo: Slo) -> tuple[float, int]:
    """The highest goodput of some stages, and its number of clients."""
    found = max(stages, key=lambda stage: stage.goodput(slo))
    return found.goodput(slo), found.clients


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that a share of the values does not exceed; None of no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


@dataclass
class Row:
    """A configuration and what was found.

    refused         why it cannot run; empty: it can
    sequences       most of them that were in the caches at once (see `compose_room`)
    sequence_bytes  of the caches, for each of these
    weights, cache  bytes in memory, of all engines together
    pss             most bytes that all processes had together; what several of them map counts once
    ratio           perplexity relative to that of the dense cache without retention, and its standard error
    """

    systems: Systems
    refused: str = ""
    sequences: int = 0
    sequence_bytes: float = 0.0
    weights: int = 0
    cache: int = 0
    pss: int = 0
    stages: tuple[Stage, ...] = ()
    ratio: float | None = None
    ratio_error: float | None = None

    def told(self, none: Row | None, slo: Slo) -> dict[str, Any]:
        """For a report. none: the row that gains are relative to; None: there is none."""
        found: dict[str, Any] = {
            "configuration": name_of(self.systems), "systems": list(self.systems), "refused": self.refused,
            "note": note_of(self.systems), "ratio": self.ratio, "ratio_error": self.ratio_error,
        }  # fmt: skip
        if self.refused:
            return found
        goodput, clients = best(self.stages, slo)
        base = 0.0 if none is None or none.refused else best(none.stages, slo)[0]
        held = 0 if none is None else none.sequences
        return found | {
            "sequences": self.sequences,
            "sequence_bytes": self.sequence_bytes,
            "goodput": goodput,
            "clients": clients,
            "weights": self.weights,
            "cache": self.cache,
            "pss": self.pss,
            "gain_sequences": self.sequences / held if held else None,
            "gain_goodput": goodput / base if base else None,
            "stages": [stage.told(slo) for stage in self.stages],
        }


def doubts(load: Load, slo: Slo, none: Row) -> list[str]:
    """Reasons why goodputs of a load say less than they should, one sentence each. none: the base."""
    found, most = list[str](), max(load.clients)
    if most <= none.sequences:
        found.append(
            f"the largest number of clients is {most}, and the configuration '{NONE}' holds {none.sequences} sequences:"
            " no goodput was measured under memory pressure; raise --clients"
        )
    if slo.ttft >= load.seconds:
        found.append(
            f"a stage takes {load.seconds:g} s, so hardly any answer can miss the target of {slo.ttft:.4g} s to the"
            " first token; raise --seconds or lower --ttft"
        )
    answers = max((len(stage.counted) for stage in none.stages), default=0)
    if answers < FEW_ANSWERS:
        found.append(f"the configuration '{NONE}' gave at most {answers} counted answers: ratios of goodputs are rough")
    return found


@dataclass(frozen=True)
class Targets:
    """What all five together must reach, relative to none."""

    sequences: float = 6.0
    goodput: float = 2.0
    ratio: float = 1.03

    def missed(self, row: Mapping[str, Any], memory: int) -> list[str]:
        """Which of them a told row of all five misses, and whether it takes more than the memory; a sentence each."""
        found = []
        for what, key, least in (
            ("sequences", "gain_sequences", self.sequences), ("goodput", "gain_goodput", self.goodput),
        ):  # fmt: skip
            if (gain := row.get(key)) is not None and gain < least:
                found.append(f"all five have {gain:.2f} times the {what} of none, and {least:g} times are wanted")
        if row["ratio"] is not None and row["ratio"] > self.ratio:
            found.append(f"all five have {row['ratio']:.4f} times the perplexity of none; {self.ratio:g} is allowed")
        if row.get("pss", 0) > memory:
            found.append(f"all five took {format_bytes(row['pss'])} of {format_bytes(memory)}")
        return found
