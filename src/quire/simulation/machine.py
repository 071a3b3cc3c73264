"""Engines on one machine, which slow each other down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from quire.simulation.events import Call, Events

After = Callable[[float, Call], object]
"""Does something after the seconds that a step takes where nothing else computes."""


@dataclass(eq=False)
class _Step:
    """A step that runs. left: seconds that it would take from now on, alone."""

    left: float
    slower: float
    ended: Call


class Machine:
    """What several engines compute on. They share caches, memory and cores: while n others compute, a step goes on at
    1 / (1 + n * slower) of its speed, where `slower` is `LatencyModel.beside`.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._steps: list[_Step] = []
        self._since = 0.0
        self._version = 0

    def place(self, slower: float) -> After:
        """For the steps of an engine that others slow down by `slower` each."""
        return partial(self._begin, slower)

    def _begin(self, slower: float, seconds: float, ended: Call) -> None:
        self._go_on()
        self._steps.append(_Step(seconds, slower, ended))
        self._plan()

    def _go_on(self) -> None:
        """What is left of the steps, now."""
        passed, self._since = self._events.now - self._since, self._events.now
        for step in self._steps:
            step.left -= passed / self._stretch(step)

    def _stretch(self, step: _Step) -> float:
        return 1 + step.slower * (len(self._steps) - 1)

    def _plan(self) -> None:
        """The next step that ends does so, unless another one begins before."""
        self._version += 1
        if self._steps:
            following = min(self._steps, key=lambda step: step.left * self._stretch(step))
            seconds = max(0.0, following.left * self._stretch(following))
            self._events.after(seconds, partial(self._end, self._version, following))

    def _end(self, version: int, step: _Step) -> None:
        if version != self._version:
            return
        self._go_on()
        self._steps.remove(step)
        self._plan()
        step.ended()
