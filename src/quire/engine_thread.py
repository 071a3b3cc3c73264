"""The thread that owns an engine. Only this thread touches the model and the cache; others send it commands."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.step_log import StepLog
from quire.errors import QuireError
from quire.load import LoadedEngine
from quire.models.fingerprint import fingerprint

log = logging.getLogger("quire")

LOADING_THREAD, ENGINE_THREAD = "quire-loading", "quire-engine"
"""Names of an engine's thread, while it loads and afterwards."""


ROOM_SECONDS = 0.05
"""If exports hold all room, the engine waits for a command, which may end an export, for at most this many seconds.
Then it checks whether anything else has made room.
"""


class EngineListener(Protocol):
    """Receives the events of an engine's thread. The methods are called on that thread."""

    def has_started(self, error: BaseException | None) -> None:
        """Called when loading has ended. error: the reason if it failed, else None."""

    def has_stepped(self, outputs: list[RequestOutput]) -> None:
        """Called after every step, and after commands."""

    def has_failed(self, reason: str) -> None:
        """Called when the engine stops because of an error."""


class EngineThread:
    """Loads an engine, then runs commands and steps until `stop`.

    loaded   the engine and its context; None before and after the thread runs it
    failure  the error by which it stopped; None if there was none
    """

    def __init__(self, load: Callable[[], LoadedEngine], listener: EngineListener, transport: str = "") -> None:
        """transport: the transport of caches from other engines; empty: there are no other engines."""
        self.loaded: LoadedEngine | None = None
        self.failure: str | None = None
        self._transport = transport
        self._load = load
        self._listener = listener
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._main, name=LOADING_THREAD, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, command: Callable[[], object]) -> None:
        """Runs a command between two steps."""
        self._commands.append(command)
        self._wake.set()

    def replace(self, loaded: LoadedEngine) -> None:
        """Called in a command: replaces the engine."""
        self.loaded = loaded

    def stop(self) -> None:
        """Ends the thread, before the next step."""
        self.submit(_stop)

    def join(self, seconds: float | None = None) -> None:
        """Waits for the thread's end, for `seconds` at most. Later commands are not run."""
        self._thread.join(seconds)
        self._commands.clear()
        self.loaded = None

    @property
    def _engine(self) -> Engine:
        """The present engine: a command may replace it."""
        assert self.loaded is not None
        return self.loaded.engine

    def _main(self) -> None:
        try:
            self.loaded = self._load()
            steps = self._step_log(self.loaded)
        except BaseException as error:
            self._listener.has_started(error)
            return
        threading.current_thread().name = ENGINE_THREAD
        self._listener.has_started(None)
        try:
            while True:
                engine = self._engine
                if not self._commands and not engine.has_work:
                    assert engine.holds_nothing, f"an idle engine holds {engine.stats()['cache']}"
                    self._wake.wait(engine.idle())
                elif not self._commands and engine.is_blocked:
                    self._wake.wait(ROOM_SECONDS)
                self._wake.clear()
                while self._commands:
                    self._commands.popleft()()
                engine = self._engine
                if steps is None:
                    self._listener.has_stepped(engine.step())
                    continue
                steps.begin()
                self._listener.has_stepped(engine.step())
                steps.end(goes_on=engine.has_work)
        except _Stopped:
            engine.tiering.close()
            self.loaded = None
        except BaseException as error:
            if isinstance(error, QuireError):
                log.error("the engine stopped: %s", error)
            else:
                log.exception("the engine stopped")
            self.failure = str(error) or type(error).__name__  # the error's traceback would keep the engine
            self._listener.has_failed(self.failure)
            if engine.tiering.tiers is not None:  # their chunks are complete
                engine.tiering.tiers.close()
        finally:
            if steps is not None:
                steps.close()

    def _step_log(self, loaded: LoadedEngine) -> StepLog | None:
        file = loaded.config.runtime.step_log
        if file is None:
            return None
        model = fingerprint(loaded.path)
        return StepLog(Path(file), loaded.engine, model, loaded.config, transport=self._transport)


def is_loading() -> bool:
    """Whether an engine's thread is loading. If the process exits while such a thread runs native code, the process
    dies by a signal.
    """
    return any(thread.name == LOADING_THREAD for thread in threading.enumerate())


class _Stopped(Exception):
    """Ends the engine's thread."""


def _stop() -> None:
    raise _Stopped
