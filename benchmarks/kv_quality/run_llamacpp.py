"""llama.cpp's cache types, through a small program of ours over its library (llamacpp_logprobs.cpp).

Flash attention is on for every type. For quantized types, llama.cpp first rotates keys and values by a Hadamard matrix,
its default, and a slice reads even its own tokens as stored.
"""

import argparse
import re
import subprocess
import sys

from windows import SLICE_TOKENS, Cache, Engine, Score, Windows, serve

CACHES = {name: Cache(bits, name) for name, bits in {"f16": 16, "q8_0": 8, "q4_1": 4, "q4_0": 4}.items()}


def start(given: argparse.Namespace) -> Engine[str]:
    """The program. It loads the model again for each cache."""
    printed = subprocess.run([given.programs / "llama-bench", "--version"], capture_output=True, text=True)
    version = (printed.stdout + printed.stderr).split("\n")[0].removeprefix("version: ")

    def measure(cache: str, windows: Windows) -> Score:
        context = max(len(window) for window in windows)
        command = [given.programs / "llamacpp_logprobs", given.model, cache, context, SLICE_TOKENS, given.threads]
        lines = "".join(" ".join(map(str, window)) + "\n" for window in windows)
        done = subprocess.run([*map(str, command)], input=lines, capture_output=True, text=True)
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
        # The program reports its allocation to a hundredth of a MiB.
        size, cells = re.search(r"size = +([\d.]+) MiB \( *(\d+) cells", done.stderr).groups()
        return Score(float(size) * 2**20 / int(cells), [float(line) for line in done.stdout.split()])

    return Engine(version, CACHES, measure)


if __name__ == "__main__":
    serve(start)
