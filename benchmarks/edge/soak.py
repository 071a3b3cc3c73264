"""A soak test: many streams, a third of them dropped midway, and clients that do not read answers of several MB.

Bounds
    lag      99.9th percentile of the event loop's lag, by the server's own metric: at most 3 times the lag while the
             same number of requests runs without streams
    memory   at most weights + arena + 600 MB; the second half of the requests adds at most 20 MB
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import urllib.request
from collections import Counter

from common import ROOT, format_table, median
from probe import family, resident
from servers import Server

AT_ONCE = 32
CALM_SECONDS = 60.0
UNREAD = 8
"""Clients that do not read, spread over the requests; 10 MB of answer each."""

MAX_RATIO, MAX_EXTRA, MAX_GROWTH = 3.0, 600e6, 20e6


def completion(**fields: object) -> bytes:
    """A request for a completion that closes its connection."""
    body = json.dumps({"prompt": [600] * 32, "ignore_eos": True, "temperature": 1.0, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def stream(port: int, draw: random.Random) -> str:
    """Runs one stream of 4 to 40 tokens; one of three is dropped midway. Returns how it ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    tokens, dropped = draw.randrange(4, 41), draw.random() < 1 / 3
    try:
        writer.write(completion(max_tokens=tokens, stream=True, seed=draw.randrange(1000)))
        if dropped:
            await reader.readexactly(draw.randrange(1, 100 * tokens))
            return "dropped"
        answer = await reader.read()
        return "complete" if b"data: [DONE]" in answer else answer[9:12].decode()
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        return type(error).__name__
    finally:
        writer.transport.abort()


def unread(port: int) -> socket.socket:
    """An unread stream with the scores of 20 tokens for each of 16 x 300 tokens."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(completion(max_tokens=300, n=16, logprobs=20, stream=True))
    return client


def metrics(url: str) -> dict[str, float]:
    """The server's metrics, by name and labels."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def lag(before: dict[str, float], after: dict[str, float], share: float) -> float:
    """The quantile `share` of the lag between two readings of the metrics, as the upper end of a bucket."""
    begin = 'quire_event_loop_lag_seconds_bucket{le="'
    counts = [
        (float(name.removeprefix(begin).rstrip('"}')), after[name] - before[name])
        for name in after
        if name.startswith(begin)
    ]
    counts.sort()
    return next(bound for bound, count in counts if count >= share * counts[-1][1])


async def calm(port: int, seconds: float) -> None:
    """The same number of concurrent requests as in the soak, without streams."""

    async def one() -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(completion(max_tokens=200))
            await reader.read()
            writer.close()

    tasks = [asyncio.ensure_future(one()) for _ in range(AT_ONCE)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def soak(port: int, pid: int, requests: int) -> tuple[Counter[str], list[int], list[int]]:
    """Runs the soak. Returns how requests ended, and the server's memory over the first and the second half."""
    draw = random.Random(0)
    ends: Counter[str] = Counter()
    halves: tuple[list[int], list[int]] = ([], [])
    waiting = iter(range(requests))
    held: list[socket.socket] = []

    async def client() -> None:
        for number in waiting:
            if number % (requests // UNREAD) == 1:
                held.append(await asyncio.to_thread(unread, port))
            ends[await stream(port, random.Random(draw.random()))] += 1

    async def watch() -> None:
        pids = family(pid)
        while True:
            halves[ends.total() >= requests / 2].append(resident(pids))
            await asyncio.sleep(0.5)

    watching = asyncio.ensure_future(watch())
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    watching.cancel()
    for each in held:
        each.close()
    return ends, *halves


def run_soak(found: Server, given: argparse.Namespace) -> bool:
    """Measures and prints. Returns whether the bounds hold."""
    command = [sys.executable, "-m", "quire", "inspect", given.model, "--json"]
    facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    asyncio.run(calm(found.port, 5.0))  # warm-up
    start = metrics(found.url)
    asyncio.run(calm(found.port, CALM_SECONDS))
    before = metrics(found.url)
    ends, first, second = asyncio.run(soak(found.port, found.process.pid, given.requests))
    after = metrics(found.url)
    quiet, loud = lag(start, before, 0.999), lag(before, after, 0.999)
    rest = facts["weight_bytes"] + after["quire_cache_capacity_bytes"]
    tenth = max(1, len(second) // 10)
    growth = median(second[-tenth:]) - median(second[:tenth])
    extra = max(first + second) - rest
    rows = [
        ["requests", ", ".join(f"{count} {how}" for how, count in sorted(ends.items())), "all complete or dropped"],
        ["loop lag p99.9 beside the engine, ms", f"{1e3 * quiet:.1f}", "-"],
        ["loop lag p99.9 in the soak, ms", f"{1e3 * loud:.1f}", f"{3e3 * quiet:.1f}"],
        [
            "loop lag p50, p99 in the soak, ms",
            f"{1e3 * lag(before, after, 0.5):.1f}, {1e3 * lag(before, after, 0.99):.1f}",
            "-",
        ],
        ["memory at most, MB", f"{max(first + second) / 1e6:.0f}", f"{(rest + MAX_EXTRA) / 1e6:.0f}"],
        ["of it beyond weights and arena, MB", f"{extra / 1e6:.0f}", f"{MAX_EXTRA / 1e6:.0f}"],
        ["growth over the second half, MB", f"{growth / 1e6:.1f}", f"{MAX_GROWTH / 1e6:.0f}"],
    ]
    print(format_table(["soak", "measured", "bound"], rows, given.markdown))
    whole = set(ends) <= {"complete", "dropped"} and ends.total() == given.requests
    return whole and loud <= MAX_RATIO * quiet and extra <= MAX_EXTRA and growth <= MAX_GROWTH
