"""Every codec, the one that only tests have among them, with and without sharing and retention, and preempted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cache.codecs import CODECS
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.llm import merge_delta
from tests import engines
from tests.codecs import ENCODING, EVERY, options_of
from tests.effort import combine
from tests.engines import drain, generate
from tests.store_helpers import open_store, put_store
from tests.tiny_models import tiny_shape
from tests.toy_store import ToyStore

RULES: dict[str, dict[str, Any]] = {
    "everything": {},
    "threshold": {"retain.threshold": 0.4, "retain.profile_rows": 32},
    "budget": {"retain.budget": 0.5, "retain.profile_rows": 32},
}
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("toy_codec")


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


COMMON = ids(128, 1)
# The first prompt's chunk is full before its answer is.
PROMPTS = [COMMON + ids(58, 2), COMMON + ids(9, 3)]


def make_engine(codec: str, **options: Any) -> Engine:
    return engines.make_engine(tiny_shape("qwen3", max_context=512), chunks=100, **{**options_of(codec), **options})


@combine(codec=EVERY, rule=list(RULES), share=[True, False])
def test_every_codec_answers_alike_from_the_cache_and_after_a_preemption(codec: str, rule: str, share: bool) -> None:
    options = {"cache.share": share, **RULES[rule]}
    engine = make_engine(codec, **options)
    assert engine.scheduler.manager.table.sealed_codec.name == codec
    cold = generate(engine, PROMPTS, PARAMS)
    assert generate(engine, PROMPTS, PARAMS) == cold
    stats = engine.stats()
    assert (stats["prefill_tokens_cached"] > 0) == share
    assert (stats["cache"]["bytes_retention_freed"] > 0) == (rule != "everything")
    assert engine.holds_nothing
    if codec in ENCODING:
        assert generate(make_engine(codec, **options, **{"attention.backend": "reference"}), PROMPTS, PARAMS) == cold
    engine = make_engine(codec, **options)
    outputs: dict[str, RequestOutput] = {}
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, PARAMS)
    for _ in range(12):
        for delta in engine.step():
            merge_delta(outputs, delta)
    engine.scheduler.preempt(engine.scheduler.running[-1])
    drain(engine, outputs)
    assert engine.stats()["preemptions"] == 1
    assert [outputs[str(index)].outputs[0].token_ids for index in range(len(PROMPTS))] == cold


@combine(codec=EVERY, rule=list(RULES), share=[True, False], kept=["toy", "memory", "disk"])
def test_every_codec_answers_alike_from_a_store_and_after_a_swap(
    codec: str, rule: str, share: bool, kept: str, tmp_path: Path, seed: int
) -> None:
    options = {"cache.share": share, **RULES[rule]}
    cold = generate(make_engine(codec, **options), PROMPTS, PARAMS)
    engine = make_engine(codec, **options)
    store = open_store(kept, tmp_path, engine.namespace, seed)
    put_store(engine, store)
    manager = engine.scheduler.manager
    assert generate(engine, PROMPTS, PARAMS) == cold
    manager.demotion.run(sys.maxsize)
    manager.eviction.evict(manager.tree.num_chunks)
    manager.table.arena.data.fill_(0xFF)
    outputs: dict[str, RequestOutput] = {}
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, PARAMS)
    num_swapped = 0
    while engine.has_work:
        for delta in engine.step():
            merge_delta(outputs, delta)
        running = [each for each in engine.scheduler.running if each.num_generated > 3 and each.path.transfer is None]
        if running and not num_swapped:
            engine.scheduler.preempt(running[-1])
            num_swapped += running[-1].swapped is not None
    assert [outputs[str(index)].outputs[0].token_ids for index in range(len(PROMPTS))] == cold
    counts = manager.fetching.counts
    # A budget ranks tokens by sums that nobody shares, and computes the last rows of every prompt: here all rows.
    assert (counts.fetched > 0) == share
    assert counts.swapped_in == counts.swapped_out > 0 and num_swapped == 1
    engine.check()
    assert engine.holds_nothing
    if not isinstance(store, ToyStore):
        store.close()


@pytest.mark.parametrize("codec", EVERY)
def test_sealed_pages_hold_the_bytes_of_their_codec(codec: str) -> None:
    engine = make_engine(codec)
    generate(engine, [PROMPTS[0]], SamplingParams(max_tokens=1, temperature=0.0))
    table = engine.scheduler.manager.table
    cached = engine.stats()["cache"]["bytes_cached"]
    assert cached == 2 * table.chunk_bytes(table.sealed_codec) + table.sidecar_bytes
    assert cached < 2 * table.chunk_bytes(table.open_codec)
    assert (table.sidecar_bytes > 0) == CODECS[codec].has_sinks
