"""The embedded model's matrix products on a CPU in bfloat16: `F.linear`, oneDNN's packed weights and our panels.

    python benchmarks/linear_cpu.py [--rounds 7] [--threads 2] [--types Q4_1,Q8_0] [--json FILE]

--types adds panels of packed blocks; only types with 32 weights per block work.

Median milliseconds per step over all layers, with the output head up to 64 rows; interleaved, warmed up. oneDNN is also
measured with float32 copies of the weights, twice the bytes: without AVX-512 it does not take bfloat16.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import append_record, arguments, format_table, median

from quire.kernels import runtime
from quire.kernels.memory import HugePageAllocator
from quire.models.cpu_ops import OneDnnLinear
from quire.models.cpu_panels import Panels
from quire.models.layers import Linear, TorchLinear
from quire.models.quants import Blocks, block_bytes

LAYERS = 30
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # qkv, o, gate and up, down: [outputs, inputs]
HEAD = (49152, 576)
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 512, 1024]


def in_float32(weight: torch.Tensor, bias: None) -> Linear:
    """The product by oneDNN with a float32 copy."""
    product = OneDnnLinear(weight.float(), bias)
    return lambda x: product(x.float()).bfloat16()


def panels(weight: torch.Tensor, bias: None, *, allocator: HugePageAllocator, kind: str = "") -> Linear:
    """The product with panels of the weight, or with random blocks of the same size."""
    outputs, inputs = weight.shape
    if kind:
        raw = torch.randint(0, 60, (outputs, block_bytes(kind, inputs)), dtype=torch.uint8)
        return Panels([Blocks(kind, raw, inputs)], bias, torch.bfloat16, allocator)
    return Panels([weight], bias, torch.bfloat16, allocator)


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--types", default="Q4_1", help="types of packed blocks, comma-separated")
    args = parser.parse_args()
    runtime.set_num_threads(args.threads)
    allocator = HugePageAllocator()
    kinds: dict[str, Callable[[torch.Tensor, None], Linear]] = {"F.linear": TorchLinear, "oneDNN float32": in_float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        kinds["oneDNN bfloat16"] = OneDnnLinear
    kinds["panels"] = functools.partial(panels, allocator=allocator)
    for name in filter(None, args.types.split(",")):
        kinds[f"panels, {name}"] = functools.partial(panels, allocator=allocator, kind=name)
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
