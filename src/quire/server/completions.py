"""POST /v1/completions: continues texts or token ids."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.params import SamplingParams
from quire.server import shapes
from quire.server.collector import AnswerCollector, ChoiceDelta, Renderer
from quire.server.errors import bad_request, json_response
from quire.server.json_encoding import Bytes, LargeJsonResponse, encoded, extend, pieces
from quire.server.logprobs import LegacyLogprobs, check_prompt_logprobs, prompt_logprobs
from quire.server.schema import CompletionRequest
from quire.server.service import PromptJob, Service
from quire.server.shapes import EncodedList
from quire.server.usage import StreamChunks

MAX_TOKENS: int = CompletionRequest.model_fields["max_tokens"].default
"""A completion's default `max_tokens`, if it is null or not given, as in OpenAI's API."""


async def create_completion(service: Service, request: Request) -> Response:
    """Answer one request, as a whole or as a stream."""
    async with service.body_reader.read(request, CompletionRequest) as body:
        service.check_model(body.model)
        jobs = await _jobs(service, body, request.state.tenant)
        collector = AnswerCollector(CompletionRenderer(service, body, jobs), is_prompt_only=body.max_tokens == 0)
        body.forget("prompt", "user")
    await service.admit(jobs, request.receive)
    return await collector.answer(request, stream=body.stream)


async def _jobs(service: Service, body: CompletionRequest, tenant: str) -> list[PromptJob]:
    num_sequences = len(body.prompt) * (body.n or 1)
    limit = service.engine.config.scheduler.max_queue
    if num_sequences > limit:
        message = f"'prompt' and 'n' need {num_sequences} sequences; the limit is {limit} (scheduler.max_queue)"
        raise bad_request(message, "prompt")
    jobs: list[PromptJob] = []
    made: dict[int, SamplingParams] = {}
    scored = body.logprobs if body.echo else None
    alternatives = [each for each in (scored, body.prompt_logprobs) if each is not None]
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    encoded = iter(await service.request_tokenizer.encode_all(texts, body.add_special_tokens is not False, "prompt"))
    for prompt in body.prompt:
        await service.body_reader.start_throttle.acquire()  # checking and keeping a million token ids takes 0.1 s
        text, ids = (prompt, next(encoded)) if isinstance(prompt, str) else (None, prompt)
        if not ids:
            raise bad_request("'prompt' is empty: it has no token", "prompt")
        service.check_tokens(ids, "prompt")
        job = service.job(
            body,
            ids,
            tenant,
            body.max_tokens if "max_tokens" in body.model_fields_set else None,
            default_tokens=MAX_TOKENS,
            param="prompt",
            logprobs=body.logprobs,
            prompt_logprobs=max(alternatives) if alternatives else None,
            text=text,
            made=made,
        )
        jobs.append(job)
    echoed = {"logprobs": body.logprobs} if body.echo else {}
    requested = echoed | {"prompt_logprobs": body.prompt_logprobs}
    check_prompt_logprobs(requested, body.n or 1, sum(len(job.prompt_ids) for job in jobs))
    return jobs


@dataclass
class PromptOutput:
    """The common beginning of all choices of a prompt.

    lists   the four lists of the echoed prompt's log-probabilities, encoded; None for a list that is null
    scores  the extension `prompt_logprobs`, encoded
    prompt_ids  the extension `return_token_ids`, encoded; None without it
    """

    text: str = ""
    lists: dict[str, bytes | None] | None = None
    scores: bytes | None = None
    prompt_ids: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all encoded lists, plus the approximate bytes of the text."""
        lists = (self.scores, self.prompt_ids, *(self.lists or {}).values())
        return len(self.text) + sum(len(each) for each in lists if each is not None)

    def as_delta(self, index: int) -> shapes.CompletionDelta:
        """The prompt's output as the first chunk of a streamed choice."""
        found: shapes.CompletionDelta = {
            "index": index, "text": self.text, "logprobs": joined_logprobs(self.lists), "finish_reason": None,
        }  # fmt: skip
        if self.prompt_ids is not None:
            found["prompt_token_ids"] = EncodedList(self.prompt_ids)
        return found


