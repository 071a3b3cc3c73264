"""The loop every engine under test runs inside: one JSON request per line in, one JSON answer per line out.

Runs in the engine's own virtual environment, so it knows the standard library only. The engine logs what it likes:
file descriptor 1 is given to standard error first, and answers leave through a private copy of it.

    {"op": "run", "batch": 8, "prompt": 128, "output": 128, "seed": 3}  ->  {"seconds": 1.23, "first_seconds": null}
    {"op": "check"}                                                     ->  {"tokens": [284, ...]}
    {"op": "quit"}
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1

# "The capital of France is" in SmolLM2's vocabulary.
CHECK_PROMPT = [504, 3575, 282, 4649, 314]
CHECK_TOKENS = 32

# SmolLM2's ids below 17 are control tokens; its vocabulary ends at 49,152.
TEXT_TOKENS = range(17, 49152)


@dataclass(frozen=True)
class Engine:
    """An engine that has started."""

    check: Callable[[], list[int]]
    """Greedy continuation of CHECK_PROMPT by CHECK_TOKENS tokens."""
    run: Callable[[int, int, int, int], tuple[float, float | None]]
    """(batch, prompt tokens, output tokens, seed) -> seconds from token ids to all new token ids, and of these the
    seconds of a prompt phase that ends, for the whole batch at once, with the first tokens; None if there is none."""
    version: str
    settings: str


def arguments() -> argparse.Namespace:
    """The arguments every runner takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="checkpoint folder, GGUF file or model name")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-gib", type=int, required=True, help="size of the KV cache, the same for every engine")
    parser.add_argument("--programs", help="folder of the engine's programs, where it is not a Python package")
    parser.add_argument("--native", action="store_true", help="keep 4-bit weights packed")
    return parser.parse_args()


def library(generate: Callable[[list[list[int]], int], list[list[int]]], version: str, settings: str) -> Engine:
    """An engine called in this process.

    generate  (prompts, output tokens) -> the new token ids of every prompt; greedy, not stopping at an end token
    """

    def run(batch: int, prompt: int, output: int, seed: int) -> tuple[float, None]:
        source = random.Random(seed)
        prompts = [[source.choice(TEXT_TOKENS) for _ in range(prompt)] for _ in range(batch)]
        began = time.perf_counter()
        answers = generate(prompts, output)
        elapsed = time.perf_counter() - began
        if [len(answer) for answer in answers] != [output] * batch:
            lengths = sorted({len(answer) for answer in answers})
            raise RuntimeError(f"asked for {batch} x {output} tokens, got {len(answers)} x {lengths}")
        return elapsed, None

    return Engine(lambda: generate([CHECK_PROMPT], CHECK_TOKENS)[0], run, version, settings)


def serve(start: Callable[[], Engine]) -> None:
    """Start the engine, then answer requests until standard input ends. An exception is answered and ends it."""
    # A benchmark that is killed must not leave gigabytes of engine behind, and paused ones would never see the end of
    # their input. Where this call (Linux) does not exist nothing is lost but that.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")

    began = time.perf_counter()
    try:
        engine = start()
        answer(start_seconds=time.perf_counter() - began, version=engine.version, settings=engine.settings)
        for line in sys.stdin:
            request = json.loads(line)
            operation = request.pop("op")
            if operation == "quit":
                break
            if operation == "check":
                answer(tokens=engine.check())
            else:
                seconds, first_seconds = engine.run(**request)
                answer(seconds=seconds, first_seconds=first_seconds)
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}".splitlines()[0])
        sys.exit(1)
