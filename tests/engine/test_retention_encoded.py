"""Retention of encoded pages: slots move as codes, and keep the rotation of their positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.attention.reference import ReferencePlan
from quire.cache.table import ALL_SLOTS
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.errors import ConfigError
from quire.llm import merge_delta
from tests import engines
from tests.codecs import ENCODING, row_of
from tests.effort import IS_FULL, whole
from tests.engines import drain, generate
from tests.tiny_models import tiny_shape

CODECS = whole(sorted(ENCODING, key=lambda name: name not in ("g4", "nuq3")), 2)
RULES = pytest.mark.parametrize(
    "rule", [{}, {"retain.threshold": "off", "retain.budget": 0.5}], ids=["threshold", "budget"]
)
LONG = SamplingParams(max_tokens=140, temperature=0.0, ignore_eos=True)
USUAL = LONG if IS_FULL else replace(LONG, max_tokens=70)
"""All sequences seal a chunk, in a full run two."""


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_engine(codec: str, chunks: int = 300, **options: object) -> Engine:
    shape = tiny_shape(max_context=1024, head_dim=64 if row_of(codec).is_calibrated else 16)
    settings = {"cache.codec": codec, "retain.threshold": 0.4, "retain.profile_rows": 32, "cache.share": True}
    return engines.make_engine(shape, chunks=chunks, **{**settings, **options})


PROMPTS = [ids(200, 1), ids(5, 2), ids(300, 3), ids(70, 4)]


def dropped(engine: Engine) -> int:
    freed: int = engine.stats()["cache"]["bytes_retention_freed"]
    return freed


@RULES
@pytest.mark.parametrize("codec", CODECS)
def test_both_backends_keep_and_answer_alike(codec: str, rule: dict[str, object]) -> None:
    """The reference decodes every page in every step. A quick run has two prompts, which are about to seal a chunk."""
    prompts, params = PROMPTS, LONG
    if not IS_FULL:
        prompts, params = [ids(245, 1), ids(55, 2)], replace(LONG, max_tokens=30)
    made = [make_engine(codec, **rule, **{"attention.backend": backend}) for backend in ("reference", "cpu")]
    answers = [generate(engine, prompts, params) for engine in made]
    assert answers[0] == answers[1]
    assert dropped(made[0]) == dropped(made[1]) > 0
    full = generate(make_engine(codec, **{"retain.threshold": 2.0}), prompts, params)
    assert answers[1] != full, "nothing was dropped"


@RULES
@pytest.mark.parametrize("codec", CODECS)
def test_hits_answer_like_misses_and_all_is_given_back(codec: str, rule: dict[str, object]) -> None:
    engine = make_engine(codec, **rule)
    cold = generate(engine, PROMPTS, USUAL)
    assert generate(engine, [*PROMPTS, *PROMPTS], USUAL) == [*cold, *cold]
    assert engine.stats()["prefill_tokens_cached"] > 0
    assert engine.holds_nothing
    manager = engine.scheduler.manager
    assert manager.tree is not None
    manager.eviction.evict(manager.tree.num_idle)
    engine.check()
    assert manager.table.ledger.allocated_bytes == 0


@RULES
@pytest.mark.parametrize("codec", CODECS)
def test_a_preemption_changes_no_token(codec: str, rule: dict[str, object]) -> None:
    """Prompt and decision are made again, and what was generated is replayed against what it saw."""
    expected = generate(make_engine(codec, **rule), PROMPTS, USUAL)
    engine = make_engine(codec, **rule)
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, USUAL)
    outputs: dict[str, RequestOutput] = {}
    every = 30 if IS_FULL else 15
    for step in range(3 * every + 5):
        for delta in engine.step():
            merge_delta(outputs, delta)
        if step % every == every * 2 // 3:
            engine.scheduler.preempt(engine.scheduler.running[step % 4])
    assert engine.stats()["preemptions"] == 3
    drain(engine, outputs)
    assert [outputs[str(index)].outputs[0].token_ids for index in range(4)] == expected


def test_a_chain_that_would_drop_exact_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"retain.chain.*special"):
        make_engine("nuq3", **{"retain.chain": "frequent,local"})


@RULES
@pytest.mark.parametrize("codec", CODECS)
def test_bytes_are_those_of_pages_sums_positions_and_the_open_chunk(codec: str, rule: dict[str, object]) -> None:
    """Exactly, in every step: pages of each head's own size, with a sidecar where first tokens are exact."""
    engine = make_engine(codec, **{"cache.share": False}, **rule)
    manager = engine.scheduler.manager
    table = manager.table
    sizes = table.page_sizes(table.sealed_codec).astype(int)
    engine.add("x", ids(300, 1), LONG)
    num_checked = 0
    while engine.has_work:
        engine.step()
        for path in (sequence.path for sequence in engine.scheduler.running):
            if path.retention.retained is None:
                continue
            pages = -(-path.retention.retained.alive.sum((-2, -1)) // 64)
            packed = path.retention.retained.policies < path.retention.retained.chain.full
            has_sums = path.retention.retained.has_sums
            is_open = path.num_tokens % 64 > 0
            expected = int((pages * (sizes + 256 * packed + 256 * has_sums)).sum())
            expected += is_open * int(packed.size * table.open_codec.page_bytes + 256 * has_sums.sum())
            expected += table.sidecar_bytes if table.sinks is not None else 0
            assert table.ledger.allocated_bytes == expected, path.num_tokens
            num_checked += is_open
    assert num_checked > 100


def test_settings_that_a_budget_would_ignore_are_refused() -> None:
    for name, value in (("frequent", 0.2), ("local", 0.1), ("chain", "special,local")):
        with pytest.raises(ConfigError, match=f"retain.{name} belongs to retain.threshold, but retain.budget is given"):
            make_engine("g4", **{"retain.threshold": "off", "retain.budget": 0.5, f"retain.{name}": value})


def test_the_reference_does_not_decode_what_a_head_gave_back() -> None:
    """The page may be anything by now, and other formats have bytes that are no channels."""
    engine = make_engine("nuq3", **{"attention.backend": "reference"})
    table = engine.scheduler.manager.table
    masks = np.full(table.shape, ALL_SLOTS, np.uint64)
    row = table.take_part(table.sealed_codec.kernel_id, masks, np.zeros(table.shape, bool), False)
    table.arena.data.fill_(0xCD)
    plan = object.__new__(ReferencePlan)  # without rows
    plan.spec, plan._staged = engine.runner.attention.spec, {}
    with pytest.raises(RuntimeError, match="out of bounds"):
        plan._keys_values(row, 0)
    table.masks[row] = 0
    keys, values = plan._keys_values(row, 0)
    assert keys.shape == values.shape and not keys.any() and not values.any()
