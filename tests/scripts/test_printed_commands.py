"""Every `quire` command that README and docs print is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cli import COMMANDS, parse, simulation_common
from quire.cli.parser import parsers_of
from quire.config import EngineConfig, options_from
from quire.placement.cluster_file import read_cluster

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def is_history(page: Path) -> bool:
    """Whether a page has commands as they were, or is generated."""
    return page.parent.name == "lab" and (page.name[:2] == "20" or page.name == "composition.md")


STANDS_FOR = {"N": "1", "X": "1", "SIZE": "1GiB", "PORT": "8000", "URL": "http://127.0.0.1:8000"}
"""Placeholders of flags that are numbers; all others are texts."""


def commands_in(text: str) -> Iterator[str]:
    """The commands of code blocks, and those between backticks that have more than a command's name."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"(?:^    .*\n)+", rest, re.MULTILINE)
    for block in blocks:
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if match := re.match(r"\s*(?:[A-Z_]+=\S+ )*(?:\$ )?(quire .*)", line):
                yield match[1]
    for inline in re.findall(r"`(quire [^`]+)`", rest):
        if " " in inline.removeprefix("quire "):
            yield " ".join(inline.split())


def words_of(command: str) -> list[str]:
    """The words behind `quire`, up to a comment, a pipe or dots."""
    words = shlex.split(command, comments=True)[1:]
    end = next((place for place, word in enumerate(words) if word in ("|", ">", ">>", "&", "...", "&&")), len(words))
    return [STANDS_FOR.get(word.strip("[]"), word.strip("[]")) for word in words[:end]]


PRINTED = [(page.name, command) for page in PAGES if not is_history(page) for command in commands_in(page.read_text())]


def test_the_files_of_machines_that_are_printed_are_taken(tmp_path: Path) -> None:
    text = (ROOT / "docs/reference/files.md").read_text()
    found = re.findall(r"^```toml\n(\[nodes\].*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(found) == 2
    file = tmp_path / "cluster.toml"
    for text in found:
        file.write_text(text)
        assert read_cluster(file).num_units in (1, 32)


USED_WITH = {
    name: {
        action.metavar
        for parser in parsers_of(name)
        for action in parser.arguments.added
        if action.nargs is None and not action.option_strings
    }
    for name in COMMANDS
}
"""The required arguments of each command."""


def test_there_are_commands_to_look_at() -> None:
    assert {"README.md", "planning.md", "restart.md"} <= {page for page, _ in PRINTED} and len(PRINTED) > 60
    assert list(commands_in("a `quire serve MODEL\n--port 1` and\n\n    quire pull x \\\n        --debug\n")) == [
        "quire pull x  --debug",
        "quire serve MODEL --port 1",
    ]


@pytest.mark.parametrize(("page", "command"), PRINTED, ids=[f"{page}: {command[:60]}" for page, command in PRINTED])
def test_a_command_that_is_printed_is_taken(page: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its words are parsed, its settings are valid, and what is required is there. A command without its model only
    names flags: these exist.
    """
    words = words_of(command)
    if words[0] == "COMMAND":
        return
    assert words[0] in COMMANDS
    if not {"MODEL", "smollm2"} & set(words) and "MODEL" in USED_WITH[words[0]]:
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= {flag for parser in parsers_of(words[0]) for flag in parser.flags}
        return
    try:
        args = parse(words)
    except SystemExit as ended:
        assert ended.code == 0, capsys.readouterr().err
        return
    settings = options_from(args)
    EngineConfig.from_options({key: value for key, value in settings.items() if str(value) != str(value).upper()})
    if words[0] == "plan" and words[1] in ("auto", "placement"):
        simulation_common.check_targets(simulation_common.slo_of(args), f"quire plan {words[1]}")
