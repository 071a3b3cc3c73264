"""Plants defects in copies of the sources, one by one, and runs the quick tests that touch them. Each must be caught.

python scripts/mutants.py                          all of tests/mutants/*.toml
python scripts/mutants.py --only "a salt" --only x those with these words in their names
python scripts/mutants.py --output docs/design/testing.md also writes the table between that file's marks
python scripts/mutants.py --tests tests/engine/test_sampler.py --only top_p   runs these tests, without a map

A mutant is caught if a test fails that passes without it. It survives if all tests that touch it pass. The script exits
with 1 if a mutant survived, is not a valid program, or took too long. scripts/touching.py finds the tests;
docs/design/testing.md explains the whole.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

from touching import ROOT, SOURCES, SUITE, Test, Touching, body_of, copy_tree, environment, measure, run_lines

FOLDER = ROOT / "tests" / "mutants"
KEPT = ROOT / ".mutants"
"""Folder of maps and compiled objects for later runs; git ignores it."""

SECONDS = 240.0
"""Seconds of tests per mutant, by the map's times; the fastest tests of each file come first."""

TURN = 2.0
"""Seconds of one file's tests before another file has its turn."""

PATIENCE = 3.0
"""How many times as long the tests may take before they are stopped: a hang that no test's time limit ended."""

START = 60.0
"""Seconds that pytest may take before its first test."""

BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"


class MutantError(Exception):
    """A mutant that cannot be planted; names it."""


@dataclass(frozen=True)
class Mutant:
    """One defect.

    area     the file of tests/mutants that it stands in
    name     what it breaks, as a claim
    file     below src/quire
    old, new text that occurs exactly once, and its replacement
    through  functions through which tests reach it, `file.py:Class.function`. A test that runs all of them touches it.
             Needed for C++, where coverage sees no lines
    """

    area: str
    name: str
    file: str
    old: str
    new: str
    through: tuple[str, ...] = ()

    @property
    def is_native(self) -> bool:
        """Whether kernels must be compiled."""
        return not self.file.endswith(".py")

    def planted(self, source: str) -> str:
        """The file's text with the defect. Raises MutantError."""
        if self.old == self.new or (count := source.count(self.old)) != 1:
            found = "equals its replacement" if self.old == self.new else f"occurs {count} times"
            raise MutantError(f"mutant {self.name!r}: its old text {found} in {SOURCES}/{self.file}, not once")
        text = source.replace(self.old, self.new)
        if not self.is_native:
            try:
                compile(text, self.file, "exec")
            except SyntaxError as error:
                raise MutantError(f"mutant {self.name!r} is no Python: {error}") from error
        return text

    def touching(self, sources: Path, known: Touching) -> set[str]:
        """The names of the tests that touch it. Raises MutantError if `through` names no function."""
        if self.through:
            found = []
            for place in self.through:
                file, _, function = place.partition(":")
                try:
                    lines = body_of((sources / file).read_text(), function)
                except (KeyError, OSError) as error:
                    raise MutantError(f"mutant {self.name!r}: there is no {place}") from error
                found.append(known.tests_of(file, lines))
            return set.intersection(*found)
        source = (sources / self.file).read_text()
        return known.tests_of(self.file, run_lines(source, changed_lines(source, self.planted(source))))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mutant: caught, survived, untouched, hangs or broken.

    test     the first test that failed
    reason   the reason of its failure
    num_run  number of tests run, of num_touching
    """

    mutant: Mutant
    verdict: str
    test: str
    reason: str
    seconds: float
    num_run: int
    num_touching: int


def read_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """All mutants of a folder's .toml files. Raises MutantError for unknown fields and names used twice."""
    found: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            try:
                mutant = Mutant(path.stem, **{**entry, "through": tuple(entry.get("through", ()))})
            except TypeError as error:
                raise MutantError(f"{path.name}: {entry.get('name')!r}: {error}") from error
            if mutant.name in found:
                raise MutantError(f"{path.name}: two mutants have the name {mutant.name!r}")
            found[mutant.name] = mutant
    return list(found.values())


def changed_lines(before: str, after: str) -> set[int]:
    """The numbers, from 1, of the lines that another text has replaced; for an insertion, the lines around it."""
    old, new, found = before.splitlines(), after.splitlines(), set()
    for tag, low, high, _, _ in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "insert":
            found |= {max(low, 1), min(low + 1, len(old))}
        elif tag != "equal":
            found |= set(range(low + 1, high + 1))
    return found


