"""Parses a command line with the parser of its command and action.

A command is a module of this package with `add_arguments` and `run`. A command with actions has ACTIONS, a module with
`add_arguments` for each, and itself adds the arguments that all actions share. `cache` and `cluster` have CHOICES
instead: their actions are words of one parser, and share its flags. The named command and action are imported; all
commands are imported only to find out which of them has an unknown flag.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import NoReturn

from quire.arguments import Arguments
from quire.config import nearest
from quire.errors import ConfigError, shortened
from quire.foreign_flags import command_hint, flag_hint
from quire.version import __version__

COMMANDS = {
    "serve": "serve a model over HTTP with OpenAI's API",
    "chat": "chat with a model in the terminal",
    "generate": "continue a prompt, or a file of them",
    "inspect": "show a model's memory needs, or the cache of a running server",
    "calibrate": "calibrate the nuq codecs for a model",
    "profile": "show which tokens of a prompt each head keeps",
    "plan": "plan settings, placements and offloading before they run",
    "simulate": "predict a server's latencies and goodput under load",
    "bench": "measure the engine on this machine",
    "eval": "measure a model's quality through the cache",
    "pull": "download a model and print its path",
    "cache": "list, remove, export or import what is kept on disk",
    "doctor": "show what this machine has, and what will be used of it",
    "cluster": "show, drain and restart the instances of a running server",
}
"""What each command does, by its name."""

DESCRIPTION = """\
Quire, an LLM inference engine whose centre is the key-value cache.

MODEL is a folder of safetensors, a .gguf file, a hub id, or smollm2, a small model for trials.
"""

TRUTHS = ("true", "false", "yes", "no", "on", "off")
"""Words that a switch takes as its value. Any other word is a separate argument: `--allow-public smollm2`."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command line (None: of this process) with its `command`, its `action` if it has one, and all
    its `words`. Ends the process for a wrong line, with one line on stderr. Raises ConfigError for a flag of another
    action.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        overview().print_help(sys.stderr)
        sys.exit(2)
    name, *rest = words
    if name.startswith("-"):
        overview().parse_args(words[:1])
    if name not in COMMANDS:
        overview().error(f"unknown command {name!r}; {command_hint(name) or nearest(name, COMMANDS)}")
    place = _place_of_action(name, rest)
    action = None if place is None else rest.pop(place)
    args = CommandParser(name, action).read(rest)
    args.words = words
    return args


def overview() -> Parser:
    """The parser of a line without a command. Its help lists them all."""
    commands = "\n".join(f"    {name:<12}{what}" for name, what in COMMANDS.items())
    parser = Parser("quire", f"{DESCRIPTION}\ncommands:\n{commands}")
    parser.arguments.add_argument("command", metavar="COMMAND", help="one of these")
    parser.arguments.add_argument("--version", action="version", version=f"quire {__version__}")
    return parser


def actions_of(command: str) -> Mapping[str, ModuleType]:
    """The modules of a command's actions, by name."""
    return getattr(importlib.import_module(f"quire.cli.{command}"), "ACTIONS", {})


