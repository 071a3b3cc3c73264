"""The cost model of offloaded generation: seconds and bytes as linear expressions in a placement.

A block of sequences is generated at once: `num_batches` micro-batches of `micro_batch` sequences. The layers are
visited in order, and within a layer the micro-batches, so that a layer's weights are loaded once a step for the whole
block. Shares of the tiers, fastest first, decide where weights, cache and activations (hidden) have their homes. The
first tier computes. Link i carries what crosses between tiers i and i + 1, in both directions.

A `Linear` is an array of coefficients: one per kind and tier, then one of `attended`, the share of the cache whose
attention is computed on the second tier instead of the first, and last a constant. There are two or three tiers.

Source: FlexGen, arXiv 2303.06865, Appendix A.3. Ours differs: two tiers are enough; bytes and operations come from the
model and the codec instead of 8 h1^2 + 4 h1 h2 and 4 h1; retention and shared prefixes count; attention on the second
tier is a variable; and the output head costs something. `quire.offload.planning.paper` has the paper's own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

from quire.offload.policy import OffloadPolicy
from quire.offload.units import ALL, TIERS, Share

Linear = NDArray[np.float64]


class Kind(IntEnum):
    """What is placed."""

    WEIGHTS = 0
    CACHE = 1
    HIDDEN = 2


class Form(StrEnum):
    """Whose model it is: how the times of a layer's stages combine, and what else memory holds.

    MAX     the paper: all stages overlap, and the slowest counts. Memory holds the largest scratch of a stage
    SUMS    the paper's public code: loads on all links add up, and so do stores; while decoding, loads to the first
            tier overlap with nothing. Memory holds the scratch of all stages. The second tier needs room for the cache
            of generated tokens only while they are generated
    ENGINE  this engine, as MAX. But both directions of the last link take turns, as those of a disk do; all of the
            cache beyond the first tier is attended to on the second, or nothing is; and the first tier has buffers
            for loaded cache already while prompts are computed, and HIDDEN_BUFFERS for activations
    """

    MAX = "max"
    SUMS = "sums"
    ENGINE = "engine"


HIDDEN_BUFFERS = 4
"""Of the engine: two to read into and two to write from, see `HiddenStates`."""


@dataclass(frozen=True)
class BlockWorkload:
    """The requests of a block, all alike.

    prompt_tokens  tokens of a prompt, s
    output_tokens  tokens that are generated, n
    shared_tokens  first tokens of a prompt that other prompts of the block share
    num_prefixes   number of different shared beginnings in a block
    kept           share of a prompt's tokens that retention keeps, averaged over layers and heads
    growth         cached tokens per generated token, likewise
    room_tokens    tokens that every sequence's cache has memory for; 0: as many as it has at its end
    """

    prompt_tokens: float
    output_tokens: float
    shared_tokens: float = 0.0
    num_prefixes: float = 0.0
    kept: Share = ALL
    growth: Share = ALL
    room_tokens: float = 0.0

    def computed_tokens(self, sequences: float) -> float:
        """Prompt tokens that a block computes: a shared beginning once."""
        own = self.prompt_tokens - self.shared_tokens
        return sequences * own + min(self.num_prefixes, sequences) * self.shared_tokens

    def pairs(self, sequences: float) -> float:
        """Pairs of query and key of a block's prompts. As in the paper, causal masks halve nothing."""
        skipped = self.shared_tokens**2 * (sequences - min(self.num_prefixes, sequences))
        return sequences * self.prompt_tokens**2 - skipped

    def cached_tokens(self, sequences: float, generated: float) -> float:
        """Tokens in the cache of a block after so many generated tokens: a shared beginning once."""
        own = self.kept * (self.prompt_tokens - self.shared_tokens) + self.growth * generated
        return sequences * own + min(self.num_prefixes, sequences) * self.kept * self.shared_tokens

    def held_tokens(self, sequences: float, generated: float) -> float:
        """Tokens that the cache of a block has memory for: with room, also for one prompt before retention."""
        if not self.room_tokens:
            return self.cached_tokens(sequences, generated)
        shared = min(self.num_prefixes, sequences) * self.shared_tokens
        own = sequences * (self.room_tokens - (self.shared_tokens if self.num_prefixes else 0.0))
        return self.kept * (own + shared) + (1 - self.kept) * self.room_tokens

    def attended_tokens(self, sequences: float, generated: float) -> float:
        """Tokens that a block's queries of one step attend to, shared ones once per query."""
        return sequences * (self.kept * self.prompt_tokens + self.growth * generated)


