"""The machines that a placement is planned for, as a TOML file. Knows sizes and speeds; measures nothing.

[nodes]                     [nodes]
count = 4                   count = 2
gpus = 8                    cores = 16
gpu_memory = "80GB"         memory = "64GiB"
device = "a100-80g"
                            [network]
[network]                   between = "125MB"
inside = "300GB"
between = "3.125GB"
fast = false
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from quire.errors import ConfigError
from quire.options import AtLeast, Bytes, Count, SettingsGroup, collect, make

MOST_MACHINES, MOST_SLOTS = 10_000, 4096
"""Machines, and GPUs or cores of one: searches of more would take hours."""


@dataclass(frozen=True, kw_only=True)
class Nodes(SettingsGroup):
    """The machines, which are all alike. Instances compute on their GPUs, or on their cores if they have no GPUs."""

    key: ClassVar[str] = "nodes"

    count: Count = 1
    """Number of machines."""
    gpus: Annotated[int, AtLeast(0)] = 0
    """GPUs of a machine."""
    gpu_memory: Bytes | None = None
    """Memory of a GPU that weights and cache may use. Needed with GPUs."""
    device: str | None = None
    """Name of the GPU, for a model of its speed."""
    cores: Count | None = None
    """Cores of a machine without GPUs that instances may use."""
    memory: Bytes | None = None
    """Memory of a machine without GPUs that instances may use. Its instances share it by their cores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("count", MOST_MACHINES), ("gpus", MOST_SLOTS), ("cores", MOST_SLOTS)):
            if (getattr(self, name) or 0) > most:
                raise ConfigError(f"nodes.{name} is {getattr(self, name)}; it must be at most {most:,}")
        if self.gpus:
            given = {"cores": self.cores, "memory": self.memory}
            for name in (name for name, value in given.items() if value is not None):
                raise ConfigError(
                    f"nodes.{name} is for machines without GPUs, and nodes.gpus is {self.gpus}; leave one of them out"
                )
            if not self.gpu_memory:
                raise ConfigError(f"nodes.gpus is {self.gpus}: set nodes.gpu_memory to the bytes of a GPU, as in 80GB")
            return
        if self.cores is None:
            raise ConfigError(
                "nodes.gpus is 0 and nodes.cores is missing: set one of them, because instances compute on"
                " GPUs or on cores"
            )
        if not self.memory:
            raise ConfigError(
                f"nodes.cores is {self.cores}: set nodes.memory to the bytes that instances may use, as in 64GiB"
            )
        for name in ("gpu_memory", "device"):
            if getattr(self, name) is not None:
                raise ConfigError(f"nodes.{name} is for GPUs, and nodes.gpus is 0; set nodes.gpus or leave it out")


@dataclass(frozen=True, kw_only=True)
class Network(SettingsGroup):
    """Links within a machine and between machines, in bytes per second of one direction."""

    key: ClassVar[str] = "network"

    inside: Bytes | None = None
    """Between two GPUs of a machine. auto: as fast as the device's own links."""
    between: Bytes | None = None
    """Between two machines. Needed with more than one machine."""
    fast: bool = False
    """Whether caches travel between machines in negligible time, so that prompts and decoding may be on different ones
    (DistServe's high affinity)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("inside", "between"):
            if getattr(self, name) == 0:
                raise ConfigError(f"network.{name} is 0; it must be bytes per second above 0, as in 3.125GB")


@dataclass(frozen=True)
class ClusterSpec:
    """Machines and their network.

    A slot is what an instance takes whole numbers of: a GPU, or a core of a machine without GPUs. Costs count units:
    GPUs, or machines if they have no GPUs.
    """

    nodes: Nodes
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        if self.nodes.count > 1 and self.network.between is None:
            raise ConfigError(
                f"nodes.count is {self.nodes.count}: set network.between to the bytes per second between machines,"
                " as in 3.125GB for 25 Gb/s"
            )
        if self.nodes.count == 1 and self.network.between is not None:
            raise ConfigError("network.between is for several machines, and nodes.count is 1; leave one of them out")

    @property
    def has_gpus(self) -> bool:
        """Whether instances compute on GPUs."""
        return self.nodes.gpus > 0

    @property
    def slots(self) -> int:
        """Slots of a machine."""
        return self.nodes.gpus or self.nodes.cores or 0

    @property
    def slot_memory(self) -> float:
        """Bytes of a slot: the memory of a GPU, or a core's share of the machine's memory."""
        if self.has_gpus:
            return float(self.nodes.gpu_memory or 0)
        return (self.nodes.memory or 0) / self.slots

    @property
    def unit(self) -> str:
        """What costs count."""
        return "GPU" if self.has_gpus else "machine"

    @property
    def slots_of_unit(self) -> int:
        """Slots of a unit."""
        return 1 if self.has_gpus else self.slots

    @property
    def num_units(self) -> int:
        """Units of all machines."""
        return self.nodes.count * self.slots // self.slots_of_unit

    @property
    def is_fast(self) -> bool:
        """Whether a cache reaches any other instance in negligible time."""
        return self.nodes.count == 1 or self.network.fast


GROUPS: tuple[type[SettingsGroup], ...] = (Nodes, Network)
"""The sections of a cluster file."""


def read_cluster(path: Path) -> ClusterSpec:
    """The machines of a cluster file. Raises ConfigError that names the file, the key and the way out."""
    values, _ = collect(GROUPS, {}, path, GROUPS)
    try:
        return ClusterSpec(make(Nodes, values), make(Network, values))
    except ConfigError as error:
        raise ConfigError(f"cluster file {path}: {error}") from None
