"""README and docs/: links lead somewhere, what pages name exists, and every page can be found."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from quire.cli.parser import COMMANDS, parsers_of
from quire.config import SECTIONS
from quire.config import _groups_of as groups_of
from quire.options import settings_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
LOG = sorted(DOCS.glob("lab/20*.md"))
"""The log, a file a month. It says what was, and names code as it was."""

USERS = [ROOT / "README.md", *sorted(DOCS.glob("guide/*.md")), *sorted(DOCS.glob("reference/*.md"))]
"""Pages for users."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def code_of(page: Path) -> Iterator[str]:
    """The lines of blocks of code, continued ones joined, and what stands between backticks."""
    text = page.read_text()
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from re.sub(r"\\\n\s*", " ", block).splitlines()
    yield from (" ".join(each.split()) for each in re.findall(r"`([^`]+)`", prose_of(page)))


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@cache
def anchors(page: Path) -> Counter[str]:
    return Counter(slug(heading) for heading in re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE))


def links_of(page: Path) -> Iterator[tuple[str, Path, str]]:
    """The relative links of a page: as written, the file, the anchor."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            yield link, (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link, file, anchor in links_of(page):
        assert file.exists(), f"{link}: there is no such file"
        assert not anchor or anchors(file)[anchor] == 1, f"{link}: there is not one heading of that name"


def test_the_index_leads_to_every_page() -> None:
    linked = {file for _, file, _ in links_of(DOCS / "index.md")}
    assert set(DOCS.rglob("*.md")) - linked == {DOCS / "index.md"}


def test_pages_of_the_documentation_that_code_names_exist() -> None:
    """In docstrings, comments, messages and scripts."""
    files = [ROOT / "Makefile", ROOT / ".ci" / "run", *PAGES]
    files += [file for folder in ("src", "tests", "scripts", "benchmarks", "examples") for file in code_files(folder)]
    named = {
        (name_of(file), path)
        for file in files
        for path in re.findall(r"(?<![\w/])docs/[\w/.-]*\.(?:md|json|png|svg)\b", file.read_text())
        if file not in LOG
    }
    assert len(named) > 40
    assert {(file, path) for file, path in named if not (ROOT / path).exists()} == set()


def code_files(folder: str) -> list[Path]:
    return [file for suffix in ("py", "sh", "cpp", "h", "toml") for file in (ROOT / folder).rglob(f"*.{suffix}")]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in LOG], ids=name_of)
def test_files_of_the_repository_that_a_page_names_exist(page: Path) -> None:
    """A path below the repository, src/quire or tests; or the name alone of a file."""
    if page.name == "CHANGELOG.md":
        return  # it names files as they were
    names = {
        file.name for folder in ("src", "tests", "scripts", "benchmarks", "examples") for file in code_files(folder)
    }
    for text in re.findall(r"`([^`]+)`", prose_of(page)):
        for path in re.findall(r"(?<![\w/.~-])([\w./-]*\w\.(?:py|cpp|sh|h))\b", text):
            if "/" in path:
                places = (ROOT / path, ROOT / "src" / "quire" / path, ROOT / "tests" / path)
                assert any(place.exists() for place in places) or "NAME" in path, path
            else:
                assert path in names or "NAME" in path, path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_fit_the_screen(page: Path) -> None:
    """Of tables and pictures they may be longer."""
    long = [line for line in page.read_text().splitlines() if len(line) > 120 and not line.startswith(("|", "!["))]
    assert long == []


def flags_in(line: str) -> Iterator[tuple[str | None, str]]:
    """The flags of Quire in a line of code, each with its command; None: without a command."""
    line = re.sub(r"^(?:\$ |ExecStart=\S*/|[A-Z_]+=\S+ )*(?:\S*/bin/)?", "", line)
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return  # not a shell's
    if not words or not (words[0] == "quire" or words[0].startswith("--")):
        return
    command = words[1] if words[0] == "quire" and len(words) > 1 else None
    yield from ((command, word.partition("=")[0].rstrip(",;")) for word in words if re.match(r"--[a-z]", word))


SETTINGS = {setting.key for group in groups_of(SECTIONS) for setting in settings_of(group)}
FLAGS = {name: {flag for parser in parsers_of(name) for flag in parser.flags} for name in COMMANDS}


@pytest.mark.parametrize("page", USERS, ids=name_of)
def test_flags_and_settings_that_users_read_of_exist(page: Path) -> None:
    anywhere = set().union(*FLAGS.values()) | {"--version"}
    for line in code_of(page):
        for command, flag in flags_in(line):
            assert flag in FLAGS.get(str(command), anywhere), line
        for setting in re.findall(rf"^(?:--)?((?:{'|'.join(SECTIONS)})\.\w+)(?= |$|=)", line):
            assert setting in SETTINGS or f"--{setting}" in anywhere, line


def test_flags_of_the_readme_are_found_by_this_test() -> None:
    found = [flag for line in code_of(ROOT / "README.md") for _, flag in flags_in(line)]
    assert {"--cache.codec", "--tiers.disk", "--offload.mode", "--api-key-file"} <= set(found)
    assert list(flags_in("$ quire serve x --port=1 # --no")) == [("serve", "--port")]
    assert list(flags_in("python benchmarks/peers.py --rounds 5")) == []


@pytest.mark.parametrize("page", USERS, ids=name_of)
def test_python_that_users_copy_parses_and_imports_what_exists(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("quire"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("page", USERS, ids=name_of)
def test_metrics_that_users_read_of_exist(page: Path) -> None:
    source = "".join(file.read_text() for file in (ROOT / "src" / "quire" / "server").glob("*.py"))
    for metric in re.findall(r"`(quire_\w+)", page.read_text()):
        assert re.sub(r"_(?:total|info)$", "", metric) in source, metric


def test_what_a_change_of_admission_reads_exists() -> None:
    """At most nine files, and in each what the page says to look at."""
    text = (DOCS / "design" / "changing-admission.md").read_text()
    rows = re.findall(r"^\| (\d) \| `([\w/]+\.py)` \| ([^|]+) \|", text, re.MULTILINE)
    assert [number for number, _, _ in rows] == [str(number) for number in range(1, len(rows) + 1)]
    assert 5 <= len(rows) <= 9
    for _, file, names in rows:
        source = (ROOT / "src" / "quire" / file).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            for part in name.split("."):
                assert re.search(rf"^ *(?:async )?(?:def|class) {part}\b", source, re.MULTILINE), (
                    f"{file} has no {name}"
                )


def test_the_readme_fits_a_screen_and_a_half() -> None:
    """What it is for and how to start, a table and a picture; all else is links."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 60
    assert len(re.findall(r"^\|[ :|-]+\|$", text, re.MULTILINE)) == 1 and text.count("![") == 1