@dataclass(frozen=True)
class Sizes:
    """A model and its cache in numbers.

    num_layers    number of layers, l
    layer_bytes   bytes of a layer's weights as they are stored
    cache_bytes   bytes of a cached token in one layer, as the codec stores them
    hidden_bytes  bytes of a token's activations between two layers
    layer_flops   operations of a layer's products per token
    pair_flops    operations of attention per pair of query and key in one layer
    score_bytes   bytes of the scores of one query with one key, where attention is computed on the second tier
    prefill       scratch of each stage of a layer while prompts are computed: bytes per sequence of a micro-batch
    decode        the same while tokens are generated
    head_flops    operations of the output head per sequence and step
    fixed_bytes   bytes on the first tier in any placement: embedding, head, last norm
    open_bytes    bytes on the first tier for the chunks that a sequence writes to, in any placement
    open_cache_bytes  bytes of a token of such a chunk in one layer, if the codec stores only full ones; else 0
    matrices      bytes of the matrices of each layer, as they are placed; empty: not known
    window        tokens that a query sees at most
    """

    num_layers: int
    layer_bytes: float
    cache_bytes: float
    hidden_bytes: float
    layer_flops: float
    pair_flops: float
    score_bytes: float = 0.0
    prefill: tuple[float, ...] = ()
    decode: tuple[float, ...] = ()
    head_flops: float = 0.0
    fixed_bytes: float = 0.0
    open_bytes: float = 0.0
    open_cache_bytes: float = 0.0
    matrices: tuple[tuple[float, ...], ...] = ()
    window: float = math.inf


@dataclass(frozen=True)
class Traffic:
    """Bytes per second of one direction of a link, by kind; infinity where nothing limits."""

    weights: float
    cache: float
    hidden: float

    @staticmethod
    def alike(rate: float) -> Traffic:
        """The same for every kind."""
        return Traffic(rate, rate, rate)


@dataclass(frozen=True)
class TierLink:
    """A link between two neighbouring tiers in one phase; up is towards the faster one."""

    up: Traffic
    down: Traffic


@dataclass(frozen=True)
class Rates:
    """Speeds of a machine for one micro-batch size and one phase; constant within a linear program.

    links             from the first tier outwards
    product_flops     operations per second of matrix products on the first tier
    attention_flops   the same of attention on the first tier
    far_flops         the same of attention on the second tier, where its bytes are; 0: it cannot be computed there
    passes            passes over the layers in which the phase, or a step of it, loads the weights
    fixed_seconds     of a layer, beside products and attention; of all these passes together
    request_seconds   of a request to the last tier beside its bytes: one a layer and micro-batch for a cache there, and
                      one each way for activations
    """

    links: tuple[TierLink, ...]
    product_flops: float
    attention_flops: float
    far_flops: float = 0.0
    passes: float = 1.0
    fixed_seconds: float = 0.0
    request_seconds: float = 0.0


@dataclass(frozen=True)
class TieredMachine:
    """Tiers and speeds.

    tiers       names, fastest first
    capacities  bytes of each tier
    prefill     speeds while prompts are computed
    decode      speeds while tokens are generated
    """

    tiers: tuple[str, ...]
    capacities: tuple[float, ...]
    prefill: Rates
    decode: Rates

    def __post_init__(self) -> None:
        counts = len(self.capacities), len(self.prefill.links) + 1, len(self.decode.links) + 1
        assert set(counts) == {len(self.tiers)}, f"{len(self.tiers)} tiers, but {counts}"


@dataclass(frozen=True)
class Options:
    """Choices of the model itself.

    slack          share of each tier's capacity that may be used
    cache_tiers    number of first tiers that the cache may have homes on
    hidden_tiers   number of first tiers that activations may have homes on
    exposed        share of every other stage that the slowest one does not hide; not with Form.SUMS
    most_rows      rows of a pass at most: of no others there are activations
    whole_on_last  whether the last tier has all weights, those of other tiers too
    """

    form: Form = Form.MAX
    slack: float = 1.0
    cache_tiers: int = len(TIERS)
    hidden_tiers: int = len(TIERS)
    exposed: float = 0.0
    most_rows: float = math.inf
    whole_on_last: bool = False


