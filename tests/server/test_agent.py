"""The agent of examples/, with OpenAI's client and the embedded model."""

import importlib.util
import json
from pathlib import Path

import openai
import pytest

from quire.async_llm import AsyncLLM
from quire.config import ServeConfig
from quire.server.app import create_app
from tests.server.harness import OPTIONS, asgi_http

pytestmark = pytest.mark.anyio

FILE = Path(__file__).parents[2] / "examples" / "agent.py"


@pytest.fixture(scope="module")
def agent():
    spec = importlib.util.spec_from_file_location("agent", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_agent_calls_and_answers(agent):
    said = []
    async with AsyncLLM("smollm2", OPTIONS | {"model.dtype": "bfloat16", "cache.memory": "64MiB"}) as llm:
        app = create_app(llm, ServeConfig())
        async with openai.AsyncOpenAI(
            api_key="none", base_url="http://127.0.0.1:8000/v1", http_client=asgi_http(app), max_retries=0
        ) as client:
            answer = await agent.answer(client, "tiny", "What is 17 times 23?", say=said.append)
            free = await agent.answer(client, "tiny", "Say hello.", is_free=True, say=said.append)
    assert answer and isinstance(free, str)
    name, arguments = said[0].split("(", 1)
    assert name in agent.FUNCTIONS
    assert isinstance(json.loads(arguments.rpartition(") = ")[0]), dict)


@pytest.mark.parametrize(("text", "value"), [("17 * 23", 391), ("3*(4+5)", 27), ("-2 + 1/4", -1.75)])
async def test_the_calculator_calculates(agent, text, value):
    assert agent.calculate(text) == value
    with pytest.raises(ValueError, match="something else"):
        agent.calculate("__import__('os')")
