"""Many clients, some of whom leave, bursts beyond the queue: complete answers or clean errors, and nothing left."""

import asyncio
import gc
import random
import resource
from pathlib import Path

import pytest

from quire.async_llm import AsyncLLM
from quire.config import ServeConfig
from quire.engine.params import SamplingParams
from quire.models.cpu_ops import padded_rows
from quire.server.app import create_app
from tests.server.harness import RawCall, events
from tests.tiny_models import save_tiny

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

REQUESTS = 500
OPTIONS = {
    "model.dtype": "float32",
    "cache.memory": "2MiB",
    "runtime.threads": 1,
    "runtime.device": "cpu",
    "scheduler.max_running": 16,
    "scheduler.max_queue": 24,
    "scheduler.token_budget": 96,
}


def resident_mib():
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def one_client(app, draw):
    """One streamed request of random length; a third of the clients leave midway. Returns how it ended."""
    body = {
        "prompt": [draw.randrange(256) for _ in range(draw.choice([1, 5, 63, 64, 65, 130]))],
        "max_tokens": draw.randrange(1, 40),
        "n": draw.choice([1, 1, 1, 2]),
        "ignore_eos": True,
        "stream": True,
        "seed": draw.randrange(1000),
        "stream_options": {"include_usage": True},
    }
    call = RawCall(app, "/v1/completions", body)
    if draw.random() < 1 / 3:
        chunks = draw.randrange(0, 10)
        while not call.task.done() and len(call.sent) <= chunks:
            await asyncio.sleep(0.002)
        call.leave()
        await call.task
        return "left"
    await call.task
    if call.status == 429:
        return "refused"
    assert call.status == 200, call.body
    chunks = events(call.body.decode())
    assert chunks[-1]["usage"]["completion_tokens"] == body["max_tokens"] * body["n"]
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert ends.count("length") == body["n"]
    return "complete"


async def test_nothing_is_left_after_many_clients(tmp_path, seed):
    draw = random.Random(seed)
    llm = AsyncLLM(str(save_tiny(tmp_path)), OPTIONS)
    await llm.start()
    app = create_app(llm, ServeConfig())
    # Matrix kernels are compiled for each padded number of rows and kept: that is no leak, and it ends.
    for rows in sorted({padded_rows(count) for count in range(1, 65)}):
        async for _ in llm.generate([1] * rows, SamplingParams(max_tokens=1)):
            pass
    try:
        ends = []
        sizes = []
        while len(ends) < REQUESTS:
            burst = draw.choice([1, 5, 20, 60])  # 60 is more than run and wait together
            clients = [one_client(app, random.Random(draw.random())) for _ in range(burst)]
            ends += await asyncio.wait_for(asyncio.gather(*clients), 90)
            gc.collect()
            sizes.append(resident_mib())
        async with asyncio.timeout(10):
            while (stats := llm.stats())["running"] or stats["waiting"] or stats["cache"]["bytes_used"]:
                await asyncio.sleep(0.005)
    finally:
        await llm.close()
    assert {"complete", "left", "refused"} == set(ends), "a way to end was not exercised"
    assert ends.count("complete") > REQUESTS / 4
    assert stats["cache"]["bytes_free"] + stats["cache"]["bytes_cached"] == stats["cache"]["bytes_total"]
    service = app.state.service
    assert service.in_flight == 0 and not llm._streams
    half = len(sizes) // 2
    assert sizes[-1] - sizes[half] < 8, f"memory grew: {sizes[half]:.0f} to {sizes[-1]:.0f} MiB in half a run"
