"""Watches a server from a separate process: the latency of its health endpoint, and its memory.

    python probe.py PORT PATH PID

Answers each line of standard input with a JSON line about the time since the last one: {"worst": seconds of the slowest
answer, "busy": most processor seconds of the server within an answer, "probes": number, "failed": number without status
200, "before": bytes at the start, "peak": most bytes}.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import sys
import threading
import time
from pathlib import Path

PERIOD = 0.02
SECONDS = 90.0
PAGE = 4096


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def resident(pids: list[int]) -> int:
    """Resident bytes of some processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return total


def mapped(pid: int) -> dict[tuple[int, int], int]:
    """Resident bytes of the mappings of a process, by their addresses; none if it has ended."""
    found: dict[tuple[int, int], int] = {}
    place = (0, 0)
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                begin, end = words[0].split("-")
                place = int(begin, 16), int(end, 16)
            elif words[0] == "Rss:":
                found[place] = int(words[1]) * 1024
    return found


def computed(pid: int) -> float:
    """Processor seconds that a process has used in all its threads."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_well(port: int, path: str) -> bool:
    """Whether a new connection is answered with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Memory(threading.Thread):
    """Samples the memory of a process and its descendants, even while health does not answer."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.begin()
        self.start()

    def begin(self) -> None:
        """Forgets the peak."""
        self.pids = family(self.pid)
        self.before = self.peak = resident(self.pids)

    def run(self) -> None:
        """Samples until the process ends."""
        while True:
            self.peak = max(self.peak, resident(self.pids))
            time.sleep(PERIOD)


def main() -> None:
    """Answers until the input ends."""
    port, path = int(sys.argv[1]), sys.argv[2]
    pid = int(sys.argv[3])
    memory = Memory(pid)
    while True:
        memory.begin()
        worst, busy, probes, failed = 0.0, 0.0, 0, 0
        while not select.select([sys.stdin], [], [], PERIOD)[0]:
            begun, before = time.perf_counter(), computed(pid)
            failed += not is_well(port, path)
            seconds = time.perf_counter() - begun
            worst, busy, probes = max(worst, seconds), max(busy, min(seconds, computed(pid) - before)), probes + 1
        if not sys.stdin.readline():
            return
        seen = {
            "worst": worst,
            "busy": busy,
            "probes": probes,
            "failed": failed,
            "before": memory.before,
            "peak": memory.peak,
        }
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
