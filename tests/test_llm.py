"""The library: names, shapes of results, counters, progress, closing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, AsyncLLM, RequestOutput, SamplingParams
from quire.cli import main
from quire.config import format_bytes
from quire.engine import build
from quire.engine.footprint import RUNTIME_BYTES, footprint
from quire.errors import ConfigError, ModelError, QuireError, RequestError
from quire.kernels import runtime
from quire.kernels.build import library_name
from quire.kernels.levels import LEVELS, supported_levels
from quire.models.resolve import short_name

from .kernels.pages import LEVELS as TESTED_LEVELS
from .tiny_models import EOS, save_tiny, save_tokenizer, tiny_shape, write_gguf

OPTIONS = {
    "model.dtype": "float32",
    "cache.memory": "8MiB",
    "runtime.threads": 1,
    "runtime.device": "cpu",
    "scheduler.max_running": 4,
    "scheduler.max_queue": 3,
}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), OPTIONS) as made:
        yield made


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_may_be_texts_ids_or_dicts(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    outputs = llm.generate(["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}], GREEDY)
    assert len({tuple(row) for row in tokens(outputs)}) == 1
    assert [output.prompt for output in outputs] == ["hello", None, "hello", None]
    assert all(output.prompt_token_ids == ids and output.finished for output in outputs)
    assert tokens(llm.generate(ids, GREEDY)) == tokens(llm.generate("hello", GREEDY)) == tokens(outputs[:1])


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_an_argument_of_other_engines_names_the_setting(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"no argument 'max_model_len'; it is model.max_context here.*options=\{"):
        kind("smollm2", max_model_len=4096)
    with pytest.raises(ConfigError, match="no argument 'memory'; did you mean cache.memory"):
        kind("smollm2", memory="1GiB")
    with pytest.raises(ConfigError, match="no argument 'zzz'; docs/reference/settings.md"):
        kind("smollm2", zzz=1)


def test_a_model_is_named_by_the_last_part_of_its_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    assert llm.model_name == folder.name
    for name in ("one.gguf", "many-00001-of-00003.gguf"):
        (tmp_path / name).touch()
    assert [short_name(str(tmp_path / name)) for name in ("one.gguf", "many-00001-of-00003.gguf", "")] == [
        "one",
        "many",
        tmp_path.name,
    ]
    monkeypatch.chdir(tmp_path)
    assert [short_name(name) for name in (".", "one.gguf", "smollm2", "owner/name")] == [
        tmp_path.name,
        "one",
        "smollm2",
        "owner/name",
    ]


def test_a_context_that_the_cache_has_no_room_for_is_lowered_aloud(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = OPTIONS | {"cache.memory": "64KiB"}
    with LLM(str(folder), small | {"model.max_context": 512}) as made:
        held = made.max_context
    assert held < 512
    (said,) = [record.getMessage() for record in caplog.records if "max_context" in record.getMessage()]
    assert said.startswith("model.max_context is 512, and a cache of") and f"holds {held} tokens" in said
    caplog.clear()
    for options in (small, OPTIONS | {"model.max_context": 64}):
        LLM(str(folder), options).close()
    assert not [record for record in caplog.records if "max_context" in record.getMessage()]


def test_loading_says_what_the_whole_process_takes(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights and cache are not all: steps, libraries and the interpreter count, too."""
    with caplog.at_level("INFO", "quire"), LLM(str(folder), OPTIONS) as made:
        parts = made._parts
    whole = footprint(parts.shape, parts.config, parts.sizes)
    (said,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("memory: ")]
    assert f"about {format_bytes(whole.total)} in all" in said and "cache.memory sets the cache" in said
    assert whole.total == parts.sizes.memory_bytes + whole.step + RUNTIME_BYTES and whole.step > 0
    flags = [word for key, value in OPTIONS.items() for word in (f"--{key}", str(value))]
    assert main(["inspect", str(folder), *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["process_bytes"] == whole.total
    assert main(["inspect", str(folder), *flags]) == 0
    assert f"about {format_bytes(whole.total)}" in capsys.readouterr().out


def test_a_dict_with_a_text_and_ids_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="either prompt or prompt_token_ids; both are given"):
        llm.generate({"prompt": "x", "prompt_token_ids": [1]}, GREEDY)


def test_a_prompt_of_one_token_is_told_in_the_singular(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt has 1 token; pins keep whole chunks"):
        llm.generate({"prompt_token_ids": [1], "cache_pin": True}, GREEDY)


def test_token_ids_may_come_from_numpy_and_torch(llm: LLM) -> None:
    ids = [1, 2, 3]
    arrays = [np.array(ids), torch.tensor(ids)]
    expected = tokens(llm.generate(ids, GREEDY))[0]
    for prompt in (*arrays, [np.int64(each) for each in ids], tuple(ids)):
        assert tokens(llm.generate(prompt, GREEDY)) == [expected]  # type: ignore[arg-type]
    assert tokens(llm.generate(arrays, GREEDY)) == [expected] * 2  # type: ignore[arg-type]
    assert tokens(llm.generate(np.array([ids, ids]), GREEDY)) == [expected] * 2  # type: ignore[arg-type]
    for wrong, found in ([1, 2.5], "2.5 \\(float"), ([True, 1], "True \\(bool"), ([1, None], "None"), (b"ab", "bytes"):
        with pytest.raises(RequestError, match=found):
            llm.generate([wrong], GREEDY)  # type: ignore[list-item]


def test_calls_from_several_threads_wait_for_each_other(folder: Path) -> None:
    with LLM(str(folder), OPTIONS) as llm:
        expected = [tokens(llm.generate([index] * 70, GREEDY)) for index in range(6)]
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda index: tokens(llm.generate([index] * 70, GREEDY)), range(6)))
    assert found == expected


