"""Runs commands in this process, and reads what they print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from quire.cli import main


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JSON object that a command prints with --json."""
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], words: Sequence[str], message: str) -> None:
    """Runs a command that must end with status 2 and one line with this message."""
    capsys.readouterr()  # progress of what came before
    try:
        code = main(words)
    except SystemExit as error:
        code = int(str(error.code))
    told = capsys.readouterr().err
    assert code == 2 and told.count("\n") == 1 and message in told, (words, told)
