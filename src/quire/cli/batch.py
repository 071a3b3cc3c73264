"""Batch generation: JSON lines in, JSON lines out. A run resumes where an earlier run stopped.

The output file is the only record of progress. It belongs to one run at a time, which appends line by line. The next
run cuts off a line torn by a crash and removes failed lines. Answers to stdout are not remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from io import FileIO
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from quire.cli.batch_lines import PROMPT_KEYS, BatchLine, read_input
from quire.cli.forecast import Forecast, format_duration
from quire.cli.shared import PLAIN_SECONDS, progress_bar
from quire.errors import CacheFullError, ConfigError, QueueFullError, QuireError, RequestError
from quire.safe_io import parse_json

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.models.tokenizer import Tokenizer

log = logging.getLogger("quire")

FIRST_LINES, GROWTH = 8, 4
"""Number of lines that run at first, and number of lines started for each finished one, up to the engine's limit.
Without this, 256 lines of 256 tokens started together would finish together, and an interrupt in the first minute would
lose all of them."""

BAR_SECONDS = 0.2
"""Interval between updates of the progress bar."""


class BatchJob:
    """The input lines that the output does not have yet. A context manager: it locks the output against other runs.

    source       file of the prompts; - is stdin
    target       file of the answers; - is stdout
    sampling     default parameters of a line
    num_retried  number of lines that failed in an earlier run: removed from the output and tried again
    Raises ConfigError before it generates or writes anything: if a file cannot be read or written, if another run is
    writing the output, or if a line is invalid.
    """

    def __init__(self, source: str, target: str, sampling: dict[str, Any]) -> None:
        if "-" not in (source, target) and _is_same_file(source, target):
            raise ConfigError(f"--output is the --input file, {source}")
        lines = read_input(source, sampling)
        self._out = _Output(target, {line.line_id for line in lines})
        self.todo = deque(line for line in lines if line.line_id not in self._out.done)
        self.num_skipped = len(lines) - len(self.todo)
        self.num_retried = self._out.num_retried
        self.num_done = 0
        self.num_failed = 0
        self.num_tokens = 0
        self.seconds = 0.0
        self._num_running = 0
        self._begun = 0.0
        self._forecast = Forecast()
        self._num_answered = 0  # lines with a first token
        self._prompt_tokens = 0  # of those
        self._wanted_tokens = 0  # tokens that finished lines had

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.close()

    async def run(self, llm: AsyncLLM, *, is_planned: bool = False) -> None:
        """Generates every line and writes each answer as it finishes. Raises QuireError if an answer cannot be
        written.

        is_planned  the lines are in the order of their plan, and run in whole blocks, wherever these are
        """
        self._begun = begun = time.monotonic()
        num_first = FIRST_LINES
        if is_planned or llm.config.offload.is_on:
            # A block is loaded and stored as a whole, and neighbours share what they begin with.
            if not is_planned:
                self.to_tree_order(llm.tokenizer)
            num_first = llm.config.scheduler.max_running
        with self._progress(len(self.todo)) as (seconds, show):
            ticker = asyncio.create_task(_repeat(seconds, show))
            try:
                async with asyncio.TaskGroup() as group:
                    self._start(num_first, llm, group)
            except ExceptionGroup as group_error:
                raise group_error.exceptions[0] from None
            finally:
                ticker.cancel()
                self.seconds = time.monotonic() - begun

    def summary(self) -> str:
        """A summary of the run in one line."""
        parts = [f"{self.num_done} done"]
        if self.num_failed:
            again = "; the same command tries them again" if self._out.is_file else ""
            parts.append(f"{self.num_failed} of them failed (the output has the reasons{again})")
        if self.num_skipped:
            parts.append(f"{self.num_skipped} done before")
        if self.num_tokens:
            parts.append(f"{self.num_tokens} tokens, {self.num_tokens / self.seconds:.0f} tokens/s")
        num_left = self._num_running + len(self.todo)
        if num_left:
            again = "; the same command resumes" if self._out.is_file else ""
            parts.append(f"{num_left} not done{again}")
        return ", ".join(parts)

    def _start(self, count: int, llm: AsyncLLM, group: asyncio.TaskGroup) -> None:
        """Starts `count` more lines, or fewer if no more are left or the engine runs no more."""
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
        self._out.write({"id": line.line_id} | answer)
        self.num_done += 1
        self._num_running -= 1
        self._start(GROWTH, llm, group)

    def to_tree_order(self, tokenizer: Tokenizer) -> None:
        """Puts the lines that are left in the depth-first order of the tree of their prompts, as token ids. Lines that
        the model will refuse come first, as they are.
        """

        def tokens_of(line: BatchLine) -> list[int]:
            try:
                prompt = _in_tokens(tokenizer, line.prompt)
            except RequestError:
                return []
            line.prompt.clear()
            line.prompt.update(prompt)
            ids: list[int] = prompt["prompt_token_ids"]
            return ids

        self.todo = deque(sorted(self.todo, key=tokens_of))

    async def _generate(self, llm: AsyncLLM, line: BatchLine) -> dict[str, Any]:
        """The answer to one line, without its id."""
        prompt = dict(line.prompt) if "messages" not in line.prompt else _in_tokens(llm.tokenizer, line.prompt)
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

    def _remaining_seconds(self, total: int) -> float | None:
        """Seconds for the lines that are left, if they are like those before them."""
        if not self.num_done or not self._num_answered:
            return None
        prompts = (total - self._num_answered) * self._prompt_tokens / self._num_answered
        tokens = total * self._wanted_tokens / self.num_done - self.num_tokens
        return self._forecast.remaining_seconds(prompts, max(0.0, tokens))

    @contextlib.contextmanager
    def _progress(self, total: int) -> Iterator[tuple[float, Callable[[], None]]]:
        """Shows the progress on stderr. Yields (interval in seconds, update function)."""

        def speed() -> str:
            seconds = max(time.monotonic() - self._begun, 1e-9)
            self._forecast.note(seconds, self._prompt_tokens, self.num_tokens)
            remaining_seconds = self._remaining_seconds(total)
            return f"{self.num_tokens / seconds:.0f} tokens/s" + (
                "" if remaining_seconds is None else f", {format_duration(remaining_seconds)} left"
            )

        # On a terminal that shows both, a bar would break up the answers.
        if not sys.stderr.isatty() or (self._out.name == "-" and os.isatty(self._out.fileno())):
            yield (
                PLAIN_SECONDS,
                lambda: print(f"quire: {self.num_done}/{total} done, {speed()}", file=sys.stderr, flush=True),
            )
            return
        from rich.progress import TextColumn

        with progress_bar("generating", TextColumn("{task.fields[speed]}")) as bar:
            task = bar.add_task("", total=total, speed="")
            try:
                yield BAR_SECONDS, lambda: bar.update(task, completed=self.num_done, speed=speed())
            finally:
                bar.update(task, completed=self.num_done, speed=speed())


def _in_tokens(tokenizer: Tokenizer, prompt: dict[str, Any]) -> dict[str, Any]:
    """A prompt of any kind, with its hints, as one of tokens. Raises RequestError."""
    hints = {key: value for key, value in prompt.items() if key not in PROMPT_KEYS}
    if "messages" in prompt:
        return hints | {"prompt_token_ids": tokenizer.chat_ids(prompt["messages"])}
    if "prompt" in prompt:
        return hints | {"prompt_token_ids": tokenizer.encode(prompt["prompt"])}
    return dict(prompt)


async def _repeat(seconds: float, call: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        call()


class _Output:
    """The output: stdout, a device or pipe, or a file, locked until this object is closed.

    wanted       ids of the input: only failed lines with these ids are removed from the file
    done         ids of the answers that stay in the file
    num_retried  number of failed lines removed
    """

    def __init__(self, name: str, wanted: Collection[str | int]) -> None:
        self.name = name
        self.done: set[str | int] = set()
        self.num_retried = 0
        # A folder counts as a file that cannot be opened.
        self.is_file = name != "-" and (os.path.isfile(name) or os.path.isdir(name) or not os.path.exists(name))
        if name == "-":
            if sys.stdout is None:
                raise ConfigError("stdout is closed; give an --output")
            # Not through sys.stdout, which replaces characters that its encoding lacks.
            sys.stdout.flush()
            self._file = FileIO(sys.stdout.fileno(), "w", closefd=False)
            return
        try:
            if not self.is_file:
                self._file = FileIO(name, "w")
                return
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"cannot write {name}: {error.strerror or error}") from error
        try:
            self._resume(wanted)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Closes the file and releases its lock."""
        self._file.close()

    def write(self, answer: dict[str, Any]) -> None:
        """Appends one line. Raises QuireError if it cannot be written, BrokenPipeError if the reader has ended."""
        # An id may contain half of a surrogate pair, which becomes its JSON escape.
        self._write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n", self._file)

    def _write(self, content: bytes, file: FileIO) -> None:
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.is_file:
                with contextlib.suppress(OSError):  # removes the partial line
                    file.truncate(os.fstat(file.fileno()).st_size - (len(content) - len(rest)))
            kept = "; finished answers are kept, and the same command resumes" if self.is_file else ""
            where = "to stdout" if self.name == "-" else self.name
            raise QuireError(f"cannot write {where}: {error.strerror or error}{kept}") from error

    def _open(self) -> FileIO:
        """Opens and locks the file; creates it if there is none."""
        while True:
            file = FileIO(self.name, "a+")
            try:
                self._lock(file)
                # The previous owner of the lock may have replaced the file after it was opened here.
                if os.path.exists(self.name) and os.path.samestat(os.fstat(file.fileno()), os.stat(self.name)):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()

    def _lock(self, file: FileIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another quire generate is writing {self.name}; wait for it, or give another --output"
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked (%s); do not start a second run on it", self.name, error.strerror or error)

    def _resume(self, wanted: Collection[str | int]) -> None:
        """Reads the file. Removes a torn last line and the failed lines that will be tried again."""
        self._file.seek(0)
        *lines, tail = self._file.readall().split(b"\n")
        kept: list[bytes] = []
        for number, line in enumerate(lines, 1):
            try:
                answer = parse_json(line) if line.strip() else None
                if answer is not None:
                    if "error" in answer and answer["id"] in wanted:
                        continue
                    self.done.add(answer["id"])
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"{self.name}:{number}: not an output of quire generate; give another --output"
                ) from error
            kept.append(line + b"\n")
        # A last line without a newline may look complete and be torn, such as 12 of 123. It must begin like our lines.
        begin = tail[:7].replace(b" ", b"")
        if not begin.startswith(b'{"id":') and not b'{"id":'.startswith(begin):
            raise ConfigError(f"{self.name}:{len(lines) + 1}: not an output of quire generate; give another --output")
        self.num_retried = len(lines) - len(kept)
        if self.num_retried:
            self._replace(b"".join(kept))
        elif tail:
            self._file.truncate(sum(map(len, kept)))

    def _replace(self, content: bytes) -> None:
        """Replaces the output by a complete new file with this content, so that a crash loses no answer."""
        path = os.path.realpath(self.name)
        new = path + ".new"
        try:
            with contextlib.ExitStack() as undo:
                file = undo.enter_context(FileIO(new, "a+"))
                self._lock(file)
                undo.callback(os.unlink, new)
                file.truncate(0)
                self._write(content, file)
                shutil.copymode(path, new)
                os.replace(new, path)
                undo.pop_all()
        except OSError as error:
            raise ConfigError(f"cannot write {new}: {error.strerror or error}") from error
        self._file.close()
        self._file = file


def _is_same_file(source: str, target: str) -> bool:
    return os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target)
