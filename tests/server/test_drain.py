"""Signals that end a server, on a real process with real sockets."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
BODY = {"prompt": "abcdefgh", "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def server(drain_seconds, *before):
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "tests.server.drain_server", str(drain_seconds)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        url = process.stdout.readline().strip()
        assert url, process.stderr.read()
        with httpx.Client(base_url=url, timeout=10) as http:
            yield process, http
    finally:
        process.kill()
        process.communicate()


class Reader(threading.Thread):
    """Reads a stream to its end in a thread of its own."""

    def __init__(self, url, max_tokens):
        super().__init__(daemon=True)
        self.url, self.max_tokens, self.text, self.begun = url, max_tokens, "", threading.Event()
        self.start()
        assert self.begun.wait(10)

    def run(self):
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            httpx.stream("POST", f"{self.url}/v1/completions", json=BODY | {"max_tokens": self.max_tokens}) as response,
        ):
            for part in response.iter_text():
                self.text += part
                self.begun.set()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_running_requests_finish_and_exits_with_zero(ending):
    with server(drain_seconds=20) as (process, http):
        assert http.get("/health/ready").status_code == 200
        reader = Reader(str(http.base_url).rstrip("/"), max_tokens=60)
        process.send_signal(ending)
        until = time.monotonic() + 5
        while http.get("/health/ready").status_code != 503:
            assert time.monotonic() < until
        assert http.get("/health/live").status_code == 200
        refused = http.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        reader.join(10)
        assert reader.text.endswith("data: [DONE]\n\n") and reader.text.count('"text"') == 60
        assert process.wait(5) == 0
        assert process.stderr.read() == "waiting for 1 request, at most 20 s; Ctrl-C again ends it\n"
        last = r"stopped after \d+\.\d s: 1 prompt answered, 60 tokens generated\n"
        assert re.fullmatch(last, process.stdout.read())


@pytest.mark.slow
def test_a_drain_that_takes_too_long_is_cut_off_with_an_error_event():
    with server(drain_seconds=0.2) as (process, http):
        reader = Reader(str(http.base_url).rstrip("/"), max_tokens=2000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        reader.join(5)
        assert '"shutting_down"' in reader.text and "[DONE]" not in reader.text
        assert re.search(r"s: 0 prompts answered, 1 cut off, \d+ tokens generated\n", process.stdout.read())


@pytest.mark.slow
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP]])
def test_an_idle_server_ends_at_once(signals):
    with server(drain_seconds=20) as (process, http):
        http.get("/health")  # leaves a kept-alive connection open
        for each in signals:
            process.send_signal(each)
        assert process.wait(5) == 0
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_under_nohup_a_terminal_that_closes_ends_nothing():
    with server(20, "nohup") as (process, http):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        assert http.get("/health/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


def test_a_second_signal_does_not_wait():
    with server(drain_seconds=60) as (process, http):
        reader = Reader(str(http.base_url).rstrip("/"), max_tokens=2000)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert "Traceback" not in process.stderr.read()
        reader.join(5)
        assert '"shutting_down"' in reader.text, "what was running ends with an error, not in silence"


def test_a_client_that_hangs_up_is_noticed_through_the_socket():
    with server(drain_seconds=5) as (_, http):
        with contextlib.suppress(httpx.ReadTimeout):
            http.post("/v1/completions", json=BODY | {"stream": False, "max_tokens": 2000}, timeout=0.2)
        with http.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 2000}) as response:
            next(response.iter_bytes())
        until = time.monotonic() + 3
        while "quire_requests_running 0.0" not in (metrics := http.get("/metrics").text):
            assert time.monotonic() < until, metrics
