"""How an instance says again and again that it is alive, and what it has to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from quire.cluster.attempt_states import Timers
from quire.cluster.bodies import InstanceLoad
from quire.cluster.engine_attempts import EngineAttempts

log = logging.getLogger("quire")

LOAD_SECONDS = 0.2
"""Interval at which an instance says that it is alive."""

STATS_EVERY = 5
"""Every so many times it also tells the engine's counters."""


class Heartbeat:
    """Asks the engine's attempts for their load, and sends it.

    name      of the instance
    submit    runs a command on the engine's thread
    send      sends a load
    patience  seconds in which the engine must end a step
    stop      is called once it has not
    """

    def __init__(
        self,
        name: str,
        timers: Timers,
        submit: Callable[[Callable[[], object]], None],
        send: Callable[[InstanceLoad], None],
        patience: float,
        stop: Callable[[], None],
    ) -> None:
        self._name, self._timers, self._submit, self._send = name, timers, submit, send
        self._patience, self._stop = patience, stop
        self._num_loads = 0
        self._load: InstanceLoad | None = None
        self._asked_at: float | None = None  # when the engine was asked for it; None: it has answered

    def beat(self, engine_attempts: EngineAttempts) -> None:
        """Sends the last load, asks for the next one, and does so again in a while.

        The engine's thread may be in a long step: then the load is that of before, and says nothing of what goes on. An
        engine that stands still for longer than a request may wait ends its instance.
        """
        if self._load is not None:
            self._send(self._load if self._asked_at is None else replace(self._load, at_work=()))
        now = self._timers.clock()
        if self._asked_at is None:
            self._num_loads += 1
            self._asked_at = now
            self._submit(partial(self._read_load, engine_attempts, self._num_loads % STATS_EVERY == 1))
        elif now - self._asked_at > self._patience:
            log.error("the engine has not ended a step for %.0f s", self._patience)
            self._stop()
        self._timers.after(LOAD_SECONDS, partial(self.beat, engine_attempts))

    def _read_load(self, engine_attempts: EngineAttempts, with_stats: bool) -> None:
        """On the engine's thread."""
        self._load, self._asked_at = engine_attempts.load(self._name, with_stats=with_stats), None
