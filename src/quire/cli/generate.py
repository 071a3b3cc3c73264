"""Continue one prompt, or a file of them.

quire generate MODEL "Once upon a time"                          streams the text
quire generate MODEL --input prompts.jsonl --output out.jsonl    a line of JSON in, a line of JSON out

An input line holds prompt, messages or prompt_token_ids, and may hold an id (its line number otherwise) and sampling
parameters that win over the flags. Output lines come in the order in which they finish; each holds id, text,
token_ids, finish_reason and usage, or id and error. Run again after an interruption, the command goes on where it
stopped: ids that the output holds are skipped. Exit code 1: some lines could not be generated.
"""

from __future__ import annotations

import argparse
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
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines with answers; appended to")
    shared.add_sampling_flags(parser, {"temperature": 0.0, "max_tokens": 256})


def run(args: argparse.Namespace) -> int:
    """Stream one answer or work through a file."""
    if shared.printed_config(args):
        return 0
    sampling = shared.sampling_from(args)
    params = shared.sampling_params(sampling)
    if args.prompt is not None and args.input is None and args.output is None:
        with shared.runner() as loop:
            loop.run(_stream(args, params))
        return 0
    if args.prompt is not None or args.input is None or args.output is None:
        raise ConfigError("give a PROMPT, or --input FILE and --output FILE")
    if args.chat:
        raise ConfigError("--chat is for a PROMPT; lines of an --input file say what they are: prompt or messages")
    from quire.cli.batch import Batch

    batch = Batch(args.input, args.output, sampling)
    if batch.todo:
        with shared.runner() as loop:
            loop.run(_work(args, batch))
    print(batch.summary(), file=sys.stderr)
    return 1 if batch.num_failed else 0


async def _stream(args: argparse.Namespace, params: SamplingParams) -> None:
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    async with shared.engine(args) as llm:
        if args.chat:
            text = llm.tokenizer.chat([{"role": "user", "content": text}], add_generation_prompt=True)
        prompt = {"prompt_token_ids": llm.tokenizer.encode(text, add_special=not args.chat)}
        async for item in llm.generate(prompt, params):
            for output in item.outputs:
                sys.stdout.write(output.text)
                sys.stdout.flush()
        print()


async def _work(args: argparse.Namespace, batch: Any) -> None:
    async with shared.engine(args) as llm:
        await batch.run(llm)
