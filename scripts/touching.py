"""Maps source lines to the tests that run them: runs the quick suite once under coverage, with a context per test.

    scripts/touching.py     # measures the sources of each group in tests/touched.json again, and writes them there

Knows tests, lines and copies of the tree, not mutants.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = "src/quire"
TOUCHED = ROOT / "tests" / "touched.json"
"""Groups of tests that a short run may leave out. Of each: "tests", their files and folders; "declared", sources that
they depend on and coverage does not see, as kernels that a compiler reads; "sources", these and what coverage saw."""

SUITE = ("-p", "per_test", "-p", "no:cacheprovider", "--seed", "0")
"""Additional arguments of pytest."""

_CONFIG = """\
[run]
source = {source}
data_file = {data}
parallel = true
sigterm = true
patch = _exit
context = ${{TEST_AT_HAND-}}
"""


@dataclass(frozen=True, slots=True)
class Test:
    """One test that passes.

    seconds  its time, including fixtures and coverage
    breadth  number of source files that it touches: few for a test of one thing
    """

    name: str
    seconds: float
    breadth: int


def tracked_files() -> list[Path]:
    """The files of the tree that git does not ignore, and the compiled kernels beside their sources."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    kernels = ROOT / SOURCES / "kernels"
    names |= {str(path.relative_to(ROOT)) for path in [*kernels.glob("*.so"), *kernels.glob("*.stamp")]}
    return [Path(name) for name in sorted(names)]


def copy_tree(target: Path) -> None:
    """A private copy of the tree as it is now."""
    for name in tracked_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def environment(tree: Path, results: Path) -> dict[str, str]:
    """The environment of pytest in a copy of the tree: its sources, one thread, no byte code, and of the user's cache
    only the models.
    """
    known = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    data = os.environ.get("QUIRE_DATA") or str(ROOT.parent / "shared" / "data")
    own = {
        "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree / 'scripts'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "QUIRE_DATA": data,
        "QUIRE_EFFORT": "quick",
        "TEST_RESULTS": str(results),
    }
    return {**known, **own}


class Touching:
    """The map from lines to tests, read from the record of a run."""

    def __init__(self, folder: Path) -> None:
        """folder: what `measure` returned."""
        results = json.loads((folder / "results.json").read_text())
        self._data = sqlite3.connect(folder / "coverage")
        self._source = (folder / "source").read_text()
        breadth = dict(
            self._data.execute(
                "select context, count(distinct file_id) from line_bits join context on context.id = context_id"
                " group by context_id"
            )
        )
        self.tests = {
            name: Test(name, seconds, breadth.get(name, 0))
            for name, (outcome, seconds, _) in results.items()
            if outcome == "passed"
        }
        self.failed = {name: reason for name, (outcome, _, reason) in results.items() if outcome == "failed"}

    def tests_of(self, file: str, lines: Iterable[int]) -> set[str]:
        """The tests that run any of a source file's lines; file: below src/quire."""
        wanted, found = set(lines), set()
        rows = self._data.execute(
            "select context, numbits from line_bits join context on context.id = context_id"
            " join file on file.id = file_id where path = ?",
            (f"{self._source}/{file}",),
        )
        for context, bits in rows:
            if context in self.tests and any(
                line // 8 < len(bits) and bits[line // 8] >> line % 8 & 1 for line in wanted
            ):
                found.add(context)
        return found

    def sources_of(self, tree: Path, paths: Sequence[str]) -> set[str]:
        """The source files, from the root of the tree, of which a test below one of `paths` runs a function's body or,
        if a file has no function, that it imports: nearly everything is imported by everything.

        tree  the tree that was measured, or one with the same sources
        """
        rows = self._data.execute(
            "select context, path, numbits from line_bits join context on context.id = context_id"
            " join file on file.id = file_id"
        )
        lines = defaultdict[str, set[int]](set)
        for context, path, bits in rows:
            if any(context.startswith((f"{each}/", f"{each}::")) for each in paths):
                run = (8 * place + bit for place, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1)
                lines[SOURCES + path.removeprefix(self._source)] |= {*run}
        return {name for name, run in lines.items() if not run.isdisjoint(bodies((tree / name).read_text()) or run)}


