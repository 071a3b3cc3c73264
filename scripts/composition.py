"""Writes docs/lab/composition.md from tests/composition.py and docs/lab/composition.json: python scripts/composition.py
[--check].

The JSON file is what `benchmarks/compose.py --output` writes. Without it the page has no measured numbers. --check
writes nothing, and exits with 1 if the page is not up to date.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "compose")]

from results import WARM_UP  # noqa: E402
from systems import CONFIGURATIONS, IN_INSTANCES, NAMES, PAIRS, SYSTEMS, name_of  # noqa: E402

from quire.config import format_bytes  # noqa: E402
from tests.composition import MATRIX, Test  # noqa: E402

PAGE, RESULTS = ROOT / "docs" / "lab" / "composition.md", ROOT / "docs" / "lab" / "composition.json"

WIDTH = 120

HOW = {
    "sharing": "`cache.share`",
    "codec": "`cache.codec`",
    "retention": "`retain.budget`",
    "offload": "`offload.mode`",
    "instances": "`cluster.prefill`, `cluster.decode`",
}
"""Settings that switch a system on."""

HEAD = """\
# Composition

Generated from `tests/composition.py` and `docs/lab/composition.json` by `python scripts/composition.py`; edit these.

Five systems, each by a setting of its own. Any of them can be combined: all ten pairs, and all five at once.
"""

MEASURED = """\
`benchmarks/compose.py` runs one load with nothing on, with each system, each pair and all five. Each configuration
gets the same memory for all of its processes: what weights and processes leave of it is cache, divided among the
instances. A probe measures what they take.

- **Sequences** (simulated): the most that the caches hold at once while more of them wait, in all instances: those
  that decode, and those that are computed and wait for the instance that decodes. Scheduler, prefix tree, retention,
  ledger and router are those of the engine and of the cluster; only the model is not computed. Tests hold this number
  to real engines, with the cache in memory and on the disk, and to a real pair of instances.
- **Goodput**: answers a second that meet both latency targets, time to first token and time per token. Clients ask
  again as soon as they have their answer; the best number of clients counts. Such a load settles within two answers,
  while the queue of one with a fixed rate grows without end where the rate is too high. What comes of that depends on
  how long it runs, and a search for the highest rate needs many runs.
- **Perplexity**: of a continuation, relative to the dense cache that keeps everything ([quality](quality.md)). It is
  measured with and without the codec and retention. The other systems change no token, which the tests above prove.
- **PSS**: the most memory that all processes of the run had together once they had loaded. Memory that several of them
  map counts once.

