"""Start and graceful shutdown of the server: sockets, signals, draining.

On SIGTERM, SIGINT or SIGHUP the server answers 503 to new requests and to /health/ready. Running requests have
serve.drain_seconds to finish; then the server aborts the rest and ends. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from quire.errors import ConfigError
from quire.options import format_count
from quire.server.app import create_app
from quire.server.auth import ApiKeys, check_exposure
from quire.server.connection import HttpConnection
from quire.server.connection_manager import ConnectionLimits, ConnectionManager
from quire.server.service import Service, shutting_down

if TYPE_CHECKING:
    from quire.config import ServeConfig, SloConfig
    from quire.server.engines import ServedEngine

BACKLOG = 2048
"""Maximum number of connections that wait to be accepted."""


log = logging.getLogger("quire.server")

OTHER_FILES = 128
"""Open files other than connections: weights, caches, the log, files of libraries."""


class HttpListener:
    """A bound socket and the API keys. Created before the model is loaded, so that their errors show early.

    The socket does not listen before the model is loaded: a client's connection is refused rather than left waiting.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.keys = ApiKeys.from_file(config.api_key_file)
        check_exposure(config.host, self.keys, config.allow_public)
        self.socket = _bind(config.host, config.port)
        self._others: list[socket.socket] = []
        host, self.port = self.socket.getsockname()[:2]
        self.url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def listen(self) -> None:
        """Lets clients connect. Raises ConfigError if another program listens there by now."""
        try:
            # Connections closed by this side stay a minute in TIME_WAIT. They inherit this option, so a restart can
            # bind.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.listen(BACKLOG)
        except OSError as error:
            raise _cannot_listen(self.config.host, self.port, error) from error

    def sockets(self) -> list[socket.socket]:
        """The sockets for the event loop: the same socket several times, because uvloop accepts one connection per
        socket and turn. With a single one, /health would wait for hundreds of turns when as many connections arrive at
        once.
        """
        self._others = [self.socket.dup() for _ in range(ACCEPTED - 1)]
        return [self.socket, *self._others]

    def close(self) -> None:
        """Releases the port."""
        for each in (self.socket, *self._others):
            each.close()


ACCEPTED = 16
"""Connections that are accepted in one turn of uvloop: 3 ms. asyncio's own loop accepts all that wait."""

SWITCH_SECONDS = 0.001
"""Time after which a busy thread lets another one run; Python's default is 5 ms. The event loop waits that long in each
of its turns while a thread prepares conversations."""


@dataclass(frozen=True)
class ServeSummary:
    """Summary of a run: seconds from `ready` to the end, number of prompts answered or cut off, generated tokens."""

    seconds: float
    num_answered: int
    num_cut_off: int
    num_tokens: int

    def __str__(self) -> str:
        cut_off = f", {self.num_cut_off:,} cut off" if self.num_cut_off else ""
        prompts = "prompt" if self.num_answered == 1 else "prompts"
        return (
            f"stopped after {self.seconds:.1f} s: {self.num_answered:,} {prompts} answered{cut_off},"
            f" {self.num_tokens:,} tokens generated"
        )


