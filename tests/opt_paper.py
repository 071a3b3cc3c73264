"""OPT on the machine of FlexGen's paper in 16 bits: sizes and working memory by the appendix and by the public code."""

from __future__ import annotations

from dataclasses import dataclass

from quire.offload.costs import CostModel, Options, Scratch, Sizes, Workload
from quire.offload.paper import PAPER, t4
from quire.offload.units import Share, Split


def percents(*shares: float) -> Split:
    """A split in percent, as FlexGen's command line has it."""
    return Split(tuple(Share(each / 100) for each in shares))


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


OPT_30B = Opt(48, 7168, 28672, 56)
OPT_175B = Opt(96, 12288, 49152, 96)


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
