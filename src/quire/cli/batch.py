"""A file of prompts worked through: JSON lines in, JSON lines out, going on where an earlier run stopped.

The output file is the only record of what is done. It is appended to, a line at a time; a line torn by a crash is cut
off when the next run begins.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from quire.engine.params import SamplingParams
from quire.errors import CacheFullError, ConfigError, QueueFullError, RequestError

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_PARAMETERS = frozenset(field.name for field in fields(SamplingParams)) - {"detokenize"}


@dataclass(frozen=True)
class Line:
    """One line of the input."""

    line_id: str | int
    kind: str
    prompt: Any
    params: SamplingParams


class Batch:
    """The lines of an input file that its output file does not hold yet.

    Raises ConfigError, before anything runs, for a file that cannot be read or a line that is not what it should be.
    """

    def __init__(self, source: Path, target: Path, sampling: dict[str, Any]) -> None:
        self.target = target
        if target.exists() and source.exists() and target.samefile(source):
            raise ConfigError(f"--output is the --input file, {source}")
        lines = _read_input(source, sampling)
        done = _resume(target)
        self.todo = deque(line for line in lines if line.line_id not in done)
        self.num_skipped = len(lines) - len(self.todo)
        self.num_done = 0
        self.num_failed = 0
        self.num_tokens = 0
        self.seconds = 0.0

    async def run(self, llm: AsyncLLM) -> None:
        """Generate every line, as many at a time as the engine runs, and write each as it finishes."""
        begun = time.monotonic()
        total = len(self.todo)
        try:
            with self.target.open("a", encoding="utf-8") as out, _progress(total, self) as show:
                width = min(total, llm.config.scheduler.max_running)
                async with asyncio.TaskGroup() as group:
                    for _ in range(width):
                        group.create_task(self._worker(llm, out, show))
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            self.seconds = time.monotonic() - begun

    def summary(self) -> str:
        """One line about the run."""
        parts = [f"{self.num_done} done"]
        if self.num_failed:
            parts.append(f"{self.num_failed} of them failed (their lines say why)")
        if self.num_skipped:
            parts.append(f"{self.num_skipped} were there already")
        if self.num_tokens:
            parts.append(f"{self.num_tokens} tokens, {self.num_tokens / self.seconds:.0f} tokens/s")
        return ", ".join(parts)

    async def _worker(self, llm: AsyncLLM, out: IO[str], show: Any) -> None:
        while self.todo:
            line = self.todo.popleft()
            try:
                answer = await _generate(llm, line)
                self.num_tokens += answer["usage"]["completion_tokens"]
            except (RequestError, CacheFullError) as error:
                answer = {"error": str(error)}
                self.num_failed += 1
            out.write(json.dumps({"id": line.line_id} | answer, ensure_ascii=False) + "\n")
            out.flush()
            self.num_done += 1
            show()


async def _generate(llm: AsyncLLM, line: Line) -> dict[str, Any]:
    """The answer to one line, without its id."""
    prompt = line.prompt
    if line.kind == "messages":
        text = llm.tokenizer.chat(prompt, add_generation_prompt=True)
        prompt = {"prompt_token_ids": llm.tokenizer.encode(text, add_special=False)}
    num_choices = line.params.n
    choices: list[dict[str, Any]] = [{"text": "", "token_ids": []} for _ in range(num_choices)]
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
    while True:
        try:
            async for item in llm.generate(prompt, line.params):
                usage["prompt_tokens"] = len(item.prompt_token_ids)
                usage["cached_tokens"] = item.num_cached_tokens
                for output in item.outputs:
                    choice = choices[output.index]
                    choice["text"] += output.text
                    choice["token_ids"] += output.token_ids
                    usage["completion_tokens"] += len(output.token_ids)
                    if output.logprobs is not None:
                        scores = [{str(each): lp.logprob for each, lp in place.items()} for place in output.logprobs]
                        choice["logprobs"] = choice.get("logprobs", []) + scores
                    if output.finish_reason == "error":
                        raise RequestError(str(output.stop_reason))
                    if output.finish_reason is not None:
                        choice["finish_reason"] = output.finish_reason
            break
        except QueueFullError as error:
            # Nothing was generated: the queue refuses before it takes anything.
            await asyncio.sleep(error.retry_after)
    answer = choices[0] if num_choices == 1 else {"choices": choices}
    return answer | {"usage": usage}


def _read_input(path: Path, sampling: dict[str, Any]) -> list[Line]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    lines: list[Line] = []
    known: dict[str | int, int] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        if not raw.strip():
            continue
        try:
            line = _read_line(raw, number, sampling)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} line {number}: {error}") from error
        if line.line_id in known:
            raise ConfigError(f"{path} line {number}: its id {line.line_id!r} is that of line {known[line.line_id]}")
        known[line.line_id] = number
        lines.append(line)
    return lines


def _read_line(raw: str, number: int, sampling: dict[str, Any]) -> Line:
    """Raises ValueError (RequestError is one) for a line that is not what it should be."""
    values = json.loads(raw)
    if not isinstance(values, dict):
        raise ValueError("a line must be a JSON object")
    line_id = values.pop("id", number)
    if isinstance(line_id, bool) or not isinstance(line_id, str | int):
        raise ValueError("'id' must be a string or an integer")
    kinds = [key for key in PROMPT_KEYS if key in values]
    if len(kinds) != 1:
        raise ValueError(f"a line must hold one of {', '.join(PROMPT_KEYS)}")
    kind = kinds[0]
    prompt = values.pop(kind)
    unknown = sorted(values.keys() - _PARAMETERS)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}")
    if isinstance(values.get("logit_bias"), dict):
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    if not isinstance(prompt, str if kind == "prompt" else list):
        raise ValueError(f"'{kind}' must be a {'string' if kind == 'prompt' else 'list'}")
    if kind == "messages" and not all(isinstance(each, dict) and "role" in each for each in prompt):
        raise ValueError("'messages' must be a list of objects with role and content")
    if kind == "prompt_token_ids" and not all(type(each) is int for each in prompt):
        raise ValueError("'prompt_token_ids' must be a list of integers")
    wrapped = prompt if kind == "messages" else {kind: prompt}
    return Line(line_id, kind, wrapped, SamplingParams(**(sampling | values)))


def _resume(path: Path) -> set[str | int]:
    """The ids that the output holds. A torn last line is cut off the file."""
    if not path.exists():
        try:
            path.touch()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
        return set()
    done: set[str | int] = set()
    whole = 0
    content = path.read_bytes()
    pieces = content.split(b"\n")
    for number, piece in enumerate(pieces, 1):
        is_last = number == len(pieces)
        try:
            # A last line without its line end may look complete and not be: 12 of 123.
            line = {} if is_last else json.loads(piece) if piece.strip() else {}
            if line:
                done.add(line["id"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{path} line {number} is no output of quire generate; name another --output") from error
        whole += 0 if is_last else len(piece) + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return done


@contextmanager
def _progress(total: int, batch: Batch) -> Iterator[Any]:
    """A progress bar on stderr, if that is a terminal; yields what to call after every line."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    columns = [TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    speed = TextColumn("{task.fields[speed]}")
    begun = time.monotonic()
    with Progress(*columns, speed, console=console) as bar:
        task = bar.add_task("", total=total, speed="")

        def show() -> None:
            rate = batch.num_tokens / max(time.monotonic() - begun, 1e-9)
            bar.update(task, completed=batch.num_done, speed=f"{rate:.0f} tokens/s")

        yield show
