"""Shared parts of commands: engine flags, `--config`, `--print-config`, sampling flags, running the engine."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.arguments import Arguments
from quire.config import (
    ENGINE_SECTIONS,
    CalibrateConfig,
    ClusterConfig,
    EngineConfig,
    ServeConfig,
    SloConfig,
    add_flags,
    describe,
    format_bytes,
    options_from,
    sources,
)
from quire.errors import ConfigError, RequestError
from quire.gc_pause import gc_paused
from quire.options import format_count
from quire.safe_io import check_regular

if TYPE_CHECKING:
    import asyncio

    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from quire.async_llm import AsyncLLM
    from quire.llm import LLM

DEFAULT_URL = "http://127.0.0.1:8000"
"""Default address of `quire serve`."""
KEY_VARIABLE = "QUIRE_API_KEY"
"""Environment variable with the API key for commands that query a server. Other users of the machine could see a flag.
"""

PLAIN_SECONDS = 10.0
"""Interval between progress lines if stderr is not a terminal."""

WIDEST = 500
"""Maximum width of a table, in columns of the terminal."""

COMMON = (
    "serve.host", "serve.port", "serve.api_key_file", "model.name", "model.max_context", "model.weights",
    "cache.memory", "cache.codec", "retain.budget", "tiers.disk", "offload.mode", "offload.memory",
    "scheduler.max_running", "runtime.threads",
)  # fmt: skip
"""Settings listed first in the help."""


def add_engine_arguments(
    parser: Arguments, sections: tuple[str, ...] = ENGINE_SECTIONS, *, needs_model: bool = True
) -> None:
    """Adds MODEL (optional unless needs_model), the settings of the sections, --config and --print-config."""
    nargs = None if needs_model else "?"
    parser.add_argument("model", metavar="MODEL", nargs=nargs, help="folder, .gguf file, hub id or smollm2")
    add_config(parser)
    parser.add_switch("--print-config", text="print every setting and its origin, and exit")
    add_flags(parser, sections, COMMON)


def add_config(parser: Arguments) -> None:
    """Adds --config."""
    parser.add_file("--config", text="TOML file with settings; flags override it")


def add_plot(parser: Arguments, what: str) -> None:
    """Adds --plot. what: the content of the figure, for the help."""
    parser.add_file("--plot", text=f"draw {what}; the file's ending selects PNG, SVG or PDF")


def add_api_key_file(parser: Arguments, when: str = "") -> None:
    """Adds --api-key-file. when: condition for the help, such as "with --tree: "; empty if the key is always sent."""
    text = f"{when}send the first key of this file (default: the environment variable {KEY_VARIABLE})"
    parser.add_file("--api-key-file", text=text)


def printed_config(args: argparse.Namespace, *, server: bool = False, origins: dict[str, str] | None = None) -> bool:
    """Prints the configuration if --print-config is given; returns whether it is. Raises ConfigError if it is
    invalid.

    origins  origins of settings that a command sets itself, by key
    """
    text = describe(EngineConfig.from_flags(args), sources(options_from(args), args.config) | (origins or {}))
    for group in (CalibrateConfig, ServeConfig, ClusterConfig, SloConfig) if server else ():
        found = sources(options_from(args, (group.key,)), args.config, (group.key,))
        text += "\n" + describe(group.from_flags(args), found)
    if args.print_config:
        print(text, end="")
    return bool(args.print_config)


def engine(
    args: argparse.Namespace,
    options: dict[str, Any] | None = None,
    *,
    pins_at_start: bool = True,
    calibrates_beside: bool = False,
) -> AsyncLLM:
    """An engine for the command line's model. `async with` loads, runs and closes it.

    options  all settings by key, in place of flags and --config
    The other arguments are as for AsyncLLM.
    """
    from quire.async_llm import AsyncLLM

    given = (options, None) if options is not None else (options_from(args), args.config)
    return AsyncLLM(args.model, *given, pins_at_start=pins_at_start, calibrates_beside=calibrates_beside)


@contextlib.contextmanager
def measured_model(args: argparse.Namespace, console: Console) -> Iterator[LLM]:
    """The engine that a benchmark measures. Prints its model and hardware."""
    from quire.llm import LLM

    with LLM(args.model, options_from(args), args.config) as llm:
        config = llm.config
        on_cpu = config.runtime.device == "cpu"
        threads = f", {format_count(config.runtime.threads or 0, 'thread')}" if on_cpu else ""
        where = f"{config.runtime.device}, {config.attention.backend} attention{threads}"
        console.print(f"{llm.model_name}: {config.model.dtype} on {where}")
        yield llm


def model_facts(llm: LLM) -> dict[str, Any]:
    """Facts about the model for every row of a benchmark."""
    return {"model": llm.model_name, "dtype": llm.config.model.dtype}


def check_writable(path: Path) -> None:
    """Raises ConfigError if a file cannot be appended to, before hours of work. Creates no file."""
    target = path if os.path.exists(path) else path.parent
    if os.path.isdir(path):
        reason = "it is a folder"
    elif target != path and not os.path.isdir(target):
        reason = f"there is no folder {target}"
    elif not os.access(target, os.W_OK):
        reason = f"no permission to write {target}"
    else:
        return
    raise ConfigError(f"cannot write {path}: {reason}")


def check_replaceable(path: Path) -> None:
    """Raises ConfigError if a new file cannot take a file's place, as `check_writable` does, and for pipes, devices and
    sockets.
    """
    check_writable(path)
    if os.path.exists(path):
        with writing(path):
            check_regular(path)


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turns an OSError of writing a file into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error


def check_plot(path: Path) -> None:
    """Raises ConfigError if a figure cannot be written to a file."""
    from quire.evaluation.plot import check_figure

    check_figure(path)
    check_replaceable(path)


def list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """A parser of comma-separated values, for argparse."""

    def convert(text: str) -> tuple[Any, ...]:
        words = [word.strip() for word in text.split(",")]
        if not all(words):
            raise argparse.ArgumentTypeError(f"{text!r} has an empty value beside a comma")
        return tuple(kind(word) for word in words)

    return convert


def set_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """As `list_of`, but a value that is repeated counts once."""
    convert = list_of(kind)
    return lambda text: tuple(dict.fromkeys(convert(text)))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> None:
    """Prints a table. The first column and those in `left` are aligned to the left, all others to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, no_wrap=True, justify="right" if index and name not in left else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    width = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
    # A terminal that is too narrow wraps the lines: truncated numbers would be useless.
    Console(highlight=False, width=max(width, console.width)).print(table)


