"""Shared by the runners: windows of tokens, the score of a cache, and the loop that answers requests.

Runs in each engine's own virtual environment, so it needs only the standard library. Each line of JSON in gets one line
out. The first answer comes unasked. It names the caches with the bits of their codes, the unquantized cache first:

    {"version": "5.23.0", "caches": {"f16": 16, "quanto-4": 4}}
    {"cache": "quanto-4"}  ->  {"bytes_per_token": 8190.0, "surprise": [5662.7, 6011.2]}

Windows are read in slices of SLICE_TOKENS, Quire's chunk. In one single call, tokens would read earlier ones before
they are quantized, and most caches would show no loss.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

# Below peers/, which the script that starts the runners puts on the path.
from worker import end_with_parent

SLICE_TOKENS = 64

Settings = TypeVar("Settings")
Windows = list[list[int]]


@dataclass(frozen=True)
class Score:
    """One cache's figures.

    bytes_per_token  bytes of the cache for a whole window, divided by the window's tokens
    surprise         for every window, the sum of -ln p over all its tokens but the first
    """

    bytes_per_token: float
    surprise: list[float]


@dataclass(frozen=True)
class Cache(Generic[Settings]):
    """A cache of an engine: the bits of a code, the smaller if keys and values differ; and its settings."""

    bits: int
    settings: Settings


@dataclass(frozen=True)
class Engine(Generic[Settings]):
    """A started engine, and its caches, the unquantized one first."""

    version: str
    caches: Mapping[str, Cache[Settings]]
    measure: Callable[[Settings, Windows], Score]


def arguments() -> argparse.Namespace:
    """The arguments of every runner; `windows` is already read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="checkpoint folder or GGUF file")
    parser.add_argument("--windows", type=read_windows, required=True, metavar="FILE", help="JSON: lists of token ids")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--programs", type=Path, help="folder of the engine's programs, if it is no Python package")
    return parser.parse_args()


def read_windows(path: str) -> Windows:
    """Token ids by window."""
    windows: Windows = json.loads(Path(path).read_text())
    return windows


def slices(window: list[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """(position of the first token, a slice's tokens, the token that follows each). The last slice has one fewer of
    these, because nothing follows the window.
    """
    for begin in range(0, len(window), SLICE_TOKENS):
        end = begin + SLICE_TOKENS
        yield begin, window[begin:end], window[begin + 1 : end + 1]


def serve(start: Callable[[argparse.Namespace], Engine[Settings]]) -> None:
    """Starts the engine and measures one cache per line until the input ends. A cache that fails is answered with an
    error, and the next one may follow.
    """
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Output of libraries must not mix with the answers.
    os.dup2(2, 1)

    def failed(error: Exception) -> str:
        traceback.print_exc()
        return json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0]}) + "\n"

    given = arguments()
    try:
        engine = start(given)
    except Exception as error:
        answers.write(failed(error))
        sys.exit(1)
    bits = {name: cache.bits for name, cache in engine.caches.items()}
    answers.write(json.dumps({"version": engine.version, "caches": bits}) + "\n")
    for line in sys.stdin:
        began = time.perf_counter()
        try:
            score = engine.measure(engine.caches[json.loads(line)["cache"]].settings, given.windows)
        except Exception as error:
            answers.write(failed(error))
        else:
            answers.write(json.dumps({**asdict(score), "seconds": time.perf_counter() - began}) + "\n")
