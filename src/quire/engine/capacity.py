"""The measured capacity of an engine: how many rows saturate the processor, and how many sequences a batch may have.

Source: DistServe (OSDI 2024), section 3.1: L_m, the shortest prompt that saturates the processor, groups prompts;
batching decoding sequences pays until computing bounds it. Differs from it: both are measured when an instance starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.cache.ledger import PAGE_TOKENS
from quire.engine.engine import Engine
from quire.engine.params import SamplingParams

LEAST_ROWS = 16
SATURATED = 0.9
"""A prompt saturates the processor if it reaches this share of the highest measured rate (rows a second)."""

GAIN = 1.1
"""Doubling a batch is useful if it multiplies the decoded tokens a second by at least this."""

LONGEST_SECONDS = 0.5
"""Longer prompts are not timed."""

MEASURED_TOKENS = 4 * PAGE_TOKENS
"""Prompt tokens whose prefill is timed at start."""

NUM_STEPS = 6
"""Decode steps that are timed for each batch size."""


@dataclass(frozen=True)
class MeasuredCapacity:
    """The measurements of one engine.

    prompt_rows       L_m
    batch             the largest useful batch, in sequences
    seconds_per_row   prefill seconds a row, for a prompt of L_m rows
    seconds_per_step  seconds of a decode step of the largest useful batch
    """

    prompt_rows: int
    batch: int
    seconds_per_row: float
    seconds_per_step: float


def measure_capacity(engine: Engine) -> MeasuredCapacity:
    """Times prompts and decode steps. The engine must have no requests; the timed ones leave nothing in the cache."""
    with engine.leaving_nothing():
        rows, seconds_per_row = _saturating_rows(engine)
        batch, seconds_per_step = _useful_batch(engine)
    return MeasuredCapacity(rows, batch, seconds_per_row, seconds_per_step)


def _saturating_rows(engine: Engine) -> tuple[int, float]:
    most = min(engine.scheduler.policy.token_budget, engine.max_context - 2)
    speeds: dict[int, float] = {}
    rows = min(LEAST_ROWS, most)
    while True:
        seconds = min(_prefill(engine, rows, trial) for trial in range(2))
        speeds[rows] = rows / seconds
        if rows == most or seconds > LONGEST_SECONDS:
            break
        rows = min(2 * rows, most)
    fastest = max(speeds.values())
    found = next(rows for rows, speed in speeds.items() if speed >= SATURATED * fastest)
    return found, 1 / speeds[found]


def _prefill(engine: Engine, rows: int, trial: int) -> float:
    begun = engine.clock()
    engine.add("measured", _prompt(engine, rows, 2 * rows + trial), SamplingParams(max_tokens=1, detokenize=False))
    while engine.has_work:
        engine.step()
    return engine.clock() - begun


def _useful_batch(engine: Engine) -> tuple[int, float]:
    most = min(engine.scheduler.policy.max_running, engine.scheduler.max_queue)
    batch, best, seconds = 1, 0.0, 0.0
    size = 1
    while size <= most:
        found = _decode(engine, size)
        if found is None or size / found < GAIN * best:
            break
        batch, best, seconds = size, size / found, found
        size *= 2
    return batch, seconds


def _decode(engine: Engine, batch: int) -> float | None:
    """Seconds of a step; None if the batch does not fit."""
    params = SamplingParams(max_tokens=NUM_STEPS + 2, temperature=0.0, ignore_eos=True, detokenize=False)
    rows = max(1, min(LEAST_ROWS, engine.max_context - NUM_STEPS - 3))
    for index in range(batch):
        engine.add(f"measured-{index}", _prompt(engine, rows, index), params)
    scheduler, times = engine.scheduler, list[float]()
    while engine.has_work:
        is_whole = len(scheduler.running) == batch and not scheduler.waiting
        is_decoding = is_whole and all(each.num_pending == 1 for each in scheduler.running)
        begun = engine.clock()
        engine.step()
        if is_decoding and len(scheduler.running) == batch:
            times.append(engine.clock() - begun)
    return sorted(times)[len(times) // 2] if times else None


def _prompt(engine: Engine, rows: int, number: int) -> list[int]:
    """A prompt that differs from all others in its first chunk, so that none of it is cached."""
    vocab_size = engine.vocab_size
    return [(number * PAGE_TOKENS + 7919 * each + number) % vocab_size for each in range(rows)]


def measure_prefill(engine: Engine) -> None:
    """Times the prefill of a short prompt: the first choices between fetching and computing need an estimate. The
    prompt leaves nothing in the cache.
    """
    with engine.leaving_nothing():
        for trial in range(2):  # the first one also warms up
            engine.scheduler.manager.fetching.costs.forget_prefill()
            _prefill(engine, min(MEASURED_TOKENS, engine.max_context - 2), trial)
