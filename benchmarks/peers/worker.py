"""The loop around every engine under test: one JSON request per line in, one JSON answer per line out.

Runs in the engine's own virtual environment, so it needs only the standard library. The engine may print anything: file
descriptor 1 is redirected to standard error, and answers go through a private copy of it.

    {"op": "run", "batch": 8, "prompt": 128, "output": 128, "seed": 3}
        ->  {"seconds": 1.23, "first_seconds": null, "cached_tokens": 0}
    {"op": "check"}  ->  {"tokens": [284, ...]}
    {"op": "quit"}

A run's further fields, "common" and "common_seed", are those of `Work`.
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
from dataclasses import asdict, dataclass
from typing import NamedTuple

PR_SET_PDEATHSIG = 1

# "The capital of France is" in SmolLM2's vocabulary.
CHECK_PROMPT = [504, 3575, 282, 4649, 314]
CHECK_TOKENS = 32

# SmolLM2's ids below 17 are control tokens; its vocabulary ends at 49,152.
TEXT_TOKENS = range(17, 49152)


@dataclass(frozen=True)
class Work:
    """Requests of random token ids, submitted at once.

    batch        number of requests
    prompt       tokens of each request
    output       new tokens of each request
    seed         seed of the token ids
    common       number of leading tokens that are the same in all requests, and in other work with equal `common_seed`
    """

    batch: int
    prompt: int
    output: int
    seed: int
    common: int = 0
    common_seed: int = 0

    def prompts(self) -> list[list[int]]:
        """The token ids of every request."""
        source, common = random.Random(self.seed), random.Random(f"common {self.common_seed}")
        prefix = [common.choice(TEXT_TOKENS) for _ in range(self.common)]
        own = self.prompt - self.common
        return [prefix + [source.choice(TEXT_TOKENS) for _ in range(own)] for _ in range(self.batch)]


@dataclass(frozen=True)
class Timing:
    """The duration of some work.

    seconds        from token ids to all new token ids
    first_seconds  the part of a prompt phase that ends with the first tokens of the whole batch at once; None if there
                   is none
    cached_tokens  prompt tokens of all requests found in the engine's cache; None if it does not report them
    """

    seconds: float
    first_seconds: float | None = None
    cached_tokens: int | None = None


class Answer(NamedTuple):
    """One request's new token ids, and its prompt tokens found in the cache, if the engine reports them."""

    token_ids: list[int]
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Engine:
    """A started engine."""

    check: Callable[[], list[int]]
    """Greedy continuation of CHECK_PROMPT by CHECK_TOKENS tokens."""
    run: Callable[[Work], Timing]
    version: str
    settings: str


def arguments() -> argparse.Namespace:
    """The arguments of every runner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="checkpoint folder, GGUF file or model name")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-gib", type=int, required=True, help="size of the KV cache, the same for every engine")
    parser.add_argument("--programs", help="folder of the engine's programs, if it is no Python package")
    parser.add_argument("--native", action="store_true", help="keep 4-bit weights packed")
    parser.add_argument("--option", action="append", default=[], help="KEY=VALUE, one of Quire's settings")
    return parser.parse_args()


def library(generate: Callable[[list[list[int]], int], list[Answer]], version: str, settings: str) -> Engine:
    """An engine that takes all prompts in one call.

    generate  (prompts, output tokens) -> an answer to every prompt, greedy and without stopping at an end token
    """

    def run(work: Work) -> Timing:
        prompts = work.prompts()
        began = time.perf_counter()
        answers = generate(prompts, work.output)
        elapsed = time.perf_counter() - began
        if [len(answer.token_ids) for answer in answers] != [work.output] * work.batch:
            lengths = sorted({len(answer.token_ids) for answer in answers})
            raise RuntimeError(f"asked for {work.batch} x {work.output} tokens, got {len(answers)} x {lengths}")
        found = [answer.cached_tokens for answer in answers]
        return Timing(elapsed, cached_tokens=None if None in found else sum(found))

    return Engine(lambda: generate([CHECK_PROMPT], CHECK_TOKENS)[0].token_ids, run, version, settings)


def end_with_parent() -> None:
    """Makes the system kill this process when its parent ends (Linux; does nothing elsewhere).

    A killed benchmark must not leave engines with gigabytes of memory behind. A paused engine would never see the end
    of its input.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(start: Callable[[], Engine]) -> None:
    """Starts the engine, then answers requests until standard input ends. An exception is reported and ends it."""
    end_with_parent()
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
                answer(**asdict(engine.run(Work(**request))))
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}".splitlines()[0])
        sys.exit(1)
