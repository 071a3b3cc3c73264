"""How many sequences one arena holds: dense, encoded, with retention, and with both.

    python benchmarks/retention_capacity.py --data DIR [--memory 1GiB] [--context 2048] [--threads 2] [--json FILE]
                                            [--settings dense,nuq3,dense+0.8,nuq3+0.8] [--model smollm2] [--markdown]

DIR has war_and_peace.txt. Prompts are excerpts of it, one token shorter than the context. A setting is a codec and,
after a +, a threshold (retain.threshold) or, as in nuq3+b0.5, a budget (retain.budget). More requests than fit are
queued. Sequences with a computed prompt decode until no more are admitted and all are beyond the context, without
preemption. Each setting runs in its own process, in bfloat16, without shared prefixes.

kept   mean share of the prompts' tokens, over all heads
bytes  pages, positions and sums of one sequence at the end, from the allocator
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from common import append_record, arguments, commit, format_table, hardware, hardware_line

from quire import LLM, SamplingParams
from quire.config import format_bytes

AHEAD = 3
"""Decode steps of the computed sequences for each further prompt."""


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with war_and_peace.txt")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--memory", default="1GiB", help="arena")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--settings", default="dense,nuq3,dense+0.8,nuq3+0.8", help="the first is the baseline")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(given.only, given)))
        return
    settings = given.settings.split(",")
    found = {}
    for setting in settings:
        done = subprocess.run([*sys.orig_argv, "--only", setting], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        found[setting] = json.loads(done.stdout.splitlines()[-1])
        print(f"{setting}: {found[setting]['sequences']} sequences", file=sys.stderr)
    base = found[settings[0]]["sequences"]
    rows = [
        [
            setting,
            each["sequences"],
            f"{each['sequences'] / base:.2f}",
            f"{each['kept']:.3f}",
            format_bytes(each["bytes"]),
        ]
        for setting, each in found.items()
    ]
    head = [
        f"{given.context} tokens in {given.memory}",
        "sequences at once",
        f"to {settings[0]}",
        "kept",
        "bytes of one",
    ]
    print(format_table(head, rows, given.markdown))
    print(f"\n{hardware_line(hardware())}; {given.threads} threads; commit {commit()}; {time.strftime('%Y-%m-%d')}")
    if given.json:
        append_record(given.json, {"benchmark": "retention_capacity", "memory": given.memory, "found": found})


def measure(setting: str, given: argparse.Namespace) -> dict[str, float]:
    """Queues more requests than fit. Counts those that decode when no more is admitted."""
    codec, _, kept = setting.partition("+")
    options = {
        "cache.memory": given.memory,
        "cache.codec": codec,
        "cache.share": False,
        "runtime.threads": given.threads,
    }
    options |= {"scheduler.max_running": 512, "model.max_context": 2 * given.context}
    if kept:
        name = "retain.budget" if kept.startswith("b") else "retain.threshold"
        options[name] = float(kept.removeprefix("b"))
    with LLM(given.model, options) as llm:
        text = (given.data / "war_and_peace.txt").read_text(encoding="utf-8")
        ids = llm.tokenizer.encode(text, add_special=False)
        size = given.context - 1
        prompts = [ids[first : first + size] for first in range(0, len(ids) - size, size)]
        engine = llm.engine
        scheduler = engine.scheduler
        params = SamplingParams(max_tokens=AHEAD * 200, temperature=0.0, ignore_eos=True, detokenize=False)
        for index, prompt in enumerate(prompts[:250]):
            engine.add(str(index), prompt, params)
        while True:
            engine.step()
            computed = [sequence for sequence in scheduler.running if sequence.num_computed >= given.context]
            if len(computed) == len(scheduler.running) and not has_room(engine):
                break
        assert scheduler.waiting, "all requests ran at once: there were too few"
        assert engine.stats()["preemptions"] == 0, "a request was preempted"
        kept = [sequence.kept_fraction or 1.0 for sequence in scheduler.running]
        used = engine.stats()["cache"]["bytes_used"]
        count = len(scheduler.running)
        assert all(len(sequence.token_ids) < size + AHEAD * 200 for sequence in scheduler.running), "one has ended"
        return {"sequences": count, "kept": sum(kept) / count, "bytes": used // count}


def has_room(engine: object) -> bool:
    """Whether a step admits the next request."""
    scheduler = engine.scheduler  # type: ignore[attr-defined]
    before = len(scheduler.running)
    engine.step()  # type: ignore[attr-defined]
    return len(scheduler.running) > before


if __name__ == "__main__":
    main()