def parsers_of(command: str) -> list[CommandParser]:
    """The parsers of a command: one for each action, or one."""
    return [CommandParser(command, action) for action in actions_of(command) or (None,)]


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated flags and reports an error in one line.

    arguments  adds all arguments
    """

    def __init__(self, prog: str, description: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, formatter_class=formatter, allow_abbrev=False, add_help=False)
        self.arguments = Arguments(self, [])
        self.arguments.add_argument("-h", "--help", action="help", help="show this help message and exit")

    def error(self, message: str) -> NoReturn:
        """Prints one line, and ends the process with exit code 2."""
        self.exit(2, f"{self.prog}: {shortened(message)} (see {self.prog} --help)\n")


class CommandParser(Parser):
    """The parser of one command, or of one action of it."""

    def __init__(self, command: str, action: str | None) -> None:
        """action: None for a command without actions, or for a line that names no action."""
        module = importlib.import_module(f"quire.cli.{command}")
        super().__init__(" ".join(["quire", command, *([action] if action else [])]), module.__doc__)
        self.command = command
        self.action = action
        actions = actions_of(command)
        if actions and action is None:
            self.arguments.add_argument("action", choices=actions, metavar="ACTION", help=", ".join(actions))
            self.epilog = f"{self.prog} ACTION --help shows the flags of an action: {', '.join(actions)}"
        module.add_arguments(self.arguments)
        if action is not None:
            actions[action].add_arguments(self.arguments)
        self.arguments.add_switch("--debug", text="show the traceback of an error")
        words = [_usage_of(each) for each in self.arguments.added if not each.option_strings]
        self.usage = " ".join([self.prog, *words, "[--FLAG VALUE ...]"])

    @functools.cached_property
    def flags(self) -> dict[str, argparse.Action]:
        """The argument of each flag."""
        return {flag: each for each in self.arguments.added for flag in each.option_strings}

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments of a line without its command and action. See `parse`."""
        words = list(self._spelled(words))
        self._answer_foreign_flags(words)
        namespace = argparse.Namespace(command=self.command)
        if self.action is not None:
            namespace.action = self.action
        found, unknown = self.parse_known_intermixed_args(list(self._joined(words)), namespace)
        if unknown := [word for word in unknown if word != "--"]:  # argparse leaves it without positional arguments
            self._refuse(unknown, words, getattr(found, "model", None))
        return found

    def _spelled(self, words: Sequence[str]) -> Iterator[str]:
        """The words, with hyphens and underscores of flags as this command spells them: --cache.sink-tokens."""
        by_name = {flag.replace("_", "-"): flag for flag in self.flags}
        end = _end_of_flags(words)
        for word in words[:end]:
            flag, equals, value = word.partition("=")
            is_ours = flag in self.flags or not flag.startswith("--")
            yield word if is_ours else by_name.get(flag.replace("_", "-"), flag) + equals + value
        yield from words[end:]

    def _joined(self, words: Sequence[str]) -> Iterator[str]:
        """The words, with `=` between flag and value where argparse would misread the value: a switch takes only a
        truth value, and `-1GiB` is a value, not a flag.
        """
        end = _end_of_flags(words)
        left = iter([*pairwise(words[:end]), (words[end - 1], "")] if end else [])
        for word, following in left:
            value = None
            if self._is_switch(word):
                value = following if following.lower() in TRUTHS else "true"
            elif self._takes_one(word) and re.match(r"-\.?\d", following):
                value = following
            yield word if value is None else f"{word}={value}"
            if value == following:
                next(left)
        behind = words[end:]
        # Several -- count as one: argparse drops only the first.
        while behind[:2] == ["--", "--"]:
            behind = behind[1:]
        yield from behind

    def _is_switch(self, word: str) -> bool:
        return word in self.flags and self.flags[word].nargs == "?" and self.flags[word].const == "true"

    def _takes_one(self, word: str) -> bool:
        return word.startswith("--") and word in self.flags and self.flags[word].nargs is None

    def _answer_foreign_flags(self, words: Sequence[str]) -> None:
        """Ends with one line about all flags of other engines that the command lacks. Called before argparse reports
        the missing MODEL, which such a flag (`--model NAME`) does not set.
        """
        given = words[: _end_of_flags(words)]
        unknown = [word for word in given if word.startswith("-") and word.partition("=")[0] not in self.flags]
        answers = [answer for word in unknown if (answer := flag_hint(word, self.flags)) is not None]
        if answers:
            self.error("; ".join(dict.fromkeys(answers)))

    def _refuse(self, unknown: Sequence[str], words: Sequence[str], model: str | None) -> NoReturn:
        """Reports words that the command does not take, with a correction. model: the word that was read as MODEL."""
        word = unknown[0]
        flag = word.partition("=")[0]
        if word not in words[: _end_of_flags(words)]:
            if flag in self.flags:
                self.error(f"{flag} stands behind --, after which no word is a flag")
        elif flag.startswith("--"):
            self._refuse_flag(flag)
        elif flag.startswith("-"):
            self.error(f"unknown flag {flag}; write a text that begins with - after --")
        switches = {after: each for each, after in pairwise(words) if self._is_switch(each)}
        if word in switches:
            self.error(f"{switches[word]} is {word!r}; it must be true or false")
        if model in switches:
            self.error(f"{switches[model]} takes true or false; {model!r} was read as MODEL, and {word!r} is left over")
        if any(each.dest == "prompt" for each in self.arguments.added):
            self.error(f"there is no place for {word!r}; a text of several words needs quotes")
        one = "" if model is None else f"; MODEL is {model!r}, and a process has one model"
        self.error(f"there is no place for {word!r}{one}")

    def _refuse_flag(self, flag: str) -> NoReturn:
        known = [each for each in self.flags if each.startswith("--")]
        own = "--" + flag.rpartition(".")[2].replace("_", "-")
        if own in known:
            self.error(f"unknown flag {flag}; the flag is {own}")
        if others := [each.prog for each in parsers_of(self.command) if flag in each.flags]:
            if self.action is None:
                self.error(f"{flag} is for {' and '.join(others)}; write the action before its flags")
            raise ConfigError(f"{flag} is for {' and '.join(others)}, not for {self.action}")
        others = [f"quire {name}" for name in COMMANDS if any(flag in each.flags for each in parsers_of(name))]
        if others:
            self.error(f"unknown flag {flag}; {' and '.join(others)} {'has' if len(others) == 1 else 'have'} it")
        self.error(f"unknown flag {flag}; {nearest(flag, known, 'no flag has a name like it')}")


def _place_of_action(command: str, words: Sequence[str]) -> int | None:
    """The index of the word that names an action of the command. A flag's value does not count."""
    actions = actions_of(command)
    if not actions or (words and words[0] in actions):
        return 0 if actions else None
    flags = [item for parser in parsers_of(command) for item in parser.flags.items()]
    valued = {flag for flag, argument in flags if argument.nargs is None}
    pairs = enumerate(pairwise(words), 1)
    return next((place for place, (before, word) in pairs if word in actions and before not in valued), None)


def _usage_of(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {None: name, "?": f"[{name}]"}.get(action.nargs if isinstance(action.nargs, str) else None, f"[{name} ...]")


def _end_of_flags(words: Sequence[str]) -> int:
    """The index of --, after which no word is a flag."""
    return words.index("--") if "--" in words else len(words)