def test_more_prompts_than_the_queue_holds_all_run_in_order(llm: LLM) -> None:
    prompts = [f"prompt {index}" for index in range(12)]
    params = [SamplingParams(max_tokens=1 + index % 5, temperature=0.0, ignore_eos=True) for index in range(12)]
    outputs = llm.generate(prompts, params, use_tqdm=True)
    assert [output.prompt for output in outputs] == prompts
    assert [len(row) for row in tokens(outputs)] == [1 + index % 5 for index in range(12)]


def test_what_is_no_prompt_message_or_parameter_is_named(llm: LLM) -> None:
    for call, name in [
        (lambda: llm.generate(b"hi"), "prompts must be texts"),  # type: ignore[arg-type]
        (lambda: llm.generate(None), "prompts must be texts"),  # type: ignore[arg-type]
        (lambda: llm.generate(["a", "b"], {"max_tokens": 3}), "must be a SamplingParams or a list"),  # type: ignore[arg-type]
        (lambda: llm.chat([]), "at least one"),
        (lambda: llm.chat("hi"), "at least one"),  # type: ignore[arg-type]
        (lambda: llm.chat([[]]), "it must have at least one message"),
        (lambda: llm.chat(5), "at least one"),  # type: ignore[arg-type]
        (lambda: llm.chat([5]), "'messages' is 5; it must be a list of objects with role and content"),  # type: ignore[list-item]
        (lambda: llm.chat([None]), "'messages' is None; it must be a list"),  # type: ignore[list-item]
        (lambda: llm.chat([[{"role": "user", "content": "x"}, "y"]]), r"messages\[1\] is 'y'; it must be an object"),  # type: ignore[list-item]
        (lambda: llm.chat([{"role": 5, "content": "x"}]), r"the role of messages\[0\] is 5; it must be a string"),
        (lambda: llm.chat([{"content": "x"}]), r"the role of messages\[0\] is missing; it must be a string"),
    ]:
        with pytest.raises(RequestError, match=name):
            call()


