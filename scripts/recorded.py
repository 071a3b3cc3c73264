"""Repeats more than 700 HTTP requests and 100 command lines, and prints every difference from a recording.

    scripts/recorded.py record                         # records the answers of this tree in .recorded/
    scripts/recorded.py compare                        # repeats them; exit status 1 if one differs or failed
    scripts/recorded.py compare --source ../other/src  # repeats them with another tree's code
    scripts/recorded.py compare --only tiny --only commands

A safety net for changes that must not change answers. Record before, compare after: each takes nine minutes on two
cores. It does not replace tests: of nine planted defects of engine and server it reported five. Servers are child
processes of `quire serve` with different settings, one after the other. Each gets its requests one at a time, in the
same order. The models are smollm2, which must be in the cache, and a tiny random one, both in float32 with one thread.
`recorded/servers.py` lists the servers, `recorded/lines.py` the command lines, and `recorded/plans.py` those that plan
and simulate, whose numbers must be the same in every digit.

Compared are status, some headers and the body of each answer; of a stream, what its events say together; of a command
line its exit status, standard output and the files it writes. Not compared are ids, times, the wording of errors and of
help, and values of metrics (`recorded/masks.py`). Numbers may differ by 1e-4. An answer that was added or is missing
differs, too. An answer that fails, before or now, is printed and counted although both failures are the same.

A recording has one JSON file for each server and for each of the two lists of command lines. Answers depend on the
processor: compare on the machine that recorded. Exit status 2: there is nothing to run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from recorded.cases import Places
from recorded.comparison import failures, report
from recorded.lines import lines_of
from recorded.models import save_similar, save_tiny
from recorded.plans import plans_of
from recorded.runs import Run, RunError
from recorded.servers import servers_of

ROOT = Path(__file__).resolve().parents[1]

LINES = {"commands": lines_of, "plans": plans_of}
"""The parts that have command lines."""


def parts_of(given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs the parts, one after the other. Yields the name of each and its answers by name."""
    tiny = save_tiny(folder / "tiny")
    places = Places(folder, tiny, save_similar(folder / "similar", tiny))
    run = Run(given.source, places, say if given.verbose else lambda text: None)
    servers = servers_of(places)
    known = [*(each.name for each in servers), *LINES]
    wanted = given.only or known
    if unknown := [name for name in wanted if name not in known]:
        raise RunError(f"--only is {unknown[0]!r}; the parts are {', '.join(known)}")
    for server in servers:
        if server.name in wanted:
            yield server.name, run.server(server)
    for name, lines in LINES.items():
        if name in wanted:
            yield name, {each.name: run.line(each) for each in lines(places)}


class Counts(NamedTuple):
    """Answers that differ from the recorded ones, and answers that failed: before, now, or both times."""

    num_different: int
    num_failed: int


def record(name: str, found: dict[str, Any], folder: Path) -> Counts:
    """Writes the answers of a part. Prints why some did not come or could not be read."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    failed = failures(found)
    for each, reason in failed.items():
        print(f"{name}/{each}\n    failed: {reason}")
    return Counts(0, len(failed))


def compare(name: str, found: dict[str, Any], folder: Path) -> Counts:
    """Prints how the answers of a part differ from those that were recorded, and which failed before or now."""
    path = folder / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "failed" in found.get("server", {}):
        before = {"server": before.get("server")}  # all others are missing
    told = report(before, json.loads(json.dumps(found)))
    for paragraph in told:
        print(f"{name}/{paragraph}", flush=True)
    failed = {"failed before": failures(before), "failed now": failures(found)}
    for when, reasons in failed.items():
        for each, reason in reasons.items():
            print(f"{name}/{each}\n    {when}: {reason}", flush=True)
    return Counts(len(told), len({each for reasons in failed.values() for each in reasons}))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"), help="what to do")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / ".recorded", help="default: .recorded")
    parser.add_argument(
        "--source", type=Path, default=ROOT / "src", help="folder of the package (default: this tree's)"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PART",
        help="a server's name, commands or plans; repeatable; disk-again needs disk",
    )
    parser.add_argument("--verbose", action="store_true", help="name each request when it is sent")
    given = parser.parse_args()
    given.source = given.source.resolve()
    return given


def say(text: str) -> None:
    """Prints progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Records or compares all parts."""
    given = arguments()
    begun, count, num_different, num_failed = time.monotonic(), 0, 0, 0
    try:
        with tempfile.TemporaryDirectory(prefix="quire-recorded-") as folder:
            for name, found in parts_of(given, Path(folder).resolve()):
                count += len(found)
                counts = (record if given.action == "record" else compare)(name, found, given.folder)
                num_different += counts.num_different
                num_failed += counts.num_failed
                say(f"{name}: {len(found)} answers after {time.monotonic() - begun:.0f} s")
    except RunError as error:
        say(f"recorded.py: {error}")
        return 2
    if given.action == "record":
        print(f"{num_failed} of {count} answers failed")
    else:
        print(f"{num_different} of {count} answers differ, and {num_failed} failed before or now")
    return int(num_different + num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