def test_every_entry_of_the_log_has_its_decisions() -> None:
    """In the index, newest first."""
    index = (DOCS / "lab" / "index.md").read_text()
    linked = re.findall(r"^\| (\d{4}-\d\d-\d\d) \| \[[^\]]+\]\((20\d\d-\d\d\.md)#([\w-]+)\) \|$", index, re.MULTILINE)
    assert len(linked) == len(re.findall(r"^\| \d", index, re.MULTILINE))
    assert [date for date, _, _ in linked] == sorted((date for date, _, _ in linked), reverse=True)
    assert all(anchor.startswith(date) and date.startswith(file[:7]) for date, file, anchor in linked)
    entries = {
        (file.name, slug(each)) for file in LOG for each in re.findall(r"^## (.+)$", prose_of(file), re.MULTILINE)
    }
    assert {(file, anchor) for _, file, anchor in linked} == entries


def test_the_glossary_is_one_table_with_a_line_a_word() -> None:
    text = (DOCS / "reference" / "glossary.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text.partition("|---|---|\n")[2], re.MULTILINE)
    words = [re.sub(r"[*`]", "", word) for word, _ in rows]
    assert len(rows) == text.count("\n|") - 2 and len(rows) > 90
    assert len(set(words)) == len(words) and [word.lower() for word in words] == sorted(word.lower() for word in words)


def test_the_import_chain_of_contributing_is_that_of_the_check() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (chain,) = re.findall(r"^```\n(config <- .*?)^```", text, re.MULTILINE | re.DOTALL)
    names = chain.replace("<-", " ").split()
    layers = runpy.run_path(str(ROOT / "scripts" / "check_imports.py"))["LAYERS"]
    packages = {file.parent.name for file in (ROOT / "src" / "quire").glob("*/__init__.py")}
    assert [name for name in layers if name in names] == names and packages <= set(names)