@dataclass
class CompletionChoiceBuilder:
    """One choice so far, without the output of its prompt."""

    legacy: LegacyLogprobs
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    lists: dict[str, bytearray | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def extend(self, lists: Mapping[str, Any]) -> int:
        """Appends the four lists of a delta; returns how many bytes they take."""
        if self.lists is None:
            self.lists = {name: None if values is None else bytearray() for name, values in lists.items()}
        return sum(extend(mine, lists[name] or []) for name, mine in self.lists.items() if mine is not None)

    def as_dict(self, index: int, prompt_output: PromptOutput) -> shapes.CompletionChoice:
        """The choice in an answer."""
        found: shapes.CompletionChoice = {
            "index": index,
            "text": prompt_output.text + self.text,
            "logprobs": joined_logprobs(prompt_output.lists, self.lists),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if prompt_output.scores is not None:
            found["prompt_logprobs"] = EncodedList(prompt_output.scores)
        if prompt_output.prompt_ids is not None:
            found["prompt_token_ids"] = EncodedList(prompt_output.prompt_ids)
            found["token_ids"] = EncodedList(encoded(self.token_ids))
        return found


def joined_logprobs(*given: Mapping[str, Bytes | None] | None) -> shapes.TextLogprobs | None:
    """Concatenates the four lists of several log-probabilities. A list that is null is null in all of them."""
    found = [lists for lists in given if lists is not None]
    if not found:
        return None
    lists: dict[str, EncodedList[Any] | None] = {
        name: None if part is None else EncodedList(*(lists[name] or b"" for lists in found))
        for name, part in found[0].items()
    }
    return cast(shapes.TextLogprobs, lists)


class CompletionRenderer(Renderer):
    """Writes a completion. Choice `prompt * n + index` is the index-th answer to a prompt."""

    def __init__(self, service: Service, body: CompletionRequest, jobs: list[PromptJob]) -> None:
        super().__init__(service, jobs, "cmpl-", "text_completion")
        self.body = body
        self.num_choices = body.n or 1
        self.is_unscored = body.logprobs is None and body.prompt_logprobs is None
        if self.is_unscored and not body.stream:
            self.large = ("echoed texts", "echo")
        skip_special = body.skip_special_tokens is not False
        self.choices = [
            CompletionChoiceBuilder(LegacyLogprobs(body.logprobs or 0, self.token_texts, skip_special))
            for _ in range(len(jobs) * self.num_choices)
        ]
        self.prompt_outputs: dict[int, PromptOutput] = {}
        self.chunks = StreamChunks(self.head, self.usage, body.stream_options)

    async def prepare(self, prompt: int, logprobs: list[Any]) -> None:
        """See Renderer. All choices of a prompt share this beginning."""
        job = self.jobs[prompt]
        choices = self.choices[prompt * self.num_choices : (prompt + 1) * self.num_choices]
        make = functools.partial(self._prompt_output, job, logprobs, choices[0].legacy)
        self.prompt_outputs[prompt] = prompt_output = await self.service.make_answer(job.num_prompt_logprobs, make)
        self.grow(prompt_output.num_bytes)
        for choice in choices[1:]:
            choice.legacy = choices[0].legacy.copy()

    def _prompt_output(self, job: PromptJob, logprobs: list[Any], legacy: LegacyLogprobs) -> PromptOutput:
        """The common beginning of all choices of a prompt. legacy: gets the prompt's tokens."""
        found, body = PromptOutput(), self.body
        if body.return_token_ids:
            found.prompt_ids = encoded(job.prompt_ids)
        if body.prompt_logprobs is not None:
            found.scores = encoded(prompt_logprobs(logprobs, self.token_texts))
        if body.echo:
            found.text = job.text if job.text is not None else self._text(job.prompt_ids)
        if body.echo and body.logprobs is not None:
            lists: Mapping[str, Any] = legacy(job.prompt_ids, logprobs, job.text)
            found.lists = {name: None if each is None else encoded(each) for name, each in lists.items()}
        return found

    def _text(self, prompt_ids: list[int]) -> str:
        skip_special = self.body.skip_special_tokens is not False
        text: str = self.service.engine.tokenizer.decode(prompt_ids, skip_special=skip_special)
        return text

    def _logprobs(self, delta: ChoiceDelta) -> shapes.TextLogprobs | None:
        if self.body.logprobs is None or not delta.logprobs:
            return None
        return self.choices[delta.choice].legacy(delta.token_ids, delta.logprobs)

    def add(self, event: ChoiceDelta) -> None:
        """See Renderer."""
        choice = self.choices[event.choice]
        choice.text += event.text
        if self.body.return_token_ids:
            choice.token_ids += event.token_ids
        if event.logprobs and (lists := self._logprobs(event)) is not None:
            self.grow(choice.extend(lists))
        choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason

    async def whole(self, held: ExitStack) -> Response:
        """See Renderer."""
        for prompt_output in self.prompt_outputs.values():
            self.grow((self.num_choices - 1) * len(prompt_output.text))  # each choice repeats the text
        choices = [
            choice.as_dict(index, self.prompt_outputs[index // self.num_choices])
            for index, choice in enumerate(self.choices)
        ]
        content: shapes.Completion = {**self.head, "choices": choices, "usage": self.usage.as_dict()}
        if not (self.body.return_token_ids or self.body.echo) and self.is_unscored:
            return json_response(content)  # 4 us for one choice, where pieces take 22
        return LargeJsonResponse(content, held.pop_all())

    async def render(self, deltas: Iterable[ChoiceDelta], begun: int | None) -> Iterable[bytes]:
        """See Renderer. The choices of an output are written at once."""
        return self._chunks(deltas, begun)

    def _chunks(self, deltas: Iterable[ChoiceDelta], begun: int | None) -> Iterator[bytes]:
        if begun is not None:
            yield from self._first_chunks(begun)
        if news := b"".join(map(self._chunk, list(deltas))):
            yield news

    def _first_chunks(self, prompt: int) -> Iterator[bytes]:
        """The first chunk of each choice of a prompt, unless it would be empty."""
        prompt_output = self.prompt_outputs.pop(prompt)
        has_news = prompt_output.text or prompt_output.lists or prompt_output.prompt_ids is not None
        for index in range(prompt * self.num_choices, (prompt + 1) * self.num_choices) if has_news else ():
            yield b"data: "
            yield from pieces({**self.chunks.head(), "choices": [prompt_output.as_delta(index)]})
            yield b"\n\n"
        self.grow(-prompt_output.num_bytes)

    def _chunk(self, event: ChoiceDelta) -> bytes:
        """The chunk of a delta; empty if the delta has no news."""
        ended, logprobs = event.finish_reason, self._logprobs(event)
        delta: shapes.CompletionDelta = {
            "index": event.choice, "text": event.text, "logprobs": logprobs, "finish_reason": ended,
        }  # fmt: skip
        if ended is not None:
            delta["stop_reason"] = event.stop_reason
        if self.body.return_token_ids and self.body.max_tokens != 0:
            delta["token_ids"] = event.token_ids
        has_news = event.text or logprobs or ended or delta.get("token_ids")
        return self.chunks.event(delta) if has_news else b""

    async def end(self) -> bytes:
        """See Renderer."""
        return self.chunks.end()