def in_order(tests: list[Test]) -> list[Test]:
    """Orders tests: a round of the fastest tests of each file, files that touch little first, then the next round.
    Leaves out tests beyond `SECONDS` in total.
    """
    turns: list[tuple[int, float, Test]] = []
    by_file = sorted(tests, key=lambda test: (test.name.partition("::")[0], test.seconds))
    for _, group in groupby(by_file, key=lambda test: test.name.partition("::")[0]):
        own = list(group)
        breadth = median(test.breadth for test in own)
        round_, spent = 0, 0.0
        for test in own:
            if spent > TURN:
                round_, spent = round_ + 1, 0.0
            spent += test.seconds
            turns.append((round_, breadth, test))
    turns.sort(key=lambda turn: turn[:2])
    chosen: list[Test] = []
    total = 0.0
    for _, _, test in turns:
        total += test.seconds
        if chosen and total > SECONDS:
            break
        chosen.append(test)
    return chosen


class Bench:
    """A copy of the tree in which mutants are planted and removed, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder
        copy_tree(folder)
        self.sources = folder / SOURCES

    def try_out(self, mutant: Mutant, names: list[str], num_touching: int, seconds: float) -> Outcome:
        """Plants a mutant, runs tests (`seconds`: their time without it), and removes it."""
        begun = time.perf_counter()
        if not names:
            return Outcome(mutant, "untouched", "", "no quick test touches it", 0.0, 0, 0)
        path = self.sources / mutant.file
        before = path.read_text()
        kernels = [*path.parent.glob("*.so"), *path.parent.glob("*.stamp")] if mutant.is_native else []
        compiled = {library: library.read_bytes() for library in kernels}
        path.write_text(mutant.planted(before))
        try:
            if mutant.is_native and (message := self._compile()):
                return Outcome(mutant, "broken", "", message, time.perf_counter() - begun, 0, num_touching)
            verdict, test, reason, num_run = self._run(names, PATIENCE * seconds)
        finally:
            path.write_text(before)
            for library, content in compiled.items():
                library.write_bytes(content)
        # A test that also fails without the mutant, for lack of a driver or of time, has caught nothing.
        if verdict == "caught" and self._run([test], PATIENCE * seconds)[0] != "survived":
            verdict, reason = "broken", f"fails without the mutant, too: {reason}"
        return Outcome(mutant, verdict, test, reason, time.perf_counter() - begun, num_run, num_touching)

    def _compile(self) -> str:
        """Compiles the copy's kernels for the best level. Returns the compiler's message if that fails."""
        script = (
            "from quire.kernels import build, levels;"
            "print(build.build(levels.supported_levels()[:1], build.SOURCE_DIR))"
        )
        environ = environment(self.tree, self.tree / "results.json")
        command = ["g++"] if (found := os.environ.get("CXX")) is None else shlex.split(found)
        if shutil.which(command[0]):
            cached = [sys.executable, str(ROOT / "scripts" / "cached_compiler.py"), str(KEPT / "objects")]
            environ["CXX"] = shlex.join([*cached, *command])
        done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True)
        return done.stderr.strip().splitlines()[-1] if done.returncode else ""

    def _run(self, names: list[str], seconds: float) -> tuple[str, str, str, int]:
        """(verdict, first test that failed, how, tests run)."""
        results = self.tree / "results.json"
        results.unlink(missing_ok=True)
        (self.tree / "tests.txt").write_text("\n".join(names))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", *SUITE, "@tests.txt"]
        process = subprocess.Popen(
            command, cwd=self.tree, env=environment(self.tree, results), start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "hangs", "", f"no test's time limit ended it in {seconds:.0f} s", 0
        done = json.loads(results.read_text()) if results.exists() else {}
        failed = next(((name, reason) for name, (outcome, _, reason) in done.items() if outcome == "failed"), None)
        if process.returncode == 0:
            return "survived", "", "", len(done)
        if failed is not None and process.returncode == 1:
            return "caught", *failed, len(done)
        if process.returncode < 0:
            at_hand = results.with_suffix(".at_hand")
            died = signal.Signals(-process.returncode).name
            return "caught", at_hand.read_text() if at_hand.exists() else "", f"the process ended with {died}", 0
        lines = said.strip().splitlines() or ["it said nothing"]
        return "broken", "", f"pytest ended with {process.returncode}: {lines[-1]}", len(done)


def try_all(mutants: list[Mutant], known: Touching | None, files: list[str], jobs: int) -> list[Outcome]:
    """Tries mutants in parallel, those that need compilation first. Prints each when it is done."""
    benches: queue.SimpleQueue[Bench] = queue.SimpleQueue()
    plans = {mutant.name: (files, len(files), SECONDS) for mutant in mutants}
    if known is not None:
        for mutant in mutants:
            touching = [known.tests[test] for test in mutant.touching(ROOT / SOURCES, known)]
            chosen = in_order(touching)
            seconds = START + sum(test.seconds for test in chosen)
            plans[mutant.name] = [test.name for test in chosen], len(touching), seconds
    with tempfile.TemporaryDirectory(prefix="mutants-") as name, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            benches.put(Bench(Path(name) / str(number)))

        def attempt(mutant: Mutant) -> Outcome:
            bench = benches.get()
            try:
                outcome = bench.try_out(mutant, *plans[mutant.name])
            finally:
                benches.put(bench)
            told = f"{outcome.test}: {outcome.reason[:100]}" if outcome.test else outcome.reason
            counts = f"{outcome.num_run} of {outcome.num_touching} tests"
            print(f"{outcome.verdict:9} {outcome.seconds:6.1f} s  {counts:22} {mutant.name}\n{told:>12}", flush=True)
            return outcome

        ordered = sorted(mutants, key=lambda mutant: not mutant.is_native)
        by_name = {outcome.mutant.name: outcome for outcome in pool.map(attempt, ordered)}
    return [by_name[mutant.name] for mutant in mutants]


def table(outcomes: list[Outcome]) -> str:
    """Markdown."""
    rows = [f"| {o.mutant.area} | {o.mutant.name} | `{o.mutant.file}` | {_who(o)} |" for o in outcomes]
    return "\n".join(["| area | defect | file | caught by |", "|---|---|---|---|", *rows])


def _who(outcome: Outcome) -> str:
    if outcome.verdict != "caught":
        return f"**{outcome.verdict}**"
    file, _, test = outcome.test.partition("::")
    hang = " (its time limit)" if "Timeout" in outcome.reason else ""
    return f"`{Path(file).name}`: `{test.partition('[')[0]}`{hang}"


def write_table(path: Path, text: str) -> None:
    """Puts the table between the marks of a document. Raises MutantError if it has none."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise MutantError(f"{path} has no place for the table: write {BEGIN} and {END} where it belongs")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="scripts/mutants.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="WORDS", help="mutants whose names have WORDS")
    parser.add_argument("--area", action="append", default=[], help="mutants of tests/mutants/AREA.toml")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of mutants in parallel")
    parser.add_argument("--map", type=Path, metavar="DIR", help="an earlier map, of any tree")
    parser.add_argument("--tests", nargs="+", default=[], metavar="TEST", help="run these, without a map")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a document with marks for the table")
    parser.add_argument("--list", action="store_true", help="print the mutants and plant none")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    try:
        mutants = read_mutants()
        for mutant in mutants:
            mutant.planted((ROOT / SOURCES / mutant.file).read_text())
        wanted = [
            mutant
            for mutant in mutants
            if (not arguments.only or any(words in mutant.name for words in arguments.only))
            and (not arguments.area or mutant.area in arguments.area)
        ]
        if not wanted:
            raise MutantError(f"no mutant of {len(mutants)} matches; --list prints their names")
        if arguments.list:
            print("\n".join(f"{mutant.area:10} {mutant.file:32} {mutant.name}" for mutant in wanted))
            return 0
        known = None
        if not arguments.tests:
            known = Touching(arguments.map or measure(KEPT, arguments.jobs))
            for name, reason in known.failed.items():
                print(f"fails without any mutant, so it catches none: {name}: {reason}")
        outcomes = try_all(wanted, known, arguments.tests, arguments.jobs)
        print(table(outcomes))
        if arguments.output is not None:
            write_table(arguments.output, table(outcomes))
    except MutantError as error:
        parser.exit(2, f"{error}\n")
    num_caught = sum(outcome.verdict == "caught" for outcome in outcomes)
    print(f"{num_caught} of {len(outcomes)} caught in {(time.perf_counter() - begun) / 60:.1f} minutes")
    return int(num_caught < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
