"""`quire plan offload`: the placement with the highest throughput, for a measured machine or FlexGen's."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import EngineConfig, PlanConfig, add_flags, format_bytes, options_from
from quire.errors import ConfigError, QuireError
from quire.options import format_count, format_number

if TYPE_CHECKING:
    from quire.offload.costs import CostModel, Workload
    from quire.offload.policy import Found

PAPER = "t4"
"""The value of --hardware for FlexGen's machine, in place of a profile."""
OF_AUTO = ("plan.memory", "plan.quality")
"""Settings that only `quire plan auto` has."""
GIB = 1 << 30
PAPER_CPU, PAPER_DISK = 64 * GIB, 500 * GIB
"""Default sizes of memory and disk beside the paper's GPU."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of this action."""
    group = parser.add_argument_group("plan")
    text = "needed: a file of quire plan hardware, or t4, FlexGen's machine"
    group.add_argument("--hardware", metavar="FILE", help=text)
    group.add_count("--input-tokens", text="of a prompt", default=512)
    group.add_count("--output-tokens", text="generated", default=32)
    text = "first tokens that all prompts share (default: 0)"
    group.add_argument("--shared-tokens", type=int, default=0, metavar="N", help=text)
    group.add_count("--micro-batch", text="only micro-batches of N sequences")
    group.add_count("--num-batches", text="only blocks of N micro-batches")
    group.add_switch("--only-weights", text="keep cache and activations where they are computed")
    text = "share of each tier that may be used (default: 0.8)"
    group.add_argument("--slack", type=float, default=0.8, help=text)
    text = "how a layer's stages combine with t4: as in the paper's public code, or as in the paper (default: sums)"
    group.add_argument("--form", choices=("sums", "max"), help=text)
    shared.add_plot(group, "throughput")
    add_flags(parser, ("plan",), left_out=OF_AUTO)


def run(args: argparse.Namespace) -> int:
    """Plan, and print the policy."""
    from quire.offload.files import policy_text
    from quire.offload.policy import best

    if not 0 < args.slack <= 1:
        raise ConfigError(f"--slack is {args.slack:g}; it must be above 0 and at most 1")
    if not 0 <= args.shared_tokens < args.input_tokens:
        raise ConfigError(f"--shared-tokens is {args.shared_tokens}; it must be below --input-tokens")
    if args.hardware is None:
        raise ConfigError(
            "quire plan offload needs --hardware FILE, which quire plan hardware makes on the machine to plan for, or"
            f" --hardware {PAPER}, the machine of FlexGen's paper"
        )
    if args.hardware != PAPER and not Path(args.hardware).exists():
        raise ConfigError(f"--hardware is {args.hardware!r}; it must be {PAPER}, or a file of quire plan hardware")
    if args.plot is not None:
        from quire.evaluation.plot import check_figure

        check_figure(args.plot)
    if args.output is not None:
        shared.check_writable(args.output)
    planner = PaperPlanner(args) if args.hardware == PAPER else MeasuredPlanner(args)
    tokens, limit = args.input_tokens + args.output_tokens, planner.shape.context_limit
    if tokens > limit:
        raise ConfigError(f"--input-tokens and --output-tokens are {tokens} in all; this model serves at most {limit}")
    found = planner.search()
    chosen = best(found)
    assert chosen is not None, "a search without placements"
    if args.output is not None:
        args.output.write_text(policy_text(chosen.policy, planner.tiers))
    if args.plot is not None:
        draw(args.plot, found, f"{Path(args.model).name} on {Path(args.hardware).name}")
    if args.json:
        print(json.dumps(facts(planner, chosen), indent=2))
    else:
        print_policy(planner, chosen)
    return 0


class OffloadPlanner(ABC):
    """A model and a machine, from the command line.

    tiers       names, fastest first
    capacities  bytes of each tier
    """

    tiers: tuple[str, ...]
    capacities: tuple[float, ...]

    def __init__(self, args: argparse.Namespace, options: dict[str, Any], *, on_gpu: bool | None = None) -> None:
        """on_gpu: whether a GPU computes; None: as on this machine."""
        from quire.planning.offload_sizes import has_device, sizes_from

        self.config = EngineConfig.from_options(options, args.config)
        self.plan = PlanConfig.from_flags(args)
        self.workload = _workload(args, self.config)
        if on_gpu is None:
            on_gpu = has_device(self.config)
        self.shape, self.sizes = sizes_from(args.model, self.config, self.workload, on_gpu=on_gpu)
        self.slack = args.slack
        self.micro_batches = [args.micro_batch] if args.micro_batch else None
        self.num_batches = [args.num_batches] if args.num_batches else None

    @abstractmethod
    def search(self) -> list[Found]:
        """The best placement of each block size that fits. Raises QuireError with the lacking memory if none fits."""

    def too_small(self, lack: str) -> QuireError:
        """The error of a machine that lacks memory, with settings that need less."""
        from quire.planning.offload_sizes import remedies

        return QuireError(f"no placement fits: {lack}{remedies(self.config)}")


