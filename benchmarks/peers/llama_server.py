"""Starts, queries and ends llama-server. Knows its HTTP, not the measurement."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from types import TracebackType

from worker import Answer, end_with_parent

START_SECONDS = 60


class LlamaServer:
    """One llama-server on a free local port. It ends with the context, or with the process that started it."""

    def __init__(self, command: Sequence[object]) -> None:
        """Starts it and waits until it has loaded its model. Raises RuntimeError if that fails."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/completion"
        self.process = subprocess.Popen(
            [*map(str, command), "--offline", "--no-webui", "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=end_with_parent,
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.generate([[0]], 1)
                return
            except (urllib.error.URLError, ConnectionError) as error:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    self.__exit__(None, None, None)
                    raise RuntimeError(f"llama-server did not answer: {error}") from error
                time.sleep(0.2)

    def __enter__(self) -> "LlamaServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()

    def generate(self, prompts: list[list[int]], output: int) -> list[Answer]:
        """Greedy answers to all prompts, in one call."""
        body = {"prompt": prompts, "n_predict": output, "temperature": 0.0, "ignore_eos": True}
        request = urllib.request.Request(
            self.url,
            json.dumps({**body, "cache_prompt": True, "return_tokens": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            answers = json.load(reply)
        # The answer to one prompt is an object, to several a list in their order.
        answers = answers if isinstance(answers, list) else [answers]
        return [Answer(answer["tokens"], answer["timings"]["cache_n"]) for answer in answers]
