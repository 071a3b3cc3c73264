"""Runs a workload through a simulated engine or cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from quire.simulation.cluster import Answered, Front
from quire.simulation.events import Events
from quire.simulation.outcome import STAGES, Outcome

if TYPE_CHECKING:
    from quire.workload.workload import Workload


def simulate(
    workload: Workload,
    prompts: Sequence[list[int]],
    front_of: Callable[[Events], Front],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """What comes of a workload.

    prompts   token ids of each request: of those that follow another one in a conversation only the new ones. What
              follows a failed request has stand-ins for the missing tokens of its answer
    front_of  makes what takes the requests
    progress  is told the number of requests that have ended, and of all
    """
    events = Events()
    front = front_of(events)
    count = len(workload.arrivals)
    answers: list[Answered | None] = [None] * count
    following: dict[int, list[int]] = {}
    left = count

    def begin(index: int, before: list[int]) -> None:
        prompt = before + prompts[index]
        answers[index] = front.begin(prompt, workload.arrivals[index].num_out, partial(end, index, prompt))

    def end(index: int, prompt: list[int], answered: Answered) -> None:
        nonlocal left
        left -= 1
        progress(count - left, count)
        for later in following.pop(index, []):
            missing = workload.arrivals[index].num_out - len(answered.token_ids)  # stand-ins, if the request failed
            whole = prompt + answered.token_ids + np.resize(prompts[index], missing).tolist()
            events.after(workload.arrivals[later].pause, partial(begin, later, whole))

    for index, arrival in enumerate(workload.arrivals):
        if arrival.after < 0:
            events.at(arrival.at, partial(begin, index, []))
        else:
            following.setdefault(arrival.after, []).append(index)
    events.run(lambda: not left)
    found = [each for each in answers if each is not None]
    assert len(found) == count and not left, f"{left} requests did not end"
    return outcome_of(found, front, events.now)


def outcome_of(answers: Sequence[Answered], front: Front, seconds: float) -> Outcome:
    """The times of all requests as arrays."""
    columns = {
        name: np.array([getattr(each, name) for each in answers], np.float64)
        for name in ("arrived", "admitted", "first", "taken", "last")
    }
    bounds = [columns[name] for name in ("arrived", "admitted", "first", "taken", "last")]
    with np.errstate(invalid="ignore"):
        stages = {name: after - before for name, before, after in zip(STAGES, bounds, bounds[1:], strict=False)}
    tiers = dict.fromkeys(tier for each in answers for tier in each.cached)
    by_tier = {tier: np.array([each.cached.get(tier, 0) for each in answers], np.int64) for tier in tiers}
    num_in, num_out = (np.array([getattr(each, name) for each in answers], np.int64) for name in ("num_in", "num_out"))
    cached = sum(by_tier.values(), np.zeros(len(answers), np.int64))
    return Outcome(
        columns["arrived"], columns["first"], columns["last"], num_out, num_in, cached, by_tier, stages, front.used(),
        seconds,
    )  # fmt: skip