def _workload(args: argparse.Namespace, config: EngineConfig) -> Workload:
    from quire.offload.costs import Workload
    from quire.offload.units import ALL, Share

    if config.retain.threshold != "off":
        raise ConfigError("what retain.threshold keeps is known only after a prompt; plan with retain.budget")
    budget = config.retain.budget
    kept = ALL if budget == "off" else Share(min(1.0, budget))
    prefixes = 1 if args.shared_tokens else 0
    return Workload(args.input_tokens, args.output_tokens, args.shared_tokens, prefixes, kept=kept, growth=kept)


class PaperPlanner(OffloadPlanner):
    """The machine of FlexGen's paper."""

    def __init__(self, args: argparse.Namespace) -> None:
        from quire.offload.units import TIERS

        if args.only_weights:
            raise ConfigError(f"--only-weights is for a measured machine, not for --hardware {PAPER}")
        super().__init__(args, options_from(args), on_gpu=True)
        self.form = args.form or "sums"
        self.tiers = TIERS
        plan = self.plan
        cpu, disk = (
            given if given is not None else usual for given, usual in ((plan.cpu, PAPER_CPU), (plan.disk, PAPER_DISK))
        )
        self.capacities = (float(plan.gpu), float(cpu), float(disk))

    def model_of(self, micro_batch: int, num_batches: int) -> CostModel:
        """The cost model of a block size."""
        from quire.offload import paper
        from quire.offload.costs import CostModel, Form

        form = Form(self.form)
        options = dataclasses.replace(paper.FORMS[form], slack=self.slack)
        gpu, cpu, disk = self.capacities
        machine = paper.t4(self.shape.hidden_size, micro_batch, (gpu, cpu, disk), form)
        return CostModel(self.sizes, self.workload, machine, micro_batch, num_batches, options)

    def search(self) -> list[Found]:
        """See Planner."""
        from quire.offload.planner import MICRO_BATCHES
        from quire.offload.policy import BATCHES, lack_text, lacks_of, placed, search

        batches = [
            (micro, count) for micro in self.micro_batches or MICRO_BATCHES for count in self.num_batches or BATCHES
        ]
        found = search(lambda *size: placed(self.model_of(*size)), batches)
        if not found:
            micro, count = batches[0]
            raise self.too_small(
                f"with blocks of {count} x {micro}, {lack_text(lacks_of(self.model_of(micro, count)))}"
            )
        return found


class MeasuredPlanner(OffloadPlanner):
    """A machine with a profile."""

    def __init__(self, args: argparse.Namespace) -> None:
        from quire.offload.profile import read_profile
        from quire.planning.offload_sizes import conditions_of, keeps_cache

        if args.form is not None:
            raise ConfigError(f"--form is for --hardware {PAPER}; a profile has a fitted one")
        options = {"offload.mode": "auto", **options_from(args)}
        self.profile = read_profile(Path(args.hardware))
        is_given = "plan.gpu" in options_from(args, ("plan",))
        if is_given and self.profile.device is None:
            raise ConfigError("--plan.gpu has no effect: the profile has the tiers cpu and disk")
        super().__init__(args, options)
        self.profile.check(conditions_of(args.model, self.shape, self.config, self.sizes))
        self.only_weights = args.only_weights or keeps_cache(self.config)
        self.tiers = self.profile.tiers
        self.capacities = (self._memory("cpu", self.plan.cpu), self._room())
        if self.profile.device is not None:
            self.capacities = (self._memory("cuda", self.plan.gpu if is_given else None), *self.capacities)

    @staticmethod
    def _memory(device: str, given: int | None) -> float:
        import torch

        from quire.engine.machine import available_memory

        return float(available_memory(torch.device(device)) if given is None else given)

    def _room(self) -> float:
        if self.plan.disk is not None:
            return float(self.plan.disk)
        try:
            status = os.statvfs(self.profile.disk.folder)
        except OSError as error:
            raise ConfigError(
                f"{self.profile.disk.folder} of the profile: {error.strerror or error}; set plan.disk"
            ) from None
        return float(status.f_bavail * status.f_frsize) + self.sizes.layer_bytes * self.sizes.num_layers

    def search(self) -> list[Found]:
        """See Planner."""
        from quire.offload.planner import MICRO_BATCHES, plan_all
        from quire.offload.policy import PlanError
        from quire.planning.offload_sizes import token_budget_of

        most = self.config.scheduler.max_running
        try:
            return plan_all(
                self.profile,
                self.sizes,
                self.workload,
                self.capacities,
                budget=token_budget_of(self.config),
                slack=self.slack,
                only_weights=self.only_weights,
                micro_batches=self.micro_batches or [micro for micro in MICRO_BATCHES if micro <= most],
                num_batches=self.num_batches,
                most=most,
            )
        except PlanError as error:
            raise self.too_small(str(error)) from None


