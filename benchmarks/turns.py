"""Programs that take turns on one machine: each is stopped while another is timed.

Knows processes and a line of JSON out, a line of JSON in; does not know what the lines mean.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class WorkerError(Exception):
    """A worker did not start, or failed; one line that says which and why."""


class Worker:
    """A program and all it starts, which run only between `resume` and `pause`.

    It answers every line of JSON on its standard input with one on its standard output, the first without being asked.
    """

    def __init__(
        self, name: str, command: Sequence[object], environment: Mapping[str, str], log: Path, limit_seconds: float
    ) -> None:
        """Start the program, wait for its first answer (`ready`), and leave it paused.

        log            where its standard error goes
        limit_seconds  longest wait for the first answer
        Raises WorkerError.
        """
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            # A session of its own, by which all its processes are found.
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                bufsize=1,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        try:
            self.ready = self._answer(limit_seconds)
        except BaseException:
            self.close()
            raise
        self.pause()

    def ask(self, limit_seconds: float = 600, **request: object) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises WorkerError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
        except BrokenPipeError:
            raise WorkerError(f"{self.name}: its process ended; see {self.log}") from None
        return self._answer(limit_seconds)

    def pause(self) -> None:
        """Stop every process of the program, so that no thread of it spins while others are timed."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the program run again."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End every process of the program."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in session(self.process.pid):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue

    def _answer(self, limit_seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], limit_seconds)[0]:
            raise WorkerError(f"{self.name}: no answer within {limit_seconds:.0f} s; see {self.log}")
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(f"{self.name}: its process ended; see {self.log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}; see {self.log}")
        return answer


class Meter:
    """Cores kept busy by anything but one worker and this script, since construction."""

    def __init__(self, worker: Worker) -> None:
        """Begin counting."""
        self.leader = worker.process.pid
        self.began, self.before = time.monotonic(), self._foreign_seconds()

    def other_cores(self) -> float:
        """Average number of cores; 0 when the machine is otherwise idle."""
        return max(0.0, (self._foreign_seconds() - self.before) / (time.monotonic() - self.began))

    def _foreign_seconds(self) -> float:
        return busy_seconds() - sum(process.cpu_seconds for process in session(self.leader)) - time.process_time()


@dataclass(frozen=True)
class Process:
    """One process: its id, and the CPU seconds it and its ended children have used."""

    pid: int
    cpu_seconds: float


def session(leader: int) -> list[Process]:
    """All living processes of the session that process `leader` started (Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The program's name may hold spaces and brackets; nothing after its last bracket does.
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            ticks = sum(int(value) for value in fields[11:15])
            found.append(Process(int(path.parent.name), ticks / os.sysconf("SC_CLK_TCK")))
    return found


def busy_seconds() -> float:
    """CPU seconds this machine has worked, or was kept from working by its host, since it started (Linux)."""
    user, nice, system, _idle, _wait, interrupt, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")
