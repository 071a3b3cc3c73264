"""The application in process: clients, bodies, and a raw ASGI call for what no client library would send."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai

from quire.config import ServeConfig
from quire.server.app import create_app
from tests.server.fake_engine import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "Hello, Wörld 🌍!"}]}
TEXT = {"prompt": "Hello, Wörld 🌍!"}


def application(engine: FakeEngine, **settings: Any) -> Any:
    return create_app(engine, ServeConfig(**settings))


@asynccontextmanager
async def client(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a new server; afterwards the engine must hold no request."""
    engine = FakeEngine() if engine is None else engine
    transport = httpx.ASGITransport(application(engine, **settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://quire") as http:
        yield http
    assert not engine.live, f"requests left in the engine: {engine.live}"


@asynccontextmanager
async def openai_client(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real OpenAI client of a new server."""
    engine = FakeEngine() if engine is None else engine
    # The package has moved from httpx to httpx2; take the transport of whichever it uses.
    names = (each.__module__.partition(".")[0] for each in openai.DefaultAsyncHttpxClient.__mro__)
    library = importlib.import_module(next(name for name in names if name.startswith("httpx")))
    http = library.AsyncClient(transport=library.ASGITransport(application(engine, **settings)))
    async with openai.AsyncOpenAI(api_key="none", base_url="http://quire/v1", http_client=http, max_retries=0) as api:
        yield api
    assert not engine.live, f"requests left in the engine: {engine.live}"


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream of server-sent events, which must end with [DONE]."""
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]", parts[-1]
    return [json.loads(part) for part in parts[:-1]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, in OpenAI's form."""
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}, body
    assert isinstance(body["error"]["message"], str) and body["error"]["type"]
    return body["error"]


class RawCall:
    """One request as ASGI messages: the test decides when the client leaves and, if the body is None, when it comes."""

    def __init__(self, app: Any, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None = None) -> None:
        sent = {"content-type": "application/json"} | (headers or {})
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "client": ("127.0.0.1", 1),
            "server": ("quire", 80),
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        }
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        if body is not None:
            self.inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self.sent: list[dict[str, Any]] = []
        self.arrived = asyncio.Event()
        self.task = asyncio.ensure_future(app(self.scope, self.inbox.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.arrived.set()

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int | None:
        return next((each["status"] for each in self.sent if each["type"] == "http.response.start"), None)

    @property
    def body(self) -> bytes:
        return b"".join(each.get("body", b"") for each in self.sent)
