"""POST /v1/embeddings, /score and /rerank: embeddings of texts, and the similarity of texts.

Embeddings are a prompt's last hidden states, pooled, with length 1. Every model has them. Only models that were trained
to compare texts serve /score and /rerank.
"""

from __future__ import annotations

import asyncio
import base64
import math
import operator
import struct
import uuid
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.params import SamplingParams
from quire.llm import normalized
from quire.server import shapes
from quire.server.embeddings_schema import EmbeddingsRequest, RerankRequest, ScoreRequest
from quire.server.errors import ApiError, bad_request, json_bytes, json_response
from quire.server.event_stream import unless_disconnected
from quire.server.json_encoding import LargeJsonResponse
from quire.server.model_capabilities import Pooling
from quire.server.schema import ModelRequest
from quire.server.service import PromptJob, Service
from quire.server.shapes import EncodedList
from quire.server.usage import Usage

if TYPE_CHECKING:
    from quire.engine.outputs import RequestOutput


async def create_embeddings(service: Service, request: Request) -> Response:
    """The embeddings of texts."""
    async with service.body_reader.read(request, EmbeddingsRequest) as body:
        service.check_model(body.model)
        size = service.engine.shape.hidden_size
        if body.dimensions is not None and body.dimensions > size:
            raise bad_request(f"'dimensions' is {body.dimensions}, and this model has {size}", "dimensions")
        if body.pooling is None and service.model_capabilities.unsupported:
            raise bad_request(f"{_lacking(service)}; 'pooling' gives the ones that are computed here", "pooling")
        found = EmbeddingGeneration(service, request, body.pooling or service.model_capabilities.pooling)
        await found.add(body.input, "input", add_special=body.add_special_tokens is not False)
        body.forget("input", "user")
    await found.admit()

    async def answer() -> Response:
        parts = [b""] * found.count
        with ExitStack() as held:
            grow = held.enter_context(service.answer_limiter.hold("embeddings", "input"))

            async def take(index: int, vector: list[float]) -> None:
                parts[index] = await service.make_answer(len(vector), lambda: _encoded(body, index, vector))
                grow(len(parts[index]))

            await found.compute(take)
            content: shapes.Embeddings = {
                "object": "list", "data": EncodedList(*parts), "model": service.engine.model_name, "usage": found.usage,
            }  # fmt: skip
            return LargeJsonResponse(content, held.pop_all())

    return await unless_disconnected(request.receive, answer())


def _encoded(body: EmbeddingsRequest, index: int, vector: list[float]) -> bytes:
    """An embedding as JSON. Takes 2 ms for 4096 numbers."""
    part = normalized(vector[: body.dimensions])
    encoded: list[float] | str = part
    if body.encoding_format == "base64":
        encoded = base64.b64encode(struct.pack(f"<{len(part)}f", *part)).decode()
    data: shapes.Embedding = {"object": "embedding", "index": index, "embedding": encoded}
    return json_bytes(data)


async def create_scores(service: Service, request: Request) -> Response:
    """The similarity of texts, pair by pair: the cosine of their embeddings."""
    async with service.body_reader.read(request, ScoreRequest) as body:
        found = _comparison(service, request, body)
        num_ones, num_others = len(body.text_1), len(body.text_2)
        if num_ones not in (1, num_others):
            raise bad_request(f"'text_1' has {num_ones} texts; it must have 1 or {num_others}", "text_1")
        await found.add(body.text_1, "text_1")
        await found.add(body.text_2, "text_2")
        body.forget("text_1", "text_2")
    await found.admit()
    vectors = await unless_disconnected(request.receive, found.vectors())
    left, right = vectors[:num_ones], vectors[num_ones:]
    pairs = zip(left * len(right) if len(left) == 1 else left, right, strict=True)
    data: list[shapes.ScoreResult] = [
        {"object": "score", "index": index, "score": _cosine(*pair)} for index, pair in enumerate(pairs)
    ]
    content: shapes.ScoreResponse = {
        "id": f"score-{uuid.uuid4().hex}", "object": "list", "data": data, "model": service.engine.model_name,
        "usage": found.usage,
    }  # fmt: skip
    return json_response(content)


async def create_ranking(service: Service, request: Request) -> Response:
    """Documents by their similarity to a query, the most similar first."""
    async with service.body_reader.read(request, RerankRequest) as body:
        found = _comparison(service, request, body)
        await found.add([body.query], "query")
        await found.add(body.documents, "documents")
    await found.admit()
    query, *others = await unless_disconnected(request.receive, found.vectors())
    scores = [(_cosine(query, each), index) for index, each in enumerate(others)]
    scores.sort(key=lambda each: (-each[0], each[1]))
    results: list[shapes.RerankResult] = []
    for score, index in scores[: body.top_n or None]:
        ranked: shapes.RerankResult = {"index": index, "relevance_score": score}
        if body.return_documents is not False:
            ranked["document"] = {"text": body.documents[index]}
        results.append(ranked)
    content: shapes.RerankResponse = {
        "id": f"rerank-{uuid.uuid4().hex}", "model": service.engine.model_name, "results": results,
        "usage": found.usage,
    }  # fmt: skip
    return json_response(content)


