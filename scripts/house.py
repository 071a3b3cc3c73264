"""Prints how large and how readable src/quire is: lines, names of classes, long functions, circles of imports.

python scripts/house.py                   the working tree
python scripts/house.py --revision REV    another revision, by the limits of this script
python scripts/house.py --check           also names what is above a limit, and exits with 1 if anything is
python scripts/house.py --json            the same as JSON

Lines are those of Python files, including blank lines and comments. A function or class begins at its first decorator.
A nested function counts by itself and as a part of the outer one.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = "src/quire"

MAX_LINES = 74_000
MAX_PLANNER = 13_500
"""Lines of PLANNER."""
MAX_FUNCTION = 80
MAX_CLASS = 400
MAX_METHODS = 25
MAX_ALLOWED = 10
"""Entries of each list of exceptions."""

ALLOWED_NAMES: dict[str, str] = {}
"""Names of public classes that several packages may use, with the reasons."""

ALLOWED_SIZES: dict[str, str] = {}
"""Functions and classes that may be larger, such as `cache/tree.py:PrefixTree.walk`, with the reasons."""

PLANNER = (
    "workload/", "timing/", "placement/", "planning/", "simulation/", "measure/", "evaluation/", "offload/planning/",
    "engine/step_log.py", "engine/step_work.py", "cli/bench", "cli/eval", "cli/plan", "cli/simul",
)  # fmt: skip
"""Beginnings of the files that plan, simulate and measure."""


@dataclass(frozen=True)
class Definition:
    """A function or a class.

    place        such as `cache/tree.py:PrefixTree.walk`
    num_methods  None for a function
    """

    place: str
    num_lines: int
    num_methods: int | None = None

    @property
    def excess(self) -> str:
        """The numbers above their limits, in words; empty if there are none."""
        limit = MAX_FUNCTION if self.num_methods is None else MAX_CLASS
        parts = [f"{self.num_lines} lines (limit {limit})"] if self.num_lines > limit else []
        parts += [f"{self.num_methods} methods (limit {MAX_METHODS})"] if (self.num_methods or 0) > MAX_METHODS else []
        return " and ".join(parts)


@dataclass
class Module:
    """One file.

    file       below src/quire
    names      top-level classes
    imports    dotted names of what is imported together with the module: modules, or attributes of modules
    """

    file: str
    num_lines: int = 0
    names: list[str] = field(default_factory=list)
    functions: list[Definition] = field(default_factory=list)
    classes: list[Definition] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Dotted; an `__init__.py` has the name of its folder."""
        return ".".join(["quire", *Path(self.file).with_suffix("").parts]).removesuffix(".__init__")

    @property
    def package(self) -> str:
        """The first folder below src/quire; empty for top-level modules."""
        return self.file.rpartition("/")[0].partition("/")[0]


@dataclass
class House:
    """What is printed.

    num_testable  modules that define functions or classes, and C++ sources
    num_tested    those of them with a test of their name
    shared        names of public classes that several packages use, with the files
    folders       lines and files of each folder, without the folders in it
    """

    num_lines: int
    num_planner_lines: int
    num_files: int
    num_classes: int
    num_public_names: int
    num_testable: int
    num_tested: int
    shared: dict[str, list[str]]
    functions: list[Definition]
    classes: list[Definition]
    circles: list[list[str]]
    folders: dict[str, tuple[int, int]]


def read_module(file: str, text: str) -> Module:
    """Reads a module. file: its path below src/quire."""
    module = Module(file, len(text.splitlines()))
    _visit(ast.parse(text).body, "", True, module)
    return module


def _visit(nodes: Iterable[ast.AST], scope: str, is_loaded: bool, module: Module) -> None:
    """Adds the definitions and imports of some statements. is_loaded: whether they run when the module is imported."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            place, num_lines = f"{module.file}:{scope}{node.name}", (node.end_lineno or first) - first + 1
            if isinstance(node, ast.ClassDef):
                num_methods = sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)
                module.classes.append(Definition(place, num_lines, num_methods))
                module.names += [] if scope else [node.name]
            else:
                module.functions.append(Definition(place, num_lines))
            _visit(node.body, f"{scope}{node.name}.", is_loaded and isinstance(node, ast.ClassDef), module)
        elif isinstance(node, ast.If) and getattr(node.test, "attr", getattr(node.test, "id", "")) == "TYPE_CHECKING":
            _visit(node.body, scope, False, module)
            _visit(node.orelse, scope, is_loaded, module)
        elif isinstance(node, ast.Import) and is_loaded:
            module.imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and is_loaded:
            parents = module.name.split(".")
            # One dot is the package of the module; an `__init__.py` is that package itself.
            parents = parents[: len(parents) + module.file.endswith("__init__.py") - node.level] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            module.imports |= {f"{origin}.{alias.name}" for alias in node.names}
        else:
            for block in ("body", "handlers", "cases", "orelse", "finalbody"):
                _visit(getattr(node, block, ()), scope, is_loaded, module)


def shared_names(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Names of public classes that several packages use, with the files."""
    files: dict[str, dict[str, str]] = defaultdict(dict)
    for module in modules:
        for name in module.names:
            if not name.startswith("_"):
                files[name][module.file] = module.package
    return {name: sorted(found) for name, found in sorted(files.items()) if len(set(found.values())) > 1}


