"""A server with the fake engine in its own process: `python -m tests.server.drain_server DRAIN_SECONDS`."""

import asyncio
import logging
import sys

from quire.config import ServeConfig
from quire.server.run import HttpListener, serve
from tests.server.fake_engine import FakeEngine


async def main() -> None:
    listener = HttpListener(ServeConfig(port=0, drain_seconds=float(sys.argv[1])))
    print(await serve(FakeEngine(step_seconds=0.01), listener, ready=lambda: print(listener.url, flush=True)))


logging.basicConfig(format="%(message)s")
logging.getLogger("quire.server").setLevel(logging.INFO)
asyncio.run(main())
