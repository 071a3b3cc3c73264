"""A sequence leaves one engine after its first token and goes on in another: same tokens, nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.cache.path import SwappedPath
from quire.cluster.bodies import cache_state_of, swapped_of
from quire.cluster.messages import Attempt
from quire.cluster.outgoing_pages import OutgoingPages
from quire.cluster.peer_store import PeerStore, Pull
from quire.engine.admission import AdmittedRequest
from quire.engine.engine import Engine
from quire.engine.handover import Handover
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.llm import merge_delta
from quire.stores.signer import ExtentSigner

from ..codecs import EVERY, TOY, options_of
from ..effort import combine, whole
from ..engines import GREEDY, drain, make_engine
from ..poison import poison_free
from ..store_helpers import put_store
from ..tiny_models import tiny_shape

SHAPE = tiny_shape(head_dim=16)
SEAL = ExtentSigner(bytes(range(32)))
RETENTION: dict[str, dict[str, Any]] = {
    "no retention": {},
    "threshold": {"retain.threshold": 0.9, "retain.profile_rows": 32},
    "budget": {"retain.budget": 0.5, "retain.profile_rows": 32},
}
CODECS = whole(sorted({"dense", *EVERY}, key=lambda name: (name not in ("dense", "nuq3", TOY.name), name)), 3)

pytestmark = pytest.mark.usefixtures("toy_codec")


class Pair:
    """A source and a receiver in one process. What is pulled arrives at once, or when `deliver` is called."""

    def __init__(self, chunks: int = 64, at_once: bool = True, **options: Any) -> None:
        self.source = make_engine(SHAPE, chunks=chunks, **options)
        self.peer_store = PeerStore(SEAL)
        self.receiver = put_store(make_engine(SHAPE, chunks=chunks, **options), self.peer_store)
        table: Any = self.receiver.scheduler.manager.table
        self.peer_store.table = table
        self.peer_store.ask = self._ask
        self.at_once = at_once
        self.pulls: list[Pull] = []
        self.num_bytes = 0

    def _ask(self, pull: Pull) -> None:
        self.pulls.append(pull)
        if self.at_once:
            self.deliver()

    def outgoing_pages(self, pull: Pull) -> OutgoingPages:
        engine = self.source
        export = engine.exports[f"r{pull.attempt.request}"]
        pages = [export.pages(group) for group in pull.groups]
        return OutgoingPages(pages, SHAPE.num_layers, SEAL, lambda pages: None)

    def deliver(self) -> None:
        for pull in self.pulls:
            outgoing_pages = self.outgoing_pages(pull)
            assert self.peer_store.arrive(pull.number, outgoing_pages.pack())
            outgoing_pages.done()
            self.num_bytes += outgoing_pages.num_bytes
        self.pulls.clear()

    def begin(self, number: int, prompt: list[int], params: SamplingParams, seed: int, tokens: Any = ()) -> None:
        leaving = Handover(seed, tuple(tokens), will_hand_over=True)
        self.source.queue(f"r{number}", AdmittedRequest(None, prompt, params), continued=leaving)

    def go_on(self, number: int, prompt: list[int], params: SamplingParams, seed: int, tokens: list[int]) -> None:
        """The receiver's part, once the source holds the cache."""
        export = self.source.exports[f"r{number}"]
        swapped = arrived(export.swapped)
        keys = export.keys
        self.peer_store.offer(Attempt(number, 1), "source", keys, swapped.num_shared, swapped.run)
        continued = Handover(seed, tuple(tokens), swapped=swapped)
        self.receiver.queue(f"r{number}", AdmittedRequest(None, prompt, params), continued=continued)

    def let_go(self, number: int) -> None:
        """Ends what the source holds, and overwrites it."""
        self.peer_store.withdraw(Attempt(number, 1))
        self.source.end_export(f"r{number}")
        table: Any = self.source.scheduler.manager.table
        poison_free(table)

    def check(self) -> None:
        for engine in (self.source, self.receiver):
            engine.check()
            assert engine.holds_nothing and not engine.exports
            assert engine.scheduler.manager.stats()["bytes_used"] == 0


