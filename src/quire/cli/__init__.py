"""The command line: `quire COMMAND`. Each command is a module with `add_arguments` and `run`.

Knows arguments, errors and exit codes. A command's module is imported when the command is given, and nothing heavy
before it runs: `quire --help` takes a fraction of a second. Exit codes: 0 success, 1 part of the work failed, 2 an
error reported in one line, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import functools
import importlib
import io
import logging
import os
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from quire.arguments import Arguments
from quire.config import nearest
from quire.errors import ConfigError, QuireError, shortened, shown
from quire.foreign_flags import command_hint, flag_hint
from quire.interrupt import exit_on_next, install, remove
from quire.version import __version__

COMMANDS = {
    "serve": "serve a model over HTTP with OpenAI's API",
    "chat": "chat with a model in the terminal",
    "generate": "continue a prompt, or a file of them",
    "inspect": "show a model's memory needs, or the cache of a running server",
    "calibrate": "calibrate the nuq codecs for a model",
    "profile": "show which tokens of a prompt each head keeps",
    "plan": "plan placements before running them",
    "simulate": "predict a server's latencies and goodput under load",
    "bench": "measure the engine on this machine",
    "eval": "measure a model's quality through the cache",
    "pull": "download a model and print its path",
    "cache": "list, remove, export or import what is kept on disk",
    "doctor": "show what this machine has, and what will be used of it",
    "cluster": "show, drain and restart the instances of a running server",
}
"""What each command does, by its name."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of a disk that cannot be written. Any other unexpected OSError is a defect of ours."""

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
"""The values of QUIRE_LOG."""

DESCRIPTION = """\
Quire, an LLM inference engine whose centre is the key-value cache.

MODEL is a folder of safetensors, a .gguf file, a hub id, or smollm2, a small model for trials.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    installed = install()
    log = logging.getLogger("quire")
    before = log.level
    debug = False
    try:
        args = build_parser().parse_args(argv)
        debug = args.debug
        _set_up_output(args.command, log)
        code = int(importlib.import_module(f"quire.cli.{args.command}").run(args))
        if sys.stdout is not None:
            sys.stdout.flush()  # a failure here is still reported below
        return code
    except QuireError as error:
        if debug:
            raise
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if debug:
            raise
        exit_on_next()
        _leave_if_loading("quire: interrupted\n")
        print("quire: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has ended (`quire generate ... | head`).
        _forget_output()
        return 1
    except OSError as error:
        if debug or error.errno not in FULL:
            raise
        try:
            sys.stdout.flush()
        except OSError:
            _forget_output()
        print(
            f"quire: {shortened(str(error.filename or 'the output'))} cannot be written: {error.strerror}",
            file=sys.stderr,
        )
        return 2
    finally:
        log.setLevel(before)
        if installed:
            remove()


def _forget_output() -> None:
    """Redirects stdout, so that buffered output does not fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _set_up_output(command: str, log: logging.Logger) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without Unicode shows question marks instead of ending the answer.
        sys.stdout.reconfigure(errors="replace")
    level = os.environ.get("QUIRE_LOG") or ("info" if command in ("serve", "calibrate") else "warning")
    if (number := LEVELS.get(level.lower())) is None:
        *others, last = LEVELS
        raise ConfigError(f"QUIRE_LOG is {shown(level)}; it must be {', '.join(others)} or {last}")
    logging.basicConfig(format="quire: %(asctime)s %(message)s", level=max(number, logging.WARNING))
    # Only our logger: libraries log every request they make.
    log.setLevel(number)


def _leave_if_loading(text: str) -> None:
    """Ends the process at once if an engine is still loading, because nothing can stop the loading thread.

    Writes the text to file descriptor 2: sys.stderr may belong to a progress bar, which has hidden the cursor.
    """
    module = sys.modules.get("quire.engine_thread")
    if module is not None and module.is_loading():
        images = sys.modules.get("quire.models.image_folder")
        if images is not None:
            images.drop_drafts()
        os.write(2, ("\r\n\x1b[?25h" * os.isatty(2) + text).encode())
        sys.stdout.flush()
        os._exit(130)


