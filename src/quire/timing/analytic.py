"""How long a step takes on hardware that is not here: a roofline of a model's layers on a device.

A layer multiplies all rows with its matrices, attends, and with tensor parallelism adds up twice what its GPUs have
found. Products take their operations or their reads of weights, whichever is longer, and `exposed` of the other one.
Attention takes the longer of its operations and its reads of the cache. Launches come on top. The output head
multiplies the rows that are sampled.

Tensor parallelism divides products, attention and cache by `tp`; each all-reduce is a ring.

Pipeline parallelism divides the layers into `pp` stages. Prompts pass one stage after the other, and the next step may
begin when the widest stage is free. Decoding sequences are divided into as many micro-batches as there are stages. Each
stage computes another micro-batch at the same time, and a micro-batch begins again when it has left the last stage. A
decode step is one way of a micro-batch through all layers, in which every sequence gets a token. If stages differ, the
micro-batches wait for the widest. A step with both is divided likewise, prompts included, and ends when the last
micro-batch has left the pipeline, which had to fill.

It knows neither kernels nor the scheduler. What kernels reach of a device's peaks is `Efficiency`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from quire.errors import ConfigError
from quire.models.ffn.gated import GatedShape
from quire.models.ffn.plain import PlainShape
from quire.models.mixers.attention import AttentionShape
from quire.models.norms import NormShape
from quire.models.shape import LayerShape, ModelShape
from quire.timing.devices import Device
from quire.timing.latency import Link, Origin, StepWork


def _shape(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, context: int, *, is_opt: bool = False
) -> ModelShape:
    """A model of Llama's family or of OPT's. Nothing here depends on how it rotates."""
    head_dim = hidden // heads
    part = PlainShape(ffn_size=ffn, bias=True) if is_opt else GatedShape(ffn_size=ffn)
    layer = LayerShape(
        mixer=AttentionShape(
            num_q_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope=None, qkv_bias=is_opt, o_bias=is_opt
        ),
        ffn=part,
    )
    return ModelShape(
        architecture="opt" if is_opt else "llama", vocab_size=vocab, hidden_size=hidden, layers=(layer,) * layers,
        max_context=context, norm=NormShape(1e-5, "layer", has_bias=True) if is_opt else NormShape(1e-5),
        tied_embeddings=is_opt, learned_positions=is_opt, dtype="float16",
    )  # fmt: skip


MODELS = {
    "opt-13b": _shape(40, 5120, 20480, 40, 40, 50272, 2048, is_opt=True),
    "opt-66b": _shape(64, 9216, 36864, 72, 72, 50272, 2048, is_opt=True),
    "opt-175b": _shape(96, 12288, 49152, 96, 96, 50272, 2048, is_opt=True),
    "llama-2-7b": _shape(32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-3-8b": _shape(32, 4096, 14336, 32, 8, 128256, 8192),
}
"""Models by name."""


@dataclass(frozen=True)
class Efficiency:
    """What kernels reach of a device, as shares of its peaks, and what comes on top.

    products   of the operations, in products with weights
    attention  of the operations, in attention
    memory     of the bandwidth, reading weights
    cache      of the bandwidth, reading the cache
    exposed    share of the shorter one of operations and reads that products do not hide behind the longer one
    launch     seconds a layer: kernels that start, norms, activations
    network    of the bandwidth between GPUs
    hop        seconds from one GPU to the next, beside the bytes

    The defaults are those of DistServe's engine on A100 GPUs with 80 GB, from its published latencies of OPT-13B
    (`tests/distserve_latencies.py`): prompts of 64 to 2,048 tokens, and 1 to 256 sequences with contexts of 128 to
    1,024 tokens as far as they fit. `attention` is their quadratic term; `memory` is set, because these latencies
    hardly tell reads of weights from launches; `products`, `cache`, `exposed` and `launch` are fitted to one GPU, and
    `network` and `hop` to two and four. Predicted against published seconds, largest deviations:

                     prompts          decoding
        13B, tp 1    -4 to +2 %       -9 to +15 %      fitted
        13B, tp 2    -15 to -5 %      -16 to +2 %      network and hop fitted
        13B, tp 4    -4 to +16 %      -16 to +13 %     network and hop fitted
        66B, tp 2    -2 to +4 %       -5 to +5 %       predicted
        66B, tp 3    +1 to +8 %       -1 to +20 %      predicted
        66B, tp 4    +3 to +15 %      0 to +19 %       predicted
        66B, tp 8    +4 to +13 %      -24 to +29 %     predicted

    Other engines do better: attention kernels that keep scores on the chip reach two to three times that share, and
    recorded launches a fraction of these seconds. Devices with other ratios of operations to bytes have not been tried.
    """

    products: float = 0.77
    attention: float = 0.184
    memory: float = 0.9
    cache: float = 0.77
    exposed: float = 0.75
    launch: float = 145e-6
    network: float = 0.24
    hop: float = 4.7e-6


@dataclass(frozen=True)
class AnalyticModel:
    """The latencies of a model on devices. See StepTime.

    model         what is computed
    device        a GPU of the instance; all are alike
    weight_bytes  bytes of all weights as they are stored
    token_bytes   bytes of a cached token over all layers
    tp            GPUs that share each layer
    pp            stages that share the layers
    dtype_bytes   bytes of a number of an activation
    usable        share of the memory for weights and cache; the rest is for activations and the driver
    pp_link       from one stage to the next; None: within the node of the device, as between the GPUs of a layer
    efficiency    what kernels reach
    """

    model: ModelShape
    device: Device
    weight_bytes: float
    token_bytes: float
    tp: int = 1
    pp: int = 1
    dtype_bytes: float = 2.0
    usable: float = 0.9
    pp_link: Link | None = None
    efficiency: Efficiency = field(default_factory=Efficiency)
    origin = Origin.MODELLED
    knots = ()

    def __post_init__(self) -> None:
        num_heads, num_layers = self.model.num_q_heads, self.model.num_layers
        if self.tp < 1 or num_heads % self.tp:
            raise ConfigError(f"tp is {self.tp}; it must divide the {num_heads} heads")
        if not 1 <= self.pp <= num_layers:
            raise ConfigError(f"pp is {self.pp}; it must lie between 1 and the number of layers, {num_layers}")

    def seconds(self, work: StepWork) -> float:
        """See StepTime."""
        if not work.decode_rows:
            return self._through(work, 1)
        batches = self._batches(work)
        found = self._through(work, batches) * max(1.0, batches * self._widest)
        if not work.prompt_rows:
            return found
        # Micro-batches with a prompt's parts pass one after the other, and are no faster than the prompt as a whole.
        return max(found * (2 - 1 / batches), self._through(work, 1))

    def occupancy(self, work: StepWork) -> float:
        """See StepTime. Prompts leave the first stages before the last one: the widest stage's share of the seconds."""
        return self.seconds(work) * (1.0 if work.decode_rows else self._widest)

    def quiet(self, work: StepWork, count: int) -> float:
        """See StepTime. Exact: only reads of the cache, or the operations of attention, grow, by the same each step."""
        assert not work.prompt_rows, f"a quiet step with {work.prompt_rows} rows of prompts"
        batches, costs = self._batches(work), self._costs
        fixed = work._replace(context=0.0, unique=0.0)
        attended, read = costs.pair / batches, costs.unique / batches
        growing = _sum_of_larger(
            (attended * work.context, attended * work.decode_rows), (read * work.unique, read * work.decode_rows), count
        )
        return (count * self._through(fixed, batches) + growing) * max(1.0, batches * self._widest)

    def covers(self, work: StepWork) -> bool:
        """See StepTime. A formula has no measured range, but a cache has a size."""
        return work.unique <= self.cache_tokens

    # Memory.

    @property
    def gpu_weight_bytes(self) -> float:
        """Bytes of the weights of a GPU of the widest stage."""
        return self.weight_bytes * self._widest / self.tp

    @property
    def gpu_cache_bytes(self) -> float:
        """Bytes of memory that the weights leave the cache on such a GPU; below 0: the weights do not fit."""
        return self.usable * self.device.memory - self.gpu_weight_bytes

    @property
    def cache_tokens(self) -> float:
        """Tokens that the cache of the instance has room for."""
        per_gpu = self.token_bytes * self._widest / self._kv_parts
        return max(0.0, self.gpu_cache_bytes) / per_gpu

    # Seconds of the parts of a step.

    def _batches(self, work: StepWork) -> int:
        """Micro-batches of a step with decoding sequences."""
        return min(self.pp, max(1, work.decode_rows))

    def _through(self, work: StepWork, batches: int) -> float:
        """Seconds of one of `batches` equal parts of a step through all stages."""
        assert work.unique > 0 or not work.context, "a step with context needs `unique`"
        costs, exposed = self._costs, self.efficiency.exposed
        rows = (work.prompt_rows + work.decode_rows) / batches
        sampled = (work.num_prompts + work.decode_rows) / batches
        found = costs.fixed + costs.row * rows
        for operations, reads in (
            (costs.product * rows, costs.weights),
            (costs.head * sampled, costs.head_weights if sampled else 0.0),
        ):
            found += max(operations, reads) + exposed * min(operations, reads)
        attention = max(costs.pair * work.context, costs.unique * work.unique)
        return found + (costs.pair * work.prompt_pairs + attention) / batches

    @cached_property
    def _widest(self) -> float:
        """Share of the layers in the widest stage."""
        return math.ceil(self.model.num_layers / self.pp) / self.model.num_layers

    @property
    def _kv_parts(self) -> int:
        """GPUs of a stage with different key heads: with more GPUs than heads, some have the same."""
        return min(self.tp, self.model.num_kv_heads)

    @cached_property
    def _costs(self) -> _Costs:
        model, device, reached, tp = self.model, self.device, self.efficiency, self.tp
        ring = Link(reached.hop, device.between * reached.network)
        hops = self.pp_link or ring
        products, attention = device.flops * reached.products * tp, device.flops * reached.attention * tp
        memory = device.bandwidth * reached.memory * tp
        matrices = [size for name, size in model.tensor_shapes.items() if name.startswith("layers.") and len(size) == 2]
        layers, head = sum(map(math.prod, matrices)), model.hidden_size * model.vocab_size
        weight = self.weight_bytes / model.num_parameters
        row_bytes, reduces = model.hidden_size * self.dtype_bytes, 2 * model.num_layers
        # A ring passes each part of a row on 2 (tp - 1) times, a tp-th of its bytes each time.
        passes = reduces * 2 * (tp - 1)
        return _Costs(
            fixed=reached.launch * model.num_layers + passes * ring.latency + (self.pp - 1) * hops.latency,
            row=row_bytes * (passes / tp / ring.bytes_per_second + (self.pp - 1) / hops.bytes_per_second),
            product=2 * layers / products,
            weights=layers * weight / memory,
            head=2 * head / products,
            head_weights=head * weight / memory,
            pair=4 * model.num_layers * model.q_size / attention,
            unique=self.token_bytes / (self._kv_parts * device.bandwidth * reached.cache),
        )


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds of what a step has, over all layers.

    fixed         launches, and the way of the first byte between GPUs
    row           a row's bytes between GPUs
    product       operations of a row's products
    weights       reads of the weights of all layers
    head          operations of a sampled row's output head
    head_weights  reads of its weights
    pair          operations of a query and a token that it attends to
    unique        reads of a distinct token of context
    """

    fixed: float
    row: float
    product: float
    weights: float
    head: float
    head_weights: float
    pair: float
    unique: float


def _sum_of_larger(first: tuple[float, float], second: tuple[float, float], count: int) -> float:
    """Sum over k < count of the larger one of two straight lines in k, (at 0, slope) each."""

    def total(line: tuple[float, float], begin: int, end: int) -> float:
        number = end - begin
        return number * line[0] + line[1] * number * (begin + end - 1) / 2

    ahead, change = first[0] - second[0], first[1] - second[1]
    before, after = (first, second) if ahead > 0 or (ahead == 0 and change > 0) else (second, first)
    if ahead * change >= 0:
        return total(before, 0, count)
    crossing = min(count, math.ceil(-ahead / change))
    return total(before, 0, crossing) + total(after, crossing, count)