def find_circles(modules: Iterable[Module]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others, by name.

    Importing a module imports the packages around it first. They count as imported too, except those that contain the
    importer: they are loaded already.
    """
    imports = {module.name: module.imports for module in modules}
    targets: dict[str, set[str]] = {name: set() for name in imports}
    for name, imported in imports.items():
        for target in imported:
            while target and target not in imports:
                target = target.rpartition(".")[0]
            targets[name] |= {target} | (_packages(target) - _packages(name))
        targets[name] &= imports.keys() - {name}
    reached = {name: _reach(name, targets) for name in targets}
    found = {tuple(sorted(each for each in reached[name] if name in reached[each])) for name in targets}
    return sorted(list(circle) for circle in found if circle)


def _packages(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def _reach(name: str, targets: dict[str, set[str]]) -> set[str]:
    """All modules that a module imports, directly or through others. It is one of them if it is part of a circle."""
    found: set[str] = set()
    ahead = [name]
    while ahead:
        new = targets[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def tested_files(files: Iterable[str], tests: Iterable[str]) -> set[str]:
    """The files with a test of their name.

    The tests of `cache/tree.py` are `cache/test_tree.py` and `cache/test_tree_TOPIC.py`. Those of `tree_counts.py`
    begin alike: a test belongs to the file with the longest name. A package is tested in its folder or beside it.

    files  below src/quire
    tests  below tests
    """
    by_name: dict[str, set[str]] = defaultdict(set)
    for file in files:
        path = Path(file)
        if path.name == "__init__.py":
            by_name[(path.parent / path.parent.name).as_posix()].add(file)
            by_name[path.parent.as_posix()].add(file)
        else:
            by_name[path.with_suffix("").as_posix()].add(file)
    found = set()
    for test in tests:
        path = Path(test)
        words = path.stem.split("_")[1:]
        names = ((path.parent / "_".join(words[:count])).as_posix() for count in range(len(words), 0, -1))
        found |= by_name[next((name for name in names if name in by_name), "")]
    return found


def measure(root: Path) -> House:
    """Measures the tree with src/quire and tests below root."""
    sources = root / SOURCES
    files = sorted(sources.rglob("*.py"))
    modules = [read_module(file.relative_to(sources).as_posix(), file.read_text(encoding="utf-8")) for file in files]
    testable = {module.file for module in modules if module.functions or module.classes}
    testable |= {file.relative_to(sources).as_posix() for file in sources.rglob("*.cpp")}
    tests = [file.relative_to(root / "tests").as_posix() for file in (root / "tests").rglob("test_*.py")]
    folders: dict[str, list[int]] = defaultdict(list)
    for module in modules:
        folders[module.file.rpartition("/")[0] + "/"].append(module.num_lines)
    return House(
        num_lines=sum(module.num_lines for module in modules),
        num_planner_lines=sum(module.num_lines for module in modules if module.file.startswith(PLANNER)),
        num_files=len(modules),
        num_classes=sum(len(module.names) for module in modules),
        num_public_names=len({name for module in modules for name in module.names if not name.startswith("_")}),
        num_testable=len(testable),
        num_tested=len(tested_files(testable, tests)),
        shared=shared_names(modules),
        functions=_by_size(each for module in modules for each in module.functions),
        classes=_by_size(each for module in modules for each in module.classes),
        circles=find_circles(modules),
        folders={
            folder: (sum(found), len(found)) for folder, found in sorted(folders.items(), key=lambda i: -sum(i[1]))
        },
    )


def _by_size(definitions: Iterable[Definition]) -> list[Definition]:
    return sorted(definitions, key=lambda each: (-each.num_lines, each.place))


def faults(
    house: House, allowed_names: dict[str, str] = ALLOWED_NAMES, allowed_sizes: dict[str, str] = ALLOWED_SIZES
) -> dict[str, list[str]]:
    """Messages about what is above a limit, by limit."""

    def messages(definitions: list[Definition]) -> list[str]:
        large = (each for each in definitions if each.place in sizes and each.place not in allowed_sizes)
        return [f"{each.place} has {each.excess}" for each in large]

    sizes = {each.place for each in house.functions + house.classes if each.excess}
    total = f"{SOURCES} has {house.num_lines:,} lines (limit {MAX_LINES:,})"
    planner = f"what plans has {house.num_planner_lines:,} lines (limit {MAX_PLANNER:,})"
    found = {
        "lines": [total] if house.num_lines > MAX_LINES else [],
        "planner": [planner] if house.num_planner_lines > MAX_PLANNER else [],
        "names": [
            f"{name} is a public class of several packages: {', '.join(files)}"
            for name, files in house.shared.items()
            if name not in allowed_names
        ],
        "functions": messages(house.functions),
        "classes": messages(house.classes),
        "circles": [f"a circle of imports: {', '.join(circle)}" for circle in house.circles],
        "exceptions": [f"ALLOWED_NAMES does not need {name}" for name in allowed_names if name not in house.shared],
    }
    found["exceptions"] += [f"ALLOWED_SIZES does not need {place}" for place in allowed_sizes if place not in sizes]
    for title, allowed in (("ALLOWED_NAMES", allowed_names), ("ALLOWED_SIZES", allowed_sizes)):
        if len(allowed) > MAX_ALLOWED:
            found["exceptions"].append(f"{title} has {len(allowed)} entries (limit {MAX_ALLOWED})")
    return found


def describe(house: House, longest: int) -> str:
    """The text that is printed. longest: how many functions and classes it has, besides those above their limits."""
    lines = [
        f"{house.num_lines:,} lines in {house.num_files} files (limit {MAX_LINES:,})",
        f"{house.num_planner_lines:,} lines plan, simulate and measure (limit {MAX_PLANNER:,})",
        f"{house.num_classes} top-level classes, {house.num_public_names} public names",
        f"{house.num_tested} of {house.num_testable} modules with functions or classes, and C++ sources, have a test "
        "of their name: test_MODULE.py or test_MODULE_TOPIC.py in the same folder of tests",
        f"{len(house.circles)} circles of imports (limit 0)",
        *("! " + ", ".join(circle) for circle in house.circles),
        "",
        "Marks: ! above a limit, = above it and allowed",
        "",
        f"{len(house.shared)} names of public classes in several packages:",
    ]
    for name, files in house.shared.items():
        lines.append(f"{'=' if name in ALLOWED_NAMES else '!'} {name}: {', '.join(files)}")
    titles = f"functions above {MAX_FUNCTION} lines", f"classes above {MAX_CLASS} lines or {MAX_METHODS} methods"
    for title, definitions in zip(titles, (house.functions, house.classes), strict=True):
        above = [each for each in definitions if each.excess]
        lines += ["", f"{len(above)} {title}. The longest:"]
        for each in definitions[:longest] + [each for each in definitions[longest:] if each.excess]:
            mark = "=" if each.place in ALLOWED_SIZES else "!"
            methods = "" if each.num_methods is None else f" {each.num_methods:3} methods"
            lines.append(f"{mark if each.excess else ' '} {each.num_lines:4} lines{methods}  {each.place}")
    lines += ["", "Lines and files of each folder, without the folders in it:"]
    lines += [f"{count:7,} {files:4}  {folder}" for folder, (count, files) in house.folders.items()]
    return "\n".join(lines)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="scripts/house.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--revision", metavar="REV", help="of git, instead of the working tree")
    parser.add_argument("--check", action="store_true", help="exit with 1 if anything is above a limit, and name it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--longest", type=int, default=20, metavar="N", help="print at least N functions and classes (20)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        if arguments.revision is not None:
            command = ["git", "archive", "--format=tar", arguments.revision, SOURCES, "tests"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True)
            if done.returncode:
                parser.exit(2, done.stderr.decode())
            subprocess.run(["tar", "-x", "-C", folder], input=done.stdout, check=True)
        house = measure(ROOT if arguments.revision is None else Path(folder))
    found = faults(house)
    if arguments.json:
        house.functions, house.classes = house.functions[: arguments.longest], house.classes[: arguments.longest]
        print(json.dumps({**asdict(house), "faults": found}, indent=2))
    else:
        print(describe(house, arguments.longest))
    messages = [message for each in found.values() for message in each]
    if arguments.check and not arguments.json:
        print("", *messages, f"{len(messages)} above the limits", sep="\n")
    return int(arguments.check and bool(messages))


if __name__ == "__main__":
    sys.exit(main())