async def serve(
    llm: ServedEngine,
    listener: HttpListener,
    ready: Callable[[], None] = lambda: None,
    limits: ConnectionLimits | None = None,
    slo: SloConfig | None = None,
) -> ServeSummary:
    """Serves `llm` until a signal. `llm` is already started; this function closes it.

    ready   called when the prefixes of cache.pin are computed for every tenant and the server listens
    limits  limits of connections; by default from the settings and the system
    slo     latency targets of the metrics
    Raises ConfigError if the cache.pin file is invalid or its prefixes do not fit, and if the port was taken meanwhile.
    """
    config = listener.config
    app = create_app(llm, config, listener.keys, slo)
    service: Service = app.state.service
    body_reader = service.body_reader
    manager = ConnectionManager(
        limits or connection_limits(config), service.metrics.refused, body_reader.start_throttle,
        body_reader.memory_trimmer.note_freed,
        lambda scope: service.tenant(scope) is not None,
    )  # fmt: skip
    server = _Server(
        uvicorn.Config(
            app,
            http=functools.partial(HttpConnection, manager),  # type: ignore[arg-type]
            ws="none",
            log_level="warning",
            access_log=False,
            use_colors=False,  # otherwise uvicorn calls stdout.isatty(), and stdout may be closed
            lifespan="off",
            server_header=False,
            timeout_keep_alive=75,
            # After the drain only connections remain that do not read their last bytes.
            timeout_graceful_shutdown=2,
        )
    )
    beside: list[asyncio.Future[None]] = []
    try:
        # Until this is computed, a signal ends the process as it does while the model is loaded.
        await llm.pin(service.tenants.salts)
        # A collection stops all threads. It takes 0.1 s over the objects of libraries and model, which are frozen here,
        # and less than 10 ms over those of requests.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_SECONDS)
        listener.listen()
        begun = time.monotonic()
        watches = (
            _drain_on_signal(service, server, manager, config.drain_seconds),
            manager.watch(),
            service.metrics.watch_lag(),
        )
        beside += map(asyncio.ensure_future, watches)
        for each in beside:
            each.add_done_callback(_log_failure)
        serving = asyncio.ensure_future(server.serve(sockets=listener.sockets()))
        beside.append(serving)
        while not (server.started or serving.done()):
            await asyncio.sleep(0.01)
        if server.started:
            ready()
        await serving
        seconds = time.monotonic() - begun
        return ServeSummary(seconds, service.num_answered, service.num_cut_off, service.num_tokens)
    finally:
        gc.unfreeze()
        for each in beside:
            each.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await llm.close(0.0)
        for listening in getattr(server, "servers", ()):
            # If uvicorn is cancelled, its socket stays registered, and the loop would mistake the next one with the
            # same file descriptor for it.
            listening.close()
        listener.close()


def _log_failure(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task of the server failed", exc_info=error)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would close the sockets before /health/ready can answer 503."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _drain_on_signal(
    service: Service, server: uvicorn.Server, manager: ConnectionManager, drain_seconds: float
) -> None:
    """Waits for a signal, then for the running requests to finish or for a second signal, and then ends `server`.

    A request with an incomplete body is not running, so a slow client does not delay the end.
    """
    loop = asyncio.get_running_loop()
    signalled, hurried = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if server.should_exit:
            server.force_exit = True
        if signalled.is_set():
            hurried.set()
        signalled.set()

    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup sets SIG_IGN
        signals.append(signal.SIGHUP)
    for each in signals:
        loop.add_signal_handler(each, on_signal)
    try:
        await signalled.wait()
        service.draining = True
        manager.close_unsent(shutting_down())
        if count := service.in_flight:
            log.info(
                "waiting for %s, at most %g s; Ctrl-C again ends %s",
                format_count(count, "request"), drain_seconds, "it" if count == 1 else "them",
            )  # fmt: skip
        ends = [asyncio.ensure_future(event.wait()) for event in (service.idle, hurried)]
        await asyncio.wait(ends, timeout=drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await service.engine.close(0.0)
        server.should_exit = True
        # Never returns, so that the handler stays for a further signal.
        await asyncio.Event().wait()
    finally:
        for each in signals:
            loop.remove_signal_handler(each)


def connection_limits(config: ServeConfig) -> ConnectionLimits:
    """The limits of connections. Fewer connections are allowed if this process may not open enough files."""
    needed = config.max_connections + ConnectionLimits.lingering + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed and soft != resource.RLIM_INFINITY:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    connections = config.max_connections
    if soft < needed and soft != resource.RLIM_INFINITY:
        connections = max(1, connections - (needed - soft))
        log.warning(
            "serve.max_connections is %d, but this process may open only %d files, so %d connections; raise ulimit -n",
            config.max_connections, soft, connections,
        )  # fmt: skip
    return ConnectionLimits(connections=connections, per_address=config.max_connections_per_address)


def _bind(host: str, port: int) -> socket.socket:
    """A socket that has the port to itself although it does not listen yet.

    With SO_REUSEADDR the kernel gives a port to several sockets as long as none listens, so two servers that load at
    the same time would both get it. Without it, a port stays taken for a minute after a server that closed connections.
    So the first try is without the option. The second try sets it, which ignores connections in TIME_WAIT, and clears
    it after binding; `HttpListener.listen` sets it again. Unlike a lock file, the kernel compares addresses and knows
    other programs.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        for reuse in (0, 1):
            bound = socket.socket(family, kind, protocol)
            try:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                bound.bind(address)
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
                return bound
            except OSError as error:
                bound.close()
                if reuse or error.errno != errno.EADDRINUSE:
                    raise
        raise AssertionError("the second attempt returns or raises")
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
    hint = "choose another with --port" if is_port else "--host is an address of this machine"
    return ConfigError(f"cannot listen on {host}:{port} ({error.strerror or error}); {hint}")