A full run takes about an hour on two cores.
"""

CELLS = (
    "A cell has the sequences and the goodput relative to none, and the perplexity relative to that of none. The"
    " diagonal is each system alone."
)

LIMITS = (
    f"With `offload` and `instances` together {IN_INSTANCES}. So in instances `offload` is of weights alone.",
    "More systems are not faster by themselves. On one small machine two instances have the same cores as one engine,"
    " and processes of their own that take memory from the cache; offloading reads weights from the disk for each"
    " step. Both are for models and machines that need them: see [offload](../guide/larger-than-memory.md) and"
    " [instances](../guide/machines.md). Retention makes the sequences of a shared prompt different: a page that they"
    " keep in place is held once, but read by each of them.",
    "The gain in goodput depends on the load. This one has long prompts in common and short answers, and sharing gives"
    " most of it. With shorter prompts and longer answers, a CPU without AVX-512 loses by decoding codes what sharing"
    " saves ([log](2026-11.md#2026-11-27-planning-second-half-what-measuring-showed)).",
    "One engine that has more to do than it can computes slices of prompts in every step, so that its tokens come late."
    " Instances keep prompts and decoding apart: their tokens come in time however many prompts wait.",
)


def page(results: Mapping[str, Any] | None) -> str:
    """The page. results: of the JSON file; None: there are none."""
    rows = {} if results is None else {row["configuration"]: row for row in results["rows"]}
    parts = [
        HEAD,
        _table(
            ("system", "paper", "settings"),
            [(f"[{each.name}](../{each.page})", each.paper, HOW[each.name]) for each in SYSTEMS],
        ),
        "## Every pair\n",
        _filled(CELLS if rows else "Not measured yet."),
        _matrix(rows),
        *(_all_five(rows) if rows else ()),
        "## What is proved\n",
        _table(
            ("systems", "what the tests compare", "tests"),
            [(name_of(systems), MATRIX[systems].claim, _links(MATRIX[systems].tests)) for systems in (*PAIRS, NAMES)],
        ),
        "## What is measured\n",
        MEASURED,
        _command(results),
        *(_results(results) if results is not None else ()),
        "## Limits\n",
        *map(_filled, LIMITS),
    ]
    return "\n".join(parts)


def _matrix(rows: Mapping[str, Mapping[str, Any]]) -> str:
    def cell(one: str, other: str) -> str:
        systems = tuple(name for name in NAMES if name in (one, other))
        return _gains(rows.get(name_of(systems)))

    lines = [
        (one, *(cell(one, other) if place >= index else "" for place, other in enumerate(NAMES)))
        for index, one in enumerate(NAMES)
    ]
    return _table(("", *NAMES), lines)


def _gains(row: Mapping[str, Any] | None) -> str:
    """A cell."""
    if row is None:
        return "-"
    if row["refused"]:
        return "refused"
    gains = [f"{row[key]:.2f}" if row[key] is not None else "-" for key in ("gain_sequences", "gain_goodput")]
    return ", ".join([*gains, f"{row['ratio']:.3f}" if row["ratio"] is not None else "-"])


def _all_five(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"All five: {_gains(rows.get(name_of(NAMES)))}.\n"]


def _links(tests: Sequence[Test]) -> str:
    return "<br>".join(f"[{test.file.rpartition('/')[2]}](../../tests/{test.file}): `{test.name}`" for test in tests)


def _command(results: Mapping[str, Any] | None) -> str:
    flags = ""
    if results is not None:
        about, load = results["about"], results["about"]["load"]
        model = "" if about["model"] == "smollm2" else f" --model {about['model']}"
        clients = " ".join(map(str, load["clients"]))
        flags = f"{model} --clients {clients} --seconds {load['seconds']:g} --ttft {about['slo']['ttft']:.4g}"
    command = f"python benchmarks/compose.py --data DIR{flags}"
    return f"```sh\n{command} \\\n    --output docs/lab/composition.json\n```\n"


def _results(results: Mapping[str, Any]) -> list[str]:
    about, load, slo = results["about"], results["about"]["load"], results["about"]["slo"]
    requests = (
        f"requests of {load['trace']}"
        if load["trace"]
        else f"prompts of {load['prompt']:,} tokens, the first {load['shared']:,} of which are one of"
        f" {load['prefixes']} prefixes, and {load['output']:,} tokens out"
    )
    settings = ", ".join(
        f"`{key} {value}`" for part in ("codec", "retention", "offload") for key, value in about[part].items()
    )
    answers = [stage["answers"] for row in results["rows"] for stage in row.get("stages", ())] or [0]
    text = (
        f"{about['model']} in {format_bytes(about['memory'])}, {requests}; {settings}; at most {slo['ttft']:.2f} s to"
        f" the first token and {1e3 * slo['tpot']:.0f} ms for each one after it;"
        f" {' and '.join(map(str, load['clients']))} clients, {load['seconds']:g} s each, of which the last"
        f" {1 - WARM_UP:.0%} count ({min(answers)} to {max(answers)} answers). {about['processor']},"
        f" {about['cores']} cores, Quire {about['version']}, {about['date']}."
    )
    most = max(load["clients"])
    loaded = {
        row["configuration"]: next((each["goodput"] for each in row.get("stages", ()) if each["clients"] == most), 0.0)
        for row in results["rows"]
    }
    good = [f"{name} {rate:.3f}" for name, rate in sorted(loaded.items(), key=lambda each: -each[1]) if rate > 0]
    told = f"the goodputs are {', '.join(good)}; all others are 0" if good else "all goodputs are 0"
    text += f" With {most} clients {told}."
    lines = []
    for row in _in_order(results["rows"]):
        if row["refused"]:
            lines.append((row["configuration"], "refused", *[""] * 8))
            continue
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.4f} ± {row['ratio_error'] or 0:.4f}"
        gains = ["-" if row[key] is None else f"{row[key]:.2f}" for key in ("gain_sequences", "gain_goodput")]
        sizes = [format_bytes(row[key]) for key in ("weights", "cache", "pss")]
        lines.append((
            row["configuration"], f"{row['sequences']:,}", gains[0], f"{row['goodput']:.3f}", gains[1],
            str(row["clients"]), ratio, *sizes,
        ))  # fmt: skip
    head = ("configuration", "sequences (simulated)", "to none", "goodput/s", "to none", "clients", "perplexity ratio",
            "weights", "cache", "PSS")  # fmt: skip
    refused = [f"- {row['configuration']}: {row['refused']}" for row in results["rows"] if row["refused"]]
    doubts = [
        textwrap.fill(each, WIDTH, initial_indent="- ", subsequent_indent="  ") for each in results.get("doubts", ())
    ]
    return [
        _filled(text),
        *(["What these numbers do not show:\n", "\n".join(doubts) + "\n"] if doubts else ()),
        _table(head, lines, numbers=True),
        *(["\n".join(refused) + "\n"] if refused else ()),
    ]


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def _in_order(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    names = [name_of(each) for each in CONFIGURATIONS]
    return sorted(rows, key=lambda row: names.index(row["configuration"]))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    rule = ["---", *["---:" if numbers else "---"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)) + "\n"


def main() -> int:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    given = parser.parse_args()
    text = page(json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else None)
    if not given.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    present = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    sys.stdout.writelines(difflib.unified_diff(present.splitlines(True), text.splitlines(True), "docs", "now"))
    return int(present != text)


if __name__ == "__main__":
    sys.exit(main())
