"""pip install with short output: a line per package, and a line every ten seconds while pip prints nothing.

    python scripts/install.py --constraint constraints.txt --editable '.[serve,plot]'

Takes pip's arguments and returns pip's exit code. Shows pip's error messages unchanged. Needs only the standard library
and pip.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

SILENCE_SECONDS = 10.0


def told(line: str) -> str | None:
    """The short form of a line of pip's output; None for a line without news."""
    line = line.strip()
    if ".metadata" in line:
        return None
    if match := re.match(
        r"(?:Downloading|Using cached|Processing) (?:\S*/)?([\w.]+)-(\d[^-]*)\S*\.whl(?: (\([\d.]+ [kMG]B\)))?", line
    ):
        return " ".join(part for part in ("getting", *match.groups()) if part)
    if line.startswith("Installing collected packages"):
        return f"installing {line.count(',') + 1} packages"
    if re.match(r"(Building|Preparing|Installing build dependencies|Getting requirements)", line):
        # pip repeats this line when it is done, and sometimes in between.
        if re.search(r": (finished|still)", line):
            return None
        doing = line[0].lower() + line[1:].removesuffix(": started")
        is_ours = re.match(r"Building (editable|wheel) for quire\b", line)
        return f"{doing}: compiling the CPU kernels, which takes minutes" if is_ours else doing
    return None


def run(command: Sequence[str], silence_seconds: float = SILENCE_SECONDS) -> int:
    """Runs a command and shows its lines in short; returns its exit code."""
    begun = time.monotonic()
    doing = "resolving what is needed"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        last = begun
        while True:
            try:
                line = lines.get(timeout=max(0.0, last + silence_seconds - time.monotonic()))
            except queue.Empty:
                last = time.monotonic()
                print(f"  {last - begun:.0f} s: still {doing}", flush=True)
                continue
            if line is None:
                return process.wait()
            if (now := told(line)) is not None:
                doing, last = now, time.monotonic()
                print(f"  {doing}", flush=True)


if __name__ == "__main__":
    pip = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check"]
    try:
        sys.exit(run([*pip, *sys.argv[1:]]))
    except KeyboardInterrupt:
        sys.exit(130)
