"""Prints line and branch coverage of some packages of quire: python scripts/coverage_table.py DATA [BEFORE].

DATA is the file that `coverage combine` writes, or a folder of files to combine, which stay unchanged. BEFORE is the
data of an earlier run. Each row then has both, and the script exits with 1 if the coverage of one of these packages
fell. Lines and branches are counted in the sources beside this script or in --root; for BEFORE in --root-before.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from coverage import Coverage
from coverage.exceptions import CoverageException

PACKAGES = ("cache/", "engine/", "attention/", "server/", "")
"""Folders below src/quire; the empty one is the whole package."""


@dataclass
class Counts:
    """Number of lines and branches of some files, and of those that ran."""

    lines: int = 0
    lines_run: int = 0
    branches: int = 0
    branches_run: int = 0

    def add(self, summary: dict[str, int]) -> None:
        """Adds a file from coverage's JSON report."""
        self.lines += summary["num_statements"]
        self.lines_run += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_run += summary["covered_branches"]

    @property
    def shares(self) -> tuple[float, float]:
        """Percent of the lines and of the branches that ran."""
        return 100.0 * self.lines_run / max(1, self.lines), 100.0 * self.branches_run / max(1, self.branches)


def counts(data: Path, root: Path) -> dict[str, Counts]:
    """The counts of each package. root: the tree with the sources that ran."""
    sources = root / "src" / "quire"
    with tempfile.TemporaryDirectory() as scratch:
        config, report = Path(scratch) / "rc", Path(scratch) / "report.json"
        # Data from other copies of the tree count for this tree.
        config.write_text(f"[run]\nbranch = true\n[paths]\nsource =\n    {sources}\n    */src/quire\n")
        measured = Coverage(data_file=str(Path(scratch) / "data"), config_file=str(config), source=[str(sources)])
        measured.combine([str(data)], strict=True, keep=True)
        measured.json_report(outfile=str(report))
        files = json.loads(report.read_text())["files"]
    found = {package: Counts() for package in PACKAGES}
    for name, file in files.items():
        for package in PACKAGES:
            if f"src/quire/{package}" in name:
                found[package].add(file["summary"])
    return found


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
        counted = now[package]
        lines, branches = counted.shares
        cells = [f"{counted.lines}", f"{lines:.2f} %", f"{counted.branches}", f"{branches:.2f} %"]
        if before is not None:
            earlier = before[package].shares
            cells += [f"{share:.2f} %" for share in earlier]
            fell |= bool(package) and (lines < earlier[0] or branches < earlier[1])
        print(f"| {package or 'all'} | " + " | ".join(cells) + " |")
    return int(fell)


if __name__ == "__main__":
    sys.exit(main())
