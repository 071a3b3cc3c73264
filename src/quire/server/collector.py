"""Collects the engine's outputs for a request: a flat sequence of deltas, which a renderer turns into an answer.

Knows the engine's outputs, token counts and the parts of an answer. Renderers know the form of each endpoint's answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from quire.server.errors import ApiError
from quire.server.event_stream import EventStream, sse_event, unless_disconnected
from quire.server.logprobs import TokenTextCache
from quire.server.service import PromptJob, Service
from quire.server.usage import Usage
from quire.tools.answer_parser import AnswerParser
from quire.tools.calls import AnswerDelta, ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from quire.engine.outputs import CompletionOutput, Logprob, RequestOutput


@dataclass(slots=True)
class ChoiceDelta:
    """The new output of one choice.

    choice         `prompt * n + index`: the index-th answer to a prompt
    text           text from the engine
    parts          the same text parsed into parts; text that may be the beginning of a mark is held back
    token_ids      ids of all new tokens
    logprobs       one dict per new token; None if the request does not want them
    finish_reason  None while the choice goes on; tool_calls if it ends with whole calls
    stop_reason    see `CompletionOutput`
    is_all_text    whether no new token belongs to reasoning, a call or their marks
    is_cut         whether the last call is incomplete
    """

    choice: int
    text: str
    parts: Sequence[AnswerDelta]
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    is_all_text: bool = True
    is_cut: bool = False


class Renderer(ABC):
    """Writes the answer to a request from its deltas, whole or as server-sent events.

    kind, what  see `Service.head`
    large       for errors: the content that makes the answer large, and the parameter that requests this content
    grow        adds bytes to the size of the answer; see `AnswerByteLimiter`
    """

    large = ("log-probabilities", "logprobs")

    def __init__(self, service: Service, jobs: Sequence[PromptJob], kind: str, what: str) -> None:
        self.service = service
        self.jobs = jobs
        self.head = service.head(kind, what)
        self.usage = Usage(prompt_tokens=sum(len(job.prompt_ids) for job in jobs))
        self.token_texts = TokenTextCache(service.engine.tokenizer)
        self.grow: Callable[[int], None]

    def begin(self, grow: Callable[[int], None]) -> None:
        """Called before the request goes to the engine."""
        self.grow = grow

    @abstractmethod
    async def prepare(self, prompt: int, logprobs: list[dict[int, Logprob] | None]) -> None:
        """Encodes the part of the answer that is about a prompt. Called before the prompt's first output is rendered.

        logprobs  one dict per position, if requested; they may be kept only during this call
        """

    @abstractmethod
    def add(self, event: ChoiceDelta) -> None:
        """Adds a delta to the whole answer."""

    @abstractmethod
    async def whole(self, held: ExitStack) -> Response:
        """The answer in one piece. held: holds the count of its bytes; a large answer takes it over."""

    @abstractmethod
    async def render(self, deltas: Iterable[ChoiceDelta], begun: int | None) -> Iterable[bytes]:
        """Server-sent events for the deltas of an output, a large event in parts.

        begun  index in the request of the prompt whose first output this is; None: a later output
        """

    @abstractmethod
    async def end(self) -> bytes:
        """The last server-sent events of the answer."""

    def failed(self, error: ApiError) -> bytes:
        """The server-sent event of an error after the first output."""
        return sse_event(error.body())


class AnswerCollector:
    """One request while the engine answers it.

    renderer        writes the answer
    parsers         one for each choice; empty: texts are not parsed
    is_prompt_only  whether the answer has no generated tokens: the one token that the engine generates is dropped
    """

    def __init__(
        self, renderer: Renderer, parsers: Sequence[AnswerParser] = (), *, is_prompt_only: bool = False
    ) -> None:
        self._renderer = renderer
        self._service = renderer.service
        self._usage = renderer.usage
        self._num_choices = renderer.jobs[0].params.n
        self._is_prompt_only = is_prompt_only
        self._readers = [_ChoiceReader(parser, self._usage) for parser in parsers]
        self._begun = set[int]()  # prompts whose first output is not rendered yet

    async def answer(self, request: Request, *, stream: bool | None) -> Response:
        """The answer to an admitted request, as a whole or as a stream. Raises ClientDisconnected."""
        if stream:
            return EventStream(self.events(), self._service.config.ping_seconds, self._renderer.failed)
        return await unless_disconnected(request.receive, self.whole())

    async def whole(self) -> Response:
        """The answer in one piece."""
        with ExitStack() as held:
            self._renderer.begin(held.enter_context(self._service.answer_limiter.hold(*self._renderer.large)))
            async with aclosing(self._outputs()) as outputs:
                async for prompt, output in outputs:
                    for delta in self._deltas(prompt, output):
                        self._renderer.add(delta)
            return await self._renderer.whole(held)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        async with AsyncExitStack() as held:
            self._renderer.begin(held.enter_context(self._service.answer_limiter.hold(*self._renderer.large)))
            outputs = await held.enter_async_context(aclosing(self._outputs()))
            async for prompt, output in outputs:
                begun = prompt if prompt in self._begun else None
                self._begun.discard(prompt)
                for data in await self._renderer.render(self._deltas(prompt, output), begun):
                    yield data
        yield await self._renderer.end()

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields the engine's outputs with the indexes of their prompts."""
        return self._service.run(self._renderer.jobs, self._renderer.head["id"], self._on_first_output)

    async def _on_first_output(self, prompt: int, output: RequestOutput) -> None:
        self._usage.record(output)
        await self._renderer.prepare(prompt, output.prompt_logprobs or [])
        self._begun.add(prompt)

    def _deltas(self, prompt: int, output: RequestOutput) -> Iterator[ChoiceDelta]:
        """Yields the deltas of an output. Counts the tokens of a delta when it is consumed."""
        for each in output.outputs:
            if (delta := self._delta(prompt, each)) is not None:
                yield delta

    def _delta(self, prompt: int, output: CompletionOutput) -> ChoiceDelta | None:
        """The delta of an output for its choice; None if the output is dropped."""
        choice, reason = prompt * self._num_choices + output.index, output.finish_reason
        if self._is_prompt_only:
            return None if reason is None else ChoiceDelta(choice, "", (), [], None, "length", None)
        self._usage.completion_tokens += len(output.token_ids)
        delta = ChoiceDelta(choice, output.text, (), output.token_ids, output.logprobs, reason, output.stop_reason)
        if self._readers:
            self._readers[choice].read(delta)
        return delta


