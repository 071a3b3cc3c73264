"""Shared by the runners: tasks of token ids, the result of a task with one thinned cache, and the loop.

Runs in each engine's own virtual environment, so it needs only the standard library. Tasks are a JSON list of objects
with the fields of `Task`. Results are JSON lines. The first names the engine's version. Then follows one per task and
cache, as soon as it is known:

    {"version": "0.5.5"}
    {"task": "5a0e1c77", "method": "SnapKV", "kept": 0.5, "resident": 0.5, "answer": [216, 33, 34, 35, 36, 37, 30]}
    {"task": "90c2d1f4", "method": "SnapKV", "kept": 0.5, "resident": 0.5, "surprise": 741.3, "agreeing": 201, ...}

A task that an engine cannot run has no results. Tasks with results in the file are not run again.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# Below peers/, which the script that starts the runners puts on the path.
from worker import end_with_parent

FULL = "full"
"""The name of the method that keeps every token."""


@dataclass(frozen=True)
class Task:
    """A prompt with a cache that is thinned when the prompt is complete, and the work that follows.

    name           a unique name
    prompt         token ids
    later          token ids that are read after the thinning, before the answer
    kept           shares of the prompt's keys and values to keep, below 1; the full cache is always added
    continuation   the true text after the prompt. The full cache predicts its first id, which is not scored. The
                   thinned cache predicts the others, reading one id after the other. Empty: the engine writes an answer
    answer_tokens  most ids of an answer, decoded greedily
    stop           ids that end the answer
    """

    name: str
    prompt: list[int]
    later: list[int]
    kept: list[float]
    continuation: list[int]
    answer_tokens: int
    stop: list[int]


@dataclass(frozen=True)
class Result:
    """One task with one cache.

    method      the engine's name of its method
    kept        the requested share; 1 for FULL
    resident    bytes of the cache after the prompt, as a share of the full cache's
    resident_end  the same at the end; None if the engine does not report it
    answer      ids of the answer, if the task has one; else None
    surprise    sum of -ln p over the continuation without its first id, in nats; None for an answer
    agreeing    number of these positions with the full cache's most probable token
    divergence  sum of KL(full || thinned) over them, in nats; None also if the engine does not report it
    """

    method: str
    kept: float
    resident: float
    answer: list[int] | None = None
    surprise: float | None = None
    agreeing: int | None = None
    divergence: float | None = None
    resident_end: float | None = None


@dataclass(frozen=True)
class Engine:
    """A started engine. `run` runs one task with every cache."""

    version: str
    run: Callable[[Task], Iterator[Result]]


def work(start: Callable[[argparse.Namespace], Engine]) -> None:
    """Starts the engine and runs all tasks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--tasks", type=Path, required=True, metavar="FILE", help="JSON list")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="JSON lines, appended to")
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    end_with_parent()
    tasks = [Task(**fields) for fields in json.loads(given.tasks.read_text())]
    engine = start(given)
    before = given.results.read_text().splitlines() if given.results.exists() else []
    done = {json.loads(line).get("task") for line in before}
    with given.results.open("a") as file:
        file.write(json.dumps({"version": engine.version}) + "\n")
        for number, task in enumerate(tasks):
            if task.name in done:
                continue
            # All results of a task are written at once, so that the file has whole tasks.
            results = [{"task": task.name, **asdict(result)} for result in engine.run(task)]
            file.write("".join(json.dumps(result) + "\n" for result in results))
            file.flush()
            print(f"{number + 1} of {len(tasks)} tasks", file=sys.stderr)
