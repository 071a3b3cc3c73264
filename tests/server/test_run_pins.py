"""Prefixes of cache.pin: computed for every tenant before the server says that it is ready."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from quire.async_llm import AsyncLLM
from quire.cli import main
from quire.config import ServeConfig
from quire.errors import ConfigError
from quire.server.run import HttpListener, serve
from quire.server.tenants import Tenants, tenant_of
from tests.server.fake_engine import FakeEngine
from tests.server.harness import OPTIONS

KEYS = ("key-of-a", "key-of-b")
PINNED = "You are a bookbinder; you answer in one sentence, about paper, thread and glue. " * 2
SMALL = ["--cache.memory", "4MiB", "--runtime.device", "cpu", "--runtime.threads", "1", "--port", "0"]


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("\n".join([*KEYS, KEYS[0]]))
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def pins(tmp_path):
    path = tmp_path / "pins.jsonl"
    path.write_text(json.dumps({"prompt": PINNED}) + "\n")
    return str(path)


@asynccontextmanager
async def served(llm, **settings):
    """The server's address, as soon as it says that it is ready."""
    listener = HttpListener(ServeConfig(port=0, **settings))
    ready = asyncio.Event()
    server = asyncio.ensure_future(serve(llm, listener, ready.set))
    waiting = asyncio.ensure_future(ready.wait())
    try:
        await asyncio.wait([server, waiting], return_when=asyncio.FIRST_COMPLETED)
        if server.done():
            await server
        yield listener.url
    finally:
        waiting.cancel()
        server.cancel()
        await asyncio.gather(server, waiting, return_exceptions=True)


@pytest.mark.anyio
@pytest.mark.parametrize("share", [False, True])
async def test_every_tenant_has_its_pins_when_the_server_is_ready(keys, share):
    names = [tenant_of(key.encode()) for key in KEYS]
    for settings, salts in (
        ({}, [""]),
        ({"api_key_file": keys, "tenants_share": share}, [""] if share else Tenants(names).salts),
    ):
        engine = FakeEngine()
        async with served(engine, **settings):
            assert engine.pinned_salts == salts


@pytest.mark.anyio
@pytest.mark.parametrize("share", [False, True])
async def test_the_first_request_of_every_tenant_finds_the_pinned_prefix(folder, keys, pins, share):
    llm = AsyncLLM(folder, OPTIONS | {"cache.pin": pins}, pins_at_start=False)
    await llm.start()
    async with (
        served(llm, api_key_file=keys, tenants_share=share) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        pinned = llm.stats()["cache"]["bytes_pinned"]
        assert pinned == (1 if share else 2) * 2 * 64 * 2 * 2 * 12 * 2 * 4
        for key in KEYS:
            body = {"prompt": PINNED + "Who are you?", "max_tokens": 2}
            answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    assert not llm.is_ready


@pytest.mark.anyio
async def test_pins_that_cannot_be_end_the_server_before_it_is_ready(folder, tmp_path):
    file = tmp_path / "pins.jsonl"
    file.write_text(json.dumps({"prompt": "short"}))
    llm = AsyncLLM(folder, OPTIONS | {"cache.pin": str(file)}, pins_at_start=False)
    await llm.start()
    with pytest.raises(ConfigError, match="line 1: 5 tokens"):
        async with served(llm):
            pytest.fail("the server says that it is ready")
    assert not llm.is_ready


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read cache.pin"),
        ("{}", "line 1: it must be"),
        (json.dumps({"prompt": "a" * 300}), "would pin over 50% of the cache"),
    ],
)
def test_pins_that_cannot_be_are_one_line_and_exit_code_two(folder, keys, tmp_path, capsys, text, said):
    file = tmp_path / "pins.jsonl"
    if text is not None:
        file.write_text(text)
    # 13 chunks: the third holds 6 of them for one tenant, not for two.
    words = [*SMALL, "--cache.memory", "320KiB", "--model.dtype", "float32", "--api-key-file", keys]
    assert main(["serve", folder, "--cache.pin", str(file), *words]) == 2
    out, error = capsys.readouterr()
    assert not out and said in error and error.count("\n") == 1 and str(file) in error
