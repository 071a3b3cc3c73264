"""Plan how a model runs on less memory than it needs, before it runs.

quire plan offload MODEL --plan.gpu 16GiB --plan.cpu 200GiB --plan.disk 1500GiB --input-tokens 512 --output-tokens 32

A linear program places weights, cache and activations on the tiers, for each size of micro-batch and block, and the
placement with the highest throughput is printed: its shares, the predicted tokens per second, the memory of every tier,
and what limits it. If nothing fits, the missing memory is printed. MODEL may also be a config.json without weights.

--hardware is t4 (the machine of FlexGen's paper, with the constants of its public code). --output writes the policy as
JSON. --plot draws throughput over block size, and over the seconds until a block is done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import EngineConfig, PlanConfig, add_flags, format_bytes, options_from
from quire.errors import ConfigError, QuireError

if TYPE_CHECKING:
    from quire.models.shape import ModelShape
    from quire.offload.costs import CostModel, Sizes, Workload
    from quire.offload.policy import Found

HELP = "plan placements before running them"
SECTIONS = ("model", "cache", "retain", "plan")

MICRO_BATCHES = (1, 2, 3, *range(4, 132, 4), 160, 192, 256)
"""Sizes of a micro-batch that are tried."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    parser.add_argument("action", choices=("offload",), metavar="offload", help="what to plan")
    parser.add_argument("model", metavar="MODEL", help="folder, .gguf file, hub id, smollm2, or a config.json")
    parser.add_argument("--hardware", default="t4", metavar="NAME", help="t4: the machine of FlexGen's paper (default)")
    parser.add_argument(
        "--input-tokens", type=shared.count, default=512, metavar="N", help="of a prompt (default: 512)"
    )
    parser.add_argument("--output-tokens", type=shared.count, default=32, metavar="N", help="generated (default: 32)")
    parser.add_argument(
        "--shared-tokens", type=int, default=0, metavar="N", help="first tokens that all prompts share (default: 0)"
    )
    parser.add_argument("--micro-batch", type=shared.count, metavar="N", help="only micro-batches of N sequences")
    parser.add_argument("--num-batches", type=shared.count, metavar="N", help="only blocks of N micro-batches")
    parser.add_argument("--slack", type=float, default=0.8, help="share of each tier that may be used (default: 0.8)")
    parser.add_argument(
        "--form",
        choices=("sums", "max"),
        default="sums",
        help="how a layer's stages combine: as in the paper's public code, or as in the paper (default: sums)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the policy as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw throughput; the ending selects PNG, SVG or PDF")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings; flags override it")
    add_flags(parser, SECTIONS)


def run(args: argparse.Namespace) -> int:
    """Plan, and print the policy."""
    from quire.offload.files import policy_text
    from quire.offload.policy import BATCHES, best, search
    from quire.offload.units import TIERS

    if args.hardware != "t4":
        raise ConfigError(f"--hardware is {args.hardware!r}; it must be t4")
    if not 0 < args.slack <= 1:
        raise ConfigError(f"--slack is {args.slack:g}; it must be above 0 and at most 1")
    if not 0 <= args.shared_tokens < args.input_tokens:
        raise ConfigError(f"--shared-tokens is {args.shared_tokens}; it must be below --input-tokens")
    if args.plot is not None:
        from quire.evaluation.plot import check_figure

        check_figure(args.plot)
    if args.output is not None:
        shared.check_writable(args.output)
    planner = Planner(args)
    batches = [
        (micro, count)
        for micro in ([args.micro_batch] if args.micro_batch else MICRO_BATCHES)
        for count in ([args.num_batches] if args.num_batches else BATCHES)
    ]
    found = search(planner.model_of, batches)
    chosen = best(found)
    if chosen is None:
        raise QuireError(
            f"no placement fits: {planner.lack(*batches[0])}; --model.weights g4 and --cache.codec g4 need less"
        )
    if args.output is not None:
        args.output.write_text(policy_text(chosen.policy, TIERS))
    if args.plot is not None:
        draw(args.plot, found, f"{Path(args.model).name} on {args.hardware}")
    if args.json:
        print(json.dumps(facts(planner, chosen, TIERS), indent=2))
    else:
        print_policy(planner, chosen, TIERS)
    return 0


