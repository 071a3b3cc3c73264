"""Runs servers and command lines as child processes, and keeps what is compared of their answers.

Knows the environment of child processes, and in which order things are asked.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recorded.asking import Answer, ask, running, wait_until_drained
from recorded.cases import Crowd, Line, Places, Request, Server
from recorded.masks import (
    Marks,
    Masked,
    blamed_of,
    document_of,
    failure_of,
    headers_of,
    metrics_of,
    output_of,
    shape_of,
)
from recorded.streams import masked_stream

START_SECONDS = 180.0
END_SECONDS = 60.0
BACKGROUND_SECONDS = 10.0
LINE_SECONDS = 240.0

FAILURES = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)
"""Of requests: no answer came, it could not be read, or an earlier one lacks what a request needs."""

SHAPES = ("/v1/cluster", "/version")
"""Paths whose answers are compared by their fields alone."""


class RunError(Exception):
    """There is nothing to run: no package, or no model. The message is one line."""


@dataclass
class Run:
    """The code of one tree, run on the files of one temporary folder.

    source  folder that the package quire is imported from
    tell    called with what begins
    """

    source: Path
    places: Places
    tell: Callable[[str], None]
    environment: dict[str, str] = field(init=False)
    texts: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        own = {
            "PYTHONPATH": str(self.source),
            "XDG_CACHE_HOME": str(self.places.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
            "NO_COLOR": "1",
        }
        foreign = ("QUIRE_LOG", "QUIRE_API_KEY", "OTEL_EXPORTER_OTLP_ENDPOINT")
        kept = {name: value for name, value in os.environ.items() if name not in foreign}
        self._link_cache(kept)
        self.environment = kept | own
        self.texts = {str(self.places.folder): "FOLDER", str(self.source): "SOURCE"}

    def _link_cache(self, environment: Mapping[str, str]) -> None:
        """A cache folder that has of the user's only downloaded models and compiled kernels: what else is kept there
        changes what commands print. Raises RunError if the embedded model is not there, or the package is another one.
        """
        known = dict(environment) | {"PYTHONPATH": str(self.source)}
        code = "import quire; print(quire.__file__)"
        told = subprocess.run([sys.executable, "-c", code], env=known, capture_output=True, text=True)
        if told.returncode or not Path(told.stdout.strip()).is_relative_to(self.source):
            raise RunError(f"{self.source} has no package quire that can be imported: {told.stdout}{told.stderr}")
        kept = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"
        if not list(kept.glob("models/SmolLM2*.gguf")):
            raise RunError("the embedded model is not in the cache; run: quire pull smollm2")
        own = self.places.folder / "cache" / "quire"
        own.mkdir(parents=True)
        for name in ("models", "kernels"):
            (kept / name).mkdir(exist_ok=True)
            (own / name).symlink_to(kept / name)

    # ---- command lines -----------------------------------------------------------------------------------------------

    def line(self, line: Line, url: str = "") -> dict[str, Any]:
        """What is compared of one command line."""
        self.tell(line.name)
        marks = Marks(self.texts)
        command = [sys.executable, "-m", "quire", *(word.replace("{url}", url) for word in line.words)]
        try:
            done = subprocess.run(
                command, input=line.stdin, capture_output=True, text=True, timeout=LINE_SECONDS, errors="replace",
                env=self.environment | dict(line.variables), cwd=self.places.folder,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return failed(error, marks)
        if done.returncode and line.shows == "plan":
            return failed(RunError((done.stderr.strip() or "no message").splitlines()[-1]), marks)
        return {
            "status": done.returncode,
            "output": output_of(done.stdout, line.shows, marks),
            "blamed": blamed_of(done.stderr) if done.returncode else "",
            "files": {name: self._file(name, shows, marks) for name, shows in line.files.items()},
        }

    def _file(self, name: str, shows: str, marks: Marks) -> Any:
        path = self.places.folder / name
        return output_of(path.read_text(encoding="utf-8"), shows, marks) if path.exists() else None

    # ---- servers -----------------------------------------------------------------------------------------------------

    def server(self, server: Server) -> dict[str, Any]:
        """What is compared of one server: its answers by name, and as `server` its own output and exit status. A server
        that does not start has only the latter.
        """
        answers = ServerAnswers(Marks(self.texts), self.tell, is_cluster="--cluster.prefill" in server.words)
        lines: list[str] = []
        with self._serving(server, lines) as process:
            if not lines[-1:] or not lines[-1].startswith("ready"):
                return {"server": {"status": process.wait(), "failed": "not ready"}}
            port = int(lines[-1].split()[-1].removesuffix("/v1").rpartition(":")[2])
            for step in server.steps:
                match step:
                    case Request():
                        answers.ask(port, step)
                    case Crowd():
                        self._ask_crowd(step, process, port, answers)
                    case Line():
                        answers.found[step.name] = self.line(step, f"http://127.0.0.1:{port}")
            if not any(isinstance(step, Crowd) and step.drains for step in server.steps):
                process.send_signal(signal.SIGTERM)  # a second one would cut off what runs
            with killed_after(END_SECONDS, process):
                assert process.stdout is not None
                lines += process.stdout
                status = process.wait()
        answers.found["server"] = {
            "status": status,
            "output": output_of("".join(lines), server.shows, Marks(self.texts)),
        }
        return answers.found

    def _ask_crowd(self, crowd: Crowd, process: subprocess.Popen[str], port: int, answers: ServerAnswers) -> None:
        """Sends requests while others run."""
        try:
            with running(port, crowd.running, answers.bodies):
                if crowd.drains:
                    process.send_signal(signal.SIGTERM)
                    wait_until_drained(port)
                for request in crowd.then:
                    answers.ask(port, request)
        except FAILURES as error:
            answers.found |= {
                each.name: failed(error, answers.marks) for each in crowd.then if each.name not in answers.found
            }

    @contextmanager
    def _serving(self, server: Server, lines: list[str]) -> Iterator[subprocess.Popen[str]]:
        """The process of a server that is ready, or that has ended. lines: of its output are added."""
        self.tell(f"{server.name}: quire serve")
        log = self.places.folder / f"{server.name}.log"
        command = [sys.executable, "-m", "quire", "serve", *server.words, "--port", "0", "--runtime.threads", "1"]
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=self.environment,
                cwd=self.places.folder,
            )  # fmt: skip
        assert process.stdout is not None
        try:
            with killed_after(START_SECONDS, process):
                while not lines[-1:] or not lines[-1].startswith("ready"):
                    if not (line := process.stdout.readline()):
                        print(log.read_text(), end="", file=sys.stderr)
                        break
                    lines.append(line)
            yield process
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextmanager
def killed_after(seconds: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """Kills a process if the context takes longer."""
    late = threading.Timer(seconds, process.kill)
    late.start()
    try:
        yield
    finally:
        late.cancel()


def failed(error: Exception, marks: Marks) -> dict[str, Any]:
    """Stands for an answer that did not come, or that could not be read. It says why."""
    return {"failed": failure_of(error, marks)}


@dataclass
class ServerAnswers:
    """What one server has answered so far.

    found   what is compared, by name
    bodies  the answers themselves, for requests that follow from them
    """

    marks: Marks
    tell: Callable[[str], None]
    is_cluster: bool = False
    found: dict[str, Any] = field(default_factory=dict)
    bodies: dict[str, Any] = field(default_factory=dict)

    def ask(self, port: int, request: Request) -> None:
        """Sends a request and keeps its answer."""
        assert request.name not in self.found, f"two requests are called {request.name}"
        self.tell(request.name)
        try:
            path = request.url(self.bodies).partition("?")[0]
            answer = self._answer(port, request)
            compared, self.bodies[request.name] = self._read(answer, path)
        except FAILURES as error:
            self.found[request.name] = failed(error, self.marks)
            return
        asked_id = next((value for name, value in request.headers.items() if name.lower() == "x-request-id"), None)
        headers = headers_of(answer.headers, asked_id)
        self.found[request.name] = {"status": answer.status, "headers": headers, "body": compared}

    def _answer(self, port: int, request: Request) -> Answer:
        """The answer, or the last one of a request that is repeated."""
        until = time.monotonic() + BACKGROUND_SECONDS
        answer = ask(port, request, self.bodies)
        while request.until is not None and not request.until(json.loads(answer.body)) and time.monotonic() < until:
            time.sleep(0.1)
            answer = ask(port, request, self.bodies)
        return answer

    def _read(self, answer: Answer, path: str) -> tuple[Any, Any]:
        """A body as it is compared, and as it is."""
        kind = answer.headers.get("content-type", "")
        masked = Masked(self.marks)
        if kind.startswith("text/event-stream"):
            return masked_stream(answer.body, path, masked)
        text = answer.body.decode(errors="replace")
        if not kind.startswith("application/json"):
            return (metrics_of(text) if path == "/metrics" else self.marks.plain(text)), text
        if not text:
            return "", None
        value = json.loads(text)
        if answer.status != 200:
            return masked(value), value
        if path == "/openapi.json":
            return document_of(value), value
        if path.startswith(SHAPES):
            return shape_of(value), value
        if self.is_cluster and path in ("/debug/cache", "/v1/cache/prefixes") and "num_prefixes" in value:
            value = _of_instances(value)
        return masked(value), value


def _of_instances(value: dict[str, Any]) -> dict[str, Any]:
    """The prefixes of a cluster without what depends on times: instances tell their counts once in a while, choose
    between fetching and computing by measured speeds, and free what they have sent when it has arrived.
    """
    shapes = ("totals", "tiers", "moves")
    found = {name: shape_of(each) if name in shapes else each for name, each in value.items()}
    for name in found.keys() & {"prefixes", "data"}:
        found[name] = sorted(found[name], key=lambda each: [str(each.get(key)) for key in ("key", "id", "instance")])
    return found
