"""The application in process: clients, bodies, and a raw ASGI call for requests that no client library would send."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from quire.async_llm import AsyncLLM
from quire.config import ServeConfig
from quire.server import run
from quire.server.app import create_app
from quire.server.auth import ApiKeys
from quire.server.connection_manager import ConnectionLimits
from quire.server.run import HttpListener, serve
from tests.server.fake_engine import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "Hello, Wörld 🌍!"}]}
TEXT = {"prompt": "Hello, Wörld 🌍!"}
OPTIONS = {
    "model.dtype": "float32",
    "model.name": "tiny",
    "cache.memory": "8MiB",
    "runtime.threads": 1,
    "runtime.device": "cpu",
    "scheduler.max_running": 4,
    "scheduler.max_queue": 8,
}
"""Of the real engine with a tiny model."""


def application(engine: FakeEngine, **settings: Any) -> Any:
    return create_app(engine, ServeConfig(**settings))


@asynccontextmanager
async def client(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a new server; afterwards the engine must hold no request."""
    engine = FakeEngine() if engine is None else engine
    async with asgi_client(application(engine, **settings)) as http:
        yield http
    assert not engine.live, f"requests left in the engine: {engine.live}"


def asgi_client(app: Any) -> httpx.AsyncClient:
    """A client of an application, which it reaches by this machine's own name."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000", timeout=30)


@asynccontextmanager
async def real_server(
    folder: str, options: Mapping[str, Any] | None = None, keys: Sequence[str] = (), **settings: Any
) -> AsyncIterator[tuple[AsyncLLM, Any, httpx.AsyncClient]]:
    """(engine, application, client) with a real model; afterwards no request may use the cache."""
    async with AsyncLLM(folder, OPTIONS | dict(options or {})) as llm:
        app = create_app(llm, ServeConfig(**settings), ApiKeys(list(keys)))
        async with asgi_client(app) as http:
            yield llm, app, http
        async with asyncio.timeout(10):
            while (stats := llm.stats())["running"] or stats["waiting"] or stats["cache"]["bytes_used"]:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def turns() -> AsyncIterator[list[float]]:
    """The processor time that the event loop's thread took each time before others had their turn, whatever else the
    machine does. Without garbage collection, whose time depends on what earlier tests have left.
    """
    found: list[float] = []

    async def watch() -> None:
        while True:
            begun = time.thread_time()
            await asyncio.sleep(0.001)
            found.append(time.thread_time() - begun)

    gc.collect()
    gc.disable()
    task = asyncio.ensure_future(watch())
    try:
        yield found
    finally:
        task.cancel()
        gc.enable()


def asgi_http(app: Any) -> Any:
    """What OpenAI's client reaches an application with."""
    # The package has moved from httpx to httpx2; take the transport of whichever it uses.
    names = (each.__module__.partition(".")[0] for each in openai.DefaultAsyncHttpxClient.__mro__)
    library = importlib.import_module(next(name for name in names if name.startswith("httpx")))
    return library.AsyncClient(transport=library.ASGITransport(app))


@asynccontextmanager
async def openai_client(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real OpenAI client of a new server."""
    engine = FakeEngine() if engine is None else engine
    http = asgi_http(application(engine, **settings))
    async with openai.AsyncOpenAI(
        api_key="none", base_url="http://127.0.0.1:8000/v1", http_client=http, max_retries=0
    ) as api:
        yield api
    assert not engine.live, f"requests left in the engine: {engine.live}"


@asynccontextmanager
async def socket_server(
    engine: FakeEngine | None = None, keys: Sequence[str] = (), limits: ConnectionLimits | None = None, **settings: Any
) -> AsyncIterator[SocketServer]:
    """A server on a real socket of this event loop; afterwards the engine must hold no request."""
    engine = FakeEngine() if engine is None else engine
    listener = HttpListener(ServeConfig(port=0, **settings))
    listener.keys = ApiKeys(list(keys))
    ready = asyncio.Event()
    apps: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "create_app", lambda *given: apps.append(create_app(*given)) or apps[0])
        serving = asyncio.ensure_future(serve(engine, listener, ready.set, limits))
        await asyncio.sleep(0)
    try:
        await asyncio.wait_for(ready.wait(), 5)
        server = SocketServer(engine, listener.port, serving, apps[0])
        try:
            yield server
        finally:
            for each in server.clients:
                each.close()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert not engine.live, f"requests left in the engine: {engine.live}"


@dataclass
class SocketServer:
    """A server, and clients of it that write bytes."""

    engine: FakeEngine
    port: int
    serving: asyncio.Future[None]
    app: Any
    clients: list[RawClient] = field(default_factory=list)

    async def connect(self, sent: bytes = b"") -> RawClient:
        """A client that has sent some bytes."""
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        await client.send(sent)
        return client

    async def ask(self, sent: bytes) -> Answer:
        """The answer to some bytes on a connection of their own, which the server must close or keep."""
        client = await self.connect(sent)
        answer = await client.answer()
        client.close()
        return answer


@dataclass
class Answer:
    """A response as bytes came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The code of an error in our form."""
        return json.loads(self.body)["error"]["code"]


@dataclass
class RawClient:
    """A connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Send, however far the server reads it."""
        if data:
            self.writer.write(data)
            with contextlib.suppress(ConnectionError):
                await self.writer.drain()

    async def answer(self, seconds: float = 5) -> Answer:
        """The next answer, which must have a length or end with the connection."""
        async with asyncio.timeout(seconds):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.split("\r\n")[:-2]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            length = headers.get("content-length")
            body = await (self.reader.read() if length is None else self.reader.readexactly(int(length)))
        return Answer(int(first.split()[1]), headers, body)

    async def ended(self, seconds: float = 5) -> bool:
        """Whether the server closes the connection without a further byte."""
        async with asyncio.timeout(seconds):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True

    def close(self) -> None:
        """Leave."""
        self.writer.transport.abort()


def post_head(path: str, *lines: str) -> bytes:
    """The head of a request with a JSON body."""
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines]
    return "\r\n".join([*head, "", ""]).encode()


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream of server-sent events, which must end with [DONE]."""
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]", parts[-1]
    return [json.loads(part) for part in parts[:-1]]


def named_events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream whose events have names: those are their types, and their numbers count."""
    found: list[dict[str, Any]] = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(found)
        found.append(event)
    return found


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, in OpenAI's form."""
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}, body
    assert isinstance(body["error"]["message"], str) and body["error"]["type"]
    return body["error"]


class RawCall:
    """One request as ASGI messages: the test decides when the client leaves and, if the body is None, when it comes."""

    def __init__(
        self,
        app: Any,
        path: str,
        body: dict[str, Any] | None,
        headers: dict[str, str] | None = None,
        method: str = "POST",
    ) -> None:
        content = None if body is None else json.dumps(body).encode()
        sent = {"content-type": "application/json"} | (headers or {})
        if content is not None:
            sent |= {"content-length": str(len(content))}
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
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
        if content is not None:
            self.inbox.put_nowait({"type": "http.request", "body": content, "more_body": False})
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
