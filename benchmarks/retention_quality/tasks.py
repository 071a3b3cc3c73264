"""What the runners share: tasks of token ids, what an engine made of one through one thinned cache, and the loop.

Runs in each engine's own virtual environment, so it knows the standard library only. Tasks are a JSON list of objects
with the fields of `Task`. Results are JSON lines: the first names the engine's version, then one per task and cache, as
soon as it is there:

    {"version": "0.5.5"}
    {"task": "5a0e1c77", "method": "SnapKV", "kept": 0.5, "resident": 0.5, "answer": [216, 33, 34, 35, 36, 37, 30]}
    {"task": "90c2d1f4", "method": "SnapKV", "kept": 0.5, "resident": 0.5, "surprise": 741.3, "agreeing": 201, ...}

A task that an engine cannot do has no results. Tasks whose results are in the file already are not done again.
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
"""The method that keeps every token."""


@dataclass(frozen=True)
class Task:
    """A prompt whose cache is thinned when all of it is there, and what is done on what is left.

    name           tells this task from every other
    prompt         token ids
    later          token ids that are read after the thinning, before the answer
    kept           shares of the prompt's keys and values to keep, below 1; the full cache comes on top
    continuation   the true text behind the prompt. The prompt predicts its first id from the full cache, which is not
                   scored; the others are predicted from the thinned one, to which each id is given in turn. Empty: the
                   engine writes an answer instead
    answer_tokens  ids of an answer, greedy, at most
    stop           ids that end it
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
    """One task through one cache.

    method      the engine's name of the way tokens are chosen
    kept        the share that was asked for; 1 for FULL
    resident    bytes that the cache holds behind the prompt, by those of the full cache
    resident_end  the same behind all that was read and written; None where the engine does not tell
    answer      ids that were written, of a task that wants them; else None
    surprise    sum of -ln p over the continuation but its first id, in nats; None for an answer
    agreeing    how many of these positions have the full cache's most probable token
    divergence  sum of KL(full || thinned) over them, in nats; None also where the engine does not tell
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
    """An engine that has started. `run` does one task through every cache."""

    version: str
    run: Callable[[Task], Iterator[Result]]


def work(start: Callable[[argparse.Namespace], Engine]) -> None:
    """Start the engine and do all tasks."""
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
            # All of a task at once: what is there is whole.
            results = [{"task": task.name, **asdict(result)} for result in engine.run(task)]
            file.write("".join(json.dumps(result) + "\n" for result in results))
            file.flush()
            print(f"{number + 1} of {len(tasks)} tasks", file=sys.stderr)