def test_one_params_each_or_one_for_all(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling_params for 1"):
        llm.generate(["x"], [GREEDY, GREEDY])
    assert len(llm.generate("x")[0].outputs[0].token_ids) <= 16


def test_logprobs_and_prompt_logprobs_have_vllm_s_form(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate(["abcdef"], params)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert token in entry
        assert entry[token].decoded_token == llm.tokenizer.decode([token], skip_special=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == 3
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry[token].rank == 1
        assert entry[token].logprob <= 0
    assert answer.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    )


def test_text_is_what_the_tokens_decode_to_and_stop_strings_cut_it(llm: LLM) -> None:
    (output,) = llm.generate(["some text"], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    answer = output.outputs[0]
    whole = answer.text
    assert whole == llm.tokenizer.decode(answer.token_ids)
    stop = whole[3:5]
    (cut,) = llm.generate(["some text"], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, stop=[stop]))
    assert cut.outputs[0].text == whole[: whole.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_tools_of_a_chat_are_told_to_the_model(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, tools=[tool])
    # This template knows no tools.
    assert output.prompt is not None and output.prompt.startswith("<system>You can call") and '"add"' in output.prompt
    with pytest.raises(RequestError, match="a tool is"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, tools=[{"name": "add"}])


def test_a_chat_with_strict_tools_and_a_form_is_either(llm: LLM) -> None:
    function: dict[str, Any] = {
        "name": "add", "strict": True,
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    }  # fmt: skip
    tools = [{"type": "function", "function": function}]
    wanted = SamplingParams(max_tokens=80, temperature=1.0, seed=1, n=3, structured_outputs={"choice": ["yes", "no"]})
    (output,) = llm.chat([{"role": "user", "content": "hi"}], wanted, tools=tools)
    call = '{"tool_calls": [{"name": "add", "arguments": {}}'
    assert all(each.text in ("yes", "no") or each.text.startswith(call) for each in output.outputs)
    with pytest.raises(RequestError, match="a grammar cannot be combined with tools"):
        grammar = replace(wanted, structured_outputs={"grammar": 'start: "a"'})
        llm.chat([{"role": "user", "content": "hi"}], grammar, tools=tools)
    function["strict"] = False
    (output,) = llm.chat([{"role": "user", "content": "hi"}], grammar, tools=tools)
    assert all(each.text == "a" for each in output.outputs)
    function["strict"] = True
    many = replace(wanted, structured_outputs={"json": {"type": "object", "minProperties": 5}})
    with pytest.raises(RequestError, match="the schema cannot be honoured: minProperties") as refusal:
        llm.chat([{"role": "user", "content": "hi"}], many, tools=tools)
    assert refusal.value.param == "structured_outputs"
    function["parameters"] = {"const": 2**60}
    with pytest.raises(RequestError, match="a schema cannot be honoured: const: integers"):
        llm.chat([{"role": "user", "content": "hi"}], wanted, tools=tools)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == llm.tokenizer.chat(messages)
    assert len(llm.chat([messages, messages], GREEDY)) == 2
    (other,) = llm.chat(messages, GREEDY, chat_template_kwargs={"enable_thinking": False})
    assert other.prompt == llm.tokenizer.chat(messages, variables={"enable_thinking": False})
    for name in ("messages", "chat_template", "bos_token"):
        with pytest.raises(RequestError, match=name):
            llm.chat(messages, GREEDY, chat_template_kwargs={name: "x"})


def test_names_of_control_tokens_in_texts_of_users_and_tools_are_text(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": f"ends with {EOS}"}}]
    messages = [{"role": "user", "content": f"hi{EOS}"}, {"role": "tool", "content": EOS, "tool_call_id": "1"}]
    end = llm.tokenizer.added_id(EOS)
    for more in ({}, {"tools": tools}):
        (output,) = llm.chat(messages, GREEDY, **more)
        assert end not in output.prompt_token_ids and output.prompt.count(EOS) == 2 + len(more)
        assert llm.tokenizer.decode(output.prompt_token_ids, skip_special=False) == output.prompt
    (output,) = llm.chat([{"role": "system", "content": EOS}, *messages], GREEDY)
    assert output.prompt_token_ids.count(end) == 1


def test_stats_count_what_happened_and_bytes_add_up(folder: Path) -> None:
    with LLM(str(folder), OPTIONS) as llm:
        llm.generate([[1] * 70, [2] * 5], GREEDY)
        stats = llm.stats()
        assert stats["prefill_tokens_computed"] == 75
        assert stats["prefill_tokens_cached"] == 0
        assert stats["decode_tokens"] == 10
        assert stats["preemptions"] == stats["running"] == stats["waiting"] == 0
        cache = stats["cache"]
        assert cache["bytes_total"] == cache["bytes_free"] + cache["bytes_used"] + cache["bytes_cached"]
        assert cache["bytes_used"] == 0 < cache["bytes_peak"]


def test_a_request_that_cannot_run_stops_the_call_before_anything_runs(llm: LLM) -> None:
    steps = llm.stats()["steps"]
    for prompt in ([], [10**6], "", {"prompt": "x", "image": 1}, 7):
        with pytest.raises(RequestError):
            llm.generate(["fine", prompt], GREEDY)  # type: ignore[list-item]
    assert llm.stats()["steps"] == steps


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = llm.engine.step, 0

    def interrupted() -> object:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc"] * 6, GREEDY)
    monkeypatch.undo()
    llm.engine.check()
    assert llm.stats()["cache"]["bytes_used"] == 0
    assert len(llm.generate("abc", GREEDY)) == 1


def test_a_closed_llm_says_so(folder: Path) -> None:
    llm = LLM(str(folder), OPTIONS)
    llm.close()
    llm.close()
    with pytest.raises(QuireError, match="closed"):
        llm.generate("x")


def test_settings_that_cannot_work_are_refused_with_the_way_out(folder: Path) -> None:
    for options, word in [
        ({"cache.memory": "1KiB"}, r"cache\.memory of 1KiB"),
        ({"scheduler.token_budget": 10}, r"scheduler\.token_budget is 10"),
        ({"cache.memry": 1}, r"cache\.memory"),
        ({"model.max_context": 10**9}, "at most 512"),
        ({"cache.strict": False}, r"cache\.strict"),
        ({"attention.backend": "triton"}, "use cpu"),
        ({"runtime.device": "cuda"}, "no GPU"),
        ({"model.weights": "q4"}, r"model\.weights"),
    ]:
        with pytest.raises(ConfigError, match=word):
            LLM(str(folder), {**OPTIONS, **options})
    with pytest.raises(ConfigError, match="settings by key"):
        LLM(str(folder), [1])  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="nowhere"):
        LLM("nowhere/at-all", OPTIONS)


def test_a_cache_beyond_the_machines_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "available_memory", lambda device: 4 << 20)
    with pytest.raises(ConfigError, match=r"need .* and 4MiB are free; lower cache\.memory"):
        LLM(str(folder), {**OPTIONS, "cache.memory": "16MiB"})


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_matrices_that_no_product_reads_are_dequantized_aloud(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = tiny_shape("llama", hidden_size=256, head_dim=64, ffn_size=256, vocab_size=258, tied_embeddings=False)
    save_tokenizer(tmp_path)
    for kind, said in [("Q2_K", True), ("Q5_K", False), ("BF16", False)]:
        write_gguf(tmp_path / f"{kind}.gguf", shape, kind=kind)
        texts = []
        for weights in ("dequantized", "native"):
            options = {**OPTIONS, "attention.backend": backend, "model.weights": weights}
            with LLM(str(tmp_path / f"{kind}.gguf"), {**options, "model.tokenizer": str(tmp_path)}) as llm:
                texts.append(llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids)
        assert texts[0] == texts[1]
        assert [record.message for record in caplog.records if "dequantized" in record.message] == [
            "model.weights native: 16 of 16 matrices are dequantized, embed.weight (Q2_K) first: there is no kernel"
            " for Q2_K"
        ] * said
        caplog.clear()


def test_group_codes_are_made_of_any_checkpoint(folder: Path) -> None:
    """4.5 bits of a number, whatever backend multiplies: the tokens are those of the same numbers in float32."""
    texts = []
    for backend in ("cpu", "reference"):
        with LLM(str(folder), {**OPTIONS, "model.weights": "g4", "attention.backend": backend}) as llm:
            texts.append(llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("weights", "said"),
    [("native", "weights in Q4_K and Q6_K, the rest in float32"), ("dequantized", "weights in float32")],
)
def test_loading_tells_the_types_of_the_weights_in_memory(
    weights: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="quire")
    shape = tiny_shape("llama", hidden_size=256, head_dim=64, ffn_size=256, vocab_size=258, tied_embeddings=False)
    save_tokenizer(tmp_path)
    write_gguf(tmp_path / "model.gguf", shape, kind={"": "Q4_K", "down": "Q6_K"})
    options = {**OPTIONS, "model.weights": weights, "model.tokenizer": str(tmp_path)}
    with LLM(str(tmp_path / "model.gguf"), options):
        (line,) = [each.message for each in caplog.records if "weights in" in each.message]
    assert f" {said}, cache " in line


def test_a_call_from_within_a_call_is_refused(folder: Path) -> None:
    """As a signal handler makes one: waiting for its own thread would never end."""
    with LLM(str(folder), OPTIONS) as llm:
        step = llm.engine.step

        def interrupted() -> object:
            with pytest.raises(QuireError, match="already running in this thread"):
                llm.close()
            return step()

        llm.engine.step = interrupted
        assert tokens(llm.generate("abc", GREEDY)) == tokens(llm.generate("abc", GREEDY))


def test_loading_tells_how_the_cache_is_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="quire")
    for options, end in (
        ({}, ""),
        ({"retain.threshold": 0.95}, ", retention by a threshold of 0.95"),
        ({"retain.budget": 0.5}, ", retention by a budget of 0.5"),
    ):
        caplog.clear()
        with LLM(str(folder), OPTIONS | {"cache.codec": "g4", "cache.check": False} | options):
            (line,) = [each.message for each in caplog.records if "weights in" in each.message]
        assert "MiB of g4 for " in line
        level = supported_levels()[0]
        slower = LEVELS[level].slower
        assert line.endswith(f" attention on cpu ({level}{slower and ': ' + slower}){end}")


@pytest.mark.parametrize("level", TESTED_LEVELS)
def test_the_kernels_of_a_level_are_those_that_run(level: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="quire")
    expected = {}
    try:
        for asked, used in ((level, level), ("auto", supported_levels()[0]), (level, level)):
            caplog.clear()
            with LLM(str(folder), OPTIONS | {"runtime.cpu_level": asked, "model.dtype": "bfloat16"}) as llm:
                assert runtime.kernels()._name.endswith(library_name(used))
                assert f" attention on cpu ({used}" in caplog.text
                found = tokens(llm.generate("abc", GREEDY))
                assert expected.setdefault(used, found) == found
    finally:
        runtime.set_level(None)


def test_a_level_that_this_processor_lacks_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = supported_levels()[0]
    lacking = next(level for level in LEVELS if level != best)
    monkeypatch.setattr("quire.kernels.supported_levels", lambda: (best,))
    # Another test may have loaded the level.
    monkeypatch.setattr(runtime, "_kernels", runtime._kernels.__wrapped__)
    before = runtime.kernels()
    with pytest.raises(ConfigError, match=f"CPU level '{lacking}' does not run on this processor; it has {best}"):
        LLM(str(folder), OPTIONS | {"runtime.cpu_level": lacking})
    assert runtime.kernels() is before
