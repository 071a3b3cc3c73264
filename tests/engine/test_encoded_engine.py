"""Engines with encoded sealed chunks: answers depend only on tokens and positions, and all bytes are accounted for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.codecs import CODECS, DENSE
from quire.cache.ledger import PAGE_TOKENS
from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.engine.engine import Engine
from quire.engine.params import CacheHints, SamplingParams
from quire.engine.pins import check_pin_room, protect
from quire.errors import ConfigError
from quire.models.shape import ModelShape
from tests import engines
from tests.codecs import EVERY, options_of, row_of
from tests.effort import combine, examples
from tests.engines import chunk_bytes, drain, generate
from tests.tiny_models import tiny_shape

CODEC = "nuq3"
LONG = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
PROMPT_LOGPROBS = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)


def shape(**changes: Any) -> ModelShape:
    return tiny_shape("qwen3", max_context=1024, **changes)


def make_engine(of: ModelShape | None = None, **options: Any) -> Engine:
    return engines.make_engine(of or shape(), **{"cache.codec": CODEC, **options})


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompt_logprobs(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """The log-probability of every prompt token but the first."""
    engine.add("it", prompt, PROMPT_LOGPROBS)
    found = drain(engine)["it"].prompt_logprobs
    assert found is not None
    return torch.tensor([next(iter(each.values())).logprob for each in found[1:] if each is not None])


def next_logits(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """What the model says follows the prompt, [V], with whatever of it the cache has."""
    seen: list[torch.Tensor] = []
    sample = engine.runner.sampler.sample

    def tapped(logits: torch.Tensor, rows: Any) -> Any:
        seen.append(logits.clone())
        return sample(logits, rows)

    engine.runner.sampler.sample = tapped  # type: ignore[method-assign]
    generate(engine, [prompt], SamplingParams(max_tokens=1, temperature=0.0))
    engine.runner.sampler.sample = sample  # type: ignore[method-assign]
    return seen[0][0]


SHAPES = [shape(), tiny_shape("opt", head_dim=16, hidden_size=64)]
"""One that rotates, and one that does not."""


@combine(codec=[name for name, row in CODECS.items() if row.has_sinks], of=SHAPES, sinks=[0, 1, 5])
def test_the_cpu_backend_is_the_reference(codec: str, of: ModelShape, sinks: int) -> None:
    prompt = ids(300, 1)
    found = [
        prompt_logprobs(
            make_engine(of, **{"cache.codec": codec, "cache.sink_tokens": sinks, "attention.backend": backend}), prompt
        )
        for backend in ("cpu", "reference")
    ]
    assert (found[0] - found[1]).abs().max() < 1e-3


def test_encoding_changes_what_later_chunks_see_and_not_the_first() -> None:
    prompt = ids(200, 1)
    encoded, dense = (
        prompt_logprobs(make_engine(), prompt),
        prompt_logprobs(make_engine(**{"cache.codec": "dense"}), prompt),
    )
    difference = (encoded - dense).abs()
    assert difference[: PAGE_TOKENS - 1].max() < 1e-4, "a token's own chunk is exact"
    assert difference[PAGE_TOKENS:].max() > 1e-3


@pytest.mark.parametrize("length", [65, 128, 129, 200, 330])
def test_a_hit_says_what_a_miss_says(length: int) -> None:
    prompt = ids(length, 2)
    engine, alone = make_engine(), make_engine(**{"cache.share": False})
    missed, hit, unshared = next_logits(engine, prompt), next_logits(engine, prompt), next_logits(alone, prompt)
    assert engine.stats()["prefill_tokens_cached"] == (length - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert (missed - hit).abs().max() < 1e-4
    assert (missed - unshared).abs().max() < 1e-4


def test_equal_prompts_make_equal_pages() -> None:
    prompt = ids(200, 3)
    images = []
    for budget in (128, 256):
        engine = make_engine(**{"scheduler.token_budget": budget, "scheduler.max_running": 4})
        generate(engine, [prompt])
        table = engine.scheduler.manager.table
        tree = engine.scheduler.manager.tree
        assert tree is not None
        (segment,) = tree.segments()
        images.append(
            [
                table.arena.load(
                    table.pages[chunk, layer, head : head + 1], int(table.page_sizes(table.sealed_codec)[layer, head])
                )
                for chunk in segment.chunks[:3]
                for layer in range(table.pages.shape[1])
                for head in range(table.pages.shape[2])
            ]
        )
    assert all(torch.equal(a, b) for a, b in zip(*images, strict=True))


@pytest.mark.parametrize("budget", [128, 192, 1024])
def test_how_a_prompt_is_sliced_does_not_matter(budget: int) -> None:
    prompt = ids(500, 4)
    whole = prompt_logprobs(make_engine(**{"scheduler.token_budget": 2048}), prompt)
    sliced = prompt_logprobs(make_engine(**{"scheduler.token_budget": budget, "scheduler.max_running": 4}), prompt)
    assert (whole - sliced).abs().max() < 1e-4


def test_without_strictness_it_does() -> None:
    prompt = ids(500, 4)
    options = {"cache.strict": False, "scheduler.max_running": 4}
    dense = prompt_logprobs(make_engine(**{"cache.codec": "dense"}), prompt)
    whole = prompt_logprobs(make_engine(**options, **{"scheduler.token_budget": 2048}), prompt)
    sliced = prompt_logprobs(make_engine(**options, **{"scheduler.token_budget": 128}), prompt)
    assert (whole - dense).abs().max() < 1e-4, "in one slice nothing is read encoded"
    assert (sliced - whole).abs().max() > 1e-3
    plain = make_engine(**options, **{"scheduler.token_budget": 128, "attention.backend": "reference"})
    assert (sliced - prompt_logprobs(plain, prompt)).abs().max() < 1e-3


def test_decoding_reads_what_prefill_reads() -> None:
    """A token's probability is the same whether it was generated or part of a prompt."""
    prompt = ids(100, 5)
    engine = make_engine(**{"cache.share": False})
    engine.add("it", prompt, SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True, logprobs=0))
    (answer,) = drain(engine)["it"].outputs
    assert answer.logprobs is not None
    said = torch.tensor([next(iter(each.values())).logprob for each in answer.logprobs])
    read = prompt_logprobs(make_engine(), prompt + answer.token_ids)[len(prompt) - 1 :]
    assert (said - read).abs().max() < 1e-4


