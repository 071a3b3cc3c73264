"""Checks of forms before a request is queued: they end with the client, and the tool that is at fault is looked for
within a budget.
"""

import asyncio

import pytest

from quire.errors import RequestError
from quire.server import tooling
from quire.structured.params import StructuredOutputsParams
from tests.server.fake_engine import FakeEngine
from tests.server.harness import RawCall, application, asgi_client, error_of

pytestmark = pytest.mark.anyio

NAMES = [f"tool_{number}" for number in range(120)]


class SlowChecks(FakeEngine):
    """Refuses the tools of a request together, and takes a while for each of them, which is fine."""

    def __init__(self, seconds=0.02):
        super().__init__(max_context=100_000)
        self.seconds, self.num_checks, self.salts = seconds, 0, set()

    async def compile_grammar(self, wanted: StructuredOutputsParams, cache_salt: str = "") -> object:
        self.num_checks += 1
        self.salts.add(cache_salt)
        await asyncio.sleep(self.seconds)
        if wanted.kind == "grammar":
            raise RequestError("structured_outputs: grammar cannot be honoured: it is too large", "structured_outputs")
        return object()


def chat_body(**more):
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
    return {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required", **more}


def responses_body(**more):
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in NAMES]
    return {"input": "a", "tools": tools, **more}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", chat_body()), ("/v1/chat/completions", chat_body(stream=True)),
                       ("/v1/responses", responses_body(tool_choice="required")), ("/v1/responses", responses_body())],
    ids=["chat", "stream", "response", "response with unsaid strictness"],
)  # fmt: skip
async def test_nothing_is_compiled_for_a_client_that_has_left(path, body):
    engine = SlowChecks()
    call = RawCall(application(engine), path, body)
    async with asyncio.timeout(10):
        while engine.num_checks < 3:
            await asyncio.sleep(0.005)
        call.leave()
        await asyncio.gather(call.task, return_exceptions=True)
    seen = engine.num_checks
    await asyncio.sleep(0.2)
    assert engine.num_checks == seen < 20 and not engine.live


async def test_the_tool_at_fault_is_looked_for_within_a_budget(monkeypatch):
    monkeypatch.setattr(tooling, "BLAME_SECONDS", 0.1)
    engine = SlowChecks()
    async with asgi_client(application(engine)) as http:
        response = await http.post("/v1/chat/completions", json=chat_body())
        assert response.status_code == 400 and "too large" in error_of(response)["message"]
        assert 1 < engine.num_checks < 30
        await http.post("/v1/responses", json=responses_body(max_output_tokens=1))
        assert engine.num_checks < 60


async def test_a_form_is_compiled_for_the_salt_of_its_request():
    engine = SlowChecks()
    form = {"structured_outputs": {"regex": "a"}, "max_tokens": 1}
    async with asgi_client(application(engine)) as http:
        await http.post("/v1/completions", json={"prompt": "a", "cache_salt": "mine", **form})
        await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **form})
    assert engine.salts == {"mine", ""}
