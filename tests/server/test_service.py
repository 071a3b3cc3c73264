"""Limits, refusals and failures that every endpoint has in common, and the drain of a server."""

import asyncio

import pytest

from quire.config import EngineConfig
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, TEXT, RawCall, application, client, error_of

pytestmark = pytest.mark.anyio

OPEN = ["/health", "/health/live", "/health/ready"]


async def test_a_full_queue_says_when_to_come_back():
    async with client(FakeEngine(queue_limit=0)) as http:
        for path, body in [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT | {"stream": True})]:
            response = await http.post(path, json=body)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "3"
            assert (error_of(response)["type"], error_of(response)["code"]) == ("rate_limit_error", "queue_full")


async def test_more_output_than_the_server_allows_is_refused():
    async with client(max_output_tokens=5) as http:
        response = await http.post("/v1/completions", json=TEXT | {"max_tokens": 6})
        assert response.status_code == 400 and "serve.max_output_tokens" in error_of(response)["message"]


async def test_a_draining_server_takes_nothing_new_and_finishes_what_runs():
    app = application(engine := FakeEngine(step_seconds=0.002))
    running = RawCall(app, "/v1/completions", TEXT | {"max_tokens": 20})
    while not engine.live:
        await asyncio.sleep(0.001)
    app.state.service.draining = True
    refused = RawCall(app, "/v1/completions", TEXT)
    await refused.task
    assert refused.status == 503
    await running.task
    assert running.status == 200
    assert app.state.service.idle.is_set()


async def test_an_engine_that_stopped_is_not_ready():
    engine = FakeEngine()
    engine.is_ready = False
    async with client(engine) as http:
        assert (await http.get("/health/live")).status_code == 200
        for path in ("/health", "/health/ready"):
            assert error_of(response := await http.get(path))["code"] == "not_ready"
            assert response.status_code == 503
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 503


async def test_a_request_the_engine_aborts_is_not_passed_off_as_finished():
    app = application(engine := FakeEngine(step_seconds=0.002))
    calls = [RawCall(app, "/v1/completions", TEXT | {"stream": stream}) for stream in (False, True)]
    await calls[1].arrived.wait()
    await engine.close()
    await asyncio.gather(*(call.task for call in calls))
    assert calls[0].status == 503
    assert b'"error"' in calls[1].body and b"[DONE]" not in calls[1].body and b'"abort"' not in calls[1].body


async def test_tokenize_and_back():
    async with client() as http:
        tokens = (await http.post("/tokenize", json={"prompt": "hé"})).json()
        assert tokens == {"tokens": [256, 104, 195, 169], "count": 4, "max_model_len": 2048}
        assert (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": "<s>hé"}
        body = {"tokens": tokens["tokens"], "skip_special_tokens": True}
        assert (await http.post("/detokenize", json=body)).json() == {"prompt": "hé"}
        assert (await http.post("/tokenize", json={"prompt": "", "add_special_tokens": False})).json()["tokens"] == []
        chat = (await http.post("/tokenize", json=CHAT | {"add_generation_prompt": False})).json()
        assert bytes(chat["tokens"]).decode() == "user: Hello, Wörld 🌍!\n"
        long = (await http.post("/tokenize", json={"prompt": "x" * 20_000})).json()
        assert long["count"] == 20_001


async def test_the_fingerprint_is_that_of_model_and_settings():
    found = []
    for options in ({}, {}, {"cache.codec": "g4"}):
        engine = FakeEngine()
        engine.config = EngineConfig.from_options(options)
        async with client(engine) as http:
            both = [(await http.post("/v1/completions", json=TEXT)).json()["system_fingerprint"],
                    (await http.post("/v1/chat/completions", json=CHAT)).json()["system_fingerprint"]]  # fmt: skip
        assert both[0] == both[1]
        found.append(both[0])
    assert found[0] == found[1] != found[2] and all(each.startswith("fp_") for each in found)


async def test_a_wrong_model_is_not_found():
    async with client() as http:
        for path, body in [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "a"})]:
            response = await http.post(path, json=body | {"model": "gpt-4"})
            assert response.status_code == 404
            assert (error_of(response)["code"], error_of(response)["param"]) == ("model_not_found", "model")


async def test_a_models_path_is_a_name_of_it():
    async with client() as http:
        assert (await http.post("/v1/completions", json=TEXT | {"model": "/no/such/model"})).status_code == 200


async def test_more_prompts_than_the_queue_can_hold_are_refused_at_once():
    engine = FakeEngine()
    engine.config = EngineConfig.from_options({"scheduler.max_queue": 3})
    async with client(engine) as http:
        response = await http.post("/v1/completions", json={"prompt": ["a"] * 4})
        assert response.status_code == 400 and error_of(response)["param"] == "prompt"
        assert (await http.post("/v1/completions", json={"prompt": ["a"] * 3})).status_code == 200
