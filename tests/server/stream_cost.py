"""The server's cost per streamed token, in microseconds of CPU: `python -m tests.server.stream_cost`.

The engine returns finished items without waiting, so all time is the server's. "in process": from the engine's item
to the ASGI message. "through uvicorn": to the socket, including the kernel's part; the client is another process.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

from quire.config import ServeConfig
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.server.run import HttpListener, serve
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, TEXT, RawCall, application

TOKENS = 20_000
CLIENT = """
import http.client, json, sys
host, path, body = sys.argv[1:]
connection = http.client.HTTPConnection(host)
connection.request("POST", path, body, {"content-type": "application/json"})
assert connection.getresponse().read().endswith(b"data: [DONE]\\n\\n")
"""


class InstantEngine(FakeEngine):
    """Generates the same word at once; the event loop turns at every token, as at the steps of an engine."""

    async def generate(self, *_: Any) -> AsyncGenerator[RequestOutput, None]:
        for step in range(TOKENS):
            await asyncio.sleep(0)
            output = CompletionOutput(0, " word", [1], None, "length" if step == TOKENS - 1 else None)
            yield RequestOutput("", None, [1], None, [output], step == TOKENS - 1)


def report(what: str, path: str, seconds: float) -> None:
    """One line of the table."""
    print(f"{what:<18}{path:<24}{seconds / TOKENS * 1e6:6.1f} us per token")


async def main() -> None:
    engine = InstantEngine(max_context=2 * TOKENS)
    stream = {"stream": True, "max_tokens": TOKENS}
    bodies = [("/v1/completions", TEXT | stream), ("/v1/chat/completions", CHAT | stream)]
    begun = time.process_time()
    async for _ in engine.generate():
        pass
    report("engine alone", "", time.process_time() - begun)
    for path, body in bodies:
        begun = time.process_time()
        call = RawCall(application(engine), path, body)
        await call.task
        assert call.body.count(b" word") == TOKENS
        report("in process", path, time.process_time() - begun)

    listener = HttpListener(ServeConfig(port=0))
    ready = asyncio.Event()
    server = asyncio.ensure_future(serve(engine, listener, ready.set))
    await ready.wait()
    for path, body in bodies:
        begun = time.process_time()
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, f"127.0.0.1:{listener.port}", path, json.dumps(body), stderr=subprocess.STDOUT
        )
        assert await client.wait() == 0
        report("through uvicorn", path, time.process_time() - begun)
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
