"""Prefixes that another instance has in its cache are fetched from it instead of computed, if they are still there.

Answers are those of one engine. Instances poison their memory at first and where they let go of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.cluster.bodies import PullNotFound, PullRequest
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams

from ..clusters import SMALL, RunningCluster, ThreadedInstances
from ..tiny_models import save_tiny

PARAMS = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)


@pytest.fixture(params=["shm", "tcp"])
def turns(request: pytest.FixtureRequest, model: Path) -> Iterator[RunningCluster]:
    """One instance computes prompts and one decodes, so a second turn begins where its first was not decoded."""
    with RunningCluster(model, SMALL, ThreadedInstances(), request.param) as running:
        running.ask("prefill", always_fetches)
        yield running
        running.settle()


def always_fetches(engine: Engine) -> bool:
    """Computing a chunk of so small a model is almost as fast."""
    engine.scheduler.manager.fetching._pays = lambda *_: True  # type: ignore[method-assign]
    return True


def prompt_of(ids: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": ids}


def answer(running: RunningCluster | LLM, ids: list[int], params: SamplingParams = PARAMS) -> RequestOutput:
    (found,) = running.generate([prompt_of(ids)], params)
    return found


def ids_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def asked_for(running: RunningCluster, role: str) -> list[PullRequest]:
    return [message for _, message in running.instance(role).sent if isinstance(message, PullRequest) and message.names]


def test_the_next_turn_fetches_what_was_decoded(turns: RunningCluster, single_engine: LLM, seed: int) -> None:
    rng = random.Random(seed)
    first = [rng.randrange(3, 250) for _ in range(200)]
    second = [*first, *ids_of(answer(turns, first)), *(rng.randrange(3, 250) for _ in range(30))]
    found = answer(turns, second)
    assert ids_of(found) == ids_of(answer(single_engine, second))
    # Four whole chunks of 200 + 69 tokens, three of them computed by the source itself.
    assert [each.groups for each in asked_for(turns, "prefill")] == [[[3]]]
    assert found.cached_by_tier.get("neighbour") == 64 and found.num_cached_tokens == 4 * 64
    assert not [message for _, message in turns.instance("decode").sent if isinstance(message, PullNotFound)]


def test_chunks_in_codes_travel_as_they_are(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    options = SMALL | {"cache.codec": "g4", "cache.check": False}
    model = save_tiny(tmp_path, head_dim=64, max_position_embeddings=1024)
    first = [rng.randrange(3, 250) for _ in range(200)]
    with RunningCluster(model, options, ThreadedInstances(), "shm") as running:
        running.ask("prefill", always_fetches)
        second = [*first, *ids_of(answer(running, first)), *(rng.randrange(3, 250) for _ in range(30))]
        found = answer(running, second)
        assert found.cached_by_tier.get("neighbour") == 64
        assert ids_of(found) == ids_of(answer(LLM(str(model), options), second))


def test_what_is_not_there_any_more_is_computed(turns: RunningCluster, single_engine: LLM, seed: int) -> None:
    rng = random.Random(seed)
    first = [rng.randrange(3, 250) for _ in range(200)]
    second = [*first, *ids_of(answer(turns, first)), *(rng.randrange(3, 250) for _ in range(30))]

    def evict(engine: Engine) -> bool:
        manager = engine.scheduler.manager
        manager.eviction.evict(manager.tree.num_chunks)
        return True

    turns.ask("decode", evict)
    found = answer(turns, second)
    assert ids_of(found) == ids_of(answer(single_engine, second))
    assert len(asked_for(turns, "prefill")) == 1
    assert [message for _, message in turns.instance("decode").sent if isinstance(message, PullNotFound)]
    assert found.cached_by_tier.get("neighbour", 0) == 0


def test_a_salt_keeps_prefixes_apart(turns: RunningCluster, seed: int) -> None:
    rng = random.Random(seed)
    first = [rng.randrange(3, 250) for _ in range(200)]
    (before,) = turns.generate([prompt_of(first) | {"cache_salt": "a"}], PARAMS)
    second = [*first, *ids_of(before), *(rng.randrange(3, 250) for _ in range(30))]
    for salt, count in (("b", 0), ("a", 1)):
        (found,) = turns.generate([prompt_of(second) | {"cache_salt": salt}], PARAMS)
        assert len(asked_for(turns, "prefill")) == count and (found.num_cached_tokens > 0) == (count > 0)


def test_instances_that_do_both_parts_share_their_prefixes(model: Path, single_engine: LLM, seed: int) -> None:
    """A long queue sends a prompt to where its beginning is not cached, and the beginning comes along."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 250) for _ in range(320)]
    prompts = [[*common, *(rng.randrange(3, 250) for _ in range(40))] for _ in range(6)]
    with RunningCluster(model, SMALL, ThreadedInstances(), "shm", mixed=2) as running:
        answer(running, common)
        for instance in list(running.processes.instances.values()):  # type: ignore[attr-defined]
            instance.ask(always_fetches)
        found = running.generate([prompt_of(each) for each in prompts], PARAMS)
        assert [ids_of(each) for each in found] == [ids_of(answer(single_engine, each)) for each in prompts]
        fetched = [each.cached_by_tier.get("neighbour", 0) for each in found]
        assert max(fetched) == 320 and all(each.num_cached_tokens >= 320 for each in found), fetched
        running.settle()
