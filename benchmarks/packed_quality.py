"""Quality of quantized weights: perplexity of GGUF files, packed and dequantized, and llama.cpp's on the same ids.

    scripts/peers.sh --only llamacpp,logprobs        # llama.cpp and a small program over its library
    python benchmarks/packed_quality.py --data DIR A-Q4_0.gguf A-Q6_K.gguf ... [--windows 20] [--context 1024]

DIR has wiki.test.raw. Quire reads each file packed (native) and in 16 bits (dequantized), and the first file also in
Quire's 4-bit codes (g4), with a dense cache in bfloat16. llama.cpp multiplies by 8-bit activations and has a float16
cache. Columns are ratios of perplexities. Without the peer, its columns are empty.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path

from common import ROOT, append_record, commit, format_table, hardware, hardware_line
from contest import say

from quire.config import EngineConfig
from quire.evaluation.perplexity import cut_windows, measure
from quire.measure.engines import load_engines
from quire.models.weights import open_model


def quire_nll(model: Path, weights: str, text: str, given: argparse.Namespace) -> tuple[float, list[list[int]]]:
    """Mean -ln p over all windows, and their ids."""
    options = {"model.weights": weights, "model.dtype": given.dtype, "runtime.threads": given.threads}
    options["cache.memory"] = "1GiB"
    engines, tokenizer = load_engines(str(model), EngineConfig.from_options(options), given.context)
    windows = cut_windows(tokenizer.encode(text), given.context)[: given.windows]
    (result,) = measure(engines, windows)
    return math.log(result.perplexity), windows


def peer_nll(model: Path, windows: list[list[int]], given: argparse.Namespace) -> float:
    """llama.cpp's mean -ln p; NaN if it is not installed."""
    program = given.peers / "llamacpp/bin/llamacpp_logprobs"
    if not program.exists():
        return math.nan
    command = [program, model, "f16", given.context, 64, given.threads]
    lines = "".join(" ".join(map(str, window)) + "\n" for window in windows)
    done = subprocess.run([str(word) for word in command], input=lines, capture_output=True, text=True, check=True)
    return sum(map(float, done.stdout.split())) / sum(len(window) - 1 for window in windows)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Perplexity of weights in fewer bits.")
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files")
    parser.add_argument("--data", type=Path, required=True, help="folder with wiki.test.raw")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16", help="model.dtype; in float32 nothing else is rounded")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="folder of scripts/peers.sh")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per file")
    given = parser.parse_args()
    text = (given.data / "wiki.test.raw").read_text(encoding="utf-8")
    rows = []
    for number, model in enumerate(given.models):
        with open_model(model) as checkpoint:
            bits = 8 * model.stat().st_size / checkpoint.shape.num_parameters
        native, windows = quire_nll(model, "native", text, given)
        plain, _ = quire_nll(model, "dequantized", text, given)
        peer = peer_nll(model, windows, given)
        found = {
            "native": math.exp(native),
            "to_dequantized": math.exp(native - plain),
            "to_peer": math.exp(native - peer),
        }
        say(f"{model.name}: {found}")
        rows.append([model.name, bits, *found.values()])
        if number == 0:
            packed, _ = quire_nll(model, "g4", text, given)
            rows.append([f"{model.name} in g4", 4.5, math.exp(packed), math.exp(packed - plain), math.nan])
        if given.json:
            about = {
                "benchmark": "packed_quality",
                "model": model.name,
                "dtype": given.dtype,
                "windows": len(windows),
                **hardware(),
            }
            append_record(given.json, {**about, "commit": commit(), **found})
    headings = ["weights", "bits", "perplexity", "/ dequantized", "/ llama.cpp"]
    shown = [
        [name, f"{bits:.2f}", f"{ppl:.3f}", f"{plain:.5f}", f"{peer:.5f}"] for name, bits, ppl, plain, peer in rows
    ]
    print(format_table(headings, shown))
    print(f"{given.windows} windows of {given.context}, {given.dtype}; {hardware_line(hardware())}; commit {commit()}")


if __name__ == "__main__":
    sys.exit(main())
