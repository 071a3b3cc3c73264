"""Shared by the benchmark scripts: medians, tables, and records with commit and hardware.

Needs only the standard library, so that a script runs under any Python that has the measured engine.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Processor features that decide the speed of 16-bit and 8-bit arithmetic. Records list those that the processor has.
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "i8mm", "sve")


def arguments(doc: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """The arguments of all scripts that time Quire on a CPU; `doc` is the help text."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"how often each thing is timed (default: {rounds})")
    parser.add_argument("--threads", type=int, default=2, help="threads that compute (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results as JSON lines")
    return parser


def median(values: Iterable[float]) -> float:
    """The median without NaN; NaN if nothing was measured."""
    values = [value for value in values if not math.isnan(value)]
    return statistics.median(values) if values else math.nan


def spread(values: Sequence[float]) -> float:
    """(maximum - minimum) / median: the variation of a number within one run."""
    values = [value for value in values if not math.isnan(value)]
    return (max(values) - min(values)) / median(values) if values else math.nan


def commit() -> str:
    """The measured commit, with a + if the working tree differs from it; "none" outside a git checkout."""
    try:
        found = _git("rev-parse", "--short=12", "HEAD")
        return found + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "none"


def hardware() -> dict[str, object]:
    """Processor, usable cores, features, memory in GiB, accelerators, system and Python version."""
    facts = dict(_facts(Path("/proc/cpuinfo")))
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": facts.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "features": [feature for feature in FEATURES if feature in flags],
        "memory_gib": round(memory / 2**30),
        "gpus": _gpus(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def hardware_line(facts: Mapping[str, object]) -> str:
    """The result of `hardware()` in one line."""
    features = ", ".join(f for f in facts["features"] if f not in ("avx2", "asimd"))  # type: ignore[attr-defined]
    parts = [f"{facts['cpu']}, {facts['cores']} cores", features, f"{facts['memory_gib']} GiB"]
    return ", ".join(str(part) for part in [*parts, *facts["gpus"]] if part)  # type: ignore[misc]


def append_record(path: Path, record: Mapping[str, object]) -> None:
    """Appends one JSON line: the record, with time, commit and hardware."""
    stamp = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit(), "hardware": hardware()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**stamp, **record}) + "\n")


def format_table(head: Sequence[str], rows: Iterable[Sequence[object]], markdown: bool = False) -> str:
    """A table as text, the first column left-aligned and the others right-aligned; with pipes if `markdown`."""
    lines = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = [
        [cell.rjust(widths[column]) if column else cell.ljust(widths[column]) for column, cell in enumerate(line)]
        for line in lines
    ]
    rule = [("-" * (width - 1) + ":") if column else "-" * width for column, width in enumerate(widths)]
    if markdown:
        return "\n".join("| " + " | ".join(line) + " |" for line in [padded[0], rule, *padded[1:]])
    return "\n".join("  ".join(line).rstrip() for line in [padded[0], ["-" * width for width in widths], *padded[1:]])


def format_rate(value: float) -> str:
    """Tokens per second with at least three digits: 8.41, 59.8, 1106; a dash if nothing was measured."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 200 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *words], check=True, capture_output=True, text=True).stdout.strip()


def _facts(path: Path) -> list[tuple[str, str]]:
    """The `name : value` lines of the first processor."""
    if not path.exists():
        return []
    block = path.read_text().split("\n\n")[0]
    return [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in block.splitlines())]


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, check=True, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.split("\n")[:-1]
