"""Continue one prompt, or a file of them.

quire generate MODEL "Once upon a time"                          streams the text
quire generate MODEL --input prompts.jsonl --output out.jsonl    a line of JSON in, a line of JSON out

An input line holds prompt, messages or prompt_token_ids, and may hold an id (its line number otherwise), cache_salt,
cache_pin (see docs/server.md) and sampling parameters that win over the flags (max_tokens null: as many as the context
holds). Output lines come in the order in which they finish; each holds id, text, token_ids, finish_reason and usage, or
id and error.

Lines of a wrong form refuse the whole input before anything is generated, ten of them told at a time: what is no UTF-8
or no JSON, unknown keys, values of a wrong type or out of range, an id given twice. What only the model can tell fails
that line alone, which becomes {"id": ..., "error": ...}: a prompt too long for the context, messages that the chat
template refuses, a token that the vocabulary lacks, an answer whose numbers are not finite.

An answer is written as soon as it is finished. The first lines run 8 at a time, so that there are answers soon, later
ones as many at a time as scheduler.max_running allows. Run again after an interruption, the command goes on where it
stopped: ids that the output holds are skipped. Lines that failed are taken out of the output when a run begins, and
tried again. One run at a time may write an output. To stdout, every run answers all lines. Exit code 1: the prompt, or
some of the lines, could not be generated.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quire.arguments import Arguments
from quire.cli import shared
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.cli.batch import Batch
    from quire.engine.params import SamplingParams

HELP = "continue a prompt, or a file of them"


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    shared.add_engine_arguments(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="a text to continue; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="PROMPT is a message to answer, by the chat template")
    parser.add_argument("--input", metavar="FILE", help="JSON lines with prompts; - reads them from stdin")
    text = "JSON lines with answers, appended to; - or none: stdout. Lines that failed are taken out and tried again"
    parser.add_argument("--output", metavar="FILE", help=text)
    shared.add_sampling_flags(parser, {"temperature": 0.0, "max_tokens": 256})


def run(args: argparse.Namespace) -> int:
    """Stream one answer or work through a file."""
    if shared.printed_config(args):
        return 0
    sampling = shared.sampling_from(args)
    params = shared.sampling_params(sampling)
    if args.input is None:
        if args.prompt is None:
            raise ConfigError("give a PROMPT, or --input FILE")
        if args.output is not None:
            raise ConfigError("--output is for the answers to --input FILE; the answer to a PROMPT goes to stdout")
        with shared.runner() as loop:
            failure = loop.run(_stream(args, params))
        if failure is not None:
            print(f"quire: {failure}", file=sys.stderr)
        return 0 if failure is None else 1
    if args.prompt is not None:
        raise ConfigError("give a PROMPT or --input FILE, not both")
    if args.chat:
        raise ConfigError("--chat is for a PROMPT; lines of an --input file say what they are: prompt or messages")
    from quire.cli.batch import Batch

    with Batch(args.input, "-" if args.output is None else args.output, sampling) as batch:
        if batch.num_retried:
            print(f"failed before, tried again: {batch.num_retried}", file=sys.stderr)
        try:
            if batch.todo:
                with shared.runner() as loop:
                    loop.run(_work(args, batch))
        except KeyboardInterrupt:
            if batch.num_tokens:
                print(batch.summary(), file=sys.stderr)
            raise
        print(batch.summary(), file=sys.stderr)
    return 1 if batch.num_failed else 0


async def _stream(args: argparse.Namespace, params: SamplingParams) -> str | None:
    """Write the answer to stdout as it comes; returns why it failed, None if it did not."""
    failure: str | None = None
    text = args.prompt
    if text == "-":
        try:
            text = shared.read_stdin().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"the text on stdin is not UTF-8: {error}") from error
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


async def _work(args: argparse.Namespace, batch: Batch) -> None:
    async with shared.engine(args) as llm:
        await batch.run(llm)