@dataclass(frozen=True)
class CostModel:
    """The linear expressions of one block size."""

    sizes: Sizes
    workload: BlockWorkload
    machine: TieredMachine
    micro_batch: int
    num_batches: int
    options: Options = Options()

    @property
    def num_tiers(self) -> int:
        """Number of tiers."""
        return len(self.machine.tiers)

    @property
    def num_variables(self) -> int:
        """Shares of three kinds, and `attended`."""
        return 3 * self.num_tiers + 1

    @property
    def block(self) -> int:
        """Sequences of a block."""
        return self.micro_batch * self.num_batches

    def constant(self, value: float) -> Linear:
        """A number, as a Linear."""
        found = np.zeros(self.num_variables + 1)
        found[-1] = value
        return found

    def share(self, kind: Kind, tiers: Sequence[int]) -> Linear:
        """The share of a kind on some tiers."""
        found = np.zeros(self.num_variables + 1)
        found[[kind * self.num_tiers + tier for tier in tiers]] = 1
        return found

    def beyond(self, kind: Kind, tier: int) -> Linear:
        """The share of a kind on slower tiers."""
        return self.share(kind, range(tier + 1, self.num_tiers))

    @property
    def attended(self) -> Linear:
        """The share of the cache whose attention is computed on the second tier."""
        found = np.zeros(self.num_variables + 1)
        found[-2] = 1
        return found

    def vector(self, policy: OffloadPolicy) -> Linear:
        """A policy as the values of the variables, and 1 for the constant."""
        shares = (*policy.weights.shares, *policy.cache.shares, *policy.hidden.shares)
        return np.array([*shares, policy.attended, 1.0])

    # Seconds of a layer.

    def prefill_stages(self) -> dict[str, Linear]:
        """Seconds of each stage of a layer while prompts are computed."""
        work, rates, tokens = self.workload, self.machine.prefill, self.workload.computed_tokens(self.block)
        # As in the paper, the first generated token's keys and values are stored too.
        found = self._transfers(rates, tokens, 0.0, work.cached_tokens(self.block, 1))
        products = tokens * self.sizes.layer_flops / rates.product_flops
        attention = work.pairs(self.block) * self.sizes.pair_flops / rates.attention_flops
        return found | {"compute": self.constant(products + attention + rates.fixed_seconds)}

    def decode_stages(self) -> dict[str, Linear]:
        """Seconds of each stage of a layer in the middle of generation."""
        work, rates, middle = self.workload, self.machine.decode, self.workload.output_tokens / 2
        found = self._transfers(rates, self.block, work.cached_tokens(self.block, middle), work.growth * self.block)
        pairs = work.attended_tokens(self.block, middle) * self.sizes.pair_flops
        products = self.block * self.sizes.layer_flops / rates.product_flops
        compute = self.constant(products + pairs / rates.attention_flops + rates.fixed_seconds)
        if rates.far_flops:
            compute = compute + self.attended * (pairs / rates.far_flops - pairs / rates.attention_flops)
        return found | {"compute": compute}

    def _transfers(self, rates: Rates, rows: float, read: float, stored: float) -> dict[str, Linear]:
        """Seconds of a layer on each link, both ways.

        rows    tokens whose activations cross
        read    tokens of cache that are loaded; 0 while prompts are computed
        stored  tokens of cache that are stored
        """
        sizes, found = self.sizes, dict[str, Linear]()
        for index, link in enumerate(rates.links):
            up, down = self._link_names(index)
            hidden, cache = self.beyond(Kind.HIDDEN, index), self.beyond(Kind.CACHE, index)
            # The paper counts neither the queries nor the new keys of what is attended to on the second tier.
            moved = cache - self.attended if read and index == 0 else cache
            crossing = hidden * (sizes.hidden_bytes * rows)
            found[up] = (
                self.beyond(Kind.WEIGHTS, index) * (sizes.layer_bytes * rates.passes / link.up.weights)
                + moved * (sizes.cache_bytes * read / link.up.cache)
                + crossing / link.up.hidden
            )
            found[down] = moved * (sizes.cache_bytes * stored / link.down.cache) + crossing / link.down.hidden
            if index == self.num_tiers - 2:
                requests = rates.request_seconds * max(self.num_batches, rates.passes)
                found[up] = found[up] + hidden * requests
                found[down] = found[down] + hidden * requests
                name = up if read else down
                found[name] = found[name] + cache * requests
        return found

    def prefill_bounds(self) -> dict[str, Linear]:
        """Lower bounds of a layer's seconds while prompts are computed; the largest is the time."""
        stages = self.prefill_stages()
        if self.options.form is not Form.SUMS:
            return self._slowest(stages)
        ups, downs = zip(*(self._link_names(index) for index in range(self.num_tiers - 1)), strict=True)
        return {
            " + ".join(ups): sum((stages[name] for name in ups), self.constant(0)),
            " + ".join(downs): sum((stages[name] for name in downs), self.constant(0)),
            "compute": stages["compute"],
        }

    def decode_bounds(self) -> dict[str, Linear]:
        """The same while tokens are generated."""
        stages = self.decode_stages()
        if self.options.form is not Form.SUMS:
            return self._slowest(stages)
        first, _ = self._link_names(0)
        return {f"{first} + {name}": stages[first] + stages[name] for name in stages if name != first}

    def _slowest(self, stages: dict[str, Linear]) -> dict[str, Linear]:
        """Bounds of stages that overlap, but for the exposed share of the faster ones."""
        if self.options.form is Form.ENGINE:
            up, down = self._link_names(self.num_tiers - 2)
            both = {f"{up} and {down}": stages[up] + stages[down]}
            stages = {name: stage for name, stage in stages.items() if name not in (up, down)} | both
        exposed = self.options.exposed
        if not exposed:
            return stages
        total = sum(stages.values(), self.constant(0))
        return {name: stage * (1 - exposed) + total * exposed for name, stage in stages.items()}

    def head_seconds(self) -> float:
        """Seconds of the output head in one step of a block."""
        return self.block * self.sizes.head_flops / self.machine.decode.product_flops

    def _link_names(self, index: int) -> tuple[str, str]:
        near, far = self.machine.tiers[index], self.machine.tiers[index + 1]
        return f"{far} to {near}", f"{near} to {far}"

    # Bytes of each tier.

    def memory(self) -> dict[str, list[Linear]]:
        """Bytes that each tier needs at its peaks, by its name."""
        sizes, last = self.sizes, self.num_tiers - 1
        kept = self._resident(last, self.workload.prompt_tokens)
        if self.options.whole_on_last:
            kept = kept + self.share(Kind.WEIGHTS, range(last)) * (sizes.layer_bytes * sizes.num_layers)
        needs = [self._first_tier(), *([self._second_tier()] if last > 1 else []), [kept]]
        return dict(zip(self.machine.tiers, needs, strict=True))

    def _resident(self, tier: int, hidden_tokens: float, *, at_end: bool = True) -> Linear:
        """Bytes of what resides on a tier; at_end: with the cache of all tokens to be generated."""
        sizes, work = self.sizes, self.workload
        cached = work.held_tokens(self.block, work.output_tokens if at_end else 0)
        return (
            self.share(Kind.WEIGHTS, [tier]) * (sizes.layer_bytes * sizes.num_layers)
            + self.share(Kind.HIDDEN, [tier]) * self._hidden(hidden_tokens * self.block)
            + self.share(Kind.CACHE, [tier]) * (sizes.cache_bytes * cached * sizes.num_layers)
        )

    def _hidden(self, rows: float) -> float:
        """Bytes of the activations of some rows, or of a pass if that has fewer."""
        return self.sizes.hidden_bytes * min(rows, self.options.most_rows)

    def _first_tier(self) -> list[Linear]:
        """Homes; two layers' loaded weights; micro-batches' activations and loaded cache; scratch."""
        sizes, work, batch, form = self.sizes, self.workload, self.micro_batch, self.options.form
        weights = self.beyond(Kind.WEIGHTS, 0) * (2 * sizes.layer_bytes) + self.constant(sizes.fixed_bytes)
        loaded = sizes.cache_bytes * work.held_tokens(batch, work.output_tokens)
        cache = (self.beyond(Kind.CACHE, 0) - self.attended) * (2 * loaded)
        kept = self.constant(sizes.open_bytes * self.block)
        buffers = HIDDEN_BUFFERS if form is Form.ENGINE else 1
        found = []
        phases = (work.prompt_tokens, sizes.prefill, form is Form.ENGINE), (1.0, sizes.decode, True)
        for tokens, stages, has_cache in phases:
            hidden = self.beyond(Kind.HIDDEN, 0) * (buffers * self._hidden(tokens * batch))
            base = self._resident(0, tokens) + weights + hidden + kept + cache * has_cache
            scratch = sum(stages) if form is Form.SUMS else max(stages, default=0.0)
            found.append(base + self.constant(scratch * batch))
        return found

    def _second_tier(self) -> list[Linear]:
        """Of three tiers: homes, and what passes through."""
        sizes, work, batch = self.sizes, self.workload, self.micro_batch
        prefill = (
            self._resident(1, work.prompt_tokens, at_end=self.options.form is not Form.SUMS)
            + self.beyond(Kind.WEIGHTS, 0) * sizes.layer_bytes
            + self.beyond(Kind.HIDDEN, 0) * self._hidden(work.prompt_tokens * batch)
        )
        cached = work.cached_tokens(batch, work.output_tokens)
        decode = (
            self._resident(1, 1)
            + self.beyond(Kind.WEIGHTS, 1) * sizes.layer_bytes
            + self.beyond(Kind.HIDDEN, 1) * (2 * sizes.hidden_bytes * batch)
            + self.beyond(Kind.CACHE, 1) * (2 * sizes.cache_bytes * cached)
            + self.constant(sizes.score_bytes * cached + sizes.hidden_bytes * batch)
        )
        return [prefill, decode]
