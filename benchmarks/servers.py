"""Servers of language models as processes: their start, readiness and end.

Knows command lines and ports, not requests.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from common import ROOT

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from worker import end_with_parent

START_SECONDS = 180
# The first start of vLLM compiles for about two minutes.
PEER_START_SECONDS = 900


class ServerError(Exception):
    """A server did not start, or did not end well. The message names it and its log in one line."""


@dataclass(frozen=True)
class Server:
    """A running server. It ends with the process that started it."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def drain(self) -> None:
        """Ends it as an operator does. Raises ServerError unless its exit code is 0."""
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(60):
            raise ServerError(f"the server ended with exit code {self.process.returncode}")

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()


@contextmanager
def quire_server(log: Path, *words: object, tree: Path = ROOT) -> Iterator[Server]:
    """`quire serve WORDS` on a free port, until it is drained or the context ends. Raises ServerError.

    tree  the checkout that it runs
    """
    path = os.pathsep.join(filter(None, [str(tree / "src"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "quire", "serve", *map(str, words), "--host", "127.0.0.1", "--port", "0"]
    process = _start(command, log, {"PYTHONPATH": path}, subprocess.PIPE)
    assert process.stdout is not None
    late = threading.Timer(START_SECONDS, process.kill)  # not select: lines may wait in the stream's buffer
    late.start()
    try:
        line = "start"
        while line and not line.startswith("ready"):  # a line for each instance comes first
            line = process.stdout.readline()
        late.cancel()
        if not line:
            raise ServerError(f"the server did not become ready, see {log}")
        yield Server(process, int(line.split()[-1].removesuffix("/v1").rpartition(":")[2]))
    finally:
        late.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def peer_server(log: Path, command: Sequence[object], environment: Mapping[str, str]) -> Iterator[Server]:
    """Another server, started with `--port`, as soon as its /health answers. Raises ServerError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = _start([*map(str, command), "--host", "127.0.0.1", "--port", str(port)], log, environment, is_group=True)
    try:
        deadline = time.monotonic() + PEER_START_SECONDS
        while not answers(port, "/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"{Path(str(command[0])).name} did not become ready, see {log}")
            time.sleep(0.5)
        yield Server(process, port)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers would go on, and take a core
        process.wait()


def answers(port: int, path: str, seconds: float = 1.0) -> bool:
    """Whether a GET is answered with 200 in time."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _start(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    output: int | None = None,
    *,
    is_group: bool = False,
) -> subprocess.Popen[str]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as errors:
        return subprocess.Popen(
            command,
            stdout=errors if output is None else output,
            stderr=errors,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=end_with_parent,
            start_new_session=is_group,
        )
