"""`quire serve` with instances in processes of their own, as users run it: seen, changed, held back and killed."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.cli import main

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
FORM = (
    r"{role}-0: {role}, L_m \d+ rows at [\d.e-]+ ms each, decodes up to \d+ at [\d.e-]+ ms a step, "
    r"(all cores|cores? [\d, -]+), cache of [\d.]+(Mi|Ki)B\n"
)


@contextlib.contextmanager
def serving(folder, tmp_path, *words):
    """One instance computes prompts and one decodes. Yields the process, its URL, and the file of its log."""
    errors = tmp_path / "errors"
    command = [
        sys.executable, "-c", "import sys; from quire.cli import main; sys.exit(main())", "serve", folder,
        *"--port 0 --cluster.prefill 1 --cluster.decode 1 --runtime.device cpu --runtime.threads 1".split(), *words,
    ]  # fmt: skip
    with open(errors, "w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        for role, line in zip(("prefill", "decode"), lines, strict=False):
            assert re.fullmatch(FORM.replace("{role}", role), line), (lines, errors.read_text())
        yield process, re.search(r"http://\S+(?=/v1)", lines[2])[0], errors
    finally:
        process.kill()
        process.communicate()


def ask(url, path, body=None, method=None, **headers):
    data = None if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} | headers
    with urllib.request.urlopen(urllib.request.Request(url + path, data, sent, method=method), timeout=60) as answer:
        return answer.read().decode()


async def cluster(*words):
    return await asyncio.to_thread(main, ["cluster", *words])


def instances(url):
    return {each["role"]: each for each in json.loads(ask(url, "/v1/cluster"))["instances"]}


@pytest.mark.slow
async def test_the_instances_are_seen_and_restarted(folder, capsys, tmp_path):
    pins = tmp_path / "pins.jsonl"
    pins.write_text(json.dumps({"prompt": "p" * 70}))
    words = ("--cache.memory", "8MiB", "--slo.ttft", "50", "--slo.tpot", "5", "--cache.pin", str(pins))
    with serving(folder, tmp_path, *words) as (process, url, errors):
        check_prefixes(url)
        body = {"prompt": "a" * 100, "max_tokens": 4, "ignore_eos": True}
        ask(url, "/v1/completions", body, traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
        assert await cluster("status", "--url", url) == 0
        status = capsys.readouterr().out.splitlines()
        assert [line.split()[:3] for line in status[1:3]] == [
            ["prefill-0", "prefill", "serving"], ["decode-0", "decode", "serving"],
        ]  # fmt: skip
        assert any(line.startswith("transfer") for line in status)
        assert await cluster("drain", "prefill-0", "--url", url) == 0
        assert await cluster("role", "decode-0", "mixed", "--url", url) == 0
        assert "prefill-0 is prefill-0.3 now" in capsys.readouterr().out
        ask(url, "/v1/completions", body)
        metrics = ask(url, "/metrics")
        assert 'quire_stage_seconds_count{stage="queue"} 4.0' in metrics
        assert 'quire_slo_requests_total{met="both"} 4.0' in metrics
        assert 'quire_instance_role{instance="decode-0",role="mixed"} 1.0' in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        about = [line for line in errors.read_text().splitlines() if TRACE in line]
        assert any("prefill-0.1 computes" in line and "decode-0.2 decodes" in line for line in about)
        assert any("decode-0.2 has the cache of prefill-0.1" in line for line in about)
        assert any("ended after 4 tokens (queue " in line for line in about)


def check_prefixes(url):
    """They are warmed, listed and dropped as with one engine; the pinned one is there from the start."""
    (pinned,) = json.loads(ask(url, "/v1/cache/prefixes"))["data"]
    assert pinned["tokens"] == 64 and pinned["tiers"]["arena"]["pinned_until"] == "forever"
    warm = json.loads(ask(url, "/v1/cache/prefixes", {"prompt": "w" * 130}))
    assert (warm["tokens"], warm["cached_tokens"]) == (128, 0)
    assert json.loads(ask(url, "/v1/cache/prefixes", {"prompt": "w" * 130}))["cached_tokens"] == 128
    assert json.loads(ask(url, f"/v1/cache/prefixes/{warm['key']}"))["tokens"] == 128
    seen = json.loads(ask(url, "/debug/cache"))["prefixes"]
    assert {(each["instance"], each["text"][:1]) for each in seen} == {
        ("prefill-0.1", "p"), ("decode-0.2", "p"), ("prefill-0.1", "w"),
    }  # fmt: skip
    dropped = json.loads(ask(url, "/v1/cache/prefixes", {"key": warm["key"]}, method="DELETE"))
    assert dropped["dropped"] == {"arena": 2}
    assert [each["key"] for each in json.loads(ask(url, "/v1/cache/prefixes"))["data"]] == [pinned["key"]]


class Client(threading.Thread):
    """A stream. status: of the answer; text: what has come; is_whole: whether it has come to its end."""

    def __init__(self, url, prompt):
        super().__init__(daemon=True)
        self.status, self.text, self.is_whole = None, "", False
        body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0, "stream": True}
        self._request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        self.start()

    def run(self):
        try:
            with urllib.request.urlopen(self._request, timeout=100) as answer:
                self.status = answer.status
                for line in answer:
                    if line.startswith(b"data: {"):
                        self.text += json.loads(line[6:])["choices"][0]["text"]
                    self.is_whole |= line.startswith(b"data: [DONE]")
        except urllib.error.HTTPError as error:
            self.status = error.code


def test_a_stopped_decode_side_fills_the_queue_up_to_429_and_loses_nothing(folder, tmp_path):
    """First the memory of the prefill side is full, then the queue, then clients are told. The instances of a killed
    server end.
    """
    words = "--cache.memory 256KiB --scheduler.max_queue 4 --cluster.heartbeat 90 --cache.share false".split()
    with serving(folder, tmp_path, *words) as (process, url, _):
        prompts = [chr(97 + index % 26) * 200 for index in range(40)]
        with ThreadPoolExecutor(4) as pool:
            right = list(pool.map(lambda prompt: text_of(url, prompt), prompts))
        decode = instances(url)["decode"]["pid"]
        os.kill(decode, signal.SIGSTOP)
        clients = []
        try:
            while not any(each.status == 429 for each in clients) and len(clients) < len(prompts):
                clients.append(Client(url, prompts[len(clients)]))
                time.sleep(0.2)
            held = instances(url)["prefill"]["load"]["held"]
        finally:
            os.kill(decode, signal.SIGCONT)
        for each in clients:
            each.join(100)
        refused = [each for each in clients if each.status == 429]
        answered = [(each, text) for each, text in zip(clients, right, strict=False) if each.status == 200]
        assert held > 0 and refused and len(answered) > 4 and len(refused) + len(answered) == len(clients)
        assert all(each.is_whole and each.text == text for each, text in answered)
        pids = [each["pid"] for each in instances(url).values()]
        process.kill()
        process.wait(10)
        end = time.monotonic() + 20
        while any(runs(pid) for pid in pids):
            assert time.monotonic() < end, "an instance outlives its server"
            time.sleep(0.05)


def runs(pid):
    """Whether a process has not ended. Nobody may read the exit code of one whose parent was killed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def text_of(url, prompt):
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    while True:
        try:
            return json.loads(ask(url, "/v1/completions", body))["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            assert error.code == 429
            time.sleep(0.1)