def arrived(swapped: SwappedPath) -> SwappedPath:
    """Without anything of the source's own: its objects, but for plain values."""
    retention = swapped.path.retention
    kept = None if retention.retained is None else copied(retention.retained)
    path = replace(swapped.path, retention=replace(retention, retained=kept))
    return SwappedPath(path, swapped.num_shared, None if swapped.run is None else replace(swapped.run))


def copied(retained: Any) -> Any:
    made = replace(retained)
    made.positions, made.in_place = retained.positions.copy(), retained.in_place.copy()
    made.origins = retained.origins.copy()
    return made


def answers(engine: Engine, prompts: list[list[int]], params: SamplingParams, seeds: list[int]) -> list[list[int]]:
    """Of one engine, a request at a time."""
    found = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        engine.queue("alone", AdmittedRequest(None, prompt, params), continued=Handover(seed))
        found.append(drain(engine)["alone"].outputs[0].token_ids)
    return found


def tokens_of(outputs: dict[str, RequestOutput], number: int) -> list[int]:
    found = outputs.get(f"r{number}")
    return [] if found is None else found.outputs[0].token_ids


def prompts_of(rng: random.Random, lengths: Iterator[int] | list[int]) -> list[list[int]]:
    shared = [rng.randrange(256) for _ in range(1000)]
    return [[*shared[: length // 2], *(rng.randrange(256) for _ in range(length - length // 2))] for length in lengths]


LENGTHS = [1, 63, 64, 65, 128, 200, 257, 320]


@combine(1, codec=CODECS, retention=list(RETENTION), share=[True, False], sampled=[False, True])
def test_tokens_are_those_of_one_engine(codec: str, retention: str, share: bool, sampled: bool, seed: int) -> None:
    rng = random.Random(seed)
    options = {**options_of(codec), **RETENTION[retention], "cache.share": share}
    if codec != "dense":
        options["cache.sink_tokens"] = 3
    params = replace(GREEDY, max_tokens=90)
    if sampled:
        params = replace(params, temperature=0.9, repetition_penalty=1.2, presence_penalty=0.3)
    prompts = prompts_of(rng, rng.sample(LENGTHS, 4))
    seeds = [rng.randrange(1 << 40) for _ in prompts]
    alone = answers(make_engine(SHAPE, **options), prompts, params, seeds)
    pair, first, rest = Pair(**options), dict[str, RequestOutput](), dict[str, RequestOutput]()
    for number, (prompt, own) in enumerate(zip(prompts, seeds, strict=True)):
        pair.begin(number, prompt, params, own)
    drain(pair.source, first)
    for number, (prompt, own) in enumerate(zip(prompts, seeds, strict=True)):
        pair.go_on(number, prompt, params, own, tokens_of(first, number))
    drained = drain(pair.receiver, rest)
    for number in range(len(prompts)):
        pair.let_go(number)
    assert [tokens_of(first, number) + tokens_of(drained, number) for number in range(len(prompts))] == alone
    pair.check()


def test_pages_are_not_read_after_the_source_let_them_go(seed: int) -> None:
    rng = random.Random(seed)
    (prompt,) = prompts_of(rng, [300])
    pair, params = Pair(), replace(GREEDY, max_tokens=40)
    (alone,) = answers(make_engine(SHAPE), [prompt], params, [1])
    pair.begin(0, prompt, params, 1)
    first = drain(pair.source)
    pair.go_on(0, prompt, params, 1, tokens_of(first, 0))
    rest: dict[str, RequestOutput] = {}
    for delta in pair.receiver.step():
        merge_delta(rest, delta)
    pair.let_go(0)
    pair.source.scheduler.manager.eviction.evict(100)
    pair.source.scheduler.manager.table.arena.data.fill_(0xFF)  # type: ignore[attr-defined]
    assert tokens_of(first, 0) + tokens_of(drain(pair.receiver, rest), 0) == alone


def test_a_second_request_with_the_prefix_pulls_only_its_suffix(seed: int) -> None:
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(256)]
    pair, params = Pair(), replace(GREEDY, max_tokens=5)
    pulled = []
    for number in range(2):
        prompt = [*shared, *(rng.randrange(256) for _ in range(70))]
        pair.begin(number, prompt, params, 1)
        first = drain(pair.source)
        before = pair.num_bytes
        pair.go_on(number, prompt, params, 1, tokens_of(first, number))
        drain(pair.receiver)
        pair.let_go(number)
        pulled.append(pair.num_bytes - before)
    assert pulled[0] > 2.5 * pulled[1], "6 chunks, and then 2 of them"
    pair.check()


def test_a_transfer_may_take_chunks_that_several_offers_have(seed: int) -> None:
    """Two requests with one prefix are handed over at once: a chunk is found in the one offer or in the other."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(200)]
    prompts = [[*shared, *(rng.randrange(256) for _ in range(100))] for _ in range(2)]
    pair, params = Pair(), replace(GREEDY, max_tokens=5)
    alone = answers(make_engine(SHAPE), prompts, params, [1, 1])
    for number, prompt in enumerate(prompts):
        pair.begin(number, prompt, params, 1)
    first = drain(pair.source)
    for number, prompt in enumerate(prompts):
        pair.go_on(number, prompt, params, 1, tokens_of(first, number))
    rest = drain(pair.receiver)
    for number in range(2):
        pair.let_go(number)
    assert [tokens_of(first, number) + tokens_of(rest, number) for number in range(2)] == alone
    assert pair.receiver.stats()["replayed_tokens"] == 0, "the cache came whole"
    pair.check()


def test_damaged_extents_are_not_taken(seed: int) -> None:
    rng = random.Random(seed)
    (prompt,) = prompts_of(rng, [200])
    pair, params = Pair(at_once=False), replace(GREEDY, max_tokens=20)
    (alone,) = answers(make_engine(SHAPE), [prompt], params, [1])
    pair.begin(0, prompt, params, 1)
    first = drain(pair.source)
    pair.go_on(0, prompt, params, 1, tokens_of(first, 0))
    pair.receiver.step()
    (pull,) = pair.pulls
    outgoing_pages = pair.outgoing_pages(pull)

    def damaged() -> Iterator[memoryview]:
        for count, extent in enumerate(outgoing_pages.pack()):
            if count == 2:
                extent[-1] ^= 1
            yield extent

    assert not pair.peer_store.arrive(pull.number, damaged())
    assert not pull.transfer.is_over and pair.peer_store.stats()["num_damaged"] == 1
    pair.deliver()
    assert tokens_of(first, 0) + tokens_of(drain(pair.receiver), 0) == alone
    outgoing_pages.done()
    pair.let_go(0)
    pair.check()


def test_a_source_that_fails_leaves_the_prompt_to_its_receiver(seed: int) -> None:
    rng = random.Random(seed)
    (prompt,) = prompts_of(rng, [200])
    pair, params = Pair(at_once=False), replace(GREEDY, max_tokens=20)
    (alone,) = answers(make_engine(SHAPE), [prompt], params, [1])
    pair.begin(0, prompt, params, 1)
    first = drain(pair.source)
    pair.go_on(0, prompt, params, 1, tokens_of(first, 0))
    pair.receiver.step()
    pair.peer_store.fail(pair.pulls.pop().number, "gone")
    pair.let_go(0)
    assert tokens_of(first, 0) + tokens_of(drain(pair.receiver), 0) == alone
    pair.check()


@pytest.mark.parametrize("retention", list(RETENTION))
def test_an_answer_goes_on_from_tokens_alone(retention: str, seed: int) -> None:
    """Wherever the first engine stopped, with the text and log-probabilities of one answer."""
    rng = random.Random(seed)
    prompts, params = prompts_of(rng, [150, 256]), replace(GREEDY, max_tokens=80, temperature=0.8, logprobs=0)
    for prompt in prompts:
        whole_engine = make_engine(SHAPE, **RETENTION[retention])
        whole_engine.queue("alone", AdmittedRequest(None, prompt, params), continued=Handover(7))
        alone = drain(whole_engine)["alone"].outputs[0]
        for stop in (1, 40, 79):
            engine = make_engine(SHAPE, **RETENTION[retention])
            head = alone.token_ids[:stop]
            so_far = float(np.sum([next(iter(each.values())).logprob for each in (alone.logprobs or [])[:stop]]))
            going_on = Handover(7, tuple(head), so_far)
            engine.queue("more", AdmittedRequest(None, prompt, params), continued=going_on)
            rest = drain(engine)["more"].outputs[0]
            assert head + rest.token_ids == alone.token_ids and alone.text.endswith(rest.text)
            assert rest.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-4)
            assert engine.holds_nothing


@pytest.mark.parametrize("length", [127, 128, 129])
def test_an_answer_that_was_begun_elsewhere_is_handed_over_at_the_end_of_a_chunk(length: int, seed: int) -> None:
    """The source has not taken the next chunk, which its manifest could not describe."""
    rng = random.Random(seed)
    pair, params = Pair(), replace(GREEDY, max_tokens=60)
    prompt = [rng.randrange(256) for _ in range(100)]
    (alone,) = answers(make_engine(SHAPE), [prompt], params, [1])
    head = alone[: length - 100]
    pair.begin(0, prompt, params, 1, head)
    first = drain(pair.source)
    table: Any = pair.source.scheduler.manager.table
    state = cache_state_of(pair.source.exports["r0"].swapped, table.shape, b"digest")
    swapped_of(state, length, table.shape, len(table.sizes), b"digest")
    pair.go_on(0, prompt, params, 1, head + tokens_of(first, 0))
    assert head + tokens_of(first, 0) + tokens_of(drain(pair.receiver), 0) == alone
    pair.let_go(0)
    pair.check()


def test_an_answer_of_one_token_is_never_handed_over() -> None:
    pair = Pair()
    pair.begin(0, [1, 2, 3], replace(GREEDY, max_tokens=1), 1)
    output = drain(pair.source)["r0"]
    assert output.finished and output.outputs[0].finish_reason == "length" and not pair.source.exports
    pair.check()


def test_held_pages_are_not_given_to_others(seed: int) -> None:
    """A source whose receiver has no room keeps what it holds, and computes no more than fits beside it."""
    rng = random.Random(seed)
    pair, params = Pair(chunks=12), replace(GREEDY, max_tokens=4)
    prompts = [[rng.randrange(256) for _ in range(250)] for _ in range(4)]
    alone = answers(make_engine(SHAPE), prompts, params, [1] * 4)
    for number, prompt in enumerate(prompts):
        pair.begin(number, prompt, params, 1)
    first: dict[str, RequestOutput] = {}
    for _ in range(50):
        for delta in pair.source.step():
            merge_delta(first, delta)
        pair.source.check()
    assert 0 < len(pair.source.exports) < 4, "12 chunks hold two or three prompts of 4"
    rest: dict[str, RequestOutput] = {}
    for number, prompt in enumerate(prompts):
        while f"r{number}" not in pair.source.exports:
            for delta in pair.source.step():
                merge_delta(first, delta)
        pair.go_on(number, prompt, params, 1, tokens_of(first, number))
        drain(pair.receiver, rest)
        pair.let_go(number)
    assert [tokens_of(first, number) + tokens_of(rest, number) for number in range(4)] == alone
    pair.check()
