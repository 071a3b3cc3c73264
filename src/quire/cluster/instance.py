"""An instance: a process with an engine, which the router starts.

    python -m quire.cluster.start NUMBER      with a `LaunchConfig` as JSON on the standard input

It loads the model, measures its speed and reports to the router. It then serves attempts until the router ends it, or
until the connection to the router is lost.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.cluster.agent import Agent
from quire.cluster.attempt_states import deadlines_within
from quire.cluster.bodies import AssignRole, InstanceReady, LoadingHeartbeat
from quire.cluster.connections import PeerConnections, TransportError
from quire.cluster.engine_attempts import EngineAttempts
from quire.cluster.messages import ROUTER
from quire.cluster.peer_store import PeerStore
from quire.cluster.prefixes import PrefixQuery, PrefixService
from quire.config import EngineConfig
from quire.engine.capacity import measure_capacity
from quire.engine.outputs import RequestOutput
from quire.engine.pins import Pin, pin_prefixes
from quire.engine_thread import EngineThread
from quire.load import load_engine
from quire.stores.signer import ExtentSigner
from quire.version import __version__

log = logging.getLogger("quire")

DIAL_SECONDS = 10.0
"""Seconds for which an instance tries to reach its router."""

HELLO_SECONDS = 1.0
"""Interval of heartbeats while an instance loads."""

END_SECONDS = 10.0
"""Seconds for which an ending instance waits for its engine's step."""


