"""Latency models of settings that were not measured, from those of their parts.

Weights and codecs cost seconds of their own: products of rows, and attention to context. So of settings that differ
from a measured origin in both, a step takes

    T(weights, codec) = T(origin) + [T(weights) - T(origin)] + [T(codec) - T(origin)]

and fewer threads make all of it slower, T(threads) / T(origin) times. A model of the usual form is fitted to these
seconds over a grid of steps. What it leaves out: what parts do to each other, as in bandwidth that both need.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from quire.timing.latency import About, LatencyModel, StepTime, StepWork
from quire.timing.latency_fit import fit

LEAST = 0.1
"""Least seconds of a step, as a share of the origin's: differences of fitted seconds may sum up to less than nothing.
"""

STEPS = 6
"""Values of each feature in the grid."""


def composed(
    origin: LatencyModel,
    added: Sequence[LatencyModel],
    scaled: Sequence[tuple[LatencyModel, LatencyModel]],
    about: Mapping[str, str | int | float | bool | None],
) -> LatencyModel:
    """The model of settings that differ from the origin in several parts.

    added   models of a part alone, whose seconds beside the origin's add up
    scaled  pairs: a model of a part alone, and the one that it is a multiple of
    about   of the result
    """
    records = []
    for work in grid(origin):
        base = origin.seconds(work)
        seconds = max(base + sum(each.seconds(work) - base for each in added), LEAST * base)
        for part, whole in scaled:
            seconds *= part.seconds(work) / whole.seconds(work)
        records.append((work, seconds))
    told: About = {**about, "composed": True}
    return fit(records, told, origin.links, are_exact=True)


def grid(model: LatencyModel) -> Iterator[StepWork]:
    """Steps that cover the range of a model: prompts, decoding sequences, and both."""
    most_rows = max(2, round(_most(model, "prompt_rows")))
    most_batch = max(1, round(_most(model, "decode_rows")))
    most_context = max(64.0, _most(model, "context"))
    most_pairs = max(1.0, _most(model, "prompt_pairs"))
    rows, batches = _spread(1, most_rows), _spread(1, most_batch)
    for number in rows:
        for share in (0.0, 0.25, 1.0):
            pairs = max(number * number / 2, share * most_pairs * number / most_rows)
            yield StepWork(prompt_rows=number, prompt_pairs=pairs, num_prompts=1)
            yield StepWork(prompt_rows=number, prompt_pairs=pairs / 4, num_prompts=min(4, number))
    for number, share, alone in itertools.product(batches, (0.02, 0.1, 0.4, 1.0), (0.5, 1.0)):
        context = max(number, share * most_context)
        yield StepWork(decode_rows=number, context=context, unique=alone * context)
    for number, batch, share in itertools.product(rows[::2], batches[::2], (0.1, 1.0)):
        context = max(batch, share * most_context)
        yield StepWork(number, number * number / 2, batch, context, context, 1)


def _most(model: LatencyModel, name: str) -> float:
    return model.ranges.get(name, (0.0, 0.0))[1]


def _spread(low: int, high: int) -> list[int]:
    """Whole numbers from low to high, each about the same multiple of the one before."""
    ratio = (high / low) ** (1 / (STEPS - 1))
    return sorted({round(low * ratio**step) for step in range(STEPS)})


def profile_of(model: StepTime) -> tuple[float, ...]:
    """Seconds of some typical steps: what tells whether one model is never slower than another one.

    The steps are the same for all models.
    """
    prompts = (StepWork(rows, rows * rows / 2, num_prompts=1) for rows in (1, 16, 64, 256, 1024))
    decoding = (
        StepWork(decode_rows=batch, context=batch * context, unique=batch * context)
        for batch, context in itertools.product((1, 4, 16, 64), (64, 512, 2048))
    )
    return tuple(model.seconds(work) for work in (*prompts, *decoding))
