"""Line and branch coverage of some packages of quire, a row each: python scripts/coverage_table.py DATA [BEFORE].

DATA is what `coverage combine` leaves, or a folder of files that it would combine, which stay as they are. With BEFORE,
a second one, each row has both, and the script ends with 1 if a package has become less covered. Lines and branches
are counted in the sources beside this script, or in those that --root names, for BEFORE in those of --root-before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from coverage import Coverage
from coverage.exceptions import CoverageException
from coverage.results import Numbers

PACKAGES = ("cache", "engine", "attention", "server", "")
"""Below src/quire; the empty one is all of it."""


def counts(data: Path, root: Path) -> dict[str, Numbers]:
    """Statements, branches and how many of them ran, by package. root: the tree whose sources ran."""
    sources = root / "src" / "quire"
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "rc"
        # Data of other copies of the tree count for this one.
        config.write_text(f"[run]\nbranch = true\n[paths]\nsource =\n    {sources}\n    */src/quire\n")
        measured = Coverage(data_file=str(Path(scratch) / "data"), config_file=str(config), source=[str(sources)])
        measured.combine([str(data)], strict=True, keep=True)
        found = {package: Numbers() for package in PACKAGES}
        for path in sorted(sources.rglob("*.py")):
            # Of kernels in Triton coverage sees what is around them.
            numbers = measured._analyze(str(path)).numbers
            for package in PACKAGES:
                if path.is_relative_to(sources / package):
                    found[package] += numbers
    return found


def shares(numbers: Numbers) -> tuple[float, float]:
    """Percent of lines and of branches that ran."""
    lines = 100.0 * numbers.n_executed / max(1, numbers.n_statements)
    branches = 100.0 * numbers.n_executed_branches / max(1, numbers.n_branches)
    return lines, branches


def main() -> int:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(prog="scripts/coverage_table.py", description=__doc__.partition("\n")[0])
    here = Path(__file__).parents[1]
    parser.add_argument("data", type=Path)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("--root", type=Path, default=here, help="the tree that ran")
    parser.add_argument("--root-before", type=Path, default=here, help="the tree that ran before")
    arguments = parser.parse_args()
    try:
        now = counts(arguments.data, arguments.root.resolve())
        before = None if arguments.before is None else counts(arguments.before, arguments.root_before.resolve())
    except CoverageException as error:
        parser.exit(2, f"{error}\n")
    names = ["lines", "lines ran", "branches", "branches ran"]
    print("| package | " + " | ".join(names + (["lines ran before", "branches ran before"] if before else [])) + " |")
    print("|---|" + "---:|" * (len(names) + (2 if before else 0)))
    fell = False
    for package in PACKAGES:
        numbers = now[package]
        lines, branches = shares(numbers)
        cells = [f"{numbers.n_statements}", f"{lines:.2f} %", f"{numbers.n_branches}", f"{branches:.2f} %"]
        if before is not None:
            earlier = shares(before[package])
            cells += [f"{share:.2f} %" for share in earlier]
            fell |= lines < earlier[0] or branches < earlier[1]
        print(f"| `{package}/` | " .replace("`/`", "all") + " | ".join(cells) + " |")
    return int(fell)


if __name__ == "__main__":
    sys.exit(main())
