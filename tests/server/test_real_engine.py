"""The server on the real engine, with a tiny model: what the fake cannot show."""

import asyncio
import threading
from contextlib import asynccontextmanager

import httpx
import pytest

from quire.async_llm import AsyncLLM
from quire.config import ServeConfig
from quire.engine.params import SamplingParams
from quire.llm import LLM
from quire.server.app import create_app
from tests.server.harness import RawCall, events
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.anyio

OPTIONS = {
    "model.dtype": "float32",
    "model.name": "tiny",
    "cache.memory": "8MiB",
    "runtime.threads": 2,
    "runtime.device": "cpu",
    "scheduler.max_running": 4,
    "scheduler.max_queue": 8,
}
PROMPT = "Quires are gatherings of pages. " * 5
MESSAGES = [{"role": "user", "content": "What is a quire?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


def client(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://quire", timeout=30)


@asynccontextmanager
async def server(folder):
    """(engine, application, client); afterwards the cache must be empty."""
    async with AsyncLLM(folder, OPTIONS) as llm:
        app = create_app(llm, ServeConfig())
        async with client(app) as http:
            yield llm, app, http
        async with asyncio.timeout(10):
            while (stats := llm.stats())["running"] or stats["waiting"] or stats["cache"]["bytes_used"]:
                await asyncio.sleep(0.005)


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
    async with server(folder) as (_, _, http):
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
    async with server(folder) as (llm, _, http):
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
    async with server(folder) as (llm, app, _):
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
            while (stats := llm.stats())["running"] or stats["waiting"]:
                await asyncio.sleep(0.001)
        # An engine without requests takes no steps, so these are all there were.
        assert stats["steps"] <= after + 1, "the engine worked on for nobody"
        assert stats["cache"]["bytes_used"] == 0


async def test_a_burst_is_answered_or_refused(folder):
    async with server(folder) as (_, _, http):
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

    async with AsyncLLM(folder, OPTIONS) as llm, client(create_app(llm, ServeConfig())) as http:
        llm._parts.engine.step = broken
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code >= 500
        assert (await http.get("/health/ready")).status_code == 503
        answer = await http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503 and "broken" not in answer.text


async def test_a_closed_engine_is_a_503(folder):
    llm = AsyncLLM(folder, OPTIONS)
    await llm.start()
    async with client(create_app(llm, ServeConfig())) as http:
        await llm.close()
        assert (await http.get("/health/ready")).status_code == 503
        assert (await http.get("/metrics")).status_code == 503
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 503
