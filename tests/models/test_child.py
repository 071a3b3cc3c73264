"""A program in its own process: closing it, and the end of ours, while a thread asks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quire.models.child import DIED, NEEDS_CONTEXT, ChildProcess

PROGRAM = "tests.child_program"


def done() -> tuple[Any, ...]:
    return b"d", 0


@pytest.fixture
def child() -> Any:
    made = ChildProcess(PROGRAM, ())
    yield made
    made.close()


def test_closing_answers_the_thread_that_asks_at_once(child: ChildProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(child.ask, (b"d", 30), done)
        while child._process is None or child._socket is None:
            time.sleep(0.01)
        time.sleep(0.1)
        begun = time.monotonic()
        child.close()
        assert answer.result(5) == (DIED, "")
        assert time.monotonic() - begun < 5
    assert child.ask(done(), done) == (b"d", "answer")


def beside(work: Callable[[], object]) -> threading.Thread:
    """Runs it on another thread, as far as that gets while this one has the lock."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.2)
    return thread


@pytest.mark.parametrize("place", ["started", "between the requests"])
def test_closing_at_any_moment_of_a_request_is_no_error(
    place: str, child: ChildProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing: list[threading.Thread] = []

    def whole() -> tuple[Any, ...]:
        if place != "started":
            closing.append(beside(child.close))
        return done()

    start = child._start

    def started() -> None:
        start()
        if place == "started":
            closing.append(beside(child.close))

    monkeypatch.setattr(child, "_start", started)
    assert child.ask((NEEDS_CONTEXT, 0), whole) == (DIED, "")
    monkeypatch.undo()
    closing[0].join()
    assert child.ask(done(), done) == (b"d", "answer")


SCRIPT = """
import sys, threading, time
from quire.models.child import ChildProcess
child = ChildProcess("tests.child_program", ())

def run():
    while True:
        child.ask((b"u", 0.02), lambda: time.sleep(0.02) or (b"d", 0.02))

threading.Thread(target=run, daemon=True).start()
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.1, 0.3])
def test_a_process_ends_in_silence_while_a_thread_asks(seconds: float) -> None:
    command = [sys.executable, "-c", SCRIPT, str(seconds)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
