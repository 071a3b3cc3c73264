"""An engine with a disk: evicted chunks come back from files, also in the next process, with the same answers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.cache.manager import CacheManager
from quire.engine.engine import Engine
from quire.stores.disk import DiskStore

from ..disk_runs import MIB
from ..engines import GREEDY, drain, generate, make_engine
from ..stores import put_store
from .test_stores import CACHES, SHAPE, VOCABULARY

pytestmark = pytest.mark.usefixtures("toy_codec")


def with_disk(folder: Path, **options: Any) -> tuple[Engine, DiskStore]:
    engine = make_engine(SHAPE, **options)
    store = DiskStore(folder, 64 * MIB, engine.namespace)  # type: ignore[arg-type]
    return put_store(make_engine(SHAPE, chunks=14, **options), store), store


def settle(engine: Engine) -> None:
    """Evicts everything, which offers it to the store."""
    manager: CacheManager = engine.scheduler.manager
    manager.eviction.evict(1000)
    engine.check()


@pytest.mark.parametrize("cache", ["dense", "g4", "retained"])
def test_chunks_come_back_from_the_disk_with_the_same_answers(cache: str, tmp_path: Path, seed: int) -> None:
    rng, options = random.Random(seed), CACHES[cache]
    prompts = [[rng.randrange(VOCABULARY) for _ in range(64 * 3 + rng.randrange(64))] for _ in range(4)]
    params = replace(GREEDY, max_tokens=20)
    expected = [generate(make_engine(SHAPE, **options), [prompt], params)[0] for prompt in prompts]
    for is_restarted in (False, True):
        engine, store = with_disk(tmp_path / "store", **options)
        for index, prompt in enumerate(prompts):
            for attempt in range(2):
                engine.add(f"{index}-{attempt}", None, prompt, params)
                output = drain(engine)[f"{index}-{attempt}"]
                assert output.outputs[0].token_ids == expected[index], f"seed {seed}"
                if is_restarted or attempt:
                    assert output.num_cached_tokens > 0
                settle(engine)
        stats = store.stats()
        assert stats["num_failed"] == 0 and int(stats["num_read"] or 0) > 0
        assert store.flush(10)
        store.check()
        store.close()