def facts(planner: OffloadPlanner, found: Found) -> dict[str, Any]:
    """All numbers of a policy."""
    policy, said, tiers = found.policy, found.prediction, planner.tiers
    return {
        "micro_batch": policy.micro_batch,
        "num_batches": policy.num_batches,
        **{kind: getattr(policy, kind).named(tiers) for kind in ("weights", "cache", "hidden")},
        "attended": policy.attended,
        "throughput": said.throughput,
        "prefill_seconds": said.prefill_seconds,
        "decode_seconds": said.decode_seconds,
        "stages": said.stages,
        "memory": said.memory,
        "capacities": dict(zip(tiers, planner.capacities, strict=True)),
        "binding": list(said.binding),
    }


def print_policy(planner: OffloadPlanner, found: Found) -> None:
    """Prints a policy for people."""
    from quire.offload.units import percent

    policy, said, work, tiers = found.policy, found.prediction, planner.workload, planner.tiers
    tokens = policy.block * round(work.output_tokens)
    counted = format_count(policy.num_batches, "micro-batch", "micro-batches")
    print(f"blocks of {format_count(policy.block, 'sequence')}: {counted} of {policy.micro_batch}")
    rows = [
        [kind, *(percent(share) for share in getattr(policy, kind).shares)] for kind in ("weights", "cache", "hidden")
    ]
    needs = [format_bytes(int(said.memory[tier])) for tier in tiers]
    rows += [["memory", *needs], ["of", *(format_bytes(int(size)) for size in planner.capacities)]]
    shared.print_table(["", *tiers], rows)
    if isinstance(planner, PaperPlanner):
        print("the machine is that of FlexGen's paper; --hardware plans for a measured one")
    if "gpu" in tiers:
        print(f"attention on the CPU: {percent(policy.attended)} of the cache")
    throughput, seconds, prefill = (
        format_number(each, 4) for each in (said.throughput, said.seconds, said.prefill_seconds)
    )
    print(f"predicted: {throughput} tokens/s; {tokens} tokens in {seconds} s, {prefill} of them prefill")
    print(f"limited by {', '.join(said.binding)}")


def draw(file: Path, found: Sequence[Found], title: str) -> None:
    """Draws throughput over block size, one line per micro-batch, and over the seconds of a block."""
    from quire.evaluation.plot import load_figure, save_figure

    figure = load_figure()(figsize=(9.6, 4.0), dpi=150, layout="constrained")
    sizes, frontier = figure.subplots(1, 2)
    micros = sorted({each.policy.micro_batch for each in found})
    for micro in micros[:: max(1, len(micros) // 8)]:
        line = [each for each in found if each.policy.micro_batch == micro]
        sizes.plot([each.policy.block for each in line], [each.prediction.throughput for each in line], label=micro)
    sizes.set_xlabel("sequences of a block")
    sizes.set_ylabel("tokens per second")
    sizes.set_xscale("log")
    sizes.legend(title="micro-batch", fontsize="small")
    best_so_far, points = 0.0, []
    for each in sorted(found, key=lambda each: each.prediction.seconds):
        if each.prediction.throughput > best_so_far:
            best_so_far = each.prediction.throughput
            points.append((each.prediction.seconds, best_so_far))
    frontier.plot(*zip(*points, strict=True), marker="o", markersize=3)
    frontier.set_xlabel("seconds until a block is done")
    frontier.set_xscale("log")
    frontier.set_title("the best for each latency", fontsize="medium")
    for axes in (sizes, frontier):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    save_figure(figure, file)