def _comparison(service: Service, request: Request, body: ModelRequest) -> EmbeddingGeneration:
    """Prepares the embeddings of texts to compare. Raises ApiError 400 for a model that was not trained for that."""
    service.check_model(body.model)
    capabilities = service.model_capabilities
    if not capabilities.is_similarity:
        why = "was not made to compare texts: its folder has no modules.json of sentence-transformers"
        message = _lacking(service) if capabilities.unsupported else f"'{service.engine.model_name}' {why}"
        raise bad_request(
            f"{message}, so its scores would mean nothing; /v1/embeddings has its hidden states",
            "model",
            "unsupported_value",
        )
    return EmbeddingGeneration(service, request, capabilities.pooling)


def _lacking(service: Service) -> str:
    unsupported = service.model_capabilities.unsupported
    return f"'{service.engine.model_name}' was made for {unsupported}, which is not computed here"


AT_ONCE = 32
"""Maximum number of a request's texts that the engine has at once, so that other requests have room."""


class EmbeddingGeneration:
    """The embeddings that a request needs."""

    def __init__(self, service: Service, request: Request, pooling: Pooling) -> None:
        self._service = service
        self._tenant: str = request.state.tenant
        self._params = SamplingParams(max_tokens=1, pooling=pooling, detokenize=False)
        self._hints = {"cache_salt": service.tenants.salt(self._tenant, None)}
        # Four bytes a token; a job takes eight. A request may have a million tokens and wait long.
        self._texts: list[array[int]] = []
        self._jobs: list[PromptJob] = []  # jobs of the admitted texts, without their tokens until they begin
        self._params_of: list[str] = []  # the parameter of each text in the request
        self._usage = Usage()

    async def add(self, given: Sequence[str | list[int]], param: str, *, add_special: bool = True) -> None:
        """Adds texts or token ids. Raises ApiError or RequestError (400) for an empty or too long one."""
        service = self._service
        texts = [each for each in given if isinstance(each, str)]
        encoded = iter(await service.request_tokenizer.encode_all(texts, add_special, param))
        for index, each in enumerate(given):
            ids = next(encoded) if isinstance(each, str) else each
            if not ids:
                where = param if len(given) == 1 else f"{param}[{index}]"
                raise bad_request(f"'{where}' is an empty text: it has no token", where)
            service.check_tokens(ids, param)
            self._params_of.append(f"{param}[{index}]")
            self._texts.append(array("i", ids))

    async def admit(self) -> None:
        """See Service. Raises QueueFullError for more texts than the queue holds."""
        for begin in range(0, self.count, AT_ONCE):
            texts = self._texts[begin : begin + AT_ONCE]
            group = [PromptJob(text.tolist(), self._params, self._hints, self._tenant) for text in texts]
            await self._service.admit(group)
            self._texts[begin : begin + AT_ONCE] = [job.pack() for job in group]
            self._jobs += group
            await asyncio.sleep(0)  # a million tokens take 0.1 s

    @property
    def count(self) -> int:
        """Number of texts."""
        return len(self._texts)

    async def vectors(self) -> list[array[float]]:
        """The embeddings of all texts, in their order, with length 1."""
        found: list[array[float]] = [array("d")] * self.count

        async def take(index: int, vector: list[float]) -> None:
            found[index] = array("d", normalized(vector))

        await self.compute(take)
        return found

    async def compute(self, take: Callable[[int, list[float]], Awaitable[None]]) -> None:
        """Calls `take` with each text's index and its embedding as soon as it is computed. Raises ApiError 400 for an
        embedding that is not finite.
        """
        self._usage.prompt_tokens = sum(map(len, self._texts))
        name = f"embd-{uuid.uuid4().hex}"
        for begin in range(0, self.count, AT_ONCE):

            async def on_first_output(index: int, item: RequestOutput, begin: int = begin) -> None:
                self._usage.record(item)
                vector = item.embedding or []
                if not all(map(math.isfinite, vector)):
                    raise _not_finite(self._params_of[begin + index])
                await take(begin + index, vector)

            group, self._jobs = self._jobs[:AT_ONCE], self._jobs[AT_ONCE:]
            for job, text in zip(group, self._texts[begin : begin + AT_ONCE], strict=True):
                job.unpack(text)
            try:
                async with aclosing(self._service.run(group, f"{name}-{begin}", on_first_output)) as items:
                    async for _ in items:
                        pass
            except ApiError as error:
                if error.code != "not_finite" or error.status < 500:
                    raise
                # Some logits are not finite; the engine does not say of which text.
                raise _not_finite(self._params_of[begin] if len(group) == 1 else None) from None

    @property
    def usage(self) -> shapes.EmbeddingUsage:
        """Token counts."""
        count = self._usage.prompt_tokens
        return {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}


def _not_finite(param: str | None) -> ApiError:
    whose = "the embedding of a text" if param is None else f"the embedding of '{param}'"
    return bad_request(f"{whose} is not finite: the model's numbers overflow on it", param, "not_finite")


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of two embeddings with length 1."""
    return math.fsum(map(operator.mul, one, other))
