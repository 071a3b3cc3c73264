"""Plans on a profile: the placement with the highest throughput on this machine, and what to expect of a placement.

The cost model is `quire.offload.planning.costs` with the tiers cpu and disk, and a GPU before them if there is one. Its
rates come from the profile's tables: they are constants for one micro-batch and phase, so each block size has a linear
program of its own. Layers are visited once a step. While a layer computes, the disk reads the weights of the next one,
and reads and writes in turns what else is not in memory. The slower of computing and the disk counts, and the fitted
share of the faster one. The output head and the work between two passes count as computing: the disk goes on meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from quire.cache.ledger import PAGE_TOKENS
from quire.errors import ConfigError
from quire.offload.planning.costs import CostModel, Form, Options, Rates, TieredMachine
from quire.offload.planning.profiled import beside_layers, links_of, prompt_attention
from quire.offload.planning.program import BATCHES, PlacedBlock, PlanError, lack_text, no_fit, placed, search
from quire.offload.planning.program import predict as predict_with
from quire.offload.weight_placement import NUM_BUFFERS, assign_tiers, buffer_sizes

if TYPE_CHECKING:
    from quire.offload.planning.costs import BlockWorkload, Sizes
    from quire.offload.planning.profile import Profile
    from quire.offload.planning.program import Prediction
    from quire.offload.policy import OffloadPolicy

MICRO_BATCHES = (1, 2, 3, *range(4, 132, 4), 160, 192, 256)
"""Sizes of a micro-batch that are tried."""

OPEN_CHUNKS, OPEN_ENCODED = 1.25, 2
"""Chunks that a sequence may write to, beside its others: see `room.Needs.num_open`. The second number is for codecs
that store only full chunks.
"""

MEMORY_TRIES = 4
"""Programs for a block whose memory is more than the program counts, each with less memory to use."""


def prompt_passes(prompts: Sequence[int], budget: int, num_waiting: int = 0, shared: int = 0) -> list[int]:
    """Prompt rows of each pass until all prompts are computed, as the scheduler divides them.

    prompts      tokens of each, in the order of admission; of those that wait without what is shared
    budget       scheduler.token_budget: most rows of a pass. Rows that decode come first
    num_waiting  number of last prompts that wait until the first one's `shared` first tokens are computed
    """
    left, passes, decoding = list(prompts), [], 0
    while decoding < len(left):
        rows, finished = 0, 0
        end = len(left) if prompts[0] - left[0] >= shared else len(left) - num_waiting
        for index in range(decoding, end):
            free = budget - decoding - rows
            done = prompts[index] - left[index]
            whole = (done + free) // PAGE_TOKENS * PAGE_TOKENS - done
            taken = left[index] if left[index] <= free else max(0, whole)
            rows, left[index] = rows + taken, left[index] - taken
            finished += left[index] == 0
            if left[index]:
                break
        assert rows, f"a budget of {budget} rows computes no prompt beside {decoding} sequences"
        passes.append(rows)
        decoding += finished
    return passes


def block_passes(workload: BlockWorkload, sequences: int, budget: int) -> list[int]:
    """The rows of each pass that computes the prompts of a block. See prompt_passes."""
    shared = round(workload.shared_tokens) if workload.num_prefixes else 0
    tokens, firsts = round(workload.prompt_tokens), round(workload.num_prefixes) if shared else sequences
    firsts = min(firsts, sequences)
    prompts = [tokens] * firsts + [max(1, tokens - shared)] * (sequences - firsts)
    return prompt_passes(prompts, budget, sequences - firsts, shared)


def model_of(
    profile: Profile,
    sizes: Sizes,
    workload: BlockWorkload,
    capacities: tuple[float, ...],
    micro_batch: int,
    num_batches: int,
    *,
    budget: int,
    slack: float = 1.0,
    only_weights: bool = False,
) -> CostModel:
    """The cost model of a block size.

    capacities    bytes of the profile's tiers
    budget        scheduler.token_budget
    slack         share of each capacity that may be used
    only_weights  whether cache and activations stay where they are computed
    """
    corrections, block, device = profile.corrections, micro_batch * num_batches, profile.device
    passes = block_passes(workload, block, budget)
    links, disk = links_of(profile), profile.disk
    products = sum(profile.products.at(rows) for rows in passes)
    pairs = workload.pairs(block)
    attention = prompt_attention(profile, workload.prompt_tokens, pairs, workload.prompt_tokens**2)
    fixed = beside_layers(profile, block, len(passes), corrections.prefill)
    prefill = Rates(
        links,
        workload.computed_tokens(block) * sizes.layer_flops / (corrections.prefill * products),
        pairs * sizes.pair_flops / (corrections.prefill * attention),
        passes=len(passes),
        fixed_seconds=fixed / sizes.num_layers,
        request_seconds=disk.request_seconds,
    )
    context = workload.attended_tokens(1, workload.output_tokens / 2)
    products = num_batches * profile.products.at(micro_batch)
    attention = num_batches * profile.attention.at(micro_batch, context)
    fixed = beside_layers(profile, block, 1, corrections.decode)
    flops = block * context * sizes.pair_flops
    has_window = sizes.window < workload.prompt_tokens + workload.output_tokens
    decode = Rates(
        links,
        block * sizes.layer_flops / (corrections.decode * products),
        flops / (corrections.decode * attention),
        0.0 if device is None or has_window else flops / (num_batches * device.far.at(micro_batch, context)),
        fixed_seconds=fixed / sizes.num_layers,
        request_seconds=disk.request_seconds,
    )
    # A pass has at most `budget` rows, whatever the prompts have.
    rows = min(workload.prompt_tokens, budget / micro_batch)
    scratch = tuple(each * rows * corrections.scratch for each in sizes.decode)
    # Beside a GPU only weights are on the disk.
    tiers = 1 if only_weights else 2
    options = Options(
        form=Form.ENGINE,
        slack=slack,
        cache_tiers=tiers,
        hidden_tiers=tiers,
        exposed=corrections.exposed,
        most_rows=budget,
        # The layer image. Where there is no room for it, all weights are in memory, and there is none.
        whole_on_last=device is None and capacities[-1] >= sizes.layer_bytes * sizes.num_layers,
    )
    machine = TieredMachine(profile.tiers, capacities, prefill, decode)
    own = OPEN_ENCODED * sizes.open_cache_bytes or OPEN_CHUNKS * sizes.cache_bytes
    measured = dataclasses.replace(
        sizes, head_flops=0.0, prefill=scratch, open_bytes=own * PAGE_TOKENS * sizes.num_layers
    )
    return CostModel(measured, workload, machine, micro_batch, num_batches, options)


def predict(
    profile: Profile, sizes: Sizes, workload: BlockWorkload, policy: OffloadPolicy, *, budget: int
) -> Prediction:
    """What the profile says of a policy for its tiers, whether it fits or not. budget: see model_of."""
    unlimited = (math.inf,) * len(profile.tiers)
    model = model_of(profile, sizes, workload, unlimited, policy.micro_batch, policy.num_batches, budget=budget)
    prediction = predict_with(model, policy)
    return dataclasses.replace(prediction, memory=taken_memory(model, policy, prediction.memory))


def taken_memory(model: CostModel, policy: OffloadPolicy, counted: Mapping[str, float]) -> dict[str, float]:
    """Bytes of each tier as they are taken: whole matrices, whole chunks, and buffers for the longest sequences.

    counted  as the program counts them: shares of matrices and chunks, because its expressions are linear
    """
    sizes, work, far = model.sizes, model.workload, policy.weights.beyond(0)
    first, *others = model.machine.tiers
    more = 0.0
    if sizes.matrices and far > 0:
        loaded = _loaded(sizes, policy, 1)
        more += sum(buffer_sizes(loaded)) - sum(loaded)
        more -= far * (NUM_BUFFERS - sizes.num_layers) * sizes.layer_bytes
    if policy.cache.beyond(0) > 0:
        # Of a micro-batch, and of what several of them share: as much as the longest sequence.
        layer = 2 * sizes.cache_bytes * work.held_tokens(1, work.output_tokens)
        more += (1 - policy.cache.beyond(0) + policy.attended) * layer * model.micro_batch + layer
    elif not (work.room_tokens or work.num_prefixes or work.kept < 1):
        tokens, layers = work.prompt_tokens + work.output_tokens, sizes.num_layers
        sealed = tokens // PAGE_TOKENS if sizes.open_cache_bytes else -(-tokens // PAGE_TOKENS)
        taken = (sealed * sizes.cache_bytes + sizes.open_cache_bytes) * PAGE_TOKENS * layers * model.block
        own = sizes.cache_bytes * work.held_tokens(model.block, work.output_tokens) * layers
        more += taken - own - sizes.open_bytes * model.block
    found = {**counted, first: counted[first] + more}
    return found if len(others) == 1 else found | dict(zip(others, _beside_device(model, policy), strict=True))


def _loaded(sizes: Sizes, policy: OffloadPolicy, first: int) -> list[int]:
    """Bytes of each layer on tiers from `first` on, as matrices are placed."""
    tiers = assign_tiers([[round(size) for size in layer] for layer in sizes.matrices], policy.weights)
    return [
        sum(round(size) for size, tier in zip(layer, of_layer, strict=True) if tier >= first)
        for layer, of_layer in zip(sizes.matrices, tiers, strict=True)
    ]


def _beside_device(model: CostModel, policy: OffloadPolicy) -> tuple[float, float]:
    """Bytes of host and disk beside a GPU. The host has room for the whole cache and for the activations of a whole
    pass if any of them are there; the disk has an image with all weights if any are there.
    """
    sizes, work = model.sizes, model.workload
    weights = sizes.layer_bytes * sizes.num_layers
    host, on_disk = policy.weights.shares[1] * weights, policy.weights.beyond(1)
    if on_disk > 0:
        loaded = _loaded(sizes, policy, 2) or [round(on_disk * sizes.layer_bytes)] * sizes.num_layers
        host += sum(buffer_sizes(loaded))
    if policy.cache.beyond(0) > 0:
        tokens = work.held_tokens(model.block, work.output_tokens) + 2 * PAGE_TOKENS * model.block
        host += sizes.cache_bytes * tokens * sizes.num_layers
    if policy.hidden.beyond(0) > 0:
        host += sizes.hidden_bytes * model.options.most_rows
    return host, weights if on_disk > 0 else 0.0


def plan_all(
    profile: Profile,
    sizes: Sizes,
    workload: BlockWorkload,
    capacities: tuple[float, ...],
    *,
    budget: int,
    slack: float = 1.0,
    only_weights: bool = False,
    micro_batches: Iterable[int] = MICRO_BATCHES,
    num_batches: Iterable[int] | None = None,
    most: int | None = None,
) -> list[PlacedBlock]:
    """The best placement of every block size that fits, in the order of the sizes.

    micro_batches, num_batches  the sizes to try; without num_batches several
    most                        scheduler.max_running: most sequences of a block
    Raises PlanError if nothing fits, and ConfigError if no size is left to try. See model_of for all else.
    """
    numbers = list(num_batches if num_batches is not None else [1] if only_weights else BATCHES)
    blocks = [(micro, count) for micro in micro_batches for count in numbers]
    # Prompts need room for a chunk beside a block that decodes.
    blocks = [each for each in blocks if each[0] * each[1] + PAGE_TOKENS <= budget]
    if not blocks:
        raise ConfigError(f"no block leaves prompts {PAGE_TOKENS} of scheduler.token_budget {budget}; raise it")
    blocks = [each for each in blocks if most is None or each[0] * each[1] <= most]
    if not blocks:
        raise ConfigError(f"every block has more sequences than scheduler.max_running, {most}; raise it")

    def model(micro_batch: int, count: int, rooms: Sequence[float]) -> CostModel:
        return model_of(
            profile, sizes, workload, tuple(rooms), micro_batch, count,
            budget=budget, slack=slack, only_weights=only_weights,
        )  # fmt: skip

    lacks = list[dict[str, float]]()

    def fitting(micro_batch: int, count: int) -> PlacedBlock | None:
        """A placement whose memory as it is taken fits. Where it does not, the program gets less memory."""
        rooms = list(capacities)
        for _ in range(MEMORY_TRIES):
            tried = model(micro_batch, count, rooms)
            found = placed(tried) if min(rooms) >= 0 else None
            if found is None:
                return None
            memory = taken_memory(tried, found.policy, found.prediction.memory)
            excess = [memory[tier] / slack - most for tier, most in zip(profile.tiers, capacities, strict=True)]
            if max(excess) < 1:  # byte
                return PlacedBlock(found.policy, dataclasses.replace(found.prediction, memory=memory))
            lacks.append({tier: more for tier, more in zip(profile.tiers, excess, strict=True) if more >= 1})
            rooms = [room - max(0.0, more) for room, more in zip(rooms, excess, strict=True)]
        return None

    found = search(fitting, blocks)
    if found:
        return found
    if lacks:
        raise PlanError(lack_text(min(lacks, key=lambda lack: sum(lack.values()))))
    raise no_fit(model(*blocks[0], capacities))
