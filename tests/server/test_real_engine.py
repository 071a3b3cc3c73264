"""The server with the real engine and a tiny model: behaviour that the fake engine cannot show."""

import asyncio
import threading

import pytest

from quire.async_llm import AsyncLLM
from quire.config import ServeConfig
from quire.engine.params import SamplingParams
from quire.llm import LLM
from quire.server.app import create_app
from tests.server.harness import OPTIONS, RawCall, asgi_client, events, real_server

pytestmark = pytest.mark.anyio

PROMPT = "Quires are gatherings of pages. " * 5
MESSAGES = [{"role": "user", "content": "What is a quire?"}]


class Held:
    """While it is entered, the engine stands still before the step after so many."""

    def __init__(self, llm, num_steps):
        self.engine = llm._parts.engine
        self.num_steps = num_steps
        self.reached = threading.Event()
        self.left = threading.Event()

    def __enter__(self):
        step, counters = self.engine.step, self.engine.scheduler.counters

        def held_step():
            if counters.steps == self.num_steps and self.engine.has_work:
                self.reached.set()
                self.left.wait()
            return step()

        self.engine.step = held_step
        return self

    def __exit__(self, *_):
        self.left.set()
        del self.engine.step


async def test_answers_are_the_librarys_alone_in_a_batch_and_streamed(folder):
    with LLM(folder, OPTIONS) as llm:
        prompts = [PROMPT, "a", "Ünïcödé 🌍"]
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
        said = llm.chat(MESSAGES, SamplingParams(max_tokens=10, temperature=0))[0].outputs[0].text
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    async with real_server(folder) as (_, _, http):
        whole = (await http.post("/v1/completions", json=body)).json()
        assert [choice["text"] for choice in whole["choices"]] == expected
        texts = ["", "", ""]
        for chunk in events((await http.post("/v1/completions", json=body | {"stream": True})).text):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == expected
        chat = {"messages": MESSAGES, "max_tokens": 10, "temperature": 0}
        answer = (await http.post("/v1/chat/completions", json=chat)).json()
        assert answer["choices"][0]["message"]["content"] == said


async def test_echoed_logprobs_are_those_of_generation(folder):
    """Scoring a text gives its generated tokens the log probabilities they had when they were generated."""
    prompt = [65, 66, 67, 68] * 20
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2, ignore_eos=True)
    async with real_server(folder) as (llm, _, http):
        outputs = [output async for item in llm.generate(prompt, params) for output in item.outputs]
        ids = [token for output in outputs for token in output.token_ids]
        expected = [place[output.token_ids[0]].logprob for output in outputs for place in output.logprobs]
        body = {"prompt": prompt + ids, "max_tokens": 0, "echo": True, "logprobs": 2}
        lists = (await http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    assert [len(lists[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [92] * 4
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert lists["token_logprobs"][80:] == pytest.approx(expected, abs=1e-4)
    assert lists["token_logprobs"][80:] == [max(top.values()) for top in lists["top_logprobs"][80:]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1, 20], ids="after {} steps".format)
async def test_leaving_frees_the_cache_within_one_step(folder, stream, after):
    body = {"prompt": PROMPT, "max_tokens": 350, "n": 3, "ignore_eos": True, "stream": stream}
    async with real_server(folder) as (llm, app, _):
        with Held(llm, after) as held:
            call = RawCall(app, "/v1/completions", body)
            assert await asyncio.to_thread(held.reached.wait, 30)
            # The engine is about to take a step: the server must do without its news.
            call.leave()
            async with asyncio.timeout(30):
                await call.task
            stats = llm.stats()
            assert stats["steps"] == after and stats["running"] + stats["waiting"] == 3
        async with asyncio.timeout(30):
            # Counters are read while the engine ends the requests: one may stand before another's change.
            while (stats := llm.stats())["running"] or stats["waiting"] or stats["cache"]["bytes_used"]:
                await asyncio.sleep(0.001)
        # An engine without requests takes no steps, so these are all there were.
        assert stats["steps"] <= after + 1, "the engine worked on for nobody"


async def test_a_burst_is_answered_or_refused(folder):
    async with real_server(folder) as (_, _, http):
        body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(40)))
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 429} and codes.count(200) >= 8
        assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
        refused = await http.post("/v1/completions", json=body | {"prompt": ["a"] * 3, "n": 3})
        assert refused.status_code == 400 and "max_queue" in refused.text


