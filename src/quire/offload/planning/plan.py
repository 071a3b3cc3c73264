"""Placements of a model on a machine with a profile, or on that of FlexGen's paper. Values in, placements out."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.config import EngineConfig
from quire.engine.machine import available_memory
from quire.errors import ConfigError
from quire.offload.planning.costs import BlockWorkload, CostModel, Form
from quire.offload.planning.paper import FORMS, t4
from quire.offload.planning.planner import MICRO_BATCHES, plan_all
from quire.offload.planning.profile import Profile
from quire.offload.planning.profiled import ProfiledTime
from quire.offload.planning.program import BATCHES, PlacedBlock, no_fit, placed, search
from quire.offload.planning.subject import Subject
from quire.offload.policy import read_policy
from quire.offload.units import ALL, NONE, TIERS, Share, Split


@dataclass(frozen=True)
class OffloadPlan:
    """The placements that fit a machine.

    tiers       names, fastest first
    capacities  bytes of each tier
    found       the best placement of each block size that fits, in the order of the sizes
    """

    tiers: tuple[str, ...]
    capacities: tuple[float, ...]
    found: list[PlacedBlock]


def kept_share(config: EngineConfig) -> Share:
    """The share of a prompt's tokens that retention keeps."""
    budget = config.retain.budget
    return ALL if budget == "off" else Share(min(1.0, budget))


def plan_measured(
    subject: Subject,
    profile: Profile,
    workload: BlockWorkload,
    given: Mapping[str, float | None],
    *,
    disk_setting: str,
    free_share: float = 1.0,
    slack: float = 1.0,
    only_weights: bool = False,
    micro_batches: Iterable[int] = MICRO_BATCHES,
    num_batches: Iterable[int] | None = None,
) -> OffloadPlan:
    """Placements on the machine of a profile, which is this one.

    profile       checked to be for the subject
    given         bytes of tiers by name; a tier without has a share of what is free, and the disk also the weights
    disk_setting  what a user sets if the folder of the profile cannot be asked, for the error
    free_share    share of what is free
    Others as of `plan_all`. Raises ConfigError, and PlanError if nothing fits.
    """

    def free(tier: str) -> float:
        if tier != TIERS[-1]:
            return available_memory(torch.device("cuda" if tier == TIERS[0] else "cpu")) * free_share
        try:
            return subject.layers_bytes + shutil.disk_usage(profile.disk.folder).free * free_share
        except OSError as error:
            raise ConfigError(
                f"{profile.disk.folder} of the profile: {error.strerror or error}; set {disk_setting}"
            ) from None

    sizes = {tier: given.get(tier) for tier in profile.tiers}
    capacities = tuple(free(tier) if size is None else float(size) for tier, size in sizes.items())
    found = plan_all(
        profile, subject.sizes, workload, capacities, budget=subject.token_budget, slack=slack,
        only_weights=only_weights or subject.keeps_cache, micro_batches=micro_batches, num_batches=num_batches,
        most=subject.config.scheduler.max_running,
    )  # fmt: skip
    return OffloadPlan(profile.tiers, capacities, found)


def plan_paper(
    subject: Subject,
    workload: BlockWorkload,
    capacities: tuple[float, float, float],
    form: Form,
    *,
    slack: float,
    micro_batches: Iterable[int] = MICRO_BATCHES,
    num_batches: Iterable[int] | None = None,
) -> OffloadPlan:
    """Placements on the machine of FlexGen's paper. capacities: bytes. Raises PlanError if nothing fits."""
    options = dataclasses.replace(FORMS[form], slack=slack)
    scratch = tuple(workload.prompt_tokens * each for each in subject.sizes.decode)
    sizes = dataclasses.replace(subject.sizes, prefill=scratch)

    def model(micro_batch: int, count: int) -> CostModel:
        machine = t4(subject.shape.hidden_size, micro_batch, capacities, form)
        return CostModel(sizes, workload, machine, micro_batch, count, options)

    counts = list(BATCHES if num_batches is None else num_batches)
    blocks = [(micro, count) for micro in micro_batches for count in counts]
    found = search(lambda micro, count: placed(model(micro, count)), blocks)
    if not found:
        raise no_fit(model(*blocks[0]))
    return OffloadPlan(TIERS, capacities, found)


def step_time(profile: Profile, name: str, config: EngineConfig) -> ProfiledTime:
    """The seconds of an engine's steps on the machine of a profile.

    name    of the model, as for `LLM`
    config  of the engine, without automatic values. offload.mode is off, or a policy that places weights alone and
            computes all sequences at once
    Raises ConfigError if the profile is not for this, or does not say how long the engine's steps take.
    """
    subject, offload = Subject.of(name, config), config.offload
    _check_machine(profile, subject)
    if subject.keeps_cache:
        raise ConfigError(
            "a profile has no speed of retention, tiers and sparse values; measure them with quire bench latency"
        )
    if not offload.is_on:
        return ProfiledTime(profile, subject.sizes, Split((ALL, *[NONE] * (len(profile.tiers) - 1))))
    if offload.mode == "auto":
        raise ConfigError(
            "offload.mode is auto, and an engine places its weights when it starts; give a policy of quire plan offload"
        )
    for key, is_set in (("cache", offload.cache is not None), ("overlap", not offload.overlap)):
        if is_set:
            raise ConfigError(f"offload.{key} is set, and a profile does not say what steps take with it; leave it out")
    policy = read_policy(Path(offload.mode), profile.tiers)
    if policy.cache.beyond(0) > 0 or policy.hidden.beyond(0) > 0:
        raise ConfigError(
            f"{offload.mode} places cache or activations on other tiers, and the seconds of steps are known for weights"
            " alone; plan with --only-weights"
        )
    micro_batch, most = offload.micro_batch or policy.micro_batch, config.scheduler.max_running
    if micro_batch < most:
        raise ConfigError(
            f"{offload.mode} has micro-batches of {micro_batch}, and {most} sequences may run (scheduler.max_running);"
            f" the seconds of steps are known for one micro-batch: plan with --micro-batch {most} --num-batches 1"
        )
    return ProfiledTime(profile, subject.sizes, policy.weights)


def _check_machine(profile: Profile, subject: Subject) -> None:
    """Raises ConfigError if a profile is not for the model and its settings. Its processor and its GPU may be those of
    another machine.
    """
    measured, wanted = profile.conditions, subject.conditions()
    wanted = dataclasses.replace(wanted, processor=measured.processor, kernels=measured.kernels)
    if bool(measured.device) == subject.has_device:
        wanted = dataclasses.replace(wanted, device=measured.device)
    if not subject.config.offload.is_on:  # nothing is read
        wanted = dataclasses.replace(wanted, disk_bandwidth=measured.disk_bandwidth)
    profile.check(wanted)
