"""Continue one prompt, or a file of them.

quire generate MODEL "Once upon a time"                          streams the text
quire generate MODEL --input prompts.jsonl --output out.jsonl    a line of JSON in, a line of JSON out

An input line has prompt, messages or prompt_token_ids. It may also have an id (default: its line number), cache_salt,
cache_pin, cache_priority, cache_lifetime (see docs/reference/endpoints.md) and sampling parameters, which override the
flags. If max_tokens is null or exceeds the rest of the context, the rest of the context is the limit. Output lines come
in the order in which they finish. Each has id, text, token_ids, finish_reason and usage, or id and error.

An invalid line makes the command refuse the whole input before it generates anything: invalid UTF-8 or JSON, an unknown
key, a value of a wrong type or out of range, a message without a role, a duplicate id. It reports at most ten such
lines. Errors that depend on the model fail only their line, which becomes {"id": ..., "error": ...}: a prompt too long
for the context, messages that the chat template rejects, a token id outside the vocabulary, logits that are not finite.

Each answer is written as soon as it is finished. The first lines run 8 at a time, so that answers appear soon; later
lines run scheduler.max_running at a time. After an interruption, run the same command again: it skips ids that the
output already has. Failed lines are removed from the output when a run begins, and tried again. Only one run at a time
may write an output file. A run to stdout answers all lines. Exit code 1: the prompt, or some of the lines, failed.

With --offload.mode auto a model larger than memory answers too: as many lines as possible run at once, in the order of
the prefix tree. With --offload.profile FILE (of quire plan hardware) a linear program places weights, cache and
activations for these prompts, and the predicted speed is printed beside the measured one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import EngineConfig
from quire.errors import ConfigError, EngineStoppedError
from quire.safe_io import read_source

if TYPE_CHECKING:
    from quire.batch_files.job import BatchJob
    from quire.batch_files.placement import PlannedBatch
    from quire.engine.params import SamplingParams


BAR_SECONDS = 0.2
"""Interval between updates of the progress bar."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    shared.add_engine_arguments(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="a text to continue; - reads it from stdin")
    parser.add_switch("--chat", text="answer PROMPT as a chat message, with the chat template")
    parser.add_argument("--input", metavar="FILE", help="JSON lines with prompts; - reads them from stdin")
    text = "JSON lines with answers; - or none: stdout. Appends; removes failed lines and tries them again"
    parser.add_argument("--output", metavar="FILE", help=text)
    shared.add_sampling_flags(parser, {"temperature": 0.0, "max_tokens": 256})


def run(args: argparse.Namespace) -> int:
    """Stream one answer or process a file."""
    if shared.printed_config(args):
        return 0
    sampling = shared.sampling_from(args)
    params = shared.sampling_params(sampling)
    if args.input is None:
        if args.prompt is None:
            raise ConfigError("give a PROMPT, or --input FILE")
        if args.output is not None:
            raise ConfigError("--output needs --input FILE; the answer to a PROMPT goes to stdout")
        with shared.runner() as loop:
            failure = loop.run(_stream(args, params))
        if failure is not None:
            print(f"quire: {failure}", file=sys.stderr)
        return 0 if failure is None else 1
    if args.prompt is not None:
        raise ConfigError("give a PROMPT or --input FILE, not both")
    if args.chat:
        raise ConfigError("--chat is for a PROMPT; lines of an --input file have the key prompt or messages")
    from quire.batch_files.job import BatchJob

    with BatchJob(args.input, "-" if args.output is None else args.output, sampling) as batch:
        if num_retried := batch.output.num_retried:
            print(f"failed lines, tried again: {num_retried}", file=sys.stderr)
        try:
            if batch.todo:
                from quire.batch_files import placement

                config = EngineConfig.from_flags(args)
                with placement.planned(args.model, config, batch) as plan, shared.runner() as loop:
                    if (announcement := plan.announcement()) is not None:
                        print(f"quire: {announcement}", file=sys.stderr, flush=True)
                    loop.run(_work(args, batch, plan))
        except KeyboardInterrupt:
            if batch.num_tokens:
                print(batch.summary(), file=sys.stderr)
            raise
        except EngineStoppedError as error:
            if not batch.num_done:
                raise
            print(batch.summary(), file=sys.stderr)
            print(f"quire: {error}; the same command goes on", file=sys.stderr)
            return 1
        print(batch.summary(), file=sys.stderr)
    return 1 if batch.num_failed else 0


async def _stream(args: argparse.Namespace, params: SamplingParams) -> str | None:
    """Writes the answer to stdout as it streams. Returns the reason if it failed, else None."""
    failure: str | None = None
    text = args.prompt
    if text == "-":
        try:
            text = read_source("-").decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"the text on stdin is not UTF-8: {error}") from error
    async with shared.engine(args) as llm:
        tokenizer = llm.tokenizer
        ids = tokenizer.chat_ids([{"role": "user", "content": text}]) if args.chat else tokenizer.encode(text)
        prompt = {"prompt_token_ids": ids}
        written = False
        async for item in llm.generate(prompt, params):
            for output in item.outputs:
                written = written or bool(output.text)
                sys.stdout.write(output.text)
                sys.stdout.flush()
                if output.finish_reason == "error":
                    failure = str(output.stop_reason)
        if written or failure is None:
            print()
    return failure


async def _work(args: argparse.Namespace, batch: BatchJob, plan: PlannedBatch) -> None:
    async with shared.engine(args, plan.options) as llm:
        with _progress(batch) as (seconds, show):
            await batch.run(llm, is_planned=plan.plan is not None, show=show, seconds=seconds)
        for line in plan.report(batch, llm.stats()):
            print(line, file=sys.stderr)


@contextlib.contextmanager
def _progress(batch: BatchJob) -> Iterator[tuple[float, Callable[[], None]]]:
    """Shows the progress on stderr. Yields (interval in seconds, update function)."""
    # On a terminal that shows both, a bar would break up the answers.
    if not sys.stderr.isatty() or (batch.output.name == "-" and os.isatty(batch.output.fileno())):
        yield (
            shared.PLAIN_SECONDS,
            lambda: print(
                f"quire: {batch.num_done}/{batch.num_lines} done, {batch.speed()}", file=sys.stderr, flush=True
            ),
        )
        return
    from rich.progress import TextColumn

    with shared.progress_bar("generating", TextColumn("{task.fields[speed]}")) as bar:
        task = bar.add_task("", total=batch.num_lines, speed="")

        def show() -> None:
            bar.update(task, completed=batch.num_done, speed=batch.speed())

        try:
            yield BAR_SECONDS, show
        finally:
            show()
