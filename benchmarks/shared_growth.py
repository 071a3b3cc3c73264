"""Time of a decode step over the length of its requests' common prefix, with and without `cache.share`.

    python benchmarks/shared_growth.py [--rounds 5] [--lengths 512,1024,2048,4096] [--threads 2] [--json FILE]
                                       [--plot FILE.svg] [--markdown]

SmolLM2 in bfloat16; 32 requests with a common prefix of each length and 64 own tokens. The prompts are computed once
for each length and setting. Then both batches stay in memory and decode in turns, 12 steps at a time, after one turn
each to warm up. Results are median milliseconds per step over the turns. Most time goes into prompts without sharing:
about two minutes for all four lengths on two cores. They take 3 GB at 4,096 tokens.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, arguments, commit, format_table, hardware, hardware_line, median

from quire import LLM, SamplingParams

BATCH = 32
OWN = 64
STEPS = 12
CONTEXT = 8192

# SmolLM2's cache in bfloat16.
TOKEN_BYTES = 23_040
CHUNK_TOKENS = 64

NAMES = {True: "shared", False: "apart"}


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="tokens in common")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot, SVG")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    given = parser.parse_args()
    lengths = sorted(map(int, given.lengths.split(",")))
    # A step has room for a whole prompt, so it ends at least one. When the last prompt is done, the first request is at
    # most 32 tokens ahead.
    max_tokens = STEPS * (given.rounds + 1) + BATCH + 2
    budget = lengths[-1] + OWN + BATCH + CHUNK_TOKENS
    memory = BATCH * (lengths[-1] + OWN + max_tokens + CHUNK_TOKENS) * TOKEN_BYTES
    options = {"model.dtype": "bfloat16", "runtime.threads": given.threads, "model.max_context": CONTEXT}
    options |= {"scheduler.token_budget": max(1024, budget), "scheduler.max_running": BATCH}
    engines = {
        share: LLM("smollm2", options={**options, "cache.memory": memory, "cache.share": share}) for share in NAMES
    }
    draw = random.Random(0)
    steps: dict[bool, list[float]] = {share: [] for share in NAMES}
    for length in lengths:
        prefix = [draw.randrange(1000, 40000) for _ in range(length)]
        prompts = [prefix + [draw.randrange(1000, 40000) for _ in range(OWN)] for _ in range(BATCH)]
        bytes_used = {}
        for share, llm in engines.items():
            start_batch(llm, prompts, max_tokens)
            bytes_used[NAMES[share]] = llm.stats()["cache"]["bytes_used"]
        times: dict[bool, list[float]] = {share: [] for share in NAMES}
        for number in range(given.rounds + 1):
            for share, llm in engines.items():
                began = time.perf_counter()
                for _ in range(STEPS):
                    llm.engine.step()
                if number:
                    times[share].append((time.perf_counter() - began) * 1e3 / STEPS)
        for share, llm in engines.items():
            end_batch(llm)
            steps[share].append(median(times[share]))
            print(f"{length} {NAMES[share]}: {steps[share][-1]:.1f} ms a step", file=sys.stderr, flush=True)
        if given.json:
            record = {"benchmark": "shared_growth", "batch": BATCH, "own": OWN, "common": length}
            found = {"milliseconds": {NAMES[share]: values[-1] for share, values in steps.items()}}
            rounds = {"rounds": {NAMES[share]: values for share, values in times.items()}}
            append_record(given.json, {**record, **found, **rounds, "bytes_used": bytes_used})
    head = ["tokens in common", *(word for name in NAMES.values() for word in (f"{name}, ms a step", "growth"))]
    rows = [
        [length, *(cell for share in NAMES for cell in (f"{steps[share][at]:.1f}", growth(steps[share], at)))]
        for at, length in enumerate(lengths)
    ]
    print(format_table(head, rows, given.markdown))
    print(f"\n{hardware_line(hardware())}; {given.threads} threads; commit {commit()}; {time.strftime('%Y-%m-%d')}")
    if given.plot:
        lines = {"sharing": steps[True], "not sharing": steps[False]}
        given.plot.parent.mkdir(parents=True, exist_ok=True)
        given.plot.write_text(plot(lengths, lines), encoding="utf-8")


def start_batch(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Computes all prompts. All later steps decode the whole batch, until the first request has `max_tokens`."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        llm.engine.add(str(index), prompt, params)
    scheduler = llm.engine.scheduler
    while scheduler.waiting or any(sequence.num_pending > 1 for sequence in scheduler.running):
        llm.engine.step()
    assert len(scheduler.running) == len(prompts), f"{len(scheduler.running)} of {len(prompts)} requests run"


def end_batch(llm: LLM) -> None:
    """Ends all requests. Asserts that every step decoded the whole batch."""
    running = llm.engine.scheduler.running
    assert len(running) == BATCH, f"{len(running)} of {BATCH} requests are left"
    assert llm.stats()["preemptions"] == 0, "requests were preempted: the cache is too small"
    for sequence in list(running):
        llm.engine.abort(sequence.request.request_id)


def growth(values: Sequence[float], at: int) -> str:
    """A value as a multiple of the first one."""
    return f"{values[at] / values[0]:.2f}x"


def plot(lengths: Sequence[int], lines: Mapping[str, Sequence[float]]) -> str:
    """An SVG of milliseconds per step over common tokens, both axes from zero, a line with dots for each name."""
    width, height, left, right, top, bottom = 640, 360, 64, 150, 24, 48
    most = max(value for values in lines.values() for value in values)
    stride = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if most / size <= 6)
    ceiling = stride * (int(most / stride) + 1)

    def x(tokens: float) -> float:
        return round(left + (width - left - right) * tokens / lengths[-1], 1)

    def y(milliseconds: float) -> float:
        return round(height - bottom - (height - top - bottom) * milliseconds / ceiling, 1)

    def text(at: tuple[float, float], anchor: str, words: object, more: str = "") -> str:
        return f'<text x="{at[0]}" y="{at[1]}" text-anchor="{anchor}"{more}>{words}</text>'

    shapes = []
    for value in range(0, ceiling + 1, stride):
        shapes.append(f'<path d="M{left} {y(value)}H{width - right}" stroke="#ddd"/>')
        shapes.append(text((left - 8, y(value) + 4), "end", value))
    shapes += [text((x(length), height - bottom + 18), "middle", length) for length in (0, *lengths)]
    shapes.append(text(((left + width - right) / 2, height - 8), "middle", f"tokens in common, {BATCH} requests"))
    middle = (top + height - bottom) / 2
    shapes.append(text((16, middle), "middle", "milliseconds a step", f' transform="rotate(-90 16 {middle})"'))
    for (name, values), color in zip(lines.items(), ("#0b6e4f", "#b3401f"), strict=True):
        points = [(x(length), y(value)) for length, value in zip(lengths, values, strict=True)]
        path = " ".join(f"{px},{py}" for px, py in points)
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        shapes += [f'<circle cx="{px}" cy="{py}" r="3.5" fill="{color}"/>' for px, py in points]
        label = (points[-1][0] + 10, points[-1][1] + 4)
        shapes.append(text(label, "start", f"{name} {growth(values, -1)}", f' fill="{color}"'))
    style = 'font-family="sans-serif" font-size="12" fill="#333"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [f"{head} {style}>", f'<rect width="{width}" height="{height}" fill="#fff"/>', *shapes, "</svg>\n"]
    )


if __name__ == "__main__":
    main()
