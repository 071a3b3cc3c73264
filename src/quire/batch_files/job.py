"""Batch generation: JSON lines in, JSON lines out. A run resumes where an earlier run stopped."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from quire.batch_files.forecast import Forecast, format_duration
from quire.batch_files.lines import BatchLine, in_tokens, read_input
from quire.batch_files.output import AnswerFile
from quire.errors import CacheFullError, ConfigError, QueueFullError, RequestError

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.models.tokenizer import Tokenizer

FIRST_LINES, GROWTH = 8, 4
"""Number of lines that run at first, and number of lines started for each finished one, up to the engine's limit.
Without this, 256 lines of 256 tokens started together would finish together, and an interrupt in the first minute would
lose all of them."""


class BatchJob:
    """The input lines that the output does not have yet. A context manager: it locks the output against other runs.

    source       file of the prompts; -: stdin
    target       file of the answers; -: stdout
    sampling     default parameters of a line
    output       the output of the answers
    num_lines    number of lines to run, which the output lacks at the start
    Raises ConfigError before it generates or writes anything: if a file cannot be read or written, if another run is
    writing the output, or if a line is invalid.
    """

    def __init__(self, source: str, target: str, sampling: dict[str, Any]) -> None:
        if "-" not in (source, target) and _is_same_file(source, target):
            raise ConfigError(f"--output is the --input file, {source}")
        lines = read_input(source, sampling)
        self.output = AnswerFile(target, {line.line_id for line in lines})
        self.todo = deque(line for line in lines if line.line_id not in self.output.done)
        self.num_lines = len(self.todo)
        self.num_skipped = len(lines) - len(self.todo)
        self.num_done = 0
        self.num_failed = 0
        self.num_tokens = 0
        self.seconds = 0.0
        self._num_running = 0
        self._begun = 0.0
        self._forecast = Forecast()
        self._num_answered = 0  # number of lines with a first token
        self._prompt_tokens = 0  # computed tokens of their prompts
        self._wanted_tokens = 0  # generated tokens of finished lines

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.output.close()

    async def run(
        self, llm: AsyncLLM, *, is_planned: bool = False, show: Callable[[], None] = lambda: None, seconds: float = 10.0
    ) -> None:
        """Generates every line and writes each answer as it finishes. Raises QuireError if an answer cannot be
        written.

        is_planned     whether the lines are in the order of their plan, and run in whole blocks
        show, seconds  `show` is called every `seconds`, to show the progress
        """
        self._begun = begun = time.monotonic()
        num_first = FIRST_LINES
        if is_planned or llm.config.offload.is_on:
            # A block is loaded and stored as a whole, and neighbouring lines share prefixes.
            if not is_planned:
                self.to_tree_order(llm.tokenizer)
            num_first = llm.config.scheduler.max_running
        ticker = asyncio.create_task(_repeat(seconds, show))
        try:
            async with asyncio.TaskGroup() as group:
                self._start(num_first, llm, group)
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            ticker.cancel()
            self.seconds = time.monotonic() - begun

    def speed(self) -> str:
        """The speed so far and the remaining time, in words. Notes the speed for the forecast."""
        seconds = max(time.monotonic() - self._begun, 1e-9)
        self._forecast.note(seconds, self._prompt_tokens, self.num_tokens)
        remaining_seconds = self._remaining_seconds()
        return f"{self.num_tokens / seconds:.0f} tokens/s" + (
            "" if remaining_seconds is None else f", {format_duration(remaining_seconds)} left"
        )

    def summary(self) -> str:
        """A summary of the run in one line."""
        parts = [f"{self.num_done} done"]
        if self.num_failed:
            again = "; the same command tries them again" if self.output.is_file else ""
            parts.append(f"{self.num_failed} of them failed (the output has the reasons{again})")
        if self.num_skipped:
            parts.append(f"{self.num_skipped} done before")
        if self.num_tokens:
            parts.append(f"{self.num_tokens} tokens, {self.num_tokens / self.seconds:.0f} tokens/s")
        num_left = self._num_running + len(self.todo)
        if num_left:
            again = "; the same command resumes" if self.output.is_file else ""
            parts.append(f"{num_left} not done{again}")
        return ", ".join(parts)

    def _start(self, count: int, llm: AsyncLLM, group: asyncio.TaskGroup) -> None:
        """Starts `count` more lines, or fewer if fewer are left or the engine is full."""
        for _ in range(min(count, len(self.todo), llm.config.scheduler.max_running - self._num_running)):
            self._num_running += 1
            group.create_task(self._finish(self.todo.popleft(), llm, group))

    async def _finish(self, line: BatchLine, llm: AsyncLLM, group: asyncio.TaskGroup) -> None:
        """Generates and writes one line, then starts others in its place."""
        try:
            answer = await self._generate(llm, line)
        except (RequestError, CacheFullError) as error:
            answer = {"error": str(error)}
            self.num_failed += 1
        self.output.write({"id": line.line_id} | answer)
        self.num_done += 1
        self._num_running -= 1
        self._start(GROWTH, llm, group)

    def to_tree_order(self, tokenizer: Tokenizer) -> None:
        """Sorts the remaining lines into the depth-first order of the tree of their prompts, as token ids. Lines that
        the model will refuse come first.
        """

        def tokens_of(line: BatchLine) -> list[int]:
            try:
                prompt = in_tokens(tokenizer, line.prompt)
            except RequestError:
                return []
            line.prompt.clear()
            line.prompt.update(prompt)
            ids: list[int] = prompt["prompt_token_ids"]
            return ids

        self.todo = deque(sorted(self.todo, key=tokens_of))

    async def _generate(self, llm: AsyncLLM, line: BatchLine) -> dict[str, Any]:
        """The answer to one line, without its id."""
        prompt = dict(line.prompt) if "messages" not in line.prompt else in_tokens(llm.tokenizer, line.prompt)
        num_choices = line.params.n
        choices: list[dict[str, Any]] = [{"text": "", "token_ids": []} for _ in range(num_choices)]
        usage: dict[str, Any] = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        while True:
            try:
                async for item in llm.generate(prompt, line.params):
                    if not usage["prompt_tokens"]:
                        self._num_answered += 1
                        self._prompt_tokens += len(item.prompt_token_ids) - item.num_cached_tokens
                    usage["prompt_tokens"] = len(item.prompt_token_ids)
                    usage["cached_tokens"] = item.num_cached_tokens
                    usage["cached_tokens_by_tier"] = dict(item.cached_by_tier)
                    if item.kept_fraction is not None:
                        usage["kept_fraction"] = round(item.kept_fraction, 4)
                    for output in item.outputs:
                        choice = choices[output.index]
                        choice["text"] += output.text
                        choice["token_ids"] += output.token_ids
                        usage["completion_tokens"] += len(output.token_ids)
                        self.num_tokens += len(output.token_ids)
                        if output.logprobs is not None:
                            scores = [
                                {str(each): lp.logprob for each, lp in place.items()} for place in output.logprobs
                            ]
                            choice["logprobs"] = choice.get("logprobs", []) + scores
                        if output.finish_reason == "error":
                            raise RequestError(str(output.stop_reason))
                        if output.finish_reason is not None:
                            choice["finish_reason"] = output.finish_reason
                break
            except QueueFullError as error:
                # A full queue refuses a request before anything is generated.
                await asyncio.sleep(error.retry_after)
        self._wanted_tokens += usage["completion_tokens"]
        answer = choices[0] if num_choices == 1 else {"choices": choices}
        return answer | {"usage": usage}

    def _remaining_seconds(self) -> float | None:
        """Estimated seconds for the remaining lines, if they are like the finished ones."""
        if not self.num_done or not self._num_answered:
            return None
        prompts = (self.num_lines - self._num_answered) * self._prompt_tokens / self._num_answered
        tokens = self.num_lines * self._wanted_tokens / self.num_done - self.num_tokens
        return self._forecast.remaining_seconds(prompts, max(0.0, tokens))


async def _repeat(seconds: float, call: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        call()


def _is_same_file(source: str, target: str) -> bool:
    return os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target)
