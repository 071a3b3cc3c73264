"""The places of a cluster's instances. An instance that is started again takes the place of the one before."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence

from quire.cluster.placements import (
    Action,
    InstanceSpec,
    MachineCapacity,
    ServedModel,
    check_settings,
    plan_switch,
    specs_of,
)
from quire.planning.placement_file import Instances


class InstancePlaces:
    """What the instance at each place is started with.

    specs  by place
    cores  of this machine that it has to itself, by place
    """

    def __init__(self, model: ServedModel, *, is_local: bool) -> None:
        self.specs: dict[str, InstanceSpec] = {}
        self.cores: dict[str, tuple[int, ...]] = {}
        self._model, self._is_local = model, is_local
        self._reserved: tuple[str, ...] | None = None

    def __contains__(self, place: str) -> bool:
        return place in self.specs

    @property
    def roles(self) -> dict[str, str]:
        """By place."""
        return {place: spec.role for place, spec in self.specs.items()}

    def specs_of(self, instances: Sequence[Instances]) -> list[InstanceSpec]:
        """What is needed for the instances of a placement. Raises ConfigError: see `placements.specs_of`."""
        return specs_of(instances, self._model, _num_cores(), is_local=self._is_local)

    def open(self, specs: Iterable[tuple[str, InstanceSpec]]) -> None:
        """The first instances, by place. On other machines there are no further places from now on."""
        for place, spec in specs:
            self.assign(place, spec)
        self._reserved = None if self._is_local else tuple(self.specs)

    def assign(self, place: str, spec: InstanceSpec) -> None:
        """Gives a place what the next instance there is started with, and cores that no other one has."""
        held = {core for each in self.specs if each != place for core in self.cores[each]}
        free = [core for core in sorted(os.sched_getaffinity(0)) if core not in held]
        assert spec.settings.cores <= len(free), f"{place} is to have {spec.settings.cores} cores, and {free} are free"
        self.specs[place] = spec
        self.cores[place] = tuple(free[: spec.settings.cores])

    def plan(self, wanted: Sequence[InstanceSpec], down: Collection[str], *, may_pause: bool) -> list[Action]:
        """The actions that lead from these instances to the wanted ones: see `plan_switch`."""
        needed = [sum(spec.settings.memory for spec in specs) for specs in (self.specs.values(), wanted)]
        # What both placements are is allowed: weights that instances map from one file are counted for each of them.
        capacity = MachineCapacity(_num_cores(), max(self._model.available_bytes, *needed), self._reserved)
        return plan_switch(self.specs, wanted, capacity, down=down, may_pause=may_pause)

    def check(self, specs: Iterable[InstanceSpec]) -> None:
        """Raises ConfigError if the model cannot be loaded with the settings of an instance. Reads the model."""
        check_settings(specs, self._model)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
