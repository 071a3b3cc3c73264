"""llama.cpp, through `llama-batched-bench`: its decoding loop with no server, scheduler or sampler around it.

That makes these numbers an upper bound of what its server reaches. Every run is a fresh process whose loading is not
timed, and runs the prompts once before the run that counts: the first pass also pays for touching the buffers.
"""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from worker import CHECK_PROMPT, CHECK_TOKENS, Engine, arguments, serve

SERVER_START_SECONDS = 60


def start() -> Engine:
    """Weights as the GGUF file has them, f16 cache, one cache stream per request (its default)."""
    given = arguments()
    programs = Path(given.programs)
    common = ["-m", given.model, "-t", str(given.threads)]

    def run(batch: int, prompt: int, output: int, seed: int) -> tuple[float, float]:
        # The prompts' own pass gives the first token, so `output` tokens take one decoding step fewer. Token ids are
        # the program's own random ones: a fresh process has no cache in which an earlier prompt could be found.
        steps = max(1, output - 1)
        shape = ["-npp", f"{prompt},{prompt}", "-ntg", str(steps), "-npl", str(batch)]
        context = ["-c", str(batch * (prompt + steps))]
        bench = [programs / "llama-batched-bench", *common, *context, *shape, "--output-format", "jsonl"]
        printed = subprocess.run(bench, check=True, capture_output=True, text=True).stdout
        measured = json.loads([line for line in printed.splitlines() if line.startswith("{")][-1])
        if (measured["pp"], measured["tg"], measured["pl"]) != (prompt, steps, batch):
            raise RuntimeError(f"llama-batched-bench measured another shape: {measured}")
        return measured["t_pp"] + (measured["t_tg"] if output > 1 else 0.0), measured["t_pp"]

    printed = subprocess.run([programs / "llama-bench", "--version"], capture_output=True, text=True)
    version = [word.strip("()") for word in (printed.stdout + printed.stderr).split("\n")[0].split()]
    settings = "4-bit weights" if given.native else "bf16"
    return Engine(
        lambda: _continue_check_prompt([programs / "llama-server", *common]),
        run,
        f"{version[1]} ({version[-1]})",
        f"{settings}, f16 cache, llama-batched-bench",
    )


def _continue_check_prompt(server: list[str | Path]) -> list[int]:
    """The greedy continuation through llama-server, since the benchmark program shows no tokens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*server, "-c", "512", "-np", "1", "--offline", "--no-webui", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    body = {"prompt": CHECK_PROMPT, "n_predict": CHECK_TOKENS, "temperature": 0.0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        json.dumps({**body, "return_tokens": True}).encode(),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + SERVER_START_SECONDS
    try:
        while True:
            try:
                with urllib.request.urlopen(request) as answer:
                    return json.load(answer)["tokens"]
            except (urllib.error.URLError, ConnectionError) as error:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(f"llama-server did not answer: {error}") from error
                time.sleep(0.2)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    serve(start)
