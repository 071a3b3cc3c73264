"""Sampling parameters that a request omits come from the model, unless the server is configured otherwise."""

import pytest

from quire.engine.sampling_defaults import SamplingDefaults
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, TEXT, client

pytestmark = pytest.mark.anyio
ADVICE = {"temperature": 0.2, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2, "max_tokens": 9}
NAMES = [name for name in ADVICE if name != "max_tokens"]


class Advised(FakeEngine):
    """A model whose makers advise something; keeps the parameters of the requests."""

    sampling_defaults = SamplingDefaults(ADVICE, "generation_config.json")

    def __init__(self):
        super().__init__()
        self.params = []

    async def _generate(self, ids, params, request_id):
        self.params.append(params)
        async for item in super()._generate(ids, params, request_id):
            yield item


async def engine_params(path, body, **settings):
    """The parameters with which the engine was asked."""
    engine = Advised()
    async with client(engine, **settings) as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
    (params,) = engine.params
    return params


@pytest.mark.parametrize("nulls", [False, True], ids=["left out", "null"])
@pytest.mark.parametrize("path, body", [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
async def test_what_a_request_leaves_out_or_null_is_the_models_default(path, body, nulls):
    params = await engine_params(path, body | dict.fromkeys(NAMES) if nulls else body)
    assert {name: getattr(params, name) for name in NAMES} == {name: ADVICE[name] for name in NAMES}


@pytest.mark.parametrize("path, body", [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
async def test_what_a_request_gives_wins(path, body):
    given = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 3}
    params = await engine_params(path, body | given)
    assert {name: getattr(params, name) for name in given} == given


async def test_the_makers_length_is_a_chats_default_and_no_limit():
    assert (await engine_params("/v1/chat/completions", CHAT)).max_tokens == 9
    assert (await engine_params("/v1/chat/completions", CHAT | {"max_completion_tokens": 50})).max_tokens == 50
    assert (await engine_params("/v1/chat/completions", CHAT | {"min_tokens": 12})).max_tokens == 12
    assert (await engine_params("/v1/chat/completions", CHAT, max_output_tokens=4)).max_tokens == 4
    assert (await engine_params("/v1/completions", TEXT)).max_tokens == 16


async def test_openai_turns_the_models_defaults_off():
    params = await engine_params("/v1/chat/completions", CHAT, sampling_defaults="openai")
    assert [getattr(params, name) for name in NAMES] == [1.0, 1.0, -1, 0.0, 1.0]
    assert params.max_tokens > 1000


async def test_the_models_card_says_which_defaults_hold():
    async with client(Advised()) as http:
        assert (await http.get("/v1/models")).json()["data"][0]["sampling_defaults"] == ADVICE
        assert (await http.get("/v1/models/fake")).json()["sampling_defaults"] == ADVICE
    async with client(Advised(), sampling_defaults="openai") as http:
        assert (await http.get("/v1/models")).json()["data"][0]["sampling_defaults"] == {}
