"""POST /v1/completions: continues texts or token ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.params import SamplingParams
from quire.server import shapes
from quire.server.errors import bad_request, json_response
from quire.server.event_stream import EventStream, event, unless_disconnected
from quire.server.json_encoding import Bytes, LargeJsonResponse, encoded, extend, pieces
from quire.server.logprobs import LegacyLogprobs, TokenTextCache, check_prompt_logprobs, prompt_logprobs
from quire.server.schema import CompletionRequest
from quire.server.service import PromptJob, Service
from quire.server.shapes import EncodedList
from quire.server.usage import StreamChunks, Usage

if TYPE_CHECKING:
    from quire.engine.outputs import RequestOutput

MAX_TOKENS: int = CompletionRequest.model_fields["max_tokens"].default
"""A completion's default `max_tokens`, if it is null or not given, as in OpenAI's API."""


async def create_completion(service: Service, request: Request) -> Response:
    """Answer one request, as a whole or as a stream."""
    async with service.body_reader.read(request, CompletionRequest) as body:
        service.check_model(body.model)
        completion = CompletionGeneration(service, body, await _jobs(service, body, request.state.tenant))
        body.forget("prompt", "user")
    await service.admit(completion.jobs, request.receive, body.structure_param)
    if body.stream:
        return EventStream(completion.events(), service.config.ping_seconds)
    return await unless_disconnected(request.receive, completion.full_response())


async def _jobs(service: Service, body: CompletionRequest, tenant: str) -> list[PromptJob]:
    num_sequences = len(body.prompt) * (body.n or 1)
    limit = service.engine.config.scheduler.max_queue
    if num_sequences > limit:
        message = f"'prompt' and 'n' need {num_sequences} sequences; the limit is {limit} (scheduler.max_queue)"
        raise bad_request(message, "prompt")
    jobs: list[PromptJob] = []
    made: dict[int, SamplingParams] = {}
    scored = body.logprobs if body.echo else None
    asked = [each for each in (scored, body.prompt_logprobs) if each is not None]
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    encoded = iter(await service.request_tokenizer.encode_all(texts, body.add_special_tokens is not False, "prompt"))
    for prompt in body.prompt:
        await service.body_reader.start_throttle.acquire()  # checking and keeping a million token ids takes 0.1 s
        text, ids = (prompt, next(encoded)) if isinstance(prompt, str) else (None, prompt)
        if not ids:
            raise bad_request("'prompt' is empty: it has no token", "prompt")
        service.check_tokens(ids, "prompt")
        params = service.params(
            body,
            len(ids),
            body.max_tokens if "max_tokens" in body.model_fields_set else None,
            default_tokens=MAX_TOKENS,
            param="prompt",
            logprobs=body.logprobs,
            prompt_logprobs=max(asked) if asked else None,
            made=made,
        )
        jobs.append(PromptJob(ids, params, service.hints(body, tenant), tenant, text))
    echoed = {"logprobs": body.logprobs} if body.echo else {}
    asked_for = echoed | {"prompt_logprobs": body.prompt_logprobs}
    check_prompt_logprobs(asked_for, body.n or 1, sum(len(job.prompt_ids) for job in jobs))
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
        """Bytes of all encoded lists, and about those of the text."""
        lists = (self.scores, self.prompt_ids, *(self.lists or {}).values())
        return len(self.text) + sum(len(each) for each in lists if each is not None)

    def as_delta(self, index: int) -> shapes.CompletionDelta:
        """The first chunk of a streamed choice has it."""
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
    """Four lists of log-probabilities, one behind the other; the same ones are null in all of them."""
    found = [lists for lists in given if lists is not None]
    if not found:
        return None
    lists: dict[str, EncodedList[Any] | None] = {
        name: None if part is None else EncodedList(*(lists[name] or b"" for lists in found))
        for name, part in found[0].items()
    }
    return cast(shapes.TextLogprobs, lists)


def _chunk(chunks: StreamChunks, delta: shapes.CompletionDelta) -> shapes.CompletionChunk:
    return {**chunks.head(), "choices": [delta]}


class CompletionGeneration:
    """A running request. Choice `job * n + index` is the index-th answer to the job-th prompt."""

    def __init__(self, service: Service, body: CompletionRequest, jobs: list[PromptJob]) -> None:
        self.service = service
        self.body = body
        self.jobs = jobs
        self.num_choices = body.n or 1
        self.token_texts = TokenTextCache(service.engine.tokenizer)
        skip_special = body.skip_special_tokens is not False
        self.choices = [
            CompletionChoiceBuilder(LegacyLogprobs(body.logprobs or 0, self.token_texts, skip_special))
            for _ in range(len(jobs) * self.num_choices)
        ]
        self.usage = Usage(prompt_tokens=sum(len(job.prompt_ids) for job in jobs))
        self.prompt_outputs: dict[int, PromptOutput] = {}
        self.head = service.head("cmpl-", "text_completion")

    async def full_response(self) -> Response:
        """The answer in one piece."""
        with ExitStack() as held:
            named = ("echoed texts", "echo") if self._is_unscored else ("log-probabilities", "logprobs")
            grow = held.enter_context(self.service.answer_limiter.hold(*named))
            async with aclosing(self._items(grow)) as items:
                async for job, item in items:
                    for delta in self._deltas(job, item):
                        choice = self.choices[delta["index"]]
                        choice.text += delta["text"]
                        choice.token_ids += delta.get("token_ids", [])
                        if delta["logprobs"] is not None:
                            grow(choice.extend(delta["logprobs"]))
                        if delta["finish_reason"] is not None:
                            choice.finish_reason, choice.stop_reason = delta["finish_reason"], delta["stop_reason"]
            for prompt_output in self.prompt_outputs.values():
                grow((self.num_choices - 1) * len(prompt_output.text))  # every choice has it
            choices = [
                choice.as_dict(index, self.prompt_outputs[index // self.num_choices])
                for index, choice in enumerate(self.choices)
            ]
            content: shapes.Completion = {**self.head, "choices": choices, "usage": self.usage.as_dict()}
            if not (self.body.return_token_ids or self.body.echo) and self._is_unscored:
                return json_response(content)  # 4 us for one choice, where pieces take 22
            return LargeJsonResponse(content, held.pop_all())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        chunks = StreamChunks(self.head, self.usage, self.body.stream_options)
        with self.service.answer_limiter.hold() as grow:
            async with aclosing(self._items(grow)) as items:
                async for job, item in items:
                    prompt_output = self.prompt_outputs.pop(job, None)
                    if prompt_output is not None and (
                        prompt_output.text or prompt_output.lists or prompt_output.prompt_ids is not None
                    ):
                        for index in range(job * self.num_choices, (job + 1) * self.num_choices):
                            yield b"data: "
                            for part in pieces(_chunk(chunks, prompt_output.as_delta(index))):
                                yield part
                            yield b"\n\n"
                    if prompt_output is not None:
                        grow(-prompt_output.num_bytes)
                        del prompt_output
                    news = b"".join(
                        event(_chunk(chunks, delta))
                        for delta in self._deltas(job, item)
                        if delta["text"] or delta["logprobs"] or delta["finish_reason"] or delta.get("token_ids")
                    )
                    if news:
                        yield news
        yield chunks.end()

    @property
    def _is_unscored(self) -> bool:
        return self.body.logprobs is None and self.body.prompt_logprobs is None

    def _items(self, grow: Callable[[int], None]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields the engine's output; calls `grow` with the bytes of prompt outputs."""

        async def on_first_output(job: int, item: RequestOutput) -> None:
            prompt_output = await self._prompt_output(job, item)
            grow(prompt_output.num_bytes)
            self.prompt_outputs[job] = prompt_output

        return self.service.run(self.jobs, self.head["id"], on_first_output)

    async def _prompt_output(self, job: int, item: RequestOutput) -> PromptOutput:
        """Makes the prompt output of all choices from a prompt's first item, and counts its usage."""
        self.usage.record(item)
        prompt = self.jobs[job]
        choices = self.choices[job * self.num_choices : (job + 1) * self.num_choices]

        def make() -> tuple[PromptOutput, LegacyLogprobs]:
            prompt_output, legacy, scores = PromptOutput(), choices[0].legacy, item.prompt_logprobs or []
            if self.body.return_token_ids:
                prompt_output.prompt_ids = encoded(prompt.prompt_ids)
            if self.body.prompt_logprobs is not None:
                prompt_output.scores = encoded(prompt_logprobs(scores, self.token_texts))
            if self.body.echo:
                prompt_output.text = prompt.text if prompt.text is not None else self._text(prompt.prompt_ids)
                if self.body.logprobs is not None:
                    lists: Mapping[str, Any] = legacy(prompt.prompt_ids, scores, prompt.text)
                    prompt_output.lists = {
                        name: None if each is None else encoded(each) for name, each in lists.items()
                    }
            return prompt_output, legacy

        prompt_output, legacy = await self.service.make_answer(prompt.num_prompt_logprobs, make)
        for choice in choices:
            choice.legacy = legacy.copy()
        return prompt_output

    def _text(self, prompt_ids: list[int]) -> str:
        skip_special = self.body.skip_special_tokens is not False
        text: str = self.service.engine.tokenizer.decode(prompt_ids, skip_special=skip_special)
        return text

    def _deltas(self, job: int, item: RequestOutput) -> list[shapes.CompletionDelta]:
        """What an item of the engine adds to the choices of its prompt."""
        deltas: list[shapes.CompletionDelta] = []
        for output in item.outputs:
            index, ended = job * self.num_choices + output.index, output.finish_reason
            delta: shapes.CompletionDelta = {"index": index, "text": "", "logprobs": None, "finish_reason": ended}
            if ended is not None:
                delta["stop_reason"] = output.stop_reason
            if self.body.max_tokens == 0:
                # The engine's least is one token; it is dropped here.
                if ended is None:
                    continue
                delta["finish_reason"], delta["stop_reason"] = "length", None
            else:
                self.usage.completion_tokens += len(output.token_ids)
                delta["text"] = output.text
                if self.body.return_token_ids:
                    delta["token_ids"] = output.token_ids
                if self.body.logprobs is not None and output.logprobs:
                    delta["logprobs"] = self.choices[index].legacy(output.token_ids, output.logprobs)
            deltas.append(delta)
        return deltas
