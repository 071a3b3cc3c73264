"""The embedded model's matrix products on a CPU: `F.linear`, oneDNN's packed weights and our own panels.

    python benchmarks/linear_cpu.py [--rounds 7] [--threads 2] [--json FILE]

Median milliseconds a step in bfloat16, over all layers, and the output head up to 64 rows; interleaved, warmed up.
Panels need a CPU with bf16 dot products and are left out on others.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, arguments, format_table, median

from quire.kernels import runtime
from quire.kernels.memory import Carver
from quire.models.cpu_ops import PackedLinear, PanelLinear
from quire.models.layers import TorchLinear

LAYERS = 30
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # qkv, o, gate and up, down: [outputs, inputs]
HEAD = (49152, 576)
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 512, 1024]


def main() -> None:
    """Measures and prints."""
    args = arguments(__doc__, rounds=7).parse_args()
    runtime.set_num_threads(args.threads)
    carver = Carver()
    kinds = {"F.linear": TorchLinear, "oneDNN packed": PackedLinear}
    if runtime.kernels().quire_has_linear():
        kinds["panels"] = functools.partial(PanelLinear, carver=carver)
    weights = [[torch.randn(size).bfloat16() for size in SHAPES] for _ in range(LAYERS)]
    head = torch.randn(HEAD).bfloat16()
    sides = {
        name: ([[kind(w, None) for w in layer] for layer in weights], kind(head, None)) for name, kind in kinds.items()
    }
    table = []
    with torch.inference_mode():
        for rows in ROWS:
            inputs = {width: torch.randn(rows, width).bfloat16() for width in (576, 1536)}
            times: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(args.rounds + 1):
                for name, (layers, last) in sides.items():
                    start = time.perf_counter()
                    for layer in layers:
                        for product, (_, width) in zip(layer, SHAPES, strict=True):
                            product(inputs[width])
                    if rows <= 64:
                        last(inputs[HEAD[1]])
                    if number:
                        times[name].append((time.perf_counter() - start) * 1e3)
            found = {name: median(values) for name, values in times.items()}
            table.append([rows, *(f"{value:.2f}" for value in found.values())])
            if args.json:
                append_record(args.json, {"benchmark": "linear_cpu", "rows": rows, "milliseconds": found})
    print(format_table(["rows", *sides], table))


if __name__ == "__main__":
    main()
