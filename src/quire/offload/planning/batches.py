"""Plans the placement for a batch of prompts on a machine with a profile."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cache.ledger import PAGE_TOKENS
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.offload.planning.costs import BlockWorkload
from quire.offload.planning.plan import kept_share, plan_measured
from quire.offload.planning.planner import MICRO_BATCHES
from quire.offload.planning.profile import read_profile
from quire.offload.planning.program import PlanError, Prediction
from quire.offload.planning.subject import Subject
from quire.offload.policy import OffloadPolicy
from quire.offload.units import ALL, Share

SLACK = 0.9
"""Share of the memory and of the disk's room that a plan uses."""


MARGIN, SLABS_BYTES = 0.02, 4 << 20
"""Memory of a cache beyond its chunks, because slabs are whole."""


@dataclass(frozen=True)
class BatchPlan:
    """How a batch runs.

    policy      for `tiers`
    prediction  of a block
    settings    by key, beside offload.mode
    tiers       of the machine, fastest first
    """

    policy: OffloadPolicy
    prediction: Prediction
    settings: dict[str, Any]
    tiers: tuple[str, ...]

    @property
    def is_in_memory(self) -> bool:
        """Whether everything is where it is computed."""
        policy = self.policy
        return max(each.beyond(0) for each in (policy.weights, policy.cache, policy.hidden)) <= 0

    def rate(self, num_lines: int, num_tokens: int) -> float:
        """Predicted tokens per second of a batch of some lines that have `num_tokens` tokens."""
        return num_tokens / seconds_of(self.policy, self.prediction, num_lines)


def seconds_of(policy: OffloadPolicy, prediction: Prediction, num_lines: int) -> float:
    """Predicted seconds of a batch of some lines: of whole blocks."""
    return -(-num_lines // policy.block) * prediction.seconds


def workload_of(prompts: Sequence[Sequence[int]], outputs: Sequence[int], kept: Share = ALL) -> BlockWorkload:
    """The mean request of a batch.

    prompts  token ids, in the order of the prefix tree
    outputs  tokens that are generated
    kept     share of the prompts' tokens that retention keeps
    """
    count = len(prompts)
    tokens = sum(map(len, prompts)) / count
    # As many shared tokens as there are, as if all prompts shared one beginning.
    total = sum(_common(before, prompt) for before, prompt in itertools.pairwise(prompts))
    shared = min(total / max(1, count - 1), tokens - 1)
    return BlockWorkload(tokens, sum(outputs) / count, max(0.0, shared), int(total > 0), kept=kept, growth=kept)


def _common(before: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens of the whole chunks that two prompts begin with. The last chunk of a prompt is its own."""
    most = min(len(before), len(prompt) - 1)
    same = next((at for at in range(most) if before[at] != prompt[at]), most)
    return same // PAGE_TOKENS * PAGE_TOKENS


def plan_batch(
    model: str, config: EngineConfig, prompts: Sequence[Sequence[int]], outputs: Sequence[int | None]
) -> BatchPlan | None:
    """The policy with the least predicted seconds for a batch; None if the context holds none of its prompts.

    config   offload.mode is auto, and offload.profile names the machine's profile. offload.memory is the memory for
             weights, cache and activations together, on a GPU if there is one; offload.cache the room for the cache
             on the disk
    prompts  token ids, in the order of the prefix tree
    outputs  most tokens of each answer, as far as the context goes; None: the rest of it
    Raises ConfigError if the profile is not for this model, and if nothing fits.
    """
    assert config.offload.profile is not None
    profile, subject = read_profile(Path(config.offload.profile)), Subject.of(model, config)
    if subject.has_device and config.offload.cache is not None:
        raise ConfigError("offload.profile plans the cache beside a GPU; leave offload.cache out")
    context = subject.max_context
    fits = [index for index, prompt in enumerate(prompts) if 0 < len(prompt) < context]  # others are refused
    if not fits:
        return None
    prompts, outputs = [prompts[index] for index in fits], [outputs[index] for index in fits]
    rooms = [context - len(prompt) for prompt in prompts]
    answers = [room if most is None else min(most, room) for most, room in zip(outputs, rooms, strict=True)]
    workload = workload_of(prompts, answers, kept_share(config))
    if not config.cache.share:
        workload = dataclasses.replace(workload, shared_tokens=0.0, num_prefixes=0)
    longest = max(map(sum, zip(map(len, prompts), answers, strict=True)))
    room_tokens = -(-longest // PAGE_TOKENS) * PAGE_TOKENS
    workload = dataclasses.replace(workload, room_tokens=room_tokens)
    profile.check(subject.conditions())
    room = config.offload.cache
    disk = None if room is None else subject.layers_bytes + room
    given = {profile.tiers[0]: config.offload.memory, "disk": disk}
    most = min(config.scheduler.max_running, len(prompts))
    try:
        blocks = plan_measured(
            subject, profile, workload, given, disk_setting="offload.cache", free_share=SLACK,
            micro_batches=[each for each in sorted({*MICRO_BATCHES, most}) if each <= most],
        ).found  # fmt: skip
    except PlanError as error:
        raise ConfigError(f"no placement fits offload.memory: {error}{subject.remedies}") from error
    found = min(blocks, key=lambda each: seconds_of(each.policy, each.prediction, len(prompts)))
    policy = found.policy
    settings: dict[str, Any] = {
        "model.max_context": min(room_tokens, context),
        "scheduler.token_budget": subject.token_budget,
        "scheduler.max_running": policy.block,
    }
    if policy.cache.beyond(0) <= 0:
        settings["offload.cache"] = None  # it would move the cache to the disk
        # An admission leaves every sequence room for a chunk to grow.
        sizes, own = subject.sizes, policy.block * PAGE_TOKENS
        held = workload.held_tokens(policy.block, workload.output_tokens)
        needed = (sizes.cache_bytes * (held + own) + sizes.open_cache_bytes * own) * sizes.num_layers
        settings["cache.memory"] = round(needed * (1 + MARGIN)) + SLABS_BYTES
    return BatchPlan(policy, found.prediction, settings, profile.tiers)
