"""Time from the start of a process to its first token: Quire and llama.cpp, in turns.

    python benchmarks/start.py --model FILE.gguf --peers DIR [--rounds 7] [--threads 2] [--json FILE]

Each start is a new process with a warm page cache. A first start, which compiles kernels and writes the layer image, is
not counted. Rows

    quire generate    until the first byte of the answer
    quire serve       until the first token of a streamed completion, requested every 5 ms until it is answered
    llama-server      likewise, with -c 4096 -np 1, which allocates little, and otherwise default settings

Ratios are medians relative to llama-server's median. DIR has llamacpp/bin, installed by `make peers`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import ROOT, append_record, arguments, format_table, hardware, hardware_line, median, spread

PROMPT = "The capital of France is"
POLL_SECONDS = 0.005
MAX_SECONDS = 120.0


def generate_seconds(command: Sequence[str]) -> float:
    """Seconds until a command's first byte of output."""
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - begun
        process.stdout.read()
    if not first or process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return seconds


def serve_seconds(command: Sequence[str]) -> float:
    """Seconds until a server's first token. The port is appended to the command."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begun = time.perf_counter()
    with subprocess.Popen(
        [*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    ) as process:
        try:
            while not first_token(port):
                if process.poll() is not None or time.perf_counter() - begun > MAX_SECONDS:
                    raise SystemExit(f"{' '.join(command)} does not answer")
                time.sleep(POLL_SECONDS)
            return time.perf_counter() - begun
        finally:
            process.kill()


def first_token(port: int) -> bool:
    """Whether a completion has begun; False for a server that is not ready."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MAX_SECONDS)
    body = json.dumps({"model": "model", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True})
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status == 200 and answer.readline().startswith(b"data:")
    return False


def environment() -> dict[str, str]:
    """The environment of the processes, which run this tree."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def main() -> int:
    """Measures and prints."""
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--model", required=True, help="a .gguf file")
    parser.add_argument("--peers", type=Path, help="folder with llamacpp/bin; without it Quire starts alone")
    parser.add_argument("--options", default="", help="flags of Quire, separated by spaces")
    given: argparse.Namespace = parser.parse_args()
    quire = [sys.executable, "-m", "quire"]
    options = ["--runtime.threads", str(given.threads), *given.options.split()]
    starts: dict[str, Callable[[], float]] = {
        "quire generate": lambda: generate_seconds(
            [*quire, "generate", given.model, PROMPT, "--max-tokens", "1", *options]
        ),
        "quire serve": lambda: serve_seconds(
            [*quire, "serve", given.model, "--model.name", "model", *options, "--port"]
        ),
    }
    if given.peers is not None:
        llama = [str(given.peers / "llamacpp/bin/llama-server"), "-m", given.model, "-t", str(given.threads)]
        starts["llama-server"] = lambda: serve_seconds([*llama, "-c", "4096", "-np", "1", "--offline", "--port"])
    for start in starts.values():
        start()
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(given.rounds):
        for name, start in starts.items():
            seconds[name].append(start())
    peer = median(seconds["llama-server"]) if "llama-server" in seconds else float("nan")
    rows = [
        [name, f"{median(found):.2f}", f"{spread(found):.0%}", f"{median(found) / peer:.2f}"]
        for name, found in seconds.items()
    ]
    print(format_table(["start to first token", "s", "spread", "to llama.cpp"], rows))
    print(hardware_line(hardware()))
    if given.json:
        append_record(given.json, {"benchmark": "start", "model": Path(given.model).name, "seconds": seconds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
