"""A placement: which instances run and what they are predicted to serve, as a value and as a JSON file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.placement.cluster_file import ClusterSpec
from quire.placement.divisions import Option, Role, not_served
from quire.placement.rejected import Rejected
from quire.records import above, made, read_record

VERSION = 1

SLO_KEYS = ("ttft", "tpot", "attainment")


@dataclass(frozen=True)
class Instances:
    """Equal instances.

    role     prefill, decode or mixed
    count    number of instances
    tp, pp   their division: GPUs of a stage, and stages
    options  settings of the engine by key, as in {"cache.memory": "1GiB"}
    """

    role: str
    count: int
    tp: int = 1
    pp: int = 1
    options: dict[str, str | bool | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.role not in list(Role):
            raise ConfigError(f"role is {self.role!r}; it must be {', '.join(Role)}")
        for name in ("count", "tp", "pp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        EngineConfig.from_options(self.options)


@dataclass(frozen=True)
class Predicted:
    """What the instances of a placement serve together.

    rate           requests/s that they can serve
    cost           units that they take
    unit           GPU or machine
    rate_per_unit  goodput: rate / cost
    attainment     share of requests that meet both latency targets at this rate
    fits           whether the machines of the cluster have room for the instances
    """

    rate: float
    cost: float
    unit: str
    rate_per_unit: float
    attainment: float
    fits: bool = True

    def __post_init__(self) -> None:
        for name in ("rate", "cost", "rate_per_unit"):
            above(getattr(self, name), name)
        if not 0 <= self.attainment <= 1:
            raise ConfigError(f"attainment is {self.attainment}; it must be a share from 0 to 1")


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a placement is for, which are all alike.

    device   name in DEVICES
    memory   bytes of a GPU that weights and cache may use
    count    GPUs of a machine
    inside   bytes/s from one GPU of a machine to another; None: those of the device's own links
    between  bytes/s from one machine to another; None: as inside
    """

    device: str
    memory: int
    count: int
    inside: int | None = None
    between: int | None = None

    def __post_init__(self) -> None:
        for name in ("memory", "count", "inside", "between"):
            if getattr(self, name) is not None:
                above(getattr(self, name), name)

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Gpus | None:
        """Those of a cluster's machines; None if they have none, or none with a name."""
        nodes, network = cluster.nodes, cluster.network
        if not nodes.gpus or nodes.device is None:
            return None
        assert nodes.gpu_memory is not None, "GPUs have memory"
        return cls(nodes.device, nodes.gpu_memory, nodes.gpus, network.inside, network.between)


@dataclass(frozen=True)
class Hosts:
    """The machines without GPUs that a placement is for.

    count    of them
    between  bytes/s from one to another; None: there is one
    """

    count: int
    between: int | None = None

    def __post_init__(self) -> None:
        above(self.count, "count")
        if self.between is not None:
            above(self.between, "between")

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Hosts | None:
        """A cluster's machines; None if they have GPUs."""
        return None if cluster.has_gpus else cls(cluster.nodes.count, cluster.network.between)


@dataclass(frozen=True)
class Placement:
    """Instances, and why it is these.

    instances  by role; prompts come before decoding
    predicted  what they serve
    rejected   every other option; not read from a file, where `made` lists them
    warnings   one sentence for each reason to doubt the prediction; likewise
    workload   what it was planned for, for people
    slo        the latency targets in seconds, and the wanted share of requests: ttft, tpot, attainment
    made       how it was made, for people
    gpus       what its instances run on; None: cores
    hosts      the machines that have the cores; None: GPUs, or this machine
    """

    instances: tuple[Instances, ...]
    predicted: Predicted
    rejected: tuple[Rejected[Option], ...] = ()
    warnings: tuple[str, ...] = ()
    workload: dict[str, Any] = field(default_factory=dict)
    slo: dict[str, float] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    gpus: Gpus | None = None
    hosts: Hosts | None = None

    def __post_init__(self) -> None:
        counts = dict.fromkeys(Role, 0)
        for each in self.instances:
            counts[Role(each.role)] += each.count
        if not self.instances:
            raise ConfigError("instances is empty; a placement has at least one")
        for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            if counts[role] and not counts[other] and not counts[Role.MIXED]:
                raise ConfigError(f"instances have the role {role} alone; add one with the role {other} or mixed")
        for name in (name for name in self.slo if name not in SLO_KEYS):
            raise ConfigError(f"unknown field 'slo.{name}'; the fields are {', '.join(SLO_KEYS)}")

    def count(self, role: Role) -> int:
        """The number of instances of a role."""
        return sum(each.count for each in self.instances if each.role == role)

    @property
    def unserved(self) -> str:
        """Why no engine runs the first of the instances that none runs; empty if all are served."""
        return next((told for each in self.instances if (told := not_served(each.tp, each.pp))), "")

    @property
    def in_pairs(self) -> bool:
        """Whether caches stay within pairs of an instance for prompts and one that decodes."""
        return self.made.get("algorithm") == "pairs"

    def to_json(self) -> str:
        """The placement as the text of a file. Rejected options and warnings are part of `made`."""
        made_by = dict(self.made)
        if self.rejected:
            made_by["rejected"] = [
                {"option": str(each.option), "why": each.why, "reason": each.reason, "rate": each.rate_per_unit}
                for each in self.rejected
            ]
        if self.warnings:
            made_by["warnings"] = list(self.warnings)
        fields = {
            "version": VERSION,
            "instances": [dataclasses.asdict(each) for each in self.instances],
            "predicted": dataclasses.asdict(self.predicted),
            "workload": self.workload,
            "slo": self.slo,
            "made": made_by,
        }
        for name, machines in (("gpus", self.gpus), ("hosts", self.hosts)):
            if machines is not None:
                fields[name] = dataclasses.asdict(machines)
        return json.dumps(fields, indent=2, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Writes a file that `read_placement` reads. Raises ConfigError if that is impossible."""
        try:
            path.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the placement {path}: {error.strerror or error}") from None


@dataclass(frozen=True)
class _Content:
    """The fields of a file."""

    instances: tuple[Instances, ...]
    predicted: Predicted
    workload: dict[str, Any] = field(default_factory=dict)
    slo: dict[str, int | float] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    gpus: Gpus | None = None
    hosts: Hosts | None = None


def read_placement(path: Path) -> Placement:
    """The placement of a file. Raises ConfigError that names the file and the field."""
    return read_record(path, "placement", placement_of)


def placement_of(fields: Any) -> Placement:
    """The placement of a JSON object, with the fields of the format and no others. Raises ConfigError.

    The fields workload, slo, made, gpus and hosts, and the options of instances, may be missing.
    """
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        raise ConfigError(f"not a placement of version {VERSION}; quire plan placement makes one")
    content = made(_Content, {name: value for name, value in fields.items() if name != "version"})
    for name, value in content.slo.items():
        if value < 0:
            raise ConfigError(f"slo.{name} is {value!r}; it must be a number of at least 0")
    return Placement(**vars(content))
