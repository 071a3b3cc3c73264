"""The paper's model and hardware: OPT on a T4, as the paper's appendix and as the public code have them.

It lets the program be compared with published numbers, and plans models that nobody here has. The constants are the
public code's, in GiB/s and TFLOPS, fitted by its authors on a T4 with 208 GB of memory and an SSD.

Source: FlexGen, arXiv 2303.06865, Appendix A.3, and experimental/cost_model.py of its repository.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.offload.costs import CostModel, Form, Link, Machine, Options, Rates, Scratch, Sizes, Traffic, Workload
from quire.offload.units import TIERS

GIB = float(1 << 30)
TERA = 1e12

PAPER = Options(form=Form.MAX, hidden_on_last=True)
REPOSITORY = Options(
    form=Form.SUMS, slack=(0.8, 0.8, 0.8), working_sum=True, early_cpu_cache=False, hidden_on_last=False
)

OVERALL = 12.89 * GIB
STORE_CACHE, STORE_HIDDEN = 0.97 * GIB, 4.82 * GIB
FROM_DISK = 0.473 * GIB
TO_DISK_CACHE, TO_DISK_HIDDEN, TO_DISK_LATER = 0.746 * GIB, 2.015 * GIB, 2.015 * GIB
DISK_WEIGHTS = 0.95
"""Share of the disk's bandwidth that weights reach while decoding; the public code alone has it."""

PRODUCTS, ATTENTION = (21.24 * TERA, 4.3 * TERA), (9.97 * TERA, 0.079 * TERA)
"""While prompts are computed, and while decoding."""
CPU_ATTENTION = 0.0123 * TERA
SMALL_BATCH = (0.0168, 0.0328, 0.0621)
"""Coefficients of the loss of CPU attention with small micro-batches and narrow models."""


@dataclass(frozen=True)
class Opt:
    """An OPT model: number of layers, hidden size, width of the inner layer, heads."""

    num_layers: int
    hidden: int
    inner: int
    heads: int

    @property
    def layer_bytes(self) -> float:
        """Bytes of a layer's weights in 16 bits."""
        return 8.0 * self.hidden**2 + 4.0 * self.hidden * self.inner


OPT_6B7 = Opt(32, 4096, 16384, 32)
OPT_30B = Opt(48, 7168, 28672, 56)
OPT_175B = Opt(96, 12288, 49152, 96)


def t4(hidden: int, micro_batch: int, capacities: tuple[float, float, float], options: Options) -> Machine:
    """The paper's machine, with the speeds of a micro-batch. hidden: width of the model's rows."""
    narrow = max(0.0, math.log2(4096 / hidden))
    small = max(0.0, math.log2(64 / micro_batch))
    both, of_batch, of_width = SMALL_BATCH
    cpu = CPU_ATTENTION * max(0.1, 1 + both * small * narrow - of_batch * small - of_width * narrow)
    weights = FROM_DISK * (DISK_WEIGHTS if options.form is Form.SUMS else 1)
    first = Link(Traffic.alike(OVERALL), Traffic(OVERALL, STORE_CACHE, STORE_HIDDEN))
    prefill = Link(Traffic.alike(FROM_DISK), Traffic(FROM_DISK, TO_DISK_CACHE, TO_DISK_HIDDEN))
    decode = Link(Traffic(weights, FROM_DISK, FROM_DISK), Traffic.alike(TO_DISK_LATER))
    return Machine(
        tiers=TIERS,
        capacities=capacities,
        prefill=Rates((first, prefill), PRODUCTS[0], ATTENTION[0]),
        decode=Rates((first, decode), PRODUCTS[1], ATTENTION[1], cpu),
    )


def sizes(opt: Opt, workload: Workload, options: Options) -> Sizes:
    """The bytes and operations of a layer in 16 bits, with the working memory of the appendix or of the code."""
    h1, h2, heads = float(opt.hidden), float(opt.inner), float(opt.heads)
    s, end = workload.prompt_tokens, workload.prompt_tokens + workload.output_tokens
    scores, late_scores = 2 * heads * s**2, 2 * heads * end
    if options.working_sum:
        prefill = [8 * s * h1, 2 * s * h1 + scores, 2 * s * h1, 4 * s * h1, 2 * s * h2, 2 * s * h1]
        decode = [Scratch(14 * h1 + 2 * h2, (2 * h1 + 2 * end * h1 + late_scores) + 2 * end * h1 + 2 * h1)]
        # The cache that attention reads, twice, for loading ahead.
        decode.append(Scratch(0.0, 4 * end * h1))
        return _sizes(opt, [Scratch(each) for each in prefill], decode)
    attention = Scratch(0.0, 4 * s * h1 + scores)
    early = [Scratch(8 * s * h1), attention, Scratch(4 * s * h1), Scratch(2 * s * (h1 + h2))]
    late = [Scratch(8 * h1), Scratch(0.0, 2 * h1 + 2 * end * h1 + late_scores), Scratch(4 * h1), Scratch(2 * (h1 + h2))]
    return _sizes(opt, early, late)


def _sizes(opt: Opt, prefill: list[Scratch], decode: list[Scratch]) -> Sizes:
    return Sizes(
        num_layers=opt.num_layers,
        layer_bytes=opt.layer_bytes,
        cache_bytes=4.0 * opt.hidden,
        hidden_bytes=2.0 * opt.hidden,
        layer_flops=opt.layer_bytes,
        pair_flops=4.0 * opt.hidden,
        score_bytes=2.0 * opt.heads,
        prefill=tuple(prefill),
        decode=tuple(decode),
    )


def cost_model(
    opt: Opt,
    workload: Workload,
    micro_batch: int,
    num_batches: int,
    capacities: tuple[float, float, float],
    options: Options = PAPER,
) -> CostModel:
    """The paper's model of a block; capacities in bytes."""
    machine = t4(opt.hidden, micro_batch, capacities, options)
    return CostModel(sizes(opt, workload, options), workload, machine, micro_batch, num_batches, options)