@dataclass(frozen=True)
class LaunchConfig:
    """The configuration with which a router starts an instance.

    name       name of the instance, with the number of its start: a restarted instance has another name
    router     address of the router
    secret     secret of the cluster, hexadecimal
    model      as on the command line
    options    settings of the engine, by key
    transport  transport of the caches: shm or tcp
    host       address on which the instance listens
    cores      cores on which the instance runs; empty: all
    timeout    seconds without a token after which the router gives an attempt up
    log_level  log level of the process
    pin_file   file of the pins, for messages
    pins       prefixes that are computed and pinned for each of the salts, before the instance is ready
    """

    name: str
    router: str
    secret: str
    model: str
    options: dict[str, Any]
    config_file: str | None = None
    transport: str = "shm"
    host: str = "127.0.0.1"
    cores: tuple[int, ...] = ()
    timeout: float = 60.0
    log_level: int = logging.WARNING
    pin_file: str = ""
    pins: tuple[Pin, ...] = ()
    salts: tuple[str, ...] = ("",)

    def to_json(self) -> str:
        """The configuration as one line. Values of options that JSON cannot represent, such as paths, become text."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> LaunchConfig:
        """The inverse of `to_json`."""
        return msgspec.convert(json.loads(text), cls)


def compatibility_tag() -> bytes:
    """Names the version of Quire, which is the same in all processes of a cluster."""
    return f"quire {__version__}".encode()


class Instance:
    """Engine, connections and agent of one process."""

    # Set once the engine has started.
    _engine_attempts: EngineAttempts
    _ready: InstanceReady

    def __init__(self, launch_config: LaunchConfig, is_ready: Callable[[], None] = lambda: None) -> None:
        """is_ready: called before the router learns that the instance is ready."""
        self.launch_config = launch_config
        self._is_ready = is_ready
        secret = bytes.fromhex(launch_config.secret)
        signer = ExtentSigner(secret)
        self._signer = signer
        self._peer_store = PeerStore(signer)
        self._started, self._is_alone = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._failed = False
        self._connections = PeerConnections(
            launch_config.name, secret, self, launch_config.transport, compatibility_tag=compatibility_tag()
        )
        config = EngineConfig.from_options(
            launch_config.options, Path(launch_config.config_file) if launch_config.config_file else None
        )
        if (log_file := config.runtime.step_log) is not None:
            own = Path(log_file).with_suffix(f".{launch_config.name}{Path(log_file).suffix}")
            config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, step_log=str(own)))
        load = functools.partial(
            load_engine, launch_config.model, config, show_progress=False, peer_tiers=[self._peer_store]
        )
        self.thread = EngineThread(load, self, launch_config.transport)
        self._prefix_service = PrefixService(self.thread, self._connections)
        self.agent = Agent(
            launch_config.name,
            self._connections,
            self._peer_store,
            self.thread.submit,
            deadlines_within(launch_config.timeout),
        )

    def run(self) -> int:
        """Runs until the router ends it. Returns the exit code."""
        self._connections.learn(ROUTER, self.launch_config.router)
        try:
            self._connections.connect(ROUTER, DIAL_SECONDS)
        except TransportError as error:
            log.error("the router cannot be reached: %s", error)
            return 1
        self.thread.start()
        while not self._started.wait(HELLO_SECONDS):
            self._connections.send(ROUTER, LoadingHeartbeat(self.launch_config.name))
        if self._error is not None:
            reason = str(self._error) or type(self._error).__name__
            failed = InstanceReady(self.launch_config.name, "", 0, 0, None, 0.0, 0.0, error=reason)
            self._connections.send(ROUTER, failed)
            self._is_alone.wait(DIAL_SECONDS)  # the router closes the connection once it has read the error
            self._connections.close()
            return 1
        self._is_ready()
        self._connections.send(ROUTER, self._ready)
        self.agent.run(self._engine_attempts)
        self._connections.close()
        if self._failed:
            return 1
        self.thread.stop()
        self.thread.join(END_SECONDS)
        return 1 if self.thread.is_alive else 0

    def end(self) -> None:
        """Ends `run` soon; while the model loads, it ends the process at once."""
        self.agent.stop()
        if not self._started.is_set():
            os._exit(1)

    # ---- EngineListener: on the engine's thread --------------------------------------------------------------------

    def has_started(self, error: BaseException | None) -> None:
        """Measures the engine, and reports that the instance is ready."""
        self._error = error
        if error is None:
            try:
                self._begin()
            except BaseException as failure:
                self._error = failure
        self._started.set()

    def _begin(self) -> None:
        assert self.thread.loaded is not None
        engine = self.thread.loaded.engine
        if engine.grammars is not None:
            engine.grammars.warm()
        self._engine_attempts = EngineAttempts(
            engine, self._peer_store, self._signer, self.agent.notice, self.thread.submit
        )
        if self.launch_config.pins:
            pin_prefixes(engine, Path(self.launch_config.pin_file), self.launch_config.pins, self.launch_config.salts)
        found = measure_capacity(engine)
        self._ready = InstanceReady(
            self.launch_config.name, self._connections.listen(self.launch_config.host), found.prompt_rows, found.batch,
            engine.limits, found.seconds_per_row, found.seconds_per_step,
            cache_bytes=engine.scheduler.manager.stats()["bytes_total"], namespace=engine.namespace,
        )  # fmt: skip

    def has_stepped(self, outputs: list[RequestOutput]) -> None:
        """See EngineListener."""
        self._engine_attempts.has_stepped(outputs)

    def has_failed(self, reason: str) -> None:
        """Ends the instance of an engine that has stopped. The router starts another one."""
        self._failed = True
        self.agent.stop()

    # ---- Handler: on a connection's threads ------------------------------------------------------------------------

    def receive(self, sender: str, message: Any, extents: Iterator[memoryview]) -> None:
        """See Handler."""
        match message:
            case AssignRole(role):
                self.thread.submit(functools.partial(self._set_role, role))
            case PrefixQuery():
                self._prefix_service.handle(message)
            case _:
                self.agent.receive(sender, message, extents)

    def connection_lost(self, name: str) -> None:
        """See Handler."""
        self.agent.connection_lost(name)
        if name == ROUTER:
            self._is_alone.set()
            if not self._started.is_set():
                os._exit(1)  # it still loads, and holds no attempts

    def _set_role(self, role: str) -> None:
        assert self.thread.loaded is not None
        scheduler = self.thread.loaded.engine.scheduler
        scheduler.policy.prompt_rows = self._ready.prompt_rows if role == "prefill" else None


def log_to_stderr(launch_config: LaunchConfig) -> None:
    """Logs to stderr, with the instance's name in each line."""
    line = f"%(asctime)s %(levelname)s {launch_config.name}: %(message)s"
    logging.basicConfig(level=launch_config.log_level, format=line, stream=sys.stderr)


def run(is_ready: Callable[[], None]) -> int:
    """Runs the instance that the standard input describes. is_ready: see Instance. Returns the exit code."""
    launch_config = LaunchConfig.from_json(sys.stdin.readline())
    log_to_stderr(launch_config)
    if launch_config.cores:
        os.sched_setaffinity(0, launch_config.cores)
    instance = Instance(launch_config, is_ready)
    signal.signal(signal.SIGTERM, lambda *_: instance.end())
    return instance.run()
