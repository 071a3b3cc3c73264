"""How the instances of a placement may be divided: their slots, and the memory that they need.

A stage of an instance takes `tp` GPUs of one machine; `pp` stages may be on different machines. An instance on a
machine without GPUs takes cores of one machine.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import StrEnum

from quire.options import format_bytes
from quire.placement.cluster_file import ClusterSpec


class Role(StrEnum):
    """What an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True)
class Division:
    """How an instance is divided among slots.

    tp     GPUs that share every layer; intra-op parallelism
    pp     stages, each with a part of the layers; inter-op parallelism
    cores  cores of an instance without GPUs; 0: it has tp * pp GPUs
    """

    role: Role
    tp: int = 1
    pp: int = 1
    cores: int = 0

    def __post_init__(self) -> None:
        assert self.tp >= 1 and self.pp >= 1 and self.cores >= 0, repr(self)
        assert not self.cores or self.tp == self.pp == 1, f"{self!r} divides an instance without GPUs"

    @property
    def divisions(self) -> tuple[Division, ...]:
        """The instances of an option: this one."""
        return (self,)

    @property
    def stage_slots(self) -> int:
        """Slots that must be on one machine."""
        return self.cores or self.tp

    @property
    def num_slots(self) -> int:
        """Slots of the instance."""
        return self.stage_slots * self.pp

    @property
    def order(self) -> tuple[int, ...]:
        """Of equally good divisions the one with the smallest order is taken: fewest slots, then fewest stages."""
        return self.num_slots, self.pp

    def __str__(self) -> str:
        division = f"on {self.cores} core{'s' * (self.cores > 1)}" if self.cores else f"tp {self.tp} pp {self.pp}"
        return f"{self.role} {division}"


@dataclass(frozen=True)
class Pair:
    """An instance that computes prompts and one that decodes, whose stages of equal number share a machine.

    Both have the same layers on a stage, so a cache never leaves its machine.
    """

    prefill: Division
    decode: Division

    def __post_init__(self) -> None:
        assert (self.prefill.role, self.decode.role) == (Role.PREFILL, Role.DECODE), repr(self)
        assert self.prefill.pp == self.decode.pp, f"stages of {self} hold different layers"

    @property
    def divisions(self) -> tuple[Division, ...]:
        """The instances of an option: both."""
        return self.prefill, self.decode

    @property
    def pp(self) -> int:
        """Stages of both."""
        return self.prefill.pp

    @property
    def stage_slots(self) -> int:
        """Slots that must be on one machine."""
        return self.prefill.stage_slots + self.decode.stage_slots

    @property
    def num_slots(self) -> int:
        """Slots of both instances."""
        return self.stage_slots * self.pp

    @property
    def order(self) -> tuple[int, ...]:
        """See Division."""
        return self.num_slots, self.pp, self.prefill.stage_slots

    def __str__(self) -> str:
        return f"{self.prefill} with {self.decode}"


Option = Division | Pair


def not_served(tp: int, pp: int) -> str:
    """Why no engine runs an instance that is divided like this, as the first line of a plan; empty if engines do."""
    if tp == pp == 1:
        return ""
    return f"not served yet: tp {tp} pp {pp} is only modelled, because an instance is one process with one GPU"


