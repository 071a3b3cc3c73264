"""OPT on the machine of FlexGen's paper in 16 bits: sizes and working memory by the appendix and by the public code."""

from __future__ import annotations

from dataclasses import dataclass

from quire.offload.planning.costs import BlockWorkload, CostModel, Form, Options, Sizes
from quire.offload.planning.paper import FORMS, t4
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


def sizes(opt: Opt, workload: BlockWorkload, form: Form) -> Sizes:
    """The bytes and operations of a layer in 16 bits, with the working memory of the appendix or of the code.

    Without what attention needs for the GPU's share of the cache, which the policies here leave empty.
    """
    h1, h2, s = float(opt.hidden), float(opt.inner), workload.prompt_tokens
    if form is Form.SUMS:
        prefill = [8 * s * h1, 2 * s * h1 + 2 * opt.heads * s**2, 2 * s * h1, 4 * s * h1, 2 * s * h2, 2 * s * h1]
        decode = [14 * h1 + 2 * h2]
    else:
        prefill, decode = ([each * rows for each in (8 * h1, 4 * h1, 2 * (h1 + h2))] for rows in (s, 1))
    return Sizes(
        num_layers=opt.num_layers,
        layer_bytes=opt.layer_bytes,
        cache_bytes=4.0 * h1,
        hidden_bytes=2.0 * h1,
        layer_flops=opt.layer_bytes,
        pair_flops=4.0 * h1,
        score_bytes=2.0 * opt.heads,
        prefill=tuple(prefill),
        decode=tuple(decode),
    )


def cost_model(
    opt: Opt,
    workload: BlockWorkload,
    micro_batch: int,
    num_batches: int,
    capacities: tuple[float, float, float],
    options: Options = FORMS[Form.MAX],
) -> CostModel:
    """The paper's model of a block; capacities in bytes."""
    machine = t4(opt.hidden, micro_batch, capacities, options.form)
    return CostModel(sizes(opt, workload, options.form), workload, machine, micro_batch, num_batches, options)
