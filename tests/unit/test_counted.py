"""Retention by counts decides as retention on pages: two schedulers side by side, one with an arena, one without."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.cache.arena import Arena
from quire.cache.codecs import Codec
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.group import GroupCodec
from quire.cache.codecs.sums import SumsCodec
from quire.cache.ledger import PAGE_TOKENS, PageCounts, PageLedger
from quire.cache.manager import CacheManager
from quire.cache.retention.decisions import Decided, Retention
from quire.cache.retention.policies import Chain, keep_on
from quire.cache.sinks import Sinks
from quire.cache.table import ChunkTable
from quire.cache.tree import PrefixTree
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.request import Request, Sequence
from quire.engine.scheduler import Scheduler
from quire.planning.counted import Classes, CountedRetainer, CountedTable
from tests.effort import EFFORT, tries

L, H, D = 2, 4, 8
CLASSES = np.array([[0, 1, 2, 3], [1, 1, 3, 0]])
CHAIN = Chain(2.0, frequent=0.2, local=0.3)
OPEN = DenseCodec(D, torch.float32)
SINKS = Sinks(1, L, H, D, torch.float32)
RETENTION = Retention(CHAIN, special=[[3], [4, 5]], punctuation=frozenset([7]), profile_rows=16)


def managers(chunks: int, sealed: list[Codec], sinks: Sinks | None) -> tuple[CacheManager, CacheManager]:
    """One with pages and one that counts, with room for `chunks` open chunks."""
    num_bytes, slab = chunks * L * H * OPEN.page_bytes, 2 * OPEN.page_bytes
    ledger = PageLedger(num_bytes, slab)
    arena = Arena(ledger.num_bytes)
    paged = ChunkTable(ledger, L, H, OPEN, *sealed, sinks=sinks, sums=SumsCodec(), arena=arena)
    counted = CountedTable(PageCounts(num_bytes, slab), Classes(CLASSES), OPEN, *sealed, sinks=sinks)
    return (
        CacheManager(paged, PrefixTree((L, H)), retention=RETENTION),
        CacheManager(counted, PrefixTree((L, H)), retention=RETENTION, retainer=CountedRetainer),
    )


def decision(sequence: Sequence, policies: list[int]) -> Decided:
    """What the classes keep of a prompt if its tokens all have the same attention."""
    n = sequence.num_prompt
    by_class = np.array(policies, np.uint8)[:, None]
    positions = np.tile(np.arange(n, dtype=np.int32), (len(policies), 1, 1))
    marks = RETENTION.marks(sequence.token_ids)
    kept = keep_on(CHAIN, by_class, positions, marks, np.zeros(positions.shape, np.float32), n, n)
    kept[..., n // PAGE_TOKENS * PAGE_TOKENS :] = True
    return Decided(by_class, kept, np.ones((len(policies), 1, CHAIN.full + 1)), CHAIN)


def of_heads(decided: Decided) -> Decided:
    """A decision for classes, as one for heads."""
    return Decided(decided.policies[:, 0][CLASSES], decided.kept[:, 0][CLASSES], decided.recovery, CHAIN)


def requests_of(rng: random.Random, count: int) -> list[Request]:
    prefixes = [[rng.randrange(10) for _ in range(rng.randint(1, 5) * PAGE_TOKENS)] for _ in range(3)]
    found = []
    for number in range(count):
        prompt = list(rng.choice(prefixes)) if rng.random() < 0.7 else []
        prompt += [rng.randrange(10) for _ in range(rng.randint(1, 300))]
        length = rng.randint(1, 200)
        hints = CacheHints(cache_pin=5.0) if rng.random() < 0.1 else CacheHints()
        request = Request(str(number), None, prompt, SamplingParams(max_tokens=length), 0.0, hints)
        request.sequences.append(Sequence(request, 0, list(prompt), length))
        found.append(request)
    return found


def state(scheduler: Scheduler) -> dict[str, object]:
    """All that decisions depend on."""
    manager = scheduler.manager
    tree, table = manager.tree, manager.table
    for sequence in scheduler.calendar:
        scheduler.calendar.settle(sequence)
    counts = {
        name: np.asarray(value).tolist() for name, value in vars(tree).items() if name.startswith(("num_", "part"))
    }
    running = [
        (each.sequence_id, each.path.num_tokens, len(each.path.chunks), each.path.num_dropped, each.path.num_shared)
        for each in scheduler.running
    ]
    pages = [table.ledger.out(size) for size in table.ledger.page_sizes]
    return {"running": running, "pages": pages, "rows": table.num_taken, "stats": manager.stats(), **counts}


CASES = {"dense": ([], None), "g4": ([GroupCodec(D)], None), "g4 with sinks": ([GroupCodec(D)], SINKS)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(tries(6)))
def test_counts_are_those_of_the_pages(case: str, seed: int) -> None:
    rng = random.Random(f"{case} {seed}")
    sealed, sinks = CASES[case]
    seed_of_load, num_requests = rng.random(), 10 if EFFORT == "quick" else 14
    schedulers = [
        Scheduler(manager, 200, rng_max, 1000)
        for manager, rng_max in zip(managers(rng.randint(16, 40), sealed, sinks), [rng.randint(2, 6)] * 2, strict=True)
    ]
    for scheduler in schedulers:
        for request in requests_of(random.Random(seed_of_load), num_requests):
            scheduler.add(request.sequences)
    policies = [[rng.choice([0, 1, 2, 3, CHAIN.full, CHAIN.full]) for _ in range(4)] for _ in range(num_requests)]

    def of_classes(sequence: Sequence) -> Decided:
        return decision(sequence, policies[sequence.sequence_id])

    paged, counted = schedulers
    while True:
        steps = paged.advance(3, lambda sequence: of_heads(of_classes(sequence)))
        assert counted.advance(3, of_classes) == steps
        if not steps:
            break
        for scheduler in schedulers:
            scheduler.check()
            scheduler.manager.tick(scheduler.counters.steps / 10)
        assert state(counted) == state(paged)
    assert not paged.running and not paged.waiting
    assert paged.counters == counted.counters
    assert paged.manager.retention.bytes_freed > 0
