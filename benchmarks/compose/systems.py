"""The five systems together: the configurations that are compared, and what each one gets of the same memory.

    sharing     ChunkAttention: prompts with the same beginning have it once
    codec       KVQuant: sealed chunks take few bits
    retention   FastGen: heads keep a part of a prompt
    offload     FlexGen: some of the weights, and of the cache, are on the disk
    instances   DistServe: one process computes prompts, another one decodes

A configuration is a set of them. Its engines have the options of its systems on top of those of all configurations, and
a cache of what the weights and the processes leave of the memory. Knows options and bytes, neither engines nor
processes; `run_systems.py` has these.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.cache.codecs import DENSE
from quire.cache.ledger import PAGE_TOKENS
from quire.config import format_bytes
from quire.errors import ConfigError


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

SET_HERE = ("cache.share", "cache.memory")
"""Settings that the benchmark sets: what --only and --plan.memory say."""

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
        if self.output < 2:
            raise ConfigError(f"--output-tokens is {self.output}; it must be at least 2")
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
        """Sorts the given options by the systems that they belong to, and adds defaults. Raises ConfigError for another
        device than a CPU, and for a codec that is none.
        """
        parts: dict[str, dict[str, Any]] = {"base": {}, "codec": {}, "retention": {}, "offload": {}}
        owners = {f"cache.{name}": "codec" for name in CODEC_KEYS}
        for key, value in given.items():
            section = {"retain": "retention", "offload": "offload"}.get(key.partition(".")[0], "base")
            parts[owners.get(key, section)][key] = value
        if parts["base"].setdefault("runtime.device", "cpu") != "cpu":
            raise ConfigError("runtime.device must be cpu: the benchmark counts the memory of processes")
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
    return sum(roles_of(systems).values()) or 1


def note_of(systems: Systems) -> str:
    """What a configuration leaves out of its systems, and why; empty: nothing."""
    return IN_INSTANCES if {OFFLOAD, INSTANCES} <= {*systems} else ""


def probe_of(systems: Systems) -> Systems:
    """The fewest systems whose processes and weights take the same memory."""
    return tuple(name for name in systems if name in (OFFLOAD, INSTANCES))


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