def main() -> int:
    """Measures the sources of each group of tests, and writes them."""
    groups = json.loads(TOUCHED.read_text())
    for group in groups.values():
        with tempfile.TemporaryDirectory() as folder:
            known = Touching(measure(Path(folder), len(os.sched_getaffinity(0)), group["tests"]))
        if known.failed:
            print(*known.failed, file=sys.stderr, sep="\n")
            return 1
        group["sources"] = sorted({*group["declared"], *known.sources_of(ROOT, group["tests"])})
    TOUCHED.write_text(json.dumps(groups, indent=1) + "\n")
    return 0


def measure(folder: Path, jobs: int, tests: Sequence[str] = ()) -> Path:
    """Runs the quick suite under coverage, unless there is a map of the same tree. Returns the folder of the map.

    folder  folder of all maps, by a digest of the tree
    tests   files and folders, if not all tests are to run; the folder of maps has then no maps of others
    """
    found = folder / _tree_hash()
    if (found / "results.json").exists():
        return found
    shutil.rmtree(found, ignore_errors=True)
    tree, data = found / "tree", found / "data"
    data.mkdir(parents=True)
    copy_tree(tree)
    config = found / "coveragerc"
    config.write_text(_CONFIG.format(source=tree / SOURCES, data=data / "coverage"))
    environ = {**environment(tree, found / "run.json"), "COVERAGE_PROCESS_START": str(config)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--timeout", "900", *SUITE, *tests]
    print(f"running the quick suite under coverage, once for this tree, into {found}", flush=True)
    done = subprocess.run(command, cwd=tree, env=environ)
    if done.returncode not in (0, 1):
        sys.exit(f"the quick suite did not run: pytest ended with {done.returncode}")
    command = [sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={config}"]
    subprocess.run([*command, f"--data-file={found / 'coverage'}", str(data)], check=True, cwd=tree)
    (found / "source").write_text(str(tree / SOURCES))
    shutil.rmtree(tree)
    shutil.rmtree(data, ignore_errors=True)
    # Written last: its presence means that the map is complete.
    (found / "run.json").rename(found / "results.json")
    return found


def _tree_hash() -> str:
    """A digest of everything that the suite's outcome depends on, without the mutants."""
    digest = hashlib.sha256()
    for name in tracked_files():
        if name.suffix != ".md" and name.parts[:2] != ("tests", "mutants"):
            digest.update(f"\0{name}\0".encode() + (ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def body_of(source: str, name: str) -> range:
    """The lines of a function's body, by its qualified name. Raises KeyError."""
    for qualified, node in _functions(ast.parse(source)):
        if qualified == name:
            return range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
    raise KeyError(name)


def bodies(source: str) -> set[int]:
    """The lines of the bodies of all functions."""
    functions = [node for _, node in _functions(ast.parse(source))]
    return {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}


def run_lines(source: str, changed: Iterable[int]) -> set[int]:
    """The lines, numbered from 1, that show which tests run any changed line: the lines of its statement; for a
    function's head, its body; for code that runs only on import, all functions of the module.
    """
    module, all_bodies = ast.parse(source), bodies(source)
    functions = [node for _, node in _functions(module)]
    found: set[int] = set()
    for line in changed:
        inside = [node for node in ast.walk(module) if isinstance(node, ast.stmt) and _spans(node, line)]
        statement = max(inside, key=lambda node: node.lineno, default=None)
        if line not in all_bodies:
            heads = [node for node in functions if _spans(node, line)]
            own = heads[-1] if heads else None
            found |= set(range(own.body[0].lineno, (own.end_lineno or 0) + 1)) if own else all_bodies
        elif statement is not None:
            body = getattr(statement, "body", None)
            end = body[0].lineno - 1 if body else statement.end_lineno or line
            found |= set(range(statement.lineno, max(end, statement.lineno) + 1))
    return found


def _functions(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    todo: list[tuple[str, ast.AST]] = [("", module)]
    while todo:
        prefix, parent = todo.pop()
        for node in ast.iter_child_nodes(parent):
            name = f"{prefix}{getattr(node, 'name', '')}"
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield name, node
            is_scope = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            todo.append((f"{name}." if is_scope else prefix, node))


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


if __name__ == "__main__":
    sys.exit(main())
