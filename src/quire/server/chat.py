"""POST /v1/chat/completions: answers conversations."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from quire.server import shapes
from quire.server.chat_schema import ChatRequest, content_text, template_messages
from quire.server.collector import AnswerCollector, ChoiceDelta, Renderer
from quire.server.errors import json_response
from quire.server.event_stream import sse_event
from quire.server.json_encoding import LargeJsonResponse, encoded, extend
from quire.server.logprobs import chat_logprobs, check_prompt_logprobs, prompt_logprobs
from quire.server.service import PromptJob, Service
from quire.server.shapes import EncodedList
from quire.server.tooling import Tooling
from quire.server.usage import StreamChunks
from quire.tools.calls import AnswerDelta, ArgumentsDelta, CallStart, ReasoningDelta, TextDelta


async def create_chat(service: Service, request: Request) -> Response:
    """Answer one request, as a whole or as a stream."""
    async with service.body_reader.read(request, ChatRequest) as body:
        service.check_model(body.model)
        tooling = await Tooling.of(body, service.engine.tokenizer)
        ids = await service.request_tokenizer.encode_chat(
            lambda: template_messages(body.messages),
            body.chat_template_kwargs,
            body.begins_answer,
            tooling.tools,
            continues=bool(body.continue_final_message),
        )
        is_new = body.max_completion_tokens is not None
        max_tokens = body.max_completion_tokens if is_new else body.max_tokens
        job = service.job(
            body,
            ids,
            request.state.tenant,
            max_tokens,
            param="messages",
            length_param="max_completion_tokens" if is_new else "max_tokens",
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            tooling=tooling,
        )
        check_prompt_logprobs({"prompt_logprobs": body.prompt_logprobs}, 1, len(ids))
        parsers = [tooling.answer_parser(ids) for _ in range(job.params.n)]
        collector = AnswerCollector(ChatRenderer(service, body, job), parsers)
        body.forget("messages", "chat_template_kwargs", "tools", "metadata", "prompt_cache_key", "safety_identifier")
        body.forget("user")
    await service.admit([job], request.receive, tooling.find_fault)
    return await collector.answer(request, stream=body.stream)


@dataclass
class ChatChoiceBuilder:
    """One answer so far."""

    text: str = ""
    reasoning: str = ""
    calls: list[shapes.ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: bytearray = field(default_factory=bytearray)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: ChoiceDelta) -> None:
        """Adds a delta, apart from its log-probabilities and token ids."""
        for part in event.parts:
            match part:
                case TextDelta(text):
                    self.text += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case CallStart(_, id_, name):
                    self.calls.append({"id": id_, "type": "function", "function": {"name": name, "arguments": ""}})
                case ArgumentsDelta(index, text):
                    self.calls[index]["function"]["arguments"] += text
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason

    def message(self, before: str) -> shapes.ChatMessage:
        """The whole message. before: text to put before its text."""
        text = before + self.text
        found: shapes.ChatMessage = {"role": "assistant", "content": text, "refusal": None}
        if self.calls:
            found["content"], found["tool_calls"] = text or None, self.calls
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        return found


def _delta(part: AnswerDelta) -> shapes.MessageDelta:
    """A part of an answer in a chunk."""
    match part:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case CallStart(index, id_, name):
            function: shapes.FunctionDelta = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id_, "type": "function", "function": function}]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class ChatRenderer(Renderer):
    """Writes the answer to a conversation."""

    def __init__(self, service: Service, body: ChatRequest, job: PromptJob) -> None:
        super().__init__(service, [job], "chatcmpl-", "chat.completion.chunk" if body.stream else "chat.completion")
        self.body = body
        self.choices = [ChatChoiceBuilder() for _ in range(job.params.n)]
        self.before = content_text(body.messages[-1].content) if body.echo else ""
        self.scores: bytes | None = None
        self.chunks = StreamChunks(self.head, self.usage, body.stream_options)

    async def prepare(self, prompt: int, logprobs: list[Any]) -> None:
        """See Renderer."""
        if self.body.prompt_logprobs is not None:
            self.scores = await self.service.make_answer(
                self.jobs[prompt].num_prompt_logprobs, lambda: encoded(prompt_logprobs(logprobs, self.token_texts))
            )

    def _logprobs(self, delta: ChoiceDelta) -> list[shapes.TokenLogprob]:
        if not self.body.logprobs or not delta.logprobs:
            return []
        return chat_logprobs(delta.token_ids, delta.logprobs, self.body.top_logprobs or 0, self.token_texts)

    def add(self, event: ChoiceDelta) -> None:
        """See Renderer."""
        choice = self.choices[event.choice]
        choice.add(event)
        if self.body.return_token_ids:
            choice.token_ids += event.token_ids
        if self.body.logprobs:
            self.grow(extend(choice.logprobs, self._logprobs(event)))

    async def whole(self, held: ExitStack) -> Response:
        """See Renderer."""
        choices = [self._answer(index, choice) for index, choice in enumerate(self.choices)]
        content = cast(shapes.ChatCompletion, {**self.head, "choices": choices, "usage": self.usage.as_dict()})
        if self.scores is not None:
            content["prompt_logprobs"] = EncodedList(self.scores)
        if self.body.return_token_ids:
            content["prompt_token_ids"] = self.jobs[0].prompt_ids
        is_scored = self.body.logprobs or self.scores is not None
        return LargeJsonResponse(content, held.pop_all()) if is_scored else json_response(content)

    def _answer(self, index: int, choice: ChatChoiceBuilder) -> shapes.ChatChoice:
        """A whole choice."""
        found: shapes.ChatChoice = {
            "index": index,
            "message": choice.message(self.before),
            "logprobs": {"content": EncodedList(choice.logprobs), "refusal": None} if self.body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    async def render(self, deltas: Iterable[ChoiceDelta], begun: int | None) -> Iterable[bytes]:
        """See Renderer."""
        first = b"" if begun is None else b"".join(map(self._first_chunk, range(len(self.choices))))
        news = first + b"".join(self.chunks.event(each) for delta in deltas for each in self._deltas(delta))
        return (news,) if news else ()

    def _first_chunk(self, index: int) -> bytes:
        """The first chunk of a choice, which has its role."""
        delta: shapes.MessageDelta = {"role": "assistant", "content": self.before}
        choice: shapes.ChatDelta = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if index or not self.body.return_token_ids:
            return self.chunks.event(choice)
        return sse_event({**self.chunks.head(), "choices": [choice], "prompt_token_ids": self.jobs[0].prompt_ids})

    def _deltas(self, event: ChoiceDelta) -> list[shapes.ChatDelta]:
        """The deltas of an event, one for each part. The first carries token ids and log-probabilities; the last
        carries the finish reason.
        """
        scored, has_ended = self._logprobs(event), event.finish_reason is not None
        parts = [_delta(part) for part in event.parts]
        has_ids = bool(self.body.return_token_ids and event.token_ids)
        if not parts and (scored or has_ended or has_ids):
            parts = [{} if has_ended and not scored else {"content": ""}]
        deltas: list[shapes.ChatDelta] = [
            {"index": event.choice, "delta": part, "logprobs": None, "finish_reason": None} for part in parts
        ]
        if scored:
            deltas[0]["logprobs"] = {"content": scored, "refusal": None}
        if has_ids:
            deltas[0]["token_ids"] = event.token_ids
        if has_ended:
            deltas[-1]["finish_reason"], deltas[-1]["stop_reason"] = event.finish_reason, event.stop_reason
        return deltas

    async def end(self) -> bytes:
        """See Renderer."""
        return self.chunks.end()