class _ChoiceReader:
    """Parses the text of one choice, and counts its tokens of reasoning."""

    def __init__(self, parser: AnswerParser, usage: Usage) -> None:
        self._parser = parser
        self._usage = usage
        self._num_undecided = 0

    def read(self, delta: ChoiceDelta) -> None:
        """Parses the text of a delta."""
        parser = self._parser
        if parser.is_plain:
            delta.parts = (TextDelta(delta.text),) if delta.text else ()
            return
        was_outside_text, was_reasoning = parser.is_outside_text, parser.is_reasoning
        delta.parts = parser.read(delta.text, is_last=delta.finish_reason is not None)
        self._count_reasoning(len(delta.token_ids), was_reasoning, delta.parts)
        delta.is_all_text = not (was_outside_text or parser.is_outside_text)
        delta.is_cut = parser.is_cut
        if delta.finish_reason == "stop" and parser.num_calls and not delta.is_cut:
            delta.finish_reason = "tool_calls"

    def _count_reasoning(self, num_tokens: int, was_reasoning: bool, parts: Sequence[AnswerDelta]) -> None:
        """Counts reasoning tokens, marks included. A mark may be several tokens, whose text is held back."""
        is_reasoning = self._parser.is_reasoning
        if was_reasoning or is_reasoning or any(isinstance(part, ReasoningDelta) for part in parts):
            self._usage.reasoning_tokens += self._num_undecided + num_tokens
        self._num_undecided = 0 if parts or is_reasoning else self._num_undecided + num_tokens
