"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from quire import parent_watch
from quire.cluster.instance import LaunchConfig
from quire.cluster.processes import Processes
from quire.kernels.build import _run

PATIENCE = 20.0

BUSY = """
import sys
from quire import parent_watch
number = int(sys.argv[1])
parent_watch.exit_with_parent(number)
{then}
print("tied", flush=True)
while True:
    3 ** 3_000_000  # keeps the interpreter's lock for a second
"""

SERVER = """
import sys, time
from quire.cluster.instance import LaunchConfig
from quire.cluster.processes import Processes
processes = Processes()
order = LaunchConfig("mixed-0.1", "shm://nobody", "00", "smollm2", {})
processes.start(order)
print(processes.pid(order.name), flush=True)
time.sleep(60)
"""

COMPILER = """
import sys
from pathlib import Path
from quire.kernels.build import _run
_run(["sh", "-c", "sleep 61.5 & echo $$ $! > {file}; wait"], Path("/nowhere"))
"""


def ends(pid: int, seconds: float = PATIENCE) -> bool:
    """Whether a process ends in time. One that nobody has waited for has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.005)
    return False


def busy(then: str = "") -> tuple[subprocess.Popen[bytes], int]:
    process, writing = parent_watch.start([sys.executable, "-c", BUSY.format(then=then)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"tied\n"
    return process, writing


def test_a_process_ends_with_its_starter_though_it_keeps_the_interpreters_lock() -> None:
    process, writing = busy()
    os.close(writing)
    assert process.wait(PATIENCE) == -signal.SIGIO
    process.communicate()


def test_a_process_goes_on_when_the_thread_that_started_it_ends() -> None:
    started: list[tuple[subprocess.Popen[bytes], int]] = []
    thread = threading.Thread(target=lambda: started.append(busy()))
    thread.start()
    thread.join()
    (process, writing), *_ = started
    assert not ends(process.pid, 0.1)
    os.close(writing)
    assert process.wait(PATIENCE) == -signal.SIGIO
    process.communicate()


def test_a_process_that_is_untied_goes_on() -> None:
    process, writing = busy("parent_watch.outlive_parent(number)")
    os.close(writing)
    assert not ends(process.pid, 0.1)
    process.kill()
    process.communicate()


def test_a_process_that_begins_after_its_starter_has_ended_ends_too() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    code = "import sys, time; from quire.parent_watch import exit_with_parent; exit_with_parent(int(sys.argv[1]))"
    code += "; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(reading)], pass_fds=(reading,))
    os.close(reading)
    assert process.wait(PATIENCE) == 1


def test_a_process_that_cannot_be_started_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        parent_watch.start(["/no/such/program"])
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
def test_an_instance_that_starts_ends_with_its_starter(seconds: float) -> None:
    """Also while it imports and, on a fast machine, while it waits for its configuration."""
    process, writing = parent_watch.start(
        [sys.executable, "-m", "quire.cluster.start"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(seconds)
    os.close(writing)
    is_over = ends(process.pid, 1.0)
    process.kill()
    assert is_over and process.communicate()[1] == b""


def test_signals_of_a_terminal_do_not_reach_an_instance() -> None:
    """Ctrl-C and SIGHUP reach all its processes; the server ends its instances when their requests are done."""
    process, writing = parent_watch.start(
        [sys.executable, "-m", "quire.cluster.start"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + PATIENCE
    wanted = 1 << signal.SIGHUP - 1 | 1 << signal.SIGINT - 1
    while (
        int(Path(f"/proc/{process.pid}/status").read_text().partition("SigIgn:")[2].split()[0], 16) & wanted != wanted
    ):
        assert time.monotonic() < until
        time.sleep(0.005)
    os.close(writing)
    process.communicate()


def test_nothing_is_left_of_a_server_that_is_killed_while_an_instance_starts() -> None:
    """One that got as far as to dial its router would say that nobody answers."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    instance = int(server.stdout.readline())
    server.kill()
    is_over = ends(instance, 1.0)
    _, said = server.communicate(timeout=PATIENCE)
    assert is_over and said == ""


def test_an_instance_that_is_killed_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    processes = Processes()
    launch_config = LaunchConfig("mixed-0.1", "shm://nobody", "00", "smollm2", {})
    processes.start(launch_config)
    pid = processes.pid(launch_config.name)
    assert pid is not None and not processes.ended()
    processes.kill(launch_config.name)
    assert ends(pid) and processes.pid(launch_config.name) is None
    assert processes.ended() == [] and len(os.listdir("/proc/self/fd")) == len(before)


def test_a_compiler_and_what_it_starts_end_with_the_process_that_waits_for_them(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    builder = subprocess.Popen([sys.executable, "-c", COMPILER.format(file=file)])
    until = time.monotonic() + PATIENCE
    while not (file.exists() and len(file.read_text().split()) == 2):
        assert time.monotonic() < until and builder.poll() is None
        time.sleep(0.01)
    shell, sleep = map(int, file.read_text().split())
    builder.kill()
    builder.wait()
    assert ends(shell, 2.0) and ends(sleep, 2.0)


def test_a_tied_command_has_its_own_output_and_status(tmp_path: Path) -> None:
    done = parent_watch.run(["sh", "-c", "echo out; echo err >&2; exit 3"], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    _run(["true"], tmp_path)