def test_batches_answer_as_one_alone() -> None:
    prompts = [ids(length, seed) for seed, length in enumerate((3, 63, 64, 65, 127, 190, 250))]
    together = generate(make_engine(chunks=128), prompts, LONG)
    assert together == [generate(make_engine(), [prompt], LONG)[0] for prompt in prompts]


def test_a_prompt_shorter_than_the_sinks() -> None:
    found = [
        generate(make_engine(**{"cache.sink_tokens": 5, "attention.backend": backend}), [ids(3, 6)], LONG)
        for backend in ("cpu", "reference")
    ]
    assert found[0] == found[1]


def test_sinks_are_exact_and_not_in_the_page() -> None:
    engine = make_engine(**{"cache.sink_tokens": 2})
    generate(engine, [ids(70, 7)], SamplingParams(max_tokens=1, temperature=0.0))
    table = engine.scheduler.manager.table
    tree = engine.scheduler.manager.tree
    assert tree is not None and table.sinks is not None
    (segment,) = tree.segments()
    chunk = int(segment.chunks[0])
    for layer in range(2):
        exact = torch.stack(table.sinks.rows(table.arena, int(table.sidecars[chunk]), layer), 1)
        assert exact.isfinite().all() and exact.abs().amin((-1, -2, -3)).ne(0).any()
        for head in range(2):
            size = int(table.page_sizes(table.sealed_codec)[layer, head])
            k, v = table.sealed_codec.decode(
                layer, head, table.arena.load(table.pages[chunk, layer, head : head + 1], size)
            )
            zeros = torch.zeros(1, PAGE_TOKENS, k.shape[-1])
            none_k, none_v = table.sealed_codec.decode(
                layer, head, table.sealed_codec.encode(layer, head, zeros, zeros)
            )
            assert torch.equal(k[0, :2], none_k[0, :2]) and torch.equal(v[0, :2], none_v[0, :2])


def test_an_overwritten_page_changes_the_next_logits() -> None:
    prompt = ids(200, 8)
    engine = make_engine()
    before = next_logits(engine, prompt)
    assert torch.equal(next_logits(engine, prompt), next_logits(engine, prompt))
    table, tree = engine.scheduler.manager.table, engine.scheduler.manager.tree
    assert tree is not None
    (segment,) = tree.segments()
    size = int(table.page_sizes(table.sealed_codec)[0, 0])
    table.arena.store(table.pages[segment.chunks[1], 0, :1], size, torch.zeros(1, size, dtype=torch.uint8))
    assert (next_logits(engine, prompt) - before).abs().max() > 1e-4


def test_preempted_requests_answer_as_if_they_had_not_been() -> None:
    prompts = [ids(120, seed) for seed in range(6)]
    free = generate(make_engine(chunks=256), prompts, LONG)
    tight = make_engine(chunks=9)
    assert generate(tight, prompts, LONG) == free
    assert tight.stats()["preemptions"] > 0
    assert tight.holds_nothing


def test_more_prompts_than_fit_evict_each_other() -> None:
    engine = make_engine(chunks=4)
    prompts = [ids(200, seed) for seed in range(12)]
    first = [generate(engine, [prompt])[0] for prompt in prompts]
    assert engine.stats()["cache"]["bytes_evicted"] > 0
    assert engine.holds_nothing
    assert [generate(engine, [prompt])[0] for prompt in prompts] == first


