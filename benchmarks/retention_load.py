"""A server short of memory, with and without retention: tokens per second, preemptions, and the kept share.

    python benchmarks/retention_load.py --data DIR [--requests 16] [--input 1024] [--output 512] [--share 0.25]
                                        [--settings retain.threshold=0.8,retain.budget=0.5] [--rounds 5] [--threads 2]
                                        [--model smollm2] [--json FILE] [--markdown]

DIR has war_and_peace.txt. Prompts are different excerpts of it. Each setting has its own `quire serve` in bfloat16,
which gets all requests at once over HTTP. Its cache holds --share of the memory that all requests need together at
their ends. Servers take turns. A round lasts from the first request sent to the last answer. One round to warm up is
not counted. Prefixes are not shared, so no round finds those of an earlier one.

Ratios are medians over the rounds, each within one round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import append_record, arguments, commit, format_table, hardware, hardware_line, median

from quire.cache.ledger import PAGE_TOKENS
from quire.config import format_bytes
from quire.models.resolve import resolve_model
from quire.models.tokenizer import load_tokenizer
from quire.models.weights import open_model

OFF = "off"
READY_SECONDS = 300


class Server:
    """A `quire serve` with one setting."""

    def __init__(self, setting: str, memory: int, given: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "quire", "serve", given.model, "--port", "0", "--cache.share", "false"]
        command += ["--cache.memory", str(memory), "--runtime.threads", str(given.threads)]
        if setting != OFF:
            key, _, value = setting.partition("=")
            command += [f"--{key}", value]
        self.model = given.model
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.url = self._wait()

    def _wait(self) -> str:
        """Waits until it listens. Returns its address."""
        assert self.process.stdout is not None
        ends, seen = time.monotonic() + READY_SECONDS, ""
        for line in self.process.stdout:
            seen += line
            found = next((word.rstrip("/.,;") for word in line.split() if word.startswith("http://")), None)
            if found is not None:
                return found.removesuffix("/v1")
            if time.monotonic() > ends:
                break
        sys.exit(f"the server did not start:\n{seen}")

    def ask(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """One complete answer."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            sys.exit(f"{self.url}: {error}: {error.read().decode()}")
        usage: dict[str, Any] = found["usage"]
        return usage

    def metric(self, name: str) -> float:
        """A counter of the server."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name + " "))

    def stop(self) -> None:
        """Ends it."""
        self.process.terminate()
        self.process.wait()


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with war_and_peace.txt")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=16, help="sent at once")
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--share", type=float, default=0.25, help="cache size as a share of the need of all requests")
    parser.add_argument("--settings", default="retain.threshold=0.8", help="settings to compare with retention off")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    given = parser.parse_args()
    text = (given.data / "war_and_peace.txt").read_text(encoding="utf-8")
    path = resolve_model(given.model)
    tokenizer = load_tokenizer(path)
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
    ids = tokenizer.encode(text[10_000 : 10_000 + 8 * given.requests * given.input], add_special=False)
    prompts = [ids[given.input * i : given.input * (i + 1)] for i in range(given.requests)]
    assert len(prompts[-1]) == given.input, "the text is too short"
    chunk_bytes = 2 * 2 * PAGE_TOKENS * shape.head_dim * shape.num_layers * shape.num_kv_heads
    demand = given.requests * -(-(given.input + given.output) // PAGE_TOKENS) * chunk_bytes
    memory = int(given.share * demand)
    print(f"{given.requests} x ({given.input} + {given.output}) tokens need {format_bytes(demand)};", end=" ")
    print(f"the cache has {format_bytes(memory)}\n")
    settings = [OFF, *given.settings.split(",")]
    servers = {setting: Server(setting, memory, given) for setting in settings}
    rates: dict[str, list[float]] = {setting: [] for setting in settings}
    preempted: dict[str, float] = {}
    kept: dict[str, float] = {}
    try:
        for number in range(given.rounds + 1):
            for setting, server in servers.items():
                before = server.metric("quire_preemptions_total")
                began = time.perf_counter()
                with ThreadPoolExecutor(given.requests) as pool:
                    usage = list(pool.map(lambda prompt, to=server: to.ask(prompt, given.output), prompts))
                seconds = time.perf_counter() - began
                assert all(each["completion_tokens"] == given.output for each in usage), "an answer is cut short"
                preempted[setting] = server.metric("quire_preemptions_total") - before
                details = [each["prompt_tokens_details"].get("kept_fraction", 1.0) for each in usage]
                kept[setting] = sum(details) / len(details)
                if number:
                    rates[setting].append(given.requests * given.output / seconds)
    finally:
        for server in servers.values():
            server.stop()
    rows = []
    for setting in settings:
        ratio = median(mine / base for mine, base in zip(rates[setting], rates[OFF], strict=True))
        rows.append(
            [
                setting,
                f"{median(rates[setting]):.0f}",
                f"{ratio:.2f}",
                f"{preempted[setting]:.0f}",
                f"{kept[setting]:.2f}",
            ]
        )
    head = ["retention", "tokens/s", "to off", "preemptions", "kept of prompts"]
    print(format_table(head, rows, given.markdown))
    print(f"\n{hardware_line(hardware())}; {given.threads} threads; commit {commit()}; {time.strftime('%Y-%m-%d')}")
    if given.json:
        record = {"benchmark": "retention_load", "demand": demand, "memory": memory, "rates": rates}
        record |= {"preempted": preempted, "kept": kept, "input": given.input, "output": given.output}
        append_record(given.json, record)


if __name__ == "__main__":
    main()
