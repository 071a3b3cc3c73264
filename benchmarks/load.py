"""An open-loop client of OpenAI servers: sends requests when they are due, and notes when their tokens arrive.

Knows HTTP and times, not engines. Needs only the standard library: a client that costs little matters on two cores.
"""

from __future__ import annotations

import asyncio
import csv
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class LoadRequest:
    """A request of a load: seconds from its beginning, prompt, and tokens to generate."""

    at: float
    prompt: list[int]
    num_out: int


@dataclass
class Answered:
    """When the tokens of a request arrived, on the clock of `time.perf_counter`. error: why it is not whole."""

    request: LoadRequest
    due: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to its first token."""
        return self.times[0] - self.due if self.times and not self.error else math.inf

    @property
    def tpot(self) -> float:
        """Seconds per token after the first one (DistServe, section 2.1); 0 for answers of one token."""
        if self.error or not self.times:
            return math.inf
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


Send = Callable[[LoadRequest, Answered], Awaitable[None]]


def azure(file: Path, count: int, *, longest: int, vocabulary: range, seed: int) -> list[LoadRequest]:
    """Lengths of the first requests of an Azure trace that fit `longest` tokens, with random prompts, all due at 0."""
    rng, found = random.Random(seed), list[LoadRequest]()
    with file.open() as lines:
        for row in csv.DictReader(lines):
            num_in, num_out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            if num_out >= 1 and num_in >= 1 and num_in + num_out <= longest:
                found.append(LoadRequest(0.0, [rng.choice(vocabulary) for _ in range(num_in)], num_out))
            if len(found) == count:
                return found
    raise ValueError(f"{file} has only {len(found)} requests of at most {longest} tokens")


def poisson(requests: Sequence[LoadRequest], rate: float, seed: int) -> list[LoadRequest]:
    """The same requests, as Poisson arrivals of `rate` a second."""
    rng, at, found = random.Random(seed), 0.0, list[LoadRequest]()
    for each in requests:
        at += rng.expovariate(rate)
        found.append(LoadRequest(at, each.prompt, each.num_out))
    return found


async def replay(requests: Sequence[LoadRequest], send: Send) -> list[Answered]:
    """Sends each request when it is due, however many are under way."""
    begun = time.perf_counter() + 0.1
    answers = [Answered(each, begun + each.at) for each in requests]

    async def one(answer: Answered) -> None:
        await asyncio.sleep(max(0.0, answer.due - time.perf_counter()))
        try:
            await send(answer.request, answer)
            if answer.num_tokens != answer.request.num_out:
                answer.error = answer.error or f"{answer.num_tokens} tokens of {answer.request.num_out}"
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            answer.error = f"{type(error).__name__}: {error}"

    await asyncio.gather(*(one(each) for each in answers))
    return answers


def completions(url: str, model: str, **more: Any) -> Send:
    """Sends to /v1/completions and reads the stream."""

    async def send(request: LoadRequest, answer: Answered) -> None:
        body = {
            "model": model, "prompt": request.prompt, "max_tokens": request.num_out, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}, **more,
        }  # fmt: skip
        await stream(url, "/v1/completions", body, answer)

    return send


async def stream(url: str, path: str, body: dict[str, Any], answer: Answered) -> None:
    """Posts, and notes the time of every event with text or tokens. The server says the number of tokens."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 22)
    try:
        await _post(reader, writer, path, body)
        while line := await reader.readline():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ValueError(str(event["error"])[:200])
            if event.get("choices"):
                answer.times.append(time.perf_counter())
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
    finally:
        writer.close()


async def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """Posts, and returns the JSON of the answer."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
    try:
        length = await _post(reader, writer, path, body)
        data = await (reader.readexactly(length) if length is not None else reader.read())
        return json.loads(data)
    finally:
        writer.close()


async def _post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]
) -> int | None:
    """Sends a request and reads the head of its answer. Returns the length of the body, if it is told."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    status = await reader.readline()
    length = None
    while (line := await reader.readline()).strip():
        name, _, value = line.decode().partition(":")
        if name.lower() == "content-length":
            length = int(value)
    if b" 200 " not in status:
        raise ValueError(f"{status.decode().strip()}: {(await reader.read(500)).decode()}")
    return length


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that a share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def attainment(answers: Sequence[Answered], ttft: float, tpot: float) -> float:
    """Share of requests that meet both targets (DistServe, section 2.1)."""
    return sum(each.ttft <= ttft and each.tpot <= tpot for each in answers) / len(answers)
