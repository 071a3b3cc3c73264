"""POST /v1/completions: texts or token ids continued."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from quire.server.errors import bad_request, json_response
from quire.server.logprobs import LegacyLogprobs, Names, prompt_logprobs
from quire.server.schema import CompletionRequest
from quire.server.service import Chunks, Job, Service, Usage
from quire.server.wire import EventStream, read_json, unless_disconnected

if TYPE_CHECKING:
    from quire.engine.outputs import RequestOutput


async def create_completion(service: Service, request: Request) -> Response:
    """Answer one request, as a whole or as a stream."""
    body = CompletionRequest.model_validate(await read_json(request, service.config.max_request_bytes))
    service.check_model(body.model)
    completion = Completion(service, body, await _jobs(service, body, request.state.tenant))
    service.admit(completion.jobs)
    if body.stream:
        return EventStream(completion.events())
    return json_response(await unless_disconnected(request.receive, completion.whole()))


async def _jobs(service: Service, body: CompletionRequest, tenant: str) -> list[Job]:
    num_sequences = len(body.prompt) * (body.n or 1)
    limit = service.engine.config.scheduler.max_queue
    if num_sequences > limit:
        message = f"'prompt' and 'n' ask for {num_sequences} sequences; the queue holds {limit} (scheduler.max_queue)"
        raise bad_request(message, "prompt")
    jobs = []
    scored = body.logprobs if body.echo else None
    asked = [each for each in (scored, body.prompt_logprobs) if each is not None]
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    encoded = iter(await service.encode_all(texts, body.add_special_tokens is not False, "prompt"))
    for prompt in body.prompt:
        text, ids = (prompt, next(encoded)) if isinstance(prompt, str) else (None, prompt)
        if not ids:
            raise bad_request("'prompt' is empty: it holds no token", "prompt")
        service.check_tokens(ids, "prompt")
        params = service.params(
            body,
            len(ids),
            body.max_tokens,
            param="prompt",
            logprobs=body.logprobs,
            prompt_logprobs=max(asked) if asked else None,
        )
        jobs.append(Job(ids, params, service.hints(body, tenant), tenant, text))
    return jobs


@dataclass
class Choice:
    """One choice as far as it has come."""

    legacy: LegacyLogprobs
    text: str = ""
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Delta:
    """What is new in one choice."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Completion:
    """A request under way. Choice `job * n + index` is the index-th answer to the job-th prompt."""

    def __init__(self, service: Service, body: CompletionRequest, jobs: list[Job]) -> None:
        self.service = service
        self.body = body
        self.jobs = jobs
        self.num_choices = body.n or 1
        self.names = Names(service.engine.tokenizer)
        skip_special = body.skip_special_tokens is not False
        self.choices = [
            Choice(LegacyLogprobs(body.logprobs or 0, self.names, skip_special))
            for _ in range(len(jobs) * self.num_choices)
        ]
        self.usage = Usage(prompt_tokens=sum(len(job.prompt_ids) for job in jobs))
        self.seen: set[int] = set()
        self.head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.engine.model_name,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        async with aclosing(self.service.run(self.jobs, self.head["id"])) as items:
            async for job, item in items:
                for delta in self._deltas(job, item):
                    choice = self.choices[delta.index]
                    choice.text += delta.text
                    if delta.logprobs is not None:
                        _extend(choice, delta.logprobs)
                    if delta.finish_reason is not None:
                        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        choices = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": choice.logprobs,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **choice.extra,
            }
            for index, choice in enumerate(self.choices)
        ]
        return self.head | {"choices": choices, "usage": self.usage.as_dict()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        chunks = Chunks(self.head, self.usage, self.body.stream_options)
        async with aclosing(self.service.run(self.jobs, self.head["id"])) as items:
            async for job, item in items:
                news = b"".join(
                    chunks.chunk(
                        delta.index, {"text": delta.text}, delta.logprobs, delta.finish_reason, delta.stop_reason
                    )
                    for delta in self._deltas(job, item)
                    if delta.text or delta.logprobs or delta.finish_reason
                )
                if news:
                    yield news
        yield chunks.end()

    def _deltas(self, job: int, item: RequestOutput) -> list[Delta]:
        """What an item of the engine adds to the choices of its prompt."""
        deltas = []
        first = job * self.num_choices
        if job not in self.seen:
            self.seen.add(job)
            self.usage.saw(item)
            for index in range(first, first + self.num_choices):
                if self.body.prompt_logprobs is not None:
                    scores = prompt_logprobs(item.prompt_logprobs or [], self.names)
                    self.choices[index].extra["prompt_logprobs"] = scores
                if self.body.echo:
                    deltas.append(self._echo(job, index, item))
        for output in item.outputs:
            index = first + output.index
            if self.body.max_tokens == 0:
                # The engine's least is one token; it is dropped here.
                if output.finish_reason is not None:
                    deltas.append(Delta(index, "", None, "length"))
                continue
            self.usage.completion_tokens += len(output.token_ids)
            lists = None
            if self.body.logprobs is not None and output.logprobs:
                lists = self.choices[index].legacy(output.token_ids, output.logprobs)
            deltas.append(Delta(index, output.text, lists, output.finish_reason, output.stop_reason))
        return deltas

    def _echo(self, job: int, index: int, item: RequestOutput) -> Delta:
        """The prompt as the beginning of a choice's text."""
        prompt = self.jobs[job]
        text = prompt.text
        if text is None:
            skip_special = self.body.skip_special_tokens is not False
            text = self.service.engine.tokenizer.decode(prompt.prompt_ids, skip_special=skip_special)
        lists = None
        if self.body.logprobs is not None:
            lists = self.choices[index].legacy(prompt.prompt_ids, item.prompt_logprobs or [])
        return Delta(index, text, lists)


def _extend(choice: Choice, lists: dict[str, Any]) -> None:
    """Append the four lists of a delta to those of the choice."""
    if choice.logprobs is None:
        choice.logprobs = lists
        return
    for name, values in lists.items():
        if values is not None:
            choice.logprobs[name] += values