def finishes(engine: Engine, name: str, prompt: list[int], steps: int = 400) -> bool:
    engine.add(name, prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    return any(delta.finished for _ in range(steps) for delta in engine.step())


@pytest.mark.parametrize("sinks", [0, 1, 5, 64])
def test_sidecars_that_are_only_cached_make_room(sinks: int) -> None:
    """Many short prompts leave a sidecar each; what then needs their slabs gets them, however long it is."""
    engine = make_engine(tiny_shape("qwen3", max_context=8192), chunks=16, **{"cache.sink_tokens": sinks})
    for seed in range(40):
        assert finishes(engine, str(seed), ids(66, 100 + seed)), f"the prompt after {seed} others never starts"
    assert finishes(engine, "long", ids(engine.max_context - 2, 7))
    engine.check()
    assert engine.stats()["cache"]["bytes_evicted"] > 0 and engine.holds_nothing


@pytest.mark.parametrize("chunks", [10, 13, 16, 33])
@pytest.mark.parametrize("sinks", [1, 5, 64])
def test_what_is_kept_for_good_leaves_what_is_promised(sinks: int, chunks: int) -> None:
    engine = make_engine(tiny_shape("qwen3", max_context=8192), chunks=chunks, **{"cache.sink_tokens": sinks})
    kept = [ids(66, 500 + seed) for seed in range(max(1, chunks // 8))]
    for prompt in kept:
        check_pin_room(engine, prompt)
        once = SamplingParams(max_tokens=1, temperature=0.0)
        engine.add("pinned", prompt, once, hints=CacheHints(cache_pin=True))
        drain(engine)
        protect(engine, prompt)
    assert finishes(engine, "long", ids(engine.max_context - 2, 7))
    engine.check()


def test_aborting_at_every_step_leaks_nothing() -> None:
    prompt = ids(190, 9)
    for steps in range(1, 12):
        engine = make_engine(**{"scheduler.token_budget": 128, "scheduler.max_running": 2})
        engine.add("it", prompt, LONG)
        engine.add("other", prompt[:100], LONG)
        for _ in range(steps):
            engine.step()
            engine.check()
        engine.abort("it")
        engine.check()
        engine.abort("other")
        engine.check()
        assert engine.holds_nothing


def test_several_answers_to_one_prompt() -> None:
    params = SamplingParams(n=3, max_tokens=100, temperature=0.8, seed=5, ignore_eos=True)
    answers = []
    for share in (True, False):
        engine = make_engine(**{"cache.share": share})
        engine.add("it", ids(150, 10), params)
        answers.append([output.token_ids for output in drain(engine)["it"].outputs])
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) == 3


def test_sealed_chunks_take_less() -> None:
    bytes_of = {}
    for codec in ("dense", CODEC):
        engine = make_engine(**{"cache.codec": codec, "cache.share": True})
        generate(engine, [ids(257, 11)], SamplingParams(max_tokens=1, temperature=0.0))
        bytes_of[codec] = engine.stats()["cache"]["bytes_cached"]
    table = make_engine().scheduler.manager.table
    assert bytes_of[CODEC] == 4 * table.chunk_bytes(table.sealed_codec) + table.sidecar_bytes
    assert bytes_of["dense"] == 4 * chunk_bytes(shape())
    assert bytes_of[CODEC] < bytes_of["dense"] / 3


def test_a_request_as_long_as_the_cache_runs() -> None:
    engine = make_engine(chunks=3)
    assert engine.max_context < shape().max_context
    prompt = ids(engine.max_context - 10, 12)
    (answer,) = generate(engine, [prompt], SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True))
    assert len(answer) == 10


@pytest.mark.usefixtures("toy_codec")
@pytest.mark.parametrize(
    ("codec", "sinks"),
    [(codec, sinks) for codec in (DENSE, *EVERY) for sinks in ([0, 1, 64] if row_of(codec).has_sinks else [0])],
)
def test_a_cache_too_small_is_refused_with_one_that_is_not(codec: str, sinks: int) -> None:
    options = {**options_of(codec), "cache.sink_tokens": sinks}
    with pytest.raises(ConfigError, match=r"cache\.memory") as refused:
        make_engine(**options, **{"cache.memory": 2 * chunk_bytes(shape()) // 3})
    enough = str(refused.value).rpartition(" ")[2]
    engine = make_engine(**options, **{"cache.memory": enough})
    assert finishes(engine, "it", ids(engine.max_context - 2, 1))


def test_heads_of_other_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 16"):
        resolve(EngineConfig.from_options({"cache.codec": CODEC, "runtime.device": "cpu"}), tiny_shape())


@examples(10)
@given(st.data())
def test_any_mix_of_requests_answers_as_alone(data: st.DataObject) -> None:
    common = ids(data.draw(st.integers(0, 200)), 20)
    engine = make_engine(
        chunks=data.draw(st.sampled_from([7, 64])), **{"cache.sink_tokens": data.draw(st.integers(0, 3))}
    )
    sinks = engine.scheduler.manager.table.sinks
    prompts = [
        common[: data.draw(st.integers(0, len(common)))] + ids(data.draw(st.integers(1, 90)), seed)
        for seed in range(data.draw(st.integers(1, 5)))
    ]
    params = SamplingParams(max_tokens=data.draw(st.integers(1, 80)), temperature=0.0, ignore_eos=True)
    answers = generate(engine, prompts, params)
    options = {"cache.sink_tokens": 0 if sinks is None else sinks.num_tokens}
    assert answers == [generate(make_engine(**options), [prompt], params)[0] for prompt in prompts]
    assert engine.holds_nothing
