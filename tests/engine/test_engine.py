"""The engine on tiny random models: the equality contract, the cache, preemption, aborts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.engine.sampler import SampleRow
from quire.engine.step import Step
from quire.errors import ConfigError, QueueFullError, RequestError

from ..engines import GREEDY, chunk_bytes, drain, generate, make_engine, oracle_greedy, oracle_logits
from ..tiny_models import tiny_shape

LENGTHS = [1, 5, 63, 64, 65, 127, 128, 129, 200, 300]


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def used_bytes(engine: Engine) -> int:
    used: int = engine.stats()["cache"]["bytes_used"]
    return used


@pytest.mark.parametrize("family", ["llama", "smollm", "mistral", "qwen2", "qwen3", "opt"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_greedy_tokens_equal_the_dense_oracle(family: str, backend: str) -> None:
    shape = tiny_shape(family)
    prompts = prompts_of(LENGTHS)
    got = generate(make_engine(shape, **{"attention.backend": backend}), prompts)
    assert got == [oracle_greedy(shape, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize(("max_running", "token_budget"), [(1, 65), (2, 66), (3, 130), (8, 1024)])
def test_tokens_do_not_depend_on_the_batch_or_the_slices(max_running: int, token_budget: int) -> None:
    prompts = prompts_of(LENGTHS, 1)
    alone = [generate(make_engine(), [prompt])[0] for prompt in prompts]
    engine = make_engine(**{"scheduler.max_running": max_running, "scheduler.token_budget": token_budget})
    assert generate(engine, prompts) == alone
    order = list(range(len(prompts)))
    random.Random(2).shuffle(order)
    shuffled = generate(make_engine(), [prompts[index] for index in order])
    assert shuffled == [alone[index] for index in order]


def test_seeded_samples_do_not_depend_on_the_batch() -> None:
    params = SamplingParams(max_tokens=16, temperature=1.3, top_p=0.9, seed=5, ignore_eos=True, repetition_penalty=1.1)
    prompts = prompts_of([3, 70, 130], 3)
    alone = [generate(make_engine(), [prompt], params)[0] for prompt in prompts]
    assert generate(make_engine(), prompts, params) == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


def test_preempted_requests_resume_with_the_same_tokens() -> None:
    params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    prompts = prompts_of([60, 61, 62, 63], 4)
    roomy = generate(make_engine(), prompts, params)
    tight = make_engine(chunks=10)
    made, rows = tight.scheduler.next_step, []

    def counting() -> Step | None:
        batch = made()
        rows.append(0 if batch is None else sum(piece.num_rows for piece in batch.slices))
        return batch

    tight.scheduler.next_step = counting  # type: ignore[method-assign]
    assert generate(tight, prompts, params) == roomy
    stats = tight.stats()
    assert stats["preemptions"] > 0 and stats["replayed_tokens"] > 60
    computed = stats["prefill_tokens_computed"] + stats["decode_tokens"]
    assert computed + stats["prefill_tokens_cached"] == sum(len(prompt) + 149 for prompt in prompts)
    assert computed + stats["replayed_tokens"] == sum(rows), "every row counts once"
    assert stats["prefill_tokens_computed"] == 60 + 61 + 62 + 63, "what a preemption recomputes is no new prefill"
    assert stats["decode_tokens"] == 4 * 149
    assert used_bytes(tight) == 0


def test_sampled_tokens_survive_preemption() -> None:
    params = SamplingParams(max_tokens=150, temperature=1.0, seed=11, ignore_eos=True)
    prompts = prompts_of([60, 61, 62, 63], 4)
    tight = make_engine(chunks=10)
    assert generate(tight, prompts, params) == generate(make_engine(), prompts, params)
    assert tight.stats()["preemptions"] > 0


def test_overwriting_a_sealed_page_changes_the_next_logits() -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=3, ignore_eos=True)
    (prompt,) = prompts_of([100], 5)
    results = []
    for overwrite in (False, True):
        engine = make_engine()
        request = engine.add("x", prompt, params)
        collected = {}
        for step in range(3):
            if overwrite and step == 1:
                path = request.sequences[0].path
                assert path.num_sealed == 1
                table = engine.scheduler.manager.table
                table.arena.store(
                    table.pages[path.chunks[0]].reshape(-1),
                    table.open_codec.page_bytes,
                    torch.zeros(4, table.open_codec.page_bytes, dtype=torch.uint8),
                )
            for delta in engine.step():
                collected.setdefault("deltas", []).append(delta.outputs[0])
        results.append(collected["deltas"])
    before, after = results
    assert before[0].logprobs == after[0].logprobs
    first_token = before[1].token_ids[0]
    difference = abs(before[1].logprobs[0][first_token].logprob - next(iter(after[1].logprobs[0].values())).logprob)
    assert difference > 1e-3, "the arena is not what attention reads"


def test_prompt_logprobs_equal_the_oracle_whatever_the_slices() -> None:
    shape = tiny_shape()
    (prompt,) = prompts_of([150], 6)
    expected = torch.log_softmax(oracle_logits(shape, prompt), -1)
    for budget in (72, 1024):
        engine = make_engine(shape, **{"scheduler.token_budget": budget})
        engine.add("x", prompt, SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0.0))
        found = drain(engine)["x"].prompt_logprobs
        assert found is not None
        assert len(found) == len(prompt)
        assert found[0] is None
        for position in range(1, len(prompt)):
            entry = found[position]
            assert entry is not None
            assert abs(entry[prompt[position]].logprob - expected[position - 1, prompt[position]].item()) < 1e-4
            assert set(expected[position - 1].topk(2).indices.tolist()) <= set(entry)


@pytest.mark.parametrize("length", [1, 65, 129, 150])
@pytest.mark.parametrize("share", [True, False])
def test_the_first_of_several_answers_computes_the_prompt_s_logprobs_and_the_others_wait(
    length: int, share: bool
) -> None:
    (prompt,) = prompts_of([length], 6)
    answers = [*generate(make_engine(), [prompt])] * 4
    engine = make_engine(**{"scheduler.token_budget": 72, "cache.share": share})
    params = SamplingParams(n=4, max_tokens=len(answers[0]), prompt_logprobs=2, temperature=0.0)
    engine.add("x", prompt, params)
    found: list[list[int]] = [[], [], [], []]
    begun: list[int] = []
    while engine.has_work:
        for item in engine.step():
            is_first = not any(found)
            assert len(item.prompt_logprobs or ()) == length * is_first, "an answer came before, or they came again"
            begun += [each.index for each in item.outputs if not found[each.index]]
            for each in item.outputs:
                found[each.index] += each.token_ids
    assert found == answers and begun[0] == 0
    computed = engine.stats()["prefill_tokens_computed"]
    assert computed == (length + 3 * (length - (length - 1) // 64 * 64) if share else 4 * length)
    assert engine.holds_nothing


def test_answers_wait_for_the_prompt_s_logprobs_though_its_computation_begins_again() -> None:
    (prompt,) = prompts_of([127], 6)
    engine = make_engine(**{"scheduler.token_budget": 200})
    params = SamplingParams(n=3, max_tokens=2, prompt_logprobs=1, temperature=0.0)
    request = engine.add("x", prompt, params)
    step = engine.scheduler.next_step()
    assert step is not None and len(engine.scheduler.running) == 3
    engine.runner.run(step)
    engine.scheduler.preempt(request.sequences[0])  # as a step does that cannot be kept
    assert not engine.scheduler.running, "the others hold what it may need"
    items = []
    while engine.has_work:
        items += engine.step()
    assert [len(item.prompt_logprobs or ()) for item in items] == [127] + [0] * (len(items) - 1)


def test_a_first_answer_that_begins_again_has_the_room_that_others_found_for_it() -> None:
    (prompt,) = prompts_of([300], 6)
    options = {"scheduler.token_budget": 136, "model.max_context": 400}
    engine = make_engine(chunks=9, **options)
    params = SamplingParams(n=2, max_tokens=2, prompt_logprobs=1, temperature=0.0)
    request = engine.add("x", prompt, params)
    first, other = request.sequences
    while other.num_computed == 0:
        step = engine.scheduler.next_step()
        assert step is not None and first.num_generated == 0
        result = engine.runner.run(step)
        if other.num_computed == 0:
            engine.scheduler.commit(step, result)
    engine.scheduler.preempt(first)
    for _ in range(50):
        engine.step()
    assert not engine.has_work and engine.holds_nothing


def test_answers_that_wait_for_logprobs_of_the_first_go_on_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = prompts_of([100], 6)
    (expected,) = generate(make_engine(), [prompt])
    engine = make_engine()
    sample = engine.runner.sampler.sample

    def broken(logits: torch.Tensor, rows: list[SampleRow]) -> Any:
        sampled = sample(logits, rows)
        monkeypatch.setattr(engine.runner.sampler, "sample", sample)
        return replace(sampled, errors={0: "broken"})

    monkeypatch.setattr(engine.runner.sampler, "sample", broken)
    engine.add("x", prompt, SamplingParams(n=2, max_tokens=len(expected), prompt_logprobs=1, temperature=0.0))
    outputs = drain(engine)["x"].outputs
    assert [each.finish_reason for each in outputs] == ["error", "length"]
    assert outputs[1].token_ids == expected


def test_a_preemption_in_the_middle_of_a_prompt_leaves_its_logprobs_as_they_were() -> None:
    (prompt,) = prompts_of([150], 6)
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0.0)
    found = []
    for steps_before in (None, 1, 2):
        engine = make_engine(**{"scheduler.token_budget": 72})
        request = engine.add("x", prompt, params)
        if steps_before is not None:
            for _ in range(steps_before):
                engine.step()
            engine.scheduler.preempt(request.sequences[0])
        found.append(drain(engine)["x"].prompt_logprobs)
    assert len(found[0]) == len(prompt)
    assert found == [found[0]] * 3


@pytest.mark.parametrize("abort_at", range(0, 12))
def test_aborting_at_any_step_frees_everything_and_disturbs_nobody(abort_at: int) -> None:
    prompts = prompts_of([200, 10, 130], 7)
    alone = generate(make_engine(), [prompts[1]])[0]
    engine = make_engine(**{"scheduler.token_budget": 72})
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, GREEDY)
    collected = {}
    from quire.llm import merge_delta

    for _ in range(abort_at):
        for delta in engine.step():
            merge_delta(collected, delta)
    for index in (0, 2):
        output = engine.abort(str(index))
        assert output is not None
        assert output.finished
        assert output.outputs[0].finish_reason == "abort"
        engine.check()
    drain(engine, collected)
    assert collected["1"].outputs[0].token_ids == alone
    assert used_bytes(engine) == 0
    assert engine.abort("0") is None


def test_n_sequences_of_a_request_differ_and_the_first_equals_a_single_one() -> None:
    params = SamplingParams(n=3, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    (prompt,) = prompts_of([70], 8)
    engine = make_engine()
    engine.add("x", prompt, params)
    outputs = drain(engine)["x"].outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    single = generate(make_engine(), [prompt], SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True))[
        0
    ]
    assert outputs[0].token_ids == single


def test_length_stop_and_eos_end_a_sequence() -> None:
    (prompt,) = prompts_of([20], 9)
    (tokens,) = generate(make_engine(), [prompt])
    engine = make_engine()
    engine.add("x", prompt, SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=[tokens[4]], ignore_eos=True))
    output = drain(engine)["x"].outputs[0]
    assert output.finish_reason == "stop"
    assert output.stop_reason == tokens[4]
    assert output.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    engine.add("y", prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    assert drain(engine)["y"].outputs[0].finish_reason == "length"


def test_a_request_may_fill_the_whole_arena_and_ends_by_length() -> None:
    engine = make_engine(chunks=4)
    (prompt,) = prompts_of([50], 10)
    engine.add("x", prompt, SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True))
    output = drain(engine)["x"].outputs[0]
    assert output.finish_reason == "length"
    assert len(output.token_ids) + 50 == engine.max_context == 4 * 64


def test_requests_that_can_never_run_are_refused_by_name() -> None:
    engine = make_engine(chunks=4)
    for prompt, params, word in [
        ([], GREEDY, "empty"),
        ([1, 99999], GREEDY, "99999"),
        ([1, -1], GREEDY, "-1"),
        ([1] * 256, GREEDY, "256"),
        ([1], SamplingParams(stop_token_ids=[99999]), "99999"),
    ]:
        with pytest.raises(RequestError, match=word):
            engine.add("x", prompt, params)
    assert not engine.has_work


def test_the_queue_is_bounded_and_nothing_of_a_refused_request_stays() -> None:
    engine = make_engine(**{"scheduler.max_queue": 2})
    engine.add("a", [1], GREEDY)
    with pytest.raises(QueueFullError):
        engine.add("b", [1], SamplingParams(n=2, temperature=1.0))
    engine.add("c", [1], GREEDY)
    with pytest.raises(QueueFullError):
        engine.add("d", [1], GREEDY)
    assert set(drain(engine)) == {"a", "c"}


def test_a_budget_without_room_for_a_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_budget"):
        make_engine(**{"scheduler.token_budget": 64, "scheduler.max_running": 8})


def test_prefill_is_counted_once_and_decode_by_token() -> None:
    engine = make_engine()
    generate(engine, prompts_of([100, 30], 11))
    stats = engine.stats()
    assert stats["prefill_tokens_computed"] == 130
    assert stats["decode_tokens"] == 2 * 23
    assert stats["cache"]["bytes_peak"] == 3 * 64 * 2 * 2 * 2 * 12 * 4


def half_engine(dtype: str, **options: object) -> Engine:
    return make_engine(chunks=64, **{"model.dtype": dtype, **options})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_tokens_change_with_the_batch_only_where_the_best_logits_are_within_rounding(dtype: str) -> None:
    shape = tiny_shape()
    prompts = prompts_of([60, 61, 62, 63, 5, 130], 12)
    params = SamplingParams(max_tokens=75, temperature=0.0, ignore_eos=True)
    alone = [generate(half_engine(dtype), [prompt], params)[0] for prompt in prompts]
    # 16-bit logits of this model are within 1 % (bfloat16) or 0.2 % of their spread of the float32 ones.
    rounding = 0.02 if dtype == "bfloat16" else 0.004
    tight = half_engine(dtype, **{"cache.memory": 8 * chunk_bytes(shape, 2)})
    for engine, order in (
        (half_engine(dtype), [0, 1, 2, 3, 4, 5]),
        (half_engine(dtype, **{"scheduler.max_running": 3}), [5, 3, 1, 0, 2, 4]),
        (tight, [2, 0, 4, 5, 1, 3]),
    ):
        together = generate(engine, [prompts[index] for index in order], params)
        for index, tokens in zip(order, together, strict=True):
            same = next((i for i, (a, b) in enumerate(zip(tokens, alone[index], strict=True)) if a != b), None)
            if same is None:
                continue
            row = oracle_logits(shape, prompts[index] + tokens[:same])[-1]
            gap = abs(row[tokens[same]] - row[alone[index][same]]) / (row.max() - row.min())
            assert gap < rounding, f"token {same} of prompt {index} differs where the logits are {gap:.4f} apart"
    assert tight.stats()["preemptions"] > 0


@pytest.mark.parametrize("with_prompt_logprobs", [False, True])
def test_numbers_that_are_not_finite_end_the_request_with_an_error_and_disturb_nobody(
    with_prompt_logprobs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = prompts_of([20, 100], 13)
    expected = generate(make_engine(), [good])[0]
    engine = make_engine()
    hidden = engine.runner.model.hidden

    def broken(tokens: torch.Tensor, positions: torch.Tensor, plan: object) -> torch.Tensor:
        out = hidden(tokens, positions, plan)  # type: ignore[arg-type]
        if len(tokens) >= 100:
            out[20:120] = torch.nan  # the second prompt's rows
        return out

    monkeypatch.setattr(engine.runner.model, "hidden", broken)
    engine.add("good", good, GREEDY)
    asked = 1 if with_prompt_logprobs else None
    engine.add("bad", bad, SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=asked))
    outputs = drain(engine)
    assert outputs["good"].outputs[0].token_ids == expected
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "NaN" in str(outputs["bad"].outputs[0].stop_reason)
    assert engine.holds_nothing


def test_more_sequences_than_may_ever_wait_are_refused() -> None:
    engine = make_engine(**{"scheduler.max_queue": 4})
    with pytest.raises(RequestError, match="max_queue"):
        engine.add("x", [1], SamplingParams(n=5, temperature=1.0))


def test_steps_in_which_every_row_samples_may_run_elsewhere_and_no_others_do() -> None:
    params = SamplingParams(max_tokens=75, temperature=0.0, ignore_eos=True)
    prompts = prompts_of([60, 61, 62, 130], 14)
    shape = tiny_shape(num_layers=1, num_q_heads=2, num_kv_heads=1)
    expected = generate(make_engine(shape), prompts, params)
    engine = make_engine(shape, chunks=7, **{"attention.backend": "reference", "scheduler.token_budget": 72})
    sizes = []

    def decode(tokens: torch.Tensor, positions: torch.Tensor, plan: object) -> torch.Tensor:
        sizes.append(len(tokens))
        return engine.runner.model.head(engine.runner.model.hidden(tokens, positions, plan))  # type: ignore[arg-type]

    engine.runner.decode = decode
    assert generate(engine, prompts, params) == expected
    assert engine.stats()["preemptions"] > 0
    assert sizes and max(sizes) > 1
