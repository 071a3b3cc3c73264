"""Continue one prompt, or a file of them.

quire generate MODEL "Once upon a time"                          streams the text
quire generate MODEL --input prompts.jsonl --output out.jsonl    a line of JSON in, a line of JSON out

An input line holds prompt, messages or prompt_token_ids, and may hold an id (its line number otherwise) and sampling
parameters that win over the flags. Output lines come in the order in which they finish; each holds id, text,
token_ids, finish_reason and usage, or id and error. Run again after an interruption, the command goes on where it
stopped: ids that the output holds are skipped. Lines that failed are taken out of the output when a run begins, and
tried again. Exit code 1: the prompt, or some of the lines, could not be generated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli import shared
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.engine.params import SamplingParams

HELP = "continue a prompt, or a file of them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    shared.add_engine_arguments(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="a text to continue; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="PROMPT is a message to answer, by the chat template")
    parser.add_argument("--input", type=Path, metavar="FILE", help="JSON lines with prompts")
    text = "JSON lines with answers; appended to, without the lines that failed: those are tried again"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)
    shared.add_sampling_flags(parser, {"temperature": 0.0, "max_tokens": 256})


def run(args: argparse.Namespace) -> int:
    """Stream one answer or work through a file."""
    if shared.printed_config(args):
        return 0
    sampling = shared.sampling_from(args)
    params = shared.sampling_params(sampling)
    if args.prompt is not None and args.input is None and args.output is None:
        with shared.runner() as loop:
            failure = loop.run(_stream(args, params))
        if failure is not None:
            print(f"quire: {failure}", file=sys.stderr)
        return 0 if failure is None else 1
    if args.prompt is not None or args.input is None or args.output is None:
        raise ConfigError("give a PROMPT, or --input FILE and --output FILE")
    if args.chat:
        raise ConfigError("--chat is for a PROMPT; lines of an --input file say what they are: prompt or messages")
    from quire.cli.batch import Batch

    batch = Batch(args.input, args.output, sampling)
    # Only now is it certain that both files are what they should be.
    num_failed = _forget_failures(args.output)
    if num_failed:
        print(f"failed before, tried again: {num_failed}", file=sys.stderr)
        batch = Batch(args.input, args.output, sampling)
    if batch.todo:
        with shared.runner() as loop:
            loop.run(_work(args, batch))
    print(batch.summary(), file=sys.stderr)
    return 1 if batch.num_failed else 0


def _forget_failures(path: Path) -> int:
    """Take the lines that hold an error out of an output; returns how many there were.

    The new file replaces the old one when it is whole: no crash costs an answer. Raises ConfigError if it cannot be
    written.
    """
    path = path.resolve()
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if not line.strip() or "error" not in json.loads(line)]
    if len(kept) == len(lines):
        return 0
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(b"".join(kept))
        shutil.copymode(path, new)
        os.replace(new, path)
    except OSError as error:
        raise ConfigError(f"cannot write {new}: {error.strerror or error}") from error
    return len(lines) - len(kept)


async def _stream(args: argparse.Namespace, params: SamplingParams) -> str | None:
    """Write the answer to stdout as it comes; returns why it failed, None if it did not."""
    failure: str | None = None
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    async with shared.engine(args) as llm:
        if args.chat:
            text = llm.tokenizer.chat([{"role": "user", "content": text}], add_generation_prompt=True)
        prompt = {"prompt_token_ids": llm.tokenizer.encode(text, add_special=not args.chat)}
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


async def _work(args: argparse.Namespace, batch: Any) -> None:
    async with shared.engine(args) as llm:
        await batch.run(llm)