@dataclass(frozen=True)
class Needs:
    """What an instance of a model needs memory for, and how far the model can be divided.

    num_layers     layers; a stage has at least one
    weight_bytes   weights of the whole model
    request_bytes  cache of the longest request, all layers, as the codec stores it; retention has all of it for a while
    fixed_bytes    of every GPU, or of an instance without GPUs: activations and buffers
    num_heads      query heads, which tp must divide; 0: any tp divides the model
    num_kv_heads   heads of the cache: more GPUs hold copies of them; 0: any tp divides the cache
    """

    num_layers: int
    weight_bytes: float
    request_bytes: float
    fixed_bytes: float = 0.0
    num_heads: int = 0
    num_kv_heads: int = 0

    def divides(self, option: Option) -> bool:
        """Whether the heads can be divided among the GPUs of a stage."""
        return all(self.num_heads % each.tp == 0 for each in option.divisions)

    def lack(self, option: Option, cluster: ClusterSpec) -> str | None:
        """Why an option cannot run on the cluster, as a sentence; None if it can.

        The largest stage must hold its weights and its part of the longest request's cache in less than the memory of
        its GPUs. Without GPUs an instance has the memory that belongs to its cores.
        """
        if isinstance(option, Pair):
            return self.lack(option.prefill, cluster) or self.lack(option.decode, cluster)
        if not self.divides(option):
            return f"{self.num_heads} heads cannot be divided among {option.tp} GPUs"
        layers = -(-self.num_layers // option.pp) / self.num_layers
        weights = self.weight_bytes * layers / option.tp
        request = self.request_bytes * layers / min(option.tp, self.num_kv_heads or option.tp)
        memory = cluster.slot_memory * (option.cores or 1)
        needed = weights + request + self.fixed_bytes
        if needed < memory:
            return None
        have = f"{option.cores} cores have" if option.cores > 1 else f"a {'core' if option.cores else 'GPU'} has"
        parts = [f"{_shown(weights)} of weights", f"{_shown(request)} for the longest request"]
        if self.fixed_bytes:
            parts.append(f"{_shown(self.fixed_bytes)} beside them")
        return f"{_shown(needed)} are needed ({', '.join(parts)}), and {have} {_shown(memory)}"


def degrees(cluster: ClusterSpec) -> list[int]:
    """Numbers of slots that a stage may have on a machine. Of a machine's cores, which may be many: the divisors of
    their number, and powers of two.
    """
    sizes, slots = range(1, cluster.slots + 1), cluster.slots
    return [size for size in sizes if cluster.has_gpus or slots % size == 0 or size & (size - 1) == 0]


def divisions(cluster: ClusterSpec, num_layers: int, role: Role) -> list[Division]:
    """Every instance of a role for which the cluster has slots, in the order of `order`.

    Source: DistServe, arXiv 2401.09670, Algorithm 1: tp up to the GPUs M of a machine, pp up to N * M / tp with N
    machines. Ours differs: a stage's GPUs share a machine, and a stage has at least one layer.
    """
    sizes = degrees(cluster)
    if not cluster.has_gpus:
        return [Division(role, cores=size) for size in sizes]
    found = [
        Division(role, tp, pp) for tp in sizes for pp in range(1, _most_stages(cluster, num_layers, stage_slots=tp) + 1)
    ]
    return sorted(found, key=lambda each: each.order)


def pairs(cluster: ClusterSpec, num_layers: int) -> list[Pair]:
    """Every pair for which the cluster has slots, in the order of `order`.

    Source: DistServe, arXiv 2401.09670, Algorithm 2. Ours differs: several stages of a pair may share a machine, so pp
    may exceed the number of machines.
    """
    sizes = degrees(cluster)
    found: list[Pair] = []
    for first, second in itertools.product(sizes, sizes):
        if not cluster.has_gpus and first + second <= cluster.slots:
            found.append(Pair(Division(Role.PREFILL, cores=first), Division(Role.DECODE, cores=second)))
        if cluster.has_gpus:
            found += [
                Pair(Division(Role.PREFILL, first, pp), Division(Role.DECODE, second, pp))
                for pp in range(1, _most_stages(cluster, num_layers, stage_slots=first + second) + 1)
            ]
    return sorted(found, key=lambda each: each.order)


def _most_stages(cluster: ClusterSpec, num_layers: int, *, stage_slots: int) -> int:
    return min(num_layers, cluster.nodes.count * (cluster.slots // stage_slots))


def _shown(num_bytes: float) -> str:
    return format_bytes(math.ceil(num_bytes))
