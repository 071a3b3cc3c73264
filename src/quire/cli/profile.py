"""Show which tokens of a prompt each head keeps, and how much of its attention these recover.

quire profile MODEL --input prompt.txt --plot heads.png     one prompt: a text, or with --chat a message
quire profile MODEL --input prompts.jsonl --json all.json   one prompt per line, in the format of quire generate

Each head of each layer takes the first policy that recovers enough of its attention. The table has a row per policy:
the number of heads that take it, the share of tokens they keep, the number of heads it was tried for, and its mean
recovery over these. With --retain.budget the tokens of all heads are ranked together: there is one policy, and every
head has its own share. Bytes are those of the prompt's keys and values in the cache.

Without --retain.threshold and --retain.budget the threshold is 0.95.

With several prompts the table has a row per prompt, and the picture shows the first. Sampling parameters and cache
hints of the lines are ignored. If one prompt cannot run, the command runs none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.cli import shared
from quire.config import format_bytes, options_from
from quire.errors import ConfigError, RequestError
from quire.options import read_toml
from quire.safe_io import read_source

if TYPE_CHECKING:
    from quire.engine.retention_report import RetentionReport

DEFAULT_THRESHOLD = 0.95
"""Default threshold of a profile, without threshold and budget."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    shared.add_engine_arguments(parser)
    text = "a text (- reads it from stdin), or FILE.jsonl, JSON lines with prompts"
    parser.add_argument("--input", metavar="FILE", help=text)
    parser.add_switch("--chat", text="read the text as a chat message, with the chat template")
    shared.add_plot(parser, "the heads of the first prompt")
    text = "write kept tokens and recovery of every head as JSON; - prints it instead of a table"
    parser.add_argument("--json", metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    """Profiles the prompts; prints, draws and writes the result."""
    given = {**(read_toml(args.config) if args.config else {}), **options_from(args)}
    origins: dict[str, str] = {}
    if all(given.get(key, "off") == "off" for key in ("retain.threshold", "retain.budget")):
        vars(args)["retain.threshold"] = DEFAULT_THRESHOLD
        origins["retain.threshold"] = "default of quire profile"
    if shared.printed_config(args, origins=origins):
        return 0
    if args.input is None:
        raise ConfigError("quire profile needs --input FILE, or - for a text on stdin")
    prompts = _read(args.input, args.chat)
    if args.json not in (None, "-"):
        shared.check_writable(Path(args.json))
    if args.plot is not None:
        shared.check_plot(args.plot)
    from quire.engine.retention_report import as_json

    reports = _profile(args, prompts)
    facts = {"model": args.model, "prompts": [{"id": name} | as_json(report) for name, report in reports.items()]}
    if args.json == "-":
        print(json.dumps(facts))
    elif len(reports) == 1:
        _print_one(args.model, *reports.values())
    else:
        _print_all(reports)
    if args.json not in (None, "-"):
        with shared.writing(Path(args.json)):
            Path(args.json).write_text(json.dumps(facts) + "\n", encoding="utf-8")
    if args.plot is not None:
        from quire.evaluation.retention_plot import save_retention

        save_retention(args.plot, next(iter(reports.values())), Path(args.model).name)
    return 0


_Prompts = dict[str | int, dict[str, Any]]
"""Prompts by name, in the form of input lines."""


def _read(name: str, is_chat: bool) -> _Prompts:
    if name.endswith(".jsonl"):
        from quire.batch_files.lines import read_input

        if is_chat:
            raise ConfigError("--chat is for a text; lines of a .jsonl file have the key prompt or messages")
        lines = read_input(name, {})
        if not lines:
            raise ConfigError(f"{name} has no prompts")
        return {line.line_id: line.prompt for line in lines}
    label = "stdin" if name == "-" else name
    try:
        text = read_source(name).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text {label}: {error}") from error
    return {label: {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}}


def _profile(args: argparse.Namespace, prompts: _Prompts) -> dict[str | int, RetentionReport]:
    from quire.batch_files.lines import in_tokens
    from quire.engine.params import SamplingParams
    from quire.llm import LLM

    found: dict[str | int, RetentionReport] = {}
    options = options_from(args)
    llm: Any = LLM(args.model, options, args.config)
    with llm:
        ids = {}
        for name, prompt in prompts.items():
            with _named(name, prompts):
                ids[name] = in_tokens(llm.tokenizer, prompt)["prompt_token_ids"]
                llm.engine.limits.check(ids[name], SamplingParams(max_tokens=1))
        with shared.progress("prompts") as progress:
            for name, token_ids in ids.items():
                progress(len(found), len(ids))
                with _named(name, prompts):
                    found[name] = llm.profile(token_ids)
            progress(len(found), len(ids))
    return found


@contextlib.contextmanager
def _named(name: str | int, prompts: _Prompts) -> Iterator[None]:
    """Adds the prompt's name to a RequestError if there are several prompts."""
    try:
        yield
    except RequestError as error:
        if len(prompts) == 1:
            raise
        raise RequestError(f"prompt {name!r}: {error}", error.param) from error


def _print_one(model: str, report: RetentionReport) -> None:
    how = f"threshold {report.threshold:g}, frequent {report.frequent:g}, local {report.local:g}"
    if report.budget is not None:
        how = f"budget {report.budget:g}"
    print(f"{model}: {report.num_tokens:,} tokens, {how}")
    rows = []
    numbers = zip(report.policy_names, report.num_heads, report.num_tried, report.mean_recovery, strict=True)
    for policy, (name, heads, tried, recovery) in enumerate(numbers):
        kept = report.kept[report.policies == policy].mean() / report.num_tokens if heads else None
        shown = "" if kept is None else f"{kept:.1%}"
        rows.append((name, f"{heads:,}", shown, f"{tried:,}", f"{recovery:.4f}" if tried else ""))
    shared.print_table(("policy", "heads", "kept", "tried", "recovery"), rows)
    print(
        f"kept: {report.kept_fraction:.1%} of the tokens, in {format_bytes(report.bytes_kept)} of"
        f" {format_bytes(report.bytes_full)}"
    )


def _print_all(reports: Mapping[str | int, RetentionReport]) -> None:
    from rich.markup import escape

    names = next(iter(reports.values())).policy_names
    rows = [
        (
            escape(str(name) if str(name).isprintable() else ascii(name)),
            f"{report.num_tokens:,}",
            f"{report.kept_fraction:.1%}",
            *(f"{heads:,}" for heads in report.num_heads),
            format_bytes(report.bytes_kept),
            format_bytes(report.bytes_full),
        )
        for name, report in reports.items()
    ]
    shared.print_table(("prompt", "tokens", "kept", *names, "bytes", "of"), rows)