class Planner:
    """A model and a machine, from the command line."""

    def __init__(self, args: argparse.Namespace) -> None:
        from quire.offload.costs import Workload
        from quire.offload.units import ALL, Share

        config = EngineConfig.from_options(options_from(args, SECTIONS[:-1]), args.config)
        plan = PlanConfig.from_options(options_from(args, SECTIONS[-1:]), args.config)
        if config.retain.threshold != "off":
            raise ConfigError("what retain.threshold keeps is known only after a prompt; plan with retain.budget")
        budget = config.retain.budget
        kept = ALL if budget == "off" else Share(min(1.0, budget))
        self.workload = Workload(
            args.input_tokens,
            args.output_tokens,
            args.shared_tokens,
            1 if args.shared_tokens else 0,
            kept=kept,
            growth=kept,
        )
        self.capacities = (float(plan.gpu), float(plan.cpu), float(plan.disk))
        self.slack, self.form = args.slack, args.form
        self.shape, self.sizes = sizes_from(args.model, config, self.workload)

    def model_of(self, micro_batch: int, num_batches: int) -> CostModel:
        """The cost model of a block size."""
        from quire.offload import paper
        from quire.offload.costs import CostModel, Form

        options = dataclasses.replace(paper.FORMS[Form(self.form)], slack=(self.slack,) * 3)
        machine = paper.t4(self.shape.hidden_size, micro_batch, self.capacities, options)
        return CostModel(self.sizes, self.workload, machine, micro_batch, num_batches, options)

    def lack(self, micro_batch: int, num_batches: int) -> str:
        """What is missing for the smallest block."""
        from quire.offload.policy import lacks_of

        size = f"with blocks of {num_batches} x {micro_batch}"
        return f"{size}, {lacks_of(self.model_of(micro_batch, num_batches))}"


def sizes_from(model: str, config: EngineConfig, workload: Workload) -> tuple[ModelShape, Sizes]:
    """The shape of a model, and its numbers with the configuration's weights and codec."""
    from quire.cache.ledger import PAGE_TOKENS
    from quire.engine.build import sealed_pages
    from quire.engine.sizes import page_counts
    from quire.models.families import shape_from_config
    from quire.models.files import read_json
    from quire.models.layers import torch_dtype
    from quire.models.loading import held_kind
    from quire.models.quants import BLOCK_KINDS, held_bytes
    from quire.models.resolve import resolve_model
    from quire.models.shape import ITEM_BYTES
    from quire.models.weights import open_model
    from quire.offload.sizes import sizes_of

    path = Path(model)
    if path.suffix == ".json":
        shape = shape_from_config(read_json(path, required=True), {})
        kinds = dict.fromkeys(shape.tensor_shapes, "BF16")
    else:
        with open_model(resolve_model(model)) as checkpoint:
            shape = checkpoint.shape
            kinds = {name: checkpoint.kind(name) for name in shape.tensor_shapes}
    dtype = shape.dtype if config.model.dtype == "auto" else config.model.dtype

    def tensor_bytes(name: str, size: tuple[int, ...]) -> float:
        kind = held_kind(name, size, kinds[name], config.model.weights, BLOCK_KINDS)
        return float(math.prod(size) * ITEM_BYTES[dtype] if kind is None else size[0] * held_bytes(kind, size[1]))

    pages, _ = sealed_pages(config, shape, torch_dtype(dtype), None, "cpu")
    per_token = 2.0 * shape.kv_size * ITEM_BYTES[dtype]
    if pages is not None:
        chunk = page_counts(pages, shape.num_layers, shape.num_kv_heads)
        per_token = sum(size * count for size, count in chunk.items()) / shape.num_layers / PAGE_TOKENS
    return shape, sizes_of(shape, dtype, tensor_bytes, per_token, workload)


def facts(planner: Planner, found: Found, tiers: Sequence[str]) -> dict[str, Any]:
    """All numbers of a policy."""
    policy, said = found.policy, found.prediction
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


def print_policy(planner: Planner, found: Found, tiers: Sequence[str]) -> None:
    """Prints a policy for people."""
    from quire.offload.units import percent

    policy, said, work = found.policy, found.prediction, planner.workload
    tokens = policy.block * round(work.output_tokens)
    print(f"blocks of {policy.block} sequences: {policy.num_batches} micro-batches of {policy.micro_batch}")
    rows = [
        [kind, *(percent(share) for share in getattr(policy, kind).shares)] for kind in ("weights", "cache", "hidden")
    ]
    needs = [format_bytes(int(said.memory[tier])) for tier in tiers]
    rows += [["memory", *needs], ["of", *(format_bytes(int(size)) for size in planner.capacities)]]
    shared.print_table(["", *tiers], rows)
    print(f"attention on the CPU: {percent(policy.attended)} of the cache")
    print(
        f"predicted: {said.throughput:.4g} tokens/s; {tokens} tokens in {said.seconds:.4g} s,"
        f" {said.prefill_seconds:.4g} of them prefill"
    )
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
