"""What the runners share: windows of tokens, what an engine made of them through one cache, and the loop that asks.

Runs in each engine's own virtual environment, so it knows the standard library only. One line of JSON in, one out; the
first answer comes unasked and names the caches with the bits of their codes, first the one that quantizes nothing:

    {"version": "5.23.0", "caches": {"f16": 16, "quanto-4": 4}}
    {"cache": "quanto-4"}  ->  {"bytes_per_token": 8190.0, "surprise": [5662.7, 6011.2]}

Windows are run in slices of SLICE_TOKENS, Quire's own chunk: in one call the later tokens would read the earlier ones
before anything was quantized, and most caches would show no loss at all.
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

    bytes_per_token  what the cache holds of a whole window, divided by the window's tokens
    surprise         for every window the sum of -ln p over all its tokens but the first
    """

    bytes_per_token: float
    surprise: list[float]


@dataclass(frozen=True)
class Cache(Generic[Settings]):
    """A cache that an engine can have: the bits of a code, the fewer where keys and values differ; and how to ask."""

    bits: int
    settings: Settings


@dataclass(frozen=True)
class Engine(Generic[Settings]):
    """An engine that has started, and the caches it can have; the first quantizes nothing."""

    version: str
    caches: Mapping[str, Cache[Settings]]
    measure: Callable[[Settings, Windows], Score]


def arguments() -> argparse.Namespace:
    """The arguments every runner takes; `windows` is read already."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="checkpoint folder or GGUF file")
    parser.add_argument("--windows", type=read_windows, required=True, metavar="FILE", help="JSON: lists of token ids")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--programs", type=Path, help="folder of the engine's programs, where it is no Python package")
    return parser.parse_args()


def read_windows(path: str) -> Windows:
    """Token ids by window."""
    windows: Windows = json.loads(Path(path).read_text())
    return windows


def slices(window: list[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """(position of the first token, a slice's tokens, the tokens that follow each): the last slice has one fewer of
    these, since nothing follows the window.
    """
    for begin in range(0, len(window), SLICE_TOKENS):
        end = begin + SLICE_TOKENS
        yield begin, window[begin:end], window[begin + 1 : end + 1]


def serve(start: Callable[[argparse.Namespace], Engine[Settings]]) -> None:
    """Start the engine and measure one cache per line until the input ends. A cache that fails is answered as an
    error, and the next may be asked for.
    """
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # What libraries print must not come between the answers.
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
