"""The placement of a batch: planned before the run if there is a profile, and compared with the result afterwards."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.batch_files.job import BatchJob
from quire.config import EngineConfig, format_bytes
from quire.errors import ConfigError
from quire.models.resolve import resolve_model
from quire.models.tokenizer import load_tokenizer
from quire.offload.planning.batches import BatchPlan, plan_batch
from quire.offload.policy import policy_text
from quire.offload.units import Share, percent
from quire.options import format_number


@dataclass(frozen=True)
class PlannedBatch:
    """The settings and the plan of a batch.

    options  all settings by key; None: the settings of the command line
    plan     the placement; None without a profile
    """

    options: dict[str, Any] | None = None
    plan: BatchPlan | None = None

    def announcement(self) -> str | None:
        """The placement in one line. None without a placement."""
        if self.plan is None:
            return None
        policy, said = self.plan.policy, self.plan.prediction
        shares = ", ".join(
            f"{name} {percent(split.shares[0])}"
            for name, split in (("weights", policy.weights), ("cache", policy.cache), ("activations", policy.hidden))
        )
        near = "on the GPU" if len(self.plan.tiers) > 2 else "in memory"
        return (
            f"blocks of {policy.num_batches} x {policy.micro_batch}; {near}: {shares}; predicted"
            f" {format_number(said.throughput)} tokens/s, limited by {', '.join(said.binding)}"
        )

    def report(self, batch: BatchJob, stats: Mapping[str, Any]) -> list[str]:
        """Lines about the actual placement and transfers, and about the predicted and the measured speed."""
        lines, moved = [], stats.get("offload")
        if moved is not None:
            kinds = "weights", "cache", "hidden"
            near = [f"{name} {percent(Share(moved[f'{name}_near']))}" for name in kinds if f"{name}_near" in moved]
            read = sum(moved.get(f"{name}_bytes_read", 0) for name in kinds)
            on_gpu = self.plan is not None and len(self.plan.tiers) > 2
            written = sum(moved.get(f"{name}_bytes_written", 0) for name in kinds)
            lines.append(
                f"{'on the GPU' if on_gpu else 'in memory'}: {', '.join(near)}; loaded {format_bytes(read)}, stored"
                f" {format_bytes(written)}, waited {moved['weights_wait_seconds']:.1f} s for weights"
            )
        num_lines = batch.num_done - batch.num_failed
        if self.plan is not None and num_lines and batch.num_tokens:
            said, found = self.plan.rate(num_lines, batch.num_tokens), batch.num_tokens / batch.seconds
            lines.append(
                f"predicted {format_number(said)} tokens/s, measured {format_number(found)} ({found / said - 1:+.0%})"
            )
        return lines


@contextlib.contextmanager
def planned(model: str, config: EngineConfig, batch: BatchJob) -> Iterator[PlannedBatch]:
    """Plans the remaining lines, if the configuration has a profile. The policy's file is removed at the end.

    Raises ConfigError.
    """
    if config.offload.profile is None:
        yield PlannedBatch()
        return
    for name, value in (("cache.memory", config.cache.memory), ("offload.micro_batch", config.offload.micro_batch)):
        if value not in (None, "auto"):
            raise ConfigError(f"offload.profile plans {name}; leave one of the two out")
    batch.to_tree_order(load_tokenizer(resolve_model(model), config.model.tokenizer, config.model.chat_template))
    lines = [line for line in batch.todo if "prompt_token_ids" in line.prompt]
    if any(line.params.n > 1 for line in lines):
        raise ConfigError("a batch is planned for one answer a line; leave n or offload.profile out")
    prompts = [line.prompt["prompt_token_ids"] for line in lines]
    plan = plan_batch(model, config, prompts, [line.params.max_tokens for line in lines])
    if plan is None:  # every line will be refused, with its reason
        yield PlannedBatch({**config.to_options(), "offload.profile": None})
        return
    settings = {**config.to_options(), **plan.settings, "offload.profile": None, "offload.memory": None}
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        settings["offload.mode"] = "off"
        if not plan.is_in_memory:
            file = Path(folder) / "policy.json"
            file.write_text(policy_text(plan.policy, plan.tiers))
            settings["offload.mode"] = str(file)
        else:
            settings |= {"offload.cache": None, "offload.disk_bandwidth": None, "offload.micro_batch": None}
            settings["offload.overlap"] = True
        yield PlannedBatch(settings, plan)
