"""What could serve: groups of equal instances, and how they work together. A candidate is a value.

Searches propose candidates. `LocalModel` and `Target` turn a candidate into a setup, and a setup is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.cluster.members import ROLES
from quire.config import ClusterConfig, EngineConfig

if TYPE_CHECKING:
    from quire.simulation.setup import Setup


@dataclass(frozen=True)
class InstanceGroup:
    """Equal instances.

    config  of each engine, with automatic values
    tp, pp  GPUs that share a stage, and stages
    """

    role: str
    config: EngineConfig
    count: int = 1
    tp: int = 1
    pp: int = 1


@dataclass(frozen=True)
class Candidate:
    """Instances of a model.

    groups     prompts come before decoding
    cluster    settings of the router; None: the only instance is an engine in the server's process
    transport  of caches between instances without GPUs: shm or tcp
    between    bytes/s of the network that caches cross; None: that of the machines
    in_pairs   whether caches stay within pairs of an instance for prompts and one that decodes
    """

    groups: tuple[InstanceGroup, ...]
    cluster: ClusterConfig | None = None
    transport: str = "shm"
    between: int | None = None
    in_pairs: bool = False

    @property
    def num_gpus(self) -> int:
        """GPUs of all instances."""
        return sum(each.count * each.tp * each.pp for each in self.groups)


class Maker(Protocol):
    """Makes setups, in any process."""

    def setup(self, candidate: Candidate) -> Setup:
        """What takes the requests. Raises ConfigError for instances that cannot be simulated."""
        ...


def counts_of(settings: ClusterConfig) -> Iterator[tuple[str, int]]:
    """The roles of a cluster that have instances, each with their number."""
    for role in ROLES:
        if count := int(getattr(settings, role)):
            yield role, count
