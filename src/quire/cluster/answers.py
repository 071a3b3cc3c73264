"""The answer to a request of a cluster: its sequences are routed one by one, and their tokens form one stream."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from quire.cluster.bodies import SequenceJob
from quire.cluster.messages import FirstTokenInfo, Token
from quire.cluster.router import Router
from quire.cluster.tracing import trace_of
from quire.engine.admission import AdmittedRequest
from quire.engine.outputs import RequestOutput
from quire.engine.params import CacheHints
from quire.engine.sampler import sequence_seed

Item = Token | Exception | None
"""The items of a router's answer: see `RoutedRequest.answer`."""


async def stream_answer(
    router: Router, request_id: str, request: AdmittedRequest, seed: int
) -> AsyncGenerator[RequestOutput, None]:
    """Begins a request that was admitted, and yields its deltas. Closing the generator aborts the request.

    seed  seed of the whole request
    """
    items: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()

    def put(index: int, item: Item) -> None:
        items.put_nowait((index, item))

    trace, params = trace_of(request_id), request.params
    jobs = _jobs(request_id, request, seed, trace.trace_id)
    routed = [router.begin(job, partial(put, index), trace) for index, job in enumerate(jobs)]
    first, left = None, params.n
    held: list[tuple[int, Token]] = []  # until the sequence with the prompt's log-probabilities begins
    try:
        while left:
            index, item = held.pop(0) if held and first is not None else await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                continue
            if first is None and index and params.prompt_logprobs is not None:
                held.append((index, item))
                continue
            first = first or item.first
            assert first is not None, f"{request_id} begins without what is known of its prompt"
            left -= item.is_last
            yield _request_output(request_id, request, index, item, first, finished=left == 0)
    finally:
        for each in routed:
            if not each.is_over:
                router.abort(each)


def _jobs(request_id: str, request: AdmittedRequest, seed: int, trace: str) -> Iterator[SequenceJob]:
    """One job for each sequence of a request."""
    params, hints = request.params, _hints(request.hints)
    for index in range(params.n):
        name = request_id if params.n == 1 else f"{request_id}/{index}"
        own = dataclasses.replace(params, n=1, seed=None, prompt_logprobs=None if index else params.prompt_logprobs)
        own_seed = sequence_seed(seed, index) % (1 << 64)
        yield SequenceJob(name, request.prompt_ids, asdict(own), hints, own_seed, trace=trace)


def _request_output(
    request_id: str, request: AdmittedRequest, index: int, token: Token, first: FirstTokenInfo, *, finished: bool
) -> RequestOutput:
    """A token of a sequence in the form of an engine's output. first: facts about the prompt."""
    own = token.first if token.first is first else None
    prompt_logprobs, embedding = (None, None) if own is None else (own.prompt_logprobs, own.embedding)
    output = dataclasses.replace(token.output, index=index)
    return RequestOutput(
        request_id, request.text, request.prompt_ids, prompt_logprobs, [output], finished, first.num_cached_tokens,
        first.cached_by_tier, first.num_pinned_tokens, first.kept_fraction, embedding,
    )  # fmt: skip


def _hints(hints: CacheHints) -> dict[str, Any]:
    """Keyword arguments that recreate the hints."""
    found, pin = asdict(hints), hints.cache_pin
    tier = found.pop("pin_tier")
    if pin is not None:
        found["cache_pin"] = {"tier": tier} if math.isinf(pin) else {"tier": tier, "seconds": pin}
    return found
