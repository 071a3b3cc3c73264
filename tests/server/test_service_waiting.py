"""Prompts that wait have a limit in tokens, of which several tenants have shares."""

import asyncio
import json

import pytest

from quire.config import ServeConfig
from quire.server import service as service_module
from quire.server.app import create_app
from quire.server.auth import ApiKeys
from tests.server.fake_engine import FakeEngine
from tests.server.harness import RawCall, application, post_head, socket_server

pytestmark = pytest.mark.anyio

ONE, OTHER = "a" * 32, "b" * 32


class SlowEngine(FakeEngine):
    """No token comes before it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()

    async def _generate(self, *args):
        await self.told.wait()
        async for item in super()._generate(*args):
            yield item


def prompts(length, count=1, **fields):
    return {"prompt": [[97] * length] * count, "max_tokens": 2, **fields}


async def running(engine, count):
    async with asyncio.timeout(5):
        while len(engine.live) < count:
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(service_module, "MAX_WAITING_TOKENS", 100)


async def test_prompts_that_wait_have_a_limit_in_tokens_and_one_request_always_waits():
    app = application(engine := SlowEngine())
    first = RawCall(app, "/v1/completions", prompts(50, 3))
    await running(engine, 3)
    refused = RawCall(app, "/v1/completions", prompts(1))
    await refused.task
    assert refused.status == 429 and json.loads(refused.body)["error"]["code"] == "queue_full"
    assert "150 tokens of your prompts wait" in json.loads(refused.body)["error"]["message"]
    engine.told.set()
    await first.task
    again = RawCall(app, "/v1/completions", prompts(60))
    await again.task
    assert (first.status, again.status) == (200, 200) and not app.state.service.waiting.total()


async def test_further_answers_to_a_prompt_count_half():
    app = application(engine := SlowEngine())
    first = RawCall(app, "/v1/completions", prompts(10, n=3))
    await running(engine, 1)
    assert app.state.service.waiting.total() == 20
    fits = RawCall(app, "/v1/completions", prompts(80))
    await running(engine, 2)
    refused = RawCall(app, "/v1/completions", prompts(1))
    await refused.task
    assert refused.status == 429
    engine.told.set()
    await asyncio.gather(first.task, fits.task)
    assert (first.status, fits.status) == (200, 200)


async def test_one_of_several_tenants_takes_at_most_half():
    app = create_app(engine := SlowEngine(), ServeConfig(), ApiKeys([ONE, OTHER]))

    def call(key, length):
        return RawCall(app, "/v1/completions", prompts(length), {"authorization": f"Bearer {key}"})

    calls = [call(ONE, 45)]
    await running(engine, 1)
    refused = call(ONE, 10)
    await refused.task
    calls.append(call(OTHER, 45))
    await running(engine, 2)
    engine.told.set()
    await asyncio.gather(*(each.task for each in calls))
    assert refused.status == 429 and [each.status for each in calls] == [200, 200]


async def test_a_request_counts_from_its_admission_on(monkeypatch):
    """Compiling a form takes a while, and so do the turns of further prompts."""
    engine, compiled = SlowEngine(), asyncio.Event()

    async def check(wanted, salt=""):
        await compiled.wait()
        return object()

    monkeypatch.setattr(engine, "compile_grammar", check)
    app = application(engine)
    bodies = [prompts(40, 2, structured_outputs={"choice": ["a"]}) for _ in range(5)]
    calls = [RawCall(app, "/v1/completions", body) for body in bodies]
    async with asyncio.timeout(5):
        while sum(each.task.done() for each in calls) < 4:
            await asyncio.sleep(0.001)
    assert app.state.service.waiting.total() == 80
    compiled.set()
    engine.told.set()
    await asyncio.gather(*(each.task for each in calls))
    assert sorted(each.status for each in calls) == [200, 429, 429, 429, 429]
    assert not app.state.service.waiting.total()


async def test_a_tenant_with_nothing_waiting_is_taken_and_told_nothing_of_others():
    app = create_app(engine := SlowEngine(), ServeConfig(), ApiKeys([ONE, OTHER]))

    def call(key, body):
        return RawCall(app, "/v1/completions", body, {"authorization": f"Bearer {key}"})

    calls = [call(ONE, prompts(40, n=8))]
    await running(engine, 1)
    calls.append(call(OTHER, prompts(3)))
    await running(engine, 2)
    refused = call(OTHER, prompts(1))
    await refused.task
    assert refused.status == 429 and "3 tokens of your prompts" in json.loads(refused.body)["error"]["message"]
    engine.told.set()
    await asyncio.gather(*(each.task for each in calls))
    assert [each.status for each in calls] == [200, 200]


async def test_who_leaves_or_does_not_read_holds_no_place():
    engine = FakeEngine(max_context=50_000)
    async with socket_server(engine) as server:
        service = server.app.state.service
        asked = prompts(30_000, n=100, stream=True, echo=True, ignore_eos=True)
        body = json.dumps(asked | {"max_tokens": 5000}).encode()
        client = await server.connect(post_head("/v1/completions", f"Content-Length: {len(body)}") + body)
        client.writer.transport.pause_reading()
        await running(engine, 1)
        async with asyncio.timeout(10):
            while service.waiting.total():
                await asyncio.sleep(0.01)
        assert engine.live
        client.close()
        async with asyncio.timeout(10):
            while engine.live:
                await asyncio.sleep(0.01)
