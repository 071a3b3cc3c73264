"""`quire plan offload`: the placement with the highest throughput, for a measured machine or FlexGen's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import EngineConfig, PlanConfig, add_flags, format_bytes, options_from
from quire.errors import ConfigError, QuireError
from quire.options import format_count, format_number

if TYPE_CHECKING:
    from quire.offload.planning.costs import BlockWorkload
    from quire.offload.planning.plan import OffloadPlan
    from quire.offload.planning.program import PlacedBlock

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
    from quire.offload.planning.program import best
    from quire.offload.policy import policy_text

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
        shared.check_plot(args.plot)
    if args.output is not None:
        shared.check_writable(args.output)
    plan = _planned(args)
    chosen = best(plan.found)
    assert chosen is not None, "a search without placements"
    if args.output is not None:
        args.output.write_text(policy_text(chosen.policy, plan.tiers))
    if args.plot is not None:
        draw(args.plot, plan.found, f"{Path(args.model).name} on {Path(args.hardware).name}")
    if args.json:
        print(json.dumps(facts(plan, chosen), indent=2))
    else:
        print_policy(plan, chosen, args)
    return 0


def _planned(args: argparse.Namespace) -> OffloadPlan:
    """The placements for a command line. Raises QuireError with the lacking memory if none fits."""
    from quire.offload.planning.costs import Form
    from quire.offload.planning.plan import plan_measured, plan_paper
    from quire.offload.planning.planner import MICRO_BATCHES
    from quire.offload.planning.profile import read_profile
    from quire.offload.planning.program import PlanError
    from quire.offload.planning.subject import Subject

    is_paper, options, room = args.hardware == PAPER, options_from(args), PlanConfig.from_flags(args)
    if is_paper and args.only_weights:
        raise ConfigError(f"--only-weights is for a measured machine, not for --hardware {PAPER}")
    if not is_paper and args.form is not None:
        raise ConfigError(f"--form is for --hardware {PAPER}; a profile has a fitted one")
    profile = None if is_paper else read_profile(Path(args.hardware))
    has_gpu_flag = "plan.gpu" in options_from(args, ("plan",))
    if profile is not None and profile.device is None and has_gpu_flag:
        raise ConfigError("--plan.gpu has no effect: the profile has the tiers cpu and disk")
    config = EngineConfig.from_options(options if is_paper else {"offload.mode": "auto", **options}, args.config)
    workload = _workload(args, config)
    subject = Subject.of(args.model, config, on_gpu=is_paper or None)
    if profile is not None:
        profile.check(subject.conditions())
    tokens, limit = args.input_tokens + args.output_tokens, subject.shape.context_limit
    if tokens > limit:
        raise ConfigError(f"--input-tokens and --output-tokens are {tokens} in all; this model serves at most {limit}")
    micros = [args.micro_batch] if args.micro_batch else MICRO_BATCHES
    counts = [args.num_batches] if args.num_batches else None
    try:
        if profile is None:
            capacities = (
                float(room.gpu), float(PAPER_CPU if room.cpu is None else room.cpu),
                float(PAPER_DISK if room.disk is None else room.disk),
            )  # fmt: skip
            form = Form(args.form or Form.SUMS)
            return plan_paper(
                subject, workload, capacities, form, slack=args.slack, micro_batches=micros, num_batches=counts
            )
        return plan_measured(
            subject, profile, workload,
            {"gpu": room.gpu if has_gpu_flag else None, "cpu": room.cpu, "disk": room.disk}, disk_setting="plan.disk",
            slack=args.slack, only_weights=args.only_weights, micro_batches=micros, num_batches=counts,
        )  # fmt: skip
    except PlanError as error:
        raise QuireError(f"no placement fits: {error}{subject.remedies}") from None


def _workload(args: argparse.Namespace, config: EngineConfig) -> BlockWorkload:
    from quire.offload.planning.costs import BlockWorkload
    from quire.offload.planning.plan import kept_share

    if config.retain.threshold != "off":
        raise ConfigError("what retain.threshold keeps is known only after a prompt; plan with retain.budget")
    kept = kept_share(config)
    prefixes = 1 if args.shared_tokens else 0
    return BlockWorkload(args.input_tokens, args.output_tokens, args.shared_tokens, prefixes, kept=kept, growth=kept)


def facts(plan: OffloadPlan, found: PlacedBlock) -> dict[str, Any]:
    """All numbers of a policy."""
    policy, said, tiers = found.policy, found.prediction, plan.tiers
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
        "capacities": dict(zip(tiers, plan.capacities, strict=True)),
        "binding": list(said.binding),
    }


def print_policy(plan: OffloadPlan, found: PlacedBlock, args: argparse.Namespace) -> None:
    """Prints a policy for people."""
    from quire.offload.units import percent

    policy, said, tiers = found.policy, found.prediction, plan.tiers
    tokens = policy.block * args.output_tokens
    counted = format_count(policy.num_batches, "micro-batch", "micro-batches")
    print(f"blocks of {format_count(policy.block, 'sequence')}: {counted} of {policy.micro_batch}")
    rows = [
        [kind, *(percent(share) for share in getattr(policy, kind).shares)] for kind in ("weights", "cache", "hidden")
    ]
    needs = [format_bytes(int(said.memory[tier])) for tier in tiers]
    rows += [["memory", *needs], ["of", *(format_bytes(int(size)) for size in plan.capacities)]]
    shared.print_table(["", *tiers], rows)
    if args.hardware == PAPER:
        print("the machine is that of FlexGen's paper; --hardware plans for a measured one")
    if "gpu" in tiers:
        print(f"attention on the CPU: {percent(policy.attended)} of the cache")
    throughput, seconds, prefill = (
        format_number(each, 4) for each in (said.throughput, said.seconds, said.prefill_seconds)
    )
    print(f"predicted: {throughput} tokens/s; {tokens} tokens in {seconds} s, {prefill} of them prefill")
    print(f"limited by {', '.join(said.binding)}")


def draw(file: Path, found: Sequence[PlacedBlock], title: str) -> None:
    """Draws throughput over block size, one line per micro-batch, and over the seconds of a block."""
    from quire.evaluation.plot import drawing, finish

    with drawing(file, 9.6, 4.0, title) as figure:
        sizes, frontier = figure.subplots(1, 2)
        micros = sorted({each.policy.micro_batch for each in found})
        for micro in micros[:: max(1, len(micros) // 8)]:
            line = [each for each in found if each.policy.micro_batch == micro]
            blocks, rates = zip(*((each.policy.block, each.prediction.throughput) for each in line), strict=True)
            sizes.plot(blocks, rates, label=f"micro-batch {micro}")
        finish(sizes, "sequences of a block", "tokens per second", xscale="log")
        best_so_far, points = 0.0, []
        for each in sorted(found, key=lambda each: each.prediction.seconds):
            if each.prediction.throughput > best_so_far:
                best_so_far = each.prediction.throughput
                points.append((each.prediction.seconds, best_so_far))
        frontier.plot(*zip(*points, strict=True), marker="o", markersize=3)
        finish(frontier, "seconds until a block is done", "", xscale="log", title="the best for each latency")
