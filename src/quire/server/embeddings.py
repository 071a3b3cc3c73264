"""POST /v1/embeddings, /score and /rerank: texts as vectors, and how near they are.

Embeddings are a prompt's last hidden states, pooled, with length 1. Every model has them. Only models that were made to
compare texts are asked how near two texts are.
"""

from __future__ import annotations

import base64
import struct
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.params import SamplingParams
from quire.llm import normalized
from quire.server import shapes
from quire.server.embeddings_schema import EmbeddingsRequest, RerankRequest, ScoreRequest
from quire.server.errors import bad_request, json_response
from quire.server.service import Job, Service, Usage
from quire.server.trained import Pooling
from quire.server.wire import unless_disconnected

if TYPE_CHECKING:
    from quire.engine.outputs import RequestOutput


async def create_embeddings(service: Service, request: Request) -> Response:
    """The embeddings of texts."""
    async with service.bodies.read(request, EmbeddingsRequest) as body:
        service.check_model(body.model)
        size = service.engine.shape.hidden_size
        if body.dimensions is not None and body.dimensions > size:
            raise bad_request(f"'dimensions' is {body.dimensions}, and this model has {size}", "dimensions")
        found = Embeddings(service, request, body.pooling or service.trained.pooling)
        await found.add(body.input, "input", add_special=body.add_special_tokens is not False)
        await found.admit()

    async def answer() -> Response:
        data: list[shapes.Embedding] = []
        for index, vector in enumerate(await found.vectors()):
            part = normalized(vector[: body.dimensions])
            told: list[float] | str = part
            if body.encoding_format == "base64":
                told = base64.b64encode(struct.pack(f"<{len(part)}f", *part)).decode()
            data.append({"object": "embedding", "index": index, "embedding": told})
        content: shapes.Embeddings = {
            "object": "list", "data": data, "model": service.engine.model_name, "usage": found.usage,
        }  # fmt: skip
        return json_response(content)

    return await unless_disconnected(request.receive, answer())


async def create_scores(service: Service, request: Request) -> Response:
    """How near texts are to each other, pair by pair: the cosine of their embeddings."""
    async with service.bodies.read(request, ScoreRequest) as body:
        service.check_model(body.model)
        _check_trained(service)
        ones, others = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
        if len(ones) not in (1, len(others)):
            raise bad_request(f"'text_1' has {len(ones)} texts; it must have 1 or {len(others)}", "text_1")
        found = Embeddings(service, request, service.trained.pooling)
        await found.add(ones, "text_1")
        await found.add(others, "text_2")
        await found.admit()

    async def answer() -> Response:
        vectors = await found.vectors()
        left, right = vectors[: len(ones)], vectors[len(ones) :]
        pairs = zip(left * len(right) if len(left) == 1 else left, right, strict=True)
        data: list[shapes.Score] = [
            {"object": "score", "index": index, "score": _cosine(*pair)} for index, pair in enumerate(pairs)
        ]
        content: shapes.Scores = {
            "id": f"score-{uuid.uuid4().hex}", "object": "list", "data": data, "model": service.engine.model_name,
            "usage": found.usage,
        }  # fmt: skip
        return json_response(content)

    return await unless_disconnected(request.receive, answer())


async def create_ranking(service: Service, request: Request) -> Response:
    """Documents by their nearness to a query, the nearest first."""
    async with service.bodies.read(request, RerankRequest) as body:
        service.check_model(body.model)
        _check_trained(service)
        found = Embeddings(service, request, service.trained.pooling)
        await found.add([body.query], "query")
        await found.add(body.documents, "documents")
        await found.admit()

    async def answer() -> Response:
        query, *others = await found.vectors()
        scores = [(_cosine(query, each), index) for index, each in enumerate(others)]
        scores.sort(key=lambda each: (-each[0], each[1]))
        results: list[shapes.Ranked] = []
        for score, index in scores[: body.top_n or None]:
            ranked: shapes.Ranked = {"index": index, "relevance_score": score}
            if body.return_documents is not False:
                ranked["document"] = {"text": body.documents[index]}
            results.append(ranked)
        content: shapes.Ranking = {
            "id": f"rerank-{uuid.uuid4().hex}", "model": service.engine.model_name, "results": results,
            "usage": found.usage,
        }  # fmt: skip
        return json_response(content)

    return await unless_disconnected(request.receive, answer())


def _check_trained(service: Service) -> None:
    if not service.trained.is_similarity:
        raise bad_request(
            f"'{service.engine.model_name}' was not made to compare texts: there is no modules.json of"
            " sentence-transformers beside it, so its scores would mean nothing; /v1/embeddings has its hidden states",
            "model",
            "unsupported_value",
        )


AT_ONCE = 32
"""Texts of a request that the engine has at once, so that one with thousands leaves room for others."""


class Embeddings:
    """The embeddings that a request needs."""

    def __init__(self, service: Service, request: Request, pooling: Pooling) -> None:
        self._service = service
        self._tenant: str = request.state.tenant
        self._params = SamplingParams(max_tokens=1, pooling=pooling, detokenize=False)
        self._jobs: list[Job] = []
        self._usage = Usage()

    async def add(self, given: Sequence[str | list[int]], param: str, *, add_special: bool = True) -> None:
        """Texts or token ids. Raises ApiError or RequestError (400) for what is empty or too long."""
        service = self._service
        texts = [each for each in given if isinstance(each, str)]
        encoded = iter(await service.texts.encode_all(texts, add_special, param))
        for each in given:
            ids = next(encoded) if isinstance(each, str) else each
            if not ids:
                raise bad_request(f"'{param}' has an empty text: it has no token", param)
            service.check_tokens(ids, param)
            hints = {"cache_salt": service.tenants.salt(self._tenant, None)}
            self._jobs.append(Job(ids, self._params, hints, self._tenant))

    async def admit(self) -> None:
        """See Service. Raises QueueFullError for more texts than may wait."""
        await self._service.admit(self._jobs)

    async def vectors(self) -> list[list[float]]:
        """One for each text, in their order."""
        found: list[list[float]] = [[]] * len(self._jobs)
        self._usage.prompt_tokens = sum(len(job.prompt_ids) for job in self._jobs)

        async def opens(index: int, item: RequestOutput) -> None:
            self._usage.saw(item)
            found[index] = item.embedding or []

        name = f"embd-{uuid.uuid4().hex}"
        for begin in range(0, len(self._jobs), AT_ONCE):
            group = self._jobs[begin : begin + AT_ONCE]

            async def opens_one(index: int, item: RequestOutput, begin: int = begin) -> None:
                await opens(begin + index, item)

            async with aclosing(self._service.run(group, f"{name}-{begin}", opens_one)) as items:
                async for _ in items:
                    pass
        return found

    @property
    def usage(self) -> shapes.EmbeddingUsage:
        """Token counts."""
        count = self._usage.prompt_tokens
        return {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(left * right for left, right in zip(normalized(one), normalized(other), strict=True))