async def test_a_broken_engine_is_a_503(folder):
    def broken():
        raise RuntimeError("broken on purpose")

    async with AsyncLLM(folder, OPTIONS) as llm, asgi_client(create_app(llm, ServeConfig())) as http:
        llm._parts.engine.step = broken
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code >= 500
        assert (await http.get("/health/ready")).status_code == 503
        answer = await http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503 and "broken" not in answer.text


async def test_a_closed_engine_is_a_503(folder):
    llm = AsyncLLM(folder, OPTIONS)
    await llm.start()
    async with asgi_client(create_app(llm, ServeConfig())) as http:
        await llm.close()
        assert (await http.get("/health/ready")).status_code == 503
        assert (await http.get("/metrics")).status_code == 503
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 503


WHOLE_CHUNKS = 128
"""Of the 160 tokens of PROMPT and of the rendered CONVERSATION those that may be found."""
CONVERSATION = [{"role": "user", "content": PROMPT}]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("completions", {"prompt": PROMPT}), ("chat/completions", {"messages": CONVERSATION})]
)
async def test_usage_tells_what_was_found_in_the_cache(folder, path, body, stream, n):
    async def cached_tokens():
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await http.post(f"/v1/{path}", json=body | options | {"n": n, "max_tokens": 3, "ignore_eos": True})
        usage = events(answer.text)[-1]["usage"] if stream else answer.json()["usage"]
        assert usage["completion_tokens"] == 3 * n and usage["prompt_tokens"] > WHOLE_CHUNKS + 1
        return usage["prompt_tokens_details"]["cached_tokens"]

    async with real_server(folder) as (_, _, http):
        assert await cached_tokens() == 0
        assert await cached_tokens() == WHOLE_CHUNKS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("completions", {"prompt": PROMPT}), ("chat/completions", {"messages": CONVERSATION})]
)
async def test_usage_tells_what_is_pinned(folder, path, body, stream):
    async def details(**hints):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await http.post(f"/v1/{path}", json=body | options | hints | {"n": 2, "max_tokens": 3})
        usage = events(answer.text)[-1]["usage"] if stream else answer.json()["usage"]
        return usage["prompt_tokens_details"].get("pinned_tokens", "nothing")

    async with real_server(folder) as (_, _, http):
        told = [await details(**hints) for hints in ({}, {"cache_pin": 5}, {"cache_pin": False})]
    assert told == ["nothing", WHOLE_CHUNKS, 0]


async def test_usage_adds_up_what_several_prompts_found(folder):
    async def cached_tokens(*prompts):
        answer = await http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 2, "ignore_eos": True})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    other = PROMPT[::-1]
    async with real_server(folder) as (_, _, http):
        # Of two that come together the second finds what the first has just computed.
        assert await cached_tokens(PROMPT, PROMPT) == WHOLE_CHUNKS
        assert await cached_tokens(PROMPT, other) == WHOLE_CHUNKS
        assert await cached_tokens(other, "short", PROMPT) == 2 * WHOLE_CHUNKS


async def test_a_pinned_prompt_outlives_others_and_its_pin_can_end(folder):
    async def ask(prompt, **hints):
        answer = await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2} | hints)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    chunk_bytes = 64 * 2 * 2 * 12 * 2 * 4
    async with real_server(folder, {"cache.memory": 10 * chunk_bytes}) as (llm, _, http):
        await ask(PROMPT, cache_pin=3600)
        assert llm.stats()["cache"]["bytes_pinned"] == WHOLE_CHUNKS // 64 * chunk_bytes
        for each in range(8):
            await ask([each] * 160)
        assert await ask(PROMPT, cache_pin=False) == WHOLE_CHUNKS
        assert llm.stats()["cache"]["bytes_pinned"] == 0
        for each in range(8):
            await ask([each] * 160)
        assert await ask(PROMPT) == 0


async def test_a_pin_that_cannot_be_is_refused_by_name(folder):
    async with real_server(folder, {"cache.memory": "256KiB"}) as (_, _, http):
        for prompt, said in (("short", "whole chunks"), ([1] * 400, "may be pinned")):
            for stream in (False, True):
                body = {"prompt": prompt, "cache_pin": True, "stream": stream}
                refused = await http.post("/v1/completions", json=body)
                assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_pin"
                assert said in refused.text
        bodies = [{"prompt": [each] * 160, "cache_pin": True, "max_tokens": 1} for each in range(4)]
        answers = [await http.post("/v1/completions", json=body) for body in bodies]
        # Of ten chunks half may be pinned: two prompts of two.
        details = [answer.json()["usage"]["prompt_tokens_details"] for answer in answers]
        assert [each["pinned_tokens"] for each in details] == [128, 128, 0, 0]