def print_facts(rows: Iterable[tuple[str, str, str]], *, name: str, about: str, last: str) -> None:
    """Prints names, values and notes, below a line `name: about` and above a last line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    table = Table.grid(padding=(0, 3))
    for label, value, note in rows:
        table.add_row(label, value, Text(note, "dim"))
    console.print(Text(name, "bold") + Text(f": {about}"))
    console.print(table)
    console.print(last)


def progress_bar(what: str, *more: ProgressColumn, in_bytes: bool = False) -> Progress:
    """A bar on stderr with the amount done, the total, elapsed and remaining time, and the columns in `more`."""
    from rich import progress
    from rich.console import Console

    amount = progress.DownloadColumn() if in_bytes else progress.MofNCompleteColumn()
    pace = progress.TransferSpeedColumn() if in_bytes else progress.TimeElapsedColumn()
    columns = progress.TextColumn(what), progress.BarColumn(), amount, pace, progress.TimeRemainingColumn(), *more
    return progress.Progress(*columns, console=Console(stderr=True))


@contextlib.contextmanager
def progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Shows progress: a bar on a terminal, otherwise a line every PLAIN_SECONDS. Yields a function (done, total)."""
    if not sys.stderr.isatty():
        yield _now_and_then(lambda done, total: f"{done}/{total} {unit} done")
        return
    with progress_bar(unit) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """As `progress`, of bytes: with their speed. Shows nothing until it is called."""
    if not sys.stderr.isatty():
        yield _now_and_then(lambda done, total: f"{what}, {format_bytes(done)} of {format_bytes(total)} done")
        return
    bar = progress_bar(what, in_bytes=True)

    def report(done: int, total: int) -> None:
        if not bar.tasks:
            bar.start()
            bar.add_task("", total=total)
        bar.update(bar.task_ids[0], completed=done)

    try:
        yield report
    finally:
        # stop would print an empty line for a bar that never started.
        if bar.tasks:
            bar.stop()


def _now_and_then(text: Callable[[int, int], str]) -> Callable[[int, int], None]:
    """Prints a line about the progress at most every PLAIN_SECONDS."""
    last = time.monotonic()

    def told(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            print(f"quire: {text(done, total)}", file=sys.stderr, flush=True)

    return told


def runner() -> asyncio.Runner:
    """A runner of coroutines, on uvloop if it is installed. An interrupt cancels them."""
    import asyncio

    from quire.interrupt import remove

    with gc_paused():
        import quire.async_llm  # noqa: F401  # while Ctrl-C still ends imports

    remove()  # asyncio replaces only Python's own handler
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 takes the most probable token"),
    "top_p": (float, "sample from the smallest set of most probable tokens that reaches this probability"),
    "top_k": (int, "sample from the N most probable tokens; 0: all"),
    "min_p": (float, "sample only tokens at least X times as probable as the best"),
    "repetition_penalty": (float, "above 1 discourages tokens of the text so far"),
    "max_tokens": (int, "maximum length of an answer in tokens; 0: the rest of the context"),
    "seed": (int, "fixes the random numbers of the sampling"),
}


def add_sampling_flags(parser: Arguments, defaults: dict[str, Any]) -> None:
    """--temperature and the like, and --stop; `defaults` are the command's own."""
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in SAMPLING_FLAGS.items():
        default = defaults.get(name)
        text += "" if default is None else f" (default: {default})"
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, default=default, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end an answer at this text; may be repeated")


def sampling_from(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters from flags or their defaults, under SamplingParams' names."""
    given = {name: getattr(args, name) for name in SAMPLING_FLAGS if getattr(args, name) is not None}
    max_tokens = given.get("max_tokens", 1)
    if max_tokens < 0:
        raise ConfigError(f"--max-tokens is {max_tokens}; it must be at least 0; 0 means the rest of the context")
    if max_tokens == 0:
        given["max_tokens"] = None
    if args.stop:
        given["stop"] = args.stop
    return given


def sampling_params(values: dict[str, Any]) -> Any:
    """SamplingParams of the values. Raises ConfigError, naming the flag, if a value is invalid."""
    from quire.engine.params import SamplingParams

    try:
        return SamplingParams(**values)
    except RequestError as error:
        flag = (error.param or "").replace("_", "-")
        raise ConfigError(f"--{flag}: {error}" if flag else str(error)) from error