def build_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(prog="quire", description=DESCRIPTION)
    parser.arguments.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, what in COMMANDS.items():
        parser.commands[name] = commands.add_parser(name, module=f"quire.cli.{name}", help=what)
    return parser


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated flags, takes an optional argument after flags too, and names the flag nearest
    to an unknown one.

    commands  their parsers by name
    """

    def __init__(self, *, module: str | None = None, **kwargs: Any) -> None:
        """module: of a command. It is imported when the parser's arguments are needed first."""
        super().__init__(
            **kwargs, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, add_help=False
        )
        self.commands: dict[str, Parser] = {}
        self._module = module

    @functools.cached_property
    def arguments(self) -> Arguments:
        """All of them are added through this."""
        arguments = Arguments(self, [])
        arguments.add_argument("-h", "--help", action="help", help="show this help message and exit")
        if self._module is not None:
            module = importlib.import_module(self._module)
            self.description = module.__doc__
            module.add_arguments(arguments)
            arguments.add_argument("--debug", action="store_true", help="show the traceback of an error")
            words = [_usage_of(action) for action in arguments.added if not action.option_strings]
            self.usage = " ".join([self.prog, *words, "[--FLAG VALUE ...]"])
        return arguments

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """The argument of each flag."""
        return {flag: action for action in self.arguments.added for flag in action.option_strings}

    def show_flags_of_action(self, words: Sequence[str]) -> None:
        """Before help is printed: hides the flags that belong to other actions than the one in `words`. A module with
        actions has ACTION_FLAGS, the names of each one's flags in the namespace.
        """
        flags_of = getattr(importlib.import_module(self._module), "ACTION_FLAGS", {}) if self._module else {}
        chosen = next((word for word in words if word in flags_of), None)
        hidden = {name for flags in flags_of.values() for name in flags} - set(flags_of.get(chosen, ()))
        for action in self.arguments.added:
            if action.dest in hidden:
                action.help = argparse.SUPPRESS
        if flags_of and chosen is None:
            self.epilog = f"{self.prog} ACTION --help shows the flags of an action: {', '.join(flags_of)}"

    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.exit(2, f"{self.prog}: {shortened(message)} (see {self.prog} --help)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but a switch takes the next word only if it is a truth value: `--allow-public smollm2`.
        `-1GiB` after a flag is its value, not another flag.
        """
        words = list(sys.argv[1:] if args is None else args)
        commands = self.commands
        given = [commands[word] for word in words if word in commands][:1]
        actions = [item for parser in (self, *given) for item in parser.flags.items()]
        switches = {flag for flag, action in actions if action.nargs == "?" and action.const == "true"}
        valued = {flag for flag, action in actions if action.nargs is None and flag.startswith("--")}
        switch_of: dict[str, str] = {}  # switch by the word after it, if that word is not a truth value
        for place, word in enumerate(words):
            following = words[place + 1] if place + 1 < len(words) else ""
            if word in switches and following.lower() not in ("true", "false", "yes", "no", "on", "off"):
                words[place] += "=true"
                switch_of[following] = word
            elif word in valued and re.match(r"-\.?\d", following):
                words[place : place + 2] = [f"{word}={following}"]
            elif word == "--":
                break
        for command in given:
            words = _spelled(words, command.flags)
            if {"-h", "--help"} & set(words):
                command.show_flags_of_action(words)
        self._answer_foreign_flags(words)
        if commands and not words:
            self.print_help(sys.stderr)
            self.exit(2)
        if commands and not words[0].startswith("-") and words[0] not in commands:
            self.error(f"unknown command {words[0]!r}; {command_hint(words[0]) or nearest(words[0], commands)}")
        found, unknown = self.parse_known_args(words, namespace)
        if unknown:
            command = commands.get(getattr(found, "command", ""), self)
            model = getattr(found, "model", None)
            command.error(_unknown(unknown, command, commands, switch_of, model))
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but optional arguments may also come after flags.

        argparse treats an optional argument as absent once a flag follows the earlier arguments. It then returns the
        words after the flags as unknown.
        """
        added = self.arguments.added
        found, unknown = super().parse_known_args(args, namespace)
        for action in added:
            is_optional = not action.option_strings and action.nargs == "?"
            if is_optional and unknown and getattr(found, action.dest, None) is action.default:
                # All that follows -- is no flag, whatever it begins with.
                end = unknown.index("--") if "--" in unknown else len(unknown)
                places = [each for each in range(end) if not _is_flag(unknown[each])]
                place = places[0] if places else end + 1
                if place < len(unknown):
                    setattr(found, action.dest, unknown[place])
                    del unknown[end if place > end else place : place + 1]
            if not action.option_strings and action.nargs == "*" and not getattr(found, action.dest, None):
                end = unknown.index("--") if "--" in unknown else len(unknown)
                setattr(found, action.dest, [word for word in unknown[:end] if not _is_flag(word)] + unknown[end + 1 :])
                unknown = [word for word in unknown[:end] if _is_flag(word)]
        return found, unknown

    def _answer_foreign_flags(self, words: list[str]) -> None:
        """Ends with one line about all flags that other engines have and the command does not: before argparse misses
        the model, which `--model NAME` did not give.
        """
        place = next((place for place, word in enumerate(words) if word in self.commands), None)
        if place is None:
            return
        command, rest = self.commands[words[place]], words[place + 1 :]
        known = command.flags
        given = rest[: rest.index("--")] if "--" in rest else rest
        flags = [word for word in given if word.startswith("-") and word.partition("=")[0] not in known]
        answers = [answer for word in flags if (answer := flag_hint(word, known)) is not None]
        if answers:
            command.error("; ".join(dict.fromkeys(answers)))


def _usage_of(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {None: name, "?": f"[{name}]"}.get(action.nargs if isinstance(action.nargs, str) else None, f"[{name} ...]")


def _spelled(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words, with hyphens and underscores of flags as the command has them: --cache.sink-tokens, --max_tokens."""
    end = words.index("--") if "--" in words else len(words)
    by_name = {flag.replace("_", "-"): flag for flag in known}
    found = list(words)
    for place, word in enumerate(words[:end]):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag not in known and (ours := by_name.get(flag.replace("_", "-"))):
            found[place] = ours + equals + value
    return found


def _is_flag(word: str) -> bool:
    """Whether argparse takes a word for a flag: not a lone dash, a negative number, or a text with spaces."""
    return len(word) > 1 and word[0] == "-" and " " not in word and not re.fullmatch(r"-\d+|-\d*\.\d+", word)


def _unknown(
    words: list[str], command: Parser, commands: dict[str, Parser], switch_of: dict[str, str], model: str | None
) -> str:
    """What is wrong with words that the command does not take, and what was meant.

    switch_of  switch by the word after it, if that word is not a truth value
    model      the word that was read as MODEL
    """
    flag = words[0].partition("=")[0]
    if flag.startswith("-") and not flag.startswith("--"):
        return f"unknown flag {flag}; write a text that begins with - after --"
    if not flag.startswith("--"):
        if words[0] in switch_of:
            return f"{switch_of[words[0]]} is {words[0]!r}; it must be true or false"
        if model in switch_of:
            return f"{switch_of[model]} takes true or false; {model!r} was read as MODEL, and {words[0]!r} is left over"
        if any(action.dest == "prompt" for action in command.arguments.added):
            return f"there is no place for {words[0]!r}; a text of several words needs quotes"
        if model is None:
            return f"there is no place for {words[0]!r}"
        return f"there is no place for {words[0]!r}; MODEL is {model!r}, and a process has one model"
    known = [each for each in command.flags if each.startswith("--")]
    own = "--" + flag.rpartition(".")[2].replace("_", "-")
    if own in known:
        return f"unknown flag {flag}; the flag is {own}"
    others = [f"quire {name}" for name, other in commands.items() if flag in other.flags]
    if others:
        return f"unknown flag {flag}; {' and '.join(others)} {'has' if len(others) == 1 else 'have'} it"
    return f"unknown flag {flag}; {nearest(flag, known, 'no flag has a name like it')}"
