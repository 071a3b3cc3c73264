"""AsyncLLM: streams, cancellation, the bounded queue, shutdown; on a tiny model from a folder."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from quire.async_llm import AsyncLLM
from quire.engine.params import SamplingParams
from quire.engine.pins import protect
from quire.errors import ConfigError, QueueFullError, QuireError, RequestError
from quire.llm import LLM, Prompt

from .tiny_models import save_tiny

OPTIONS = {
    "model.dtype": "float32",
    "cache.memory": "8MiB",
    "runtime.threads": 1,
    "runtime.device": "cpu",
    "scheduler.max_running": 4,
    "scheduler.max_queue": 8,
}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def run(folder: Path, body: Callable[[AsyncLLM], Awaitable[None]], **options: object) -> None:
    async def main() -> None:
        async with AsyncLLM(str(folder), {**OPTIONS, **options}) as llm:
            await body(llm)

    asyncio.run(asyncio.wait_for(main(), 60))


async def idle(llm: AsyncLLM) -> None:
    """Waits until the engine holds nothing."""
    for _ in range(500):
        stats = llm.stats()
        if not (stats["running"] or stats["waiting"] or stats["cache"]["bytes_used"]):
            break
        await asyncio.sleep(0.01)
    assert llm.stats()["cache"]["bytes_used"] == 0


async def collect(llm: AsyncLLM, prompt: object, params: SamplingParams = GREEDY) -> tuple[str, list[int]]:
    text, tokens, finished = "", [], False
    async for delta in llm.generate(prompt, params):  # type: ignore[arg-type]
        assert not finished, "an item after the last"
        finished = delta.finished
        for output in delta.outputs:
            text += output.text
            tokens += output.token_ids
    assert finished
    return text, tokens


def test_who_catches_up_does_not_keep_the_event_loop(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.generate("hello", GREEDY)
        await anext(stream)
        await idle(llm)  # all other items are there by now
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(turn())
        assert len([item async for item in stream]) == 11 and turns >= 10
        other.cancel()

    run(folder, body)


def test_concurrent_streams_equal_the_library(folder: Path) -> None:
    prompts = ["hello", "a longer prompt " * 9, [1, 2, 3], {"prompt_token_ids": list(range(100))}]
    with LLM(str(folder), OPTIONS) as llm:
        expected = [(output.outputs[0].text, output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]

    async def body(llm: AsyncLLM) -> None:
        assert await asyncio.gather(*(collect(llm, prompt) for prompt in prompts)) == expected
        await idle(llm)

    run(folder, body)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_closing_a_stream_frees_its_cache(folder: Path, after: int) -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.generate("x" * 80, SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
        for _ in range(after):
            await anext(stream)
        await stream.aclose()
        await idle(llm)

    run(folder, body)


def test_cancelling_a_task_frees_its_cache_and_others_go_on(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        long = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
        tasks = [asyncio.create_task(collect(llm, "abc", long)) for _ in range(3)]
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        tasks[2].cancel()
        assert len((await tasks[1])[1]) == 300
        await idle(llm)

    run(folder, body)


def test_abort_ends_the_stream_with_a_last_item(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        seen = []
        async for delta in llm.generate(
            "abc", SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True), "mine"
        ):
            if not seen:
                await llm.abort("mine")
            seen.append(delta)
        assert seen[-1].finished
        assert seen[-1].outputs[0].finish_reason == "abort"
        await llm.abort("unknown")
        await idle(llm)

    run(folder, body)


def test_the_queue_refuses_what_it_cannot_hold_and_recovers(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        async def one() -> bool:
            try:
                await collect(llm, "abc")
            except QueueFullError as error:
                assert error.retry_after > 0
                return False
            return True

        outcomes = await asyncio.gather(*(one() for _ in range(40)))
        assert any(outcomes)
        assert not all(outcomes)
        await idle(llm)
        assert await one()

    run(folder, body)


def test_requests_that_cannot_run_are_refused_before_anything_is_streamed(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        for prompt in ("", [], [99999], {"text": "x"}, 5, [1.5]):
            with pytest.raises(RequestError):
                await llm.admit(prompt, GREEDY)  # type: ignore[arg-type]
            with pytest.raises(RequestError):
                await collect(llm, prompt)
        stream = llm.generate("abc", GREEDY, "twice")
        await anext(stream)
        with pytest.raises(RequestError, match="twice"):
            await anext(llm.generate("abc", GREEDY, "twice"))
        await stream.aclose()

    run(folder, body)


def test_an_id_is_free_again_only_when_nothing_can_arrive_for_it(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        expected = await collect(llm, [9] * 10)
        for _ in range(20):
            stream = llm.generate([1, 2, 3], long, "same")
            await anext(stream)
            await stream.aclose()
            while True:
                try:
                    items = [item async for item in llm.generate([9] * 10, GREEDY, "same")]
                    break
                except RequestError:
                    await asyncio.sleep(0.001)
            assert all(item.prompt_token_ids == [9] * 10 for item in items)
            assert [token for item in items for token in item.outputs[0].token_ids] == expected[1]
        await idle(llm)

    run(folder, body)


def test_deltas_on_their_way_when_a_stream_is_closed_reach_nobody(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        def wait_for_the_engine() -> None:
            """Holds the loop until the engine has done what it was told to, and has begun another step."""
            done = threading.Event()
            llm._submit(done.set)
            assert done.wait(30)

        expected = await collect(llm, [9] * 10)
        long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        stream = llm.generate([1, 2, 3], long, "same")
        await anext(stream)
        for _ in range(3):
            wait_for_the_engine()  # deltas that the loop has yet to hand out
        await stream.aclose()
        wait_for_the_engine()
        with pytest.raises(RequestError, match="already running"):
            await anext(llm.generate([9] * 10, GREEDY, "same"))
        await asyncio.sleep(0)
        items = [item async for item in llm.generate([9] * 10, GREEDY, "same")]
        assert [token for item in items for token in item.outputs[0].token_ids] == expected[1]

    run(folder, body)


def test_close_drains_then_aborts(folder: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(folder), OPTIONS)
        await llm.start()
        task = asyncio.create_task(collect(llm, "abc"))
        await asyncio.sleep(0)
        await llm.close(drain_seconds=30)
        assert len((await task)[1]) == 12
        with pytest.raises(QuireError):
            await llm.admit("abc", GREEDY)
        assert not llm.is_ready

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("broken", [False, True], ids=["closed", "broken"])
def test_a_request_that_was_admitted_before_the_engine_stopped_is_refused(
    folder: Path, broken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "quire")

    async def main() -> None:
        llm = AsyncLLM(str(folder), OPTIONS)
        await llm.start()
        request = await llm.admit("abc", GREEDY)
        if broken:
            monkeypatch.setattr(llm._parts.engine, "step", _break)
            with pytest.raises(QuireError, match="on purpose"):
                await collect(llm, "abc")
            monkeypatch.undo()
        else:
            await llm.close()
        with pytest.raises(QuireError, match="stopped"):
            await anext(llm.generate(request))
        await llm.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("broken", [False, True], ids=["working", "broken"])
def test_close_gives_the_memory_back_and_what_is_used_afterwards_says_closed(
    folder: Path, broken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "quire")  # a captured record holds its traceback, and that the engine

    async def main() -> None:
        llm = AsyncLLM(str(folder), OPTIONS)
        with pytest.raises(QuireError, match="not started"):
            llm.stats()
        await llm.start()
        with pytest.raises(QuireError, match="before"):
            await llm.start()
        await collect(llm, "abc")
        abandoned = llm.generate("abc", SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True), "abandoned")
        await anext(abandoned)
        engine = llm._parts.engine
        if broken:
            monkeypatch.setattr(engine, "step", _break)
            with pytest.raises(QuireError, match="on purpose"):
                await collect(llm, "abc")
            monkeypatch.undo()
        held = [weakref.ref(each) for each in (engine, engine.scheduler.manager.table.arena.data, engine.runner.model)]
        del engine
        await asyncio.gather(llm.close(), llm.close(drain_seconds=0.05))
        assert [each() for each in held] == [None] * 3, "memory is kept"
        await llm.close()
        for use in (llm.stats, lambda: llm.model_name, lambda: llm.config, lambda: llm.tokenizer):
            with pytest.raises(QuireError, match="closed"):
                use()
        with pytest.raises(QuireError, match="stopped"):
            await llm.admit("abc", GREEDY)
        with pytest.raises(QuireError, match="stopped"):
            await collect(llm, "abc")
        with pytest.raises(QuireError, match="before"):
            await llm.start()
        await llm.abort("abandoned")
        await abandoned.aclose()
        assert not llm.is_ready

    asyncio.run(asyncio.wait_for(main(), 60))


def _break() -> None:
    raise RuntimeError("broken on purpose")


def test_the_collector_is_left_as_it_was(folder: Path) -> None:
    frozen = gc.get_freeze_count()

    async def body(llm: AsyncLLM) -> None:
        await collect(llm, "abc")
        assert gc.get_freeze_count() == frozen

    run(folder, body)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_start_that_is_closed_or_cancelled_while_it_calibrates_gives_up(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("settings", "run"):
        monkeypatch.setattr(f"quire.calibrate.{name}.folder", lambda: tmp_path / "kept")
    even = save_tiny(tmp_path / "even", head_dim=16, num_hidden_layers=8, max_position_embeddings=128)
    inside = threading.Event()
    fit = importlib.import_module("quire.calibrate.run").fit_layer

    def told(*given: Any, **more: Any) -> Any:
        inside.set()
        return fit(*given, **more)

    monkeypatch.setattr("quire.calibrate.run.fit_layer", told)

    async def main() -> None:
        llm = AsyncLLM(str(even), OPTIONS | {"cache.codec": "nuq2"})
        task = asyncio.create_task(llm.start())
        await asyncio.to_thread(inside.wait, 60)
        thread = llm._engine_thread
        assert thread is not None
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(QuireError if times == 0 else asyncio.CancelledError):
            await task
        assert not thread.is_alive and not llm.is_ready and not list((tmp_path / "kept").glob("*.safetensors"))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_start_that_is_cancelled_ends_its_thread(folder: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(folder), OPTIONS)
        task = asyncio.create_task(llm.start())
        await asyncio.sleep(0)
        thread = llm._engine_thread
        assert thread is not None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(thread.join)
        assert not thread.is_alive and not llm.is_ready
        await asyncio.sleep(0)  # what the thread has told the loop
        await llm.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    "prompt", ["abc", {"prompt": "abc"}, {"prompt": "abc", "prompt_token_ids": None}, [1, 2], {"prompt_token_ids": [1]}]
)
def test_outputs_name_the_prompt_as_the_library_does(folder: Path, prompt: Prompt) -> None:
    with LLM(str(folder), OPTIONS) as llm:
        (expected,) = llm.generate(prompt, GREEDY)

    async def body(llm: AsyncLLM) -> None:
        items = [item async for item in llm.generate(prompt, GREEDY)]
        assert {item.prompt for item in items} == {expected.prompt}
        assert all(item.prompt_token_ids == expected.prompt_token_ids for item in items)

    run(folder, body)


def test_the_prefixes_of_the_file_are_pinned_at_the_start(folder: Path, tmp_path: Path) -> None:
    file, prefix = tmp_path / "pins.jsonl", "The quick brown fox jumps over the lazy dog. " * 4
    file.write_text(json.dumps({"prompt": prefix}))

    async def body(llm: AsyncLLM) -> None:
        (pinned,) = [each for each in await llm.prefixes() if each.pinned_seconds is not None]
        assert pinned.pinned_seconds == float("inf") and llm.stats()["cache"]["bytes_pinned"] == pinned.num_bytes
        async for delta in llm.generate(prefix + "And then?", SamplingParams(max_tokens=1)):
            assert delta.num_cached_tokens == pinned.num_tokens == 128

    run(folder, body, **{"cache.pin": str(file)})


def test_pins_are_refused_while_there_are_requests(folder: Path, tmp_path: Path) -> None:
    """And an error of a query is its caller's: the engine goes on."""
    file = tmp_path / "pins.jsonl"
    file.write_text(json.dumps({"prompt": "The quick brown fox jumps over the lazy dog. " * 4}))

    async def main() -> None:
        async with AsyncLLM(str(folder), {**OPTIONS, "cache.pin": str(file)}, pins_at_start=False) as llm:
            running = llm.generate("Hello", SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
            await anext(running)
            with pytest.raises(QuireError, match="before there are requests"):
                await llm.pin()
            assert llm.is_ready and await anext(running)
            with pytest.raises(QuireError, match="before there are requests"):
                await llm._ask(lambda engine: protect(engine, [1] * 64))
            assert llm.is_ready and await anext(running)
            await running.aclose()
            await idle(llm)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_request_before_the_pins_is_refused_and_the_start_goes_on(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "pins.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n} lazy dogs. " * 12}) + "\n" for n in range(8)))

    async def main() -> None:
        llm = AsyncLLM(str(folder), {**OPTIONS, "cache.pin": str(file)})
        starting, refusals = asyncio.ensure_future(llm.start()), set()
        while not starting.done():
            assert not llm.is_ready
            try:
                await collect(llm, "Hello")
            except QuireError as error:
                refusals.add(str(error).partition(";")[0])
            await asyncio.sleep(0)
        await starting
        assert llm.is_ready and len((await collect(llm, "Hello"))[1]) == GREEDY.max_tokens
        assert refusals == {
            "this AsyncLLM is not started",
            "the engine is not ready: it first pins the prefixes of cache.pin",
        }
        await llm.close()
        assert not llm.is_ready

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_prefix_that_cannot_be_pinned_fails_the_start(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "pins.jsonl"
    file.write_text(json.dumps({"prompt": "short"}))
    llm = AsyncLLM(str(folder), {**OPTIONS, "cache.pin": str(file)})
    with pytest.raises(ConfigError, match=r"line 1: 5 tokens"):
        asyncio.run(llm.start())
    assert not llm.is_ready
    with pytest.raises(QuireError, match="closed"):
        llm.stats()


def test_a_model_that_cannot_be_loaded_fails_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(tmp_path / "nothing"), OPTIONS)
        assert not llm.is_ready
        with pytest.raises(QuireError, match="nothing"):
            await llm.start()
        assert not llm.is_ready

    asyncio.run(main())


def test_an_engine_that_breaks_fails_every_stream_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM) -> None:
        monkeypatch.setattr(llm._parts.engine, "step", _break)
        with pytest.raises(QuireError, match="broken on purpose"):
            await collect(llm, "abc")
        assert not llm.is_ready

    run(folder, body)
