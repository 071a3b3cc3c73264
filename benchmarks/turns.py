"""Programs that take turns on one machine. Each is stopped while another is timed.

Knows processes and lines of JSON, not their meaning.
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
    """A worker did not start, or failed. The message names it and the reason in one line."""


class Worker:
    """A program and all processes it starts, which run only between `resume` and `pause`.

    It answers every line of JSON on its standard input with one on its standard output. The first answer comes unasked.
    """

    def __init__(
        self, name: str, command: Sequence[object], environment: Mapping[str, str], log: Path, limit_seconds: float
    ) -> None:
        """Starts the program, waits for its first answer (`ready`), and leaves it paused.

        log            file for its standard error
        limit_seconds  longest wait for the first answer
        Raises WorkerError.
        """
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            # A session of its own identifies all its processes.
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
        """Sends one request and waits for its answer. Raises WorkerError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
        except BrokenPipeError:
            raise WorkerError(f"{self.name}: its process ended; see {self.log}") from None
        return self._answer(limit_seconds)

    def pause(self) -> None:
        """Stops every process of the program, so that none of its threads spins while others are timed."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continues the program."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends every process of the program."""
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
    """The cores that other programs than one worker and this script kept busy since construction."""

    def __init__(self, worker: Worker) -> None:
        """Starts counting."""
        self.leader = worker.process.pid
        self.began, self.before = time.monotonic(), self._foreign_seconds()

    def other_cores(self) -> float:
        """Average number of cores; 0 if the machine is otherwise idle."""
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
            # The program's name may have spaces and brackets. No field after its last bracket has any.
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            ticks = sum(int(value) for value in fields[11:15])
            found.append(Process(int(path.parent.name), ticks / os.sysconf("SC_CLK_TCK")))
    return found


def busy_seconds() -> float:
    """CPU seconds that this machine worked, or that its host took from it, since it started (Linux)."""
    user, nice, system, _idle, _wait, interrupt, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")
