#!/usr/bin/env python3
"""Counts the tokens of code in a package: names, operators and constants, without comments, docstrings and layout.

    scripts/code_tokens.py [--package cache] [--without run.py,store.py,keys.py] [REVISION ...]

Without a revision it counts the working tree. Prints a line per file, and the sum.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count(source: str) -> int:
    """Tokens of one file."""
    docstrings = {
        node.value.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    return sum(
        token.type not in LAYOUT and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def sources(package: str, revision: str | None) -> Iterator[tuple[str, str]]:
    """Names and texts of a package's files."""
    folder = f"src/quire/{package}"
    if revision is None:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT / folder).as_posix(), path.read_text()
        return
    git = ["git", "-C", str(ROOT)]
    names = subprocess.run([*git, "ls-tree", "-r", "--name-only", revision, folder], capture_output=True, text=True)
    for name in sorted(each for each in names.stdout.split() if each.endswith(".py")):
        text = subprocess.run([*git, "show", f"{revision}:{name}"], capture_output=True, text=True, check=True).stdout
        yield name.removeprefix(folder + "/"), text


def main() -> None:
    """Counts and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", metavar="REVISION")
    parser.add_argument("--package", default="cache")
    parser.add_argument("--without", default="run.py,store.py,keys.py", help="files to leave out")
    given = parser.parse_args()
    without = set(given.without.split(","))
    for revision in given.revisions or [None]:
        found = [(name, count(text)) for name, text in sources(given.package, revision) if name not in without]
        for name, number in found:
            print(f"{number:7,} {name}")
        print(f"{sum(number for _, number in found):7,} in all: {given.package}, {revision or 'the working tree'}\n")


if __name__ == "__main__":
    main()
