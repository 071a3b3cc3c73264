"""Show what this machine has, what Quire will use of it, and why."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from quire.arguments import Arguments

MARKS = {"ok": "ok  ", "note": "note", "fault": "FAIL"}


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command."""
    parser.add_switch("--json", text="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the findings. Returns 1 if models cannot run."""
    from quire.diagnosis import examine

    findings = list(examine())
    if args.json:
        print(json.dumps([asdict(each) for each in findings], indent=2))
    else:
        width = max(len(each.what) for each in findings)
        for each in findings:
            print(f"{MARKS[each.state]}  {each.what:{width}}  {each.text}")
    return int(any(each.state == "fault" for each in findings))
