"""The products of CPU levels that this processor may lack: their sources, compiled with emulated AVX-512."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from quire.kernels import runtime
from quire.kernels.build import SOURCE_DIR, find_compiler
from quire.kernels.memory import HugePageAllocator
from quire.models.cpu_panels import Panels
from quire.models.layers import TorchOps
from quire.models.quants import plain
from tests.effort import full_only
from tests.packed_blocks import KINDS, random_blocks

from .test_packed import DTYPES, assert_sums, error, random

HERE = Path(__file__).parent / "emulated"
FLAGS = "-O1 -std=c++17 -fno-math-errno -fPIC -shared -w -march=x86-64-v3".split()
MACROS = {"v4": "F BW DQ", "v4bf16": "F BW DQ VNNI BF16"}
NAMES = ("quire_pack_linear", "quire_pack_blocks", "quire_panel_rows", "quire_multiply", "quire_panel_bytes",
         "quire_quantized_bytes")  # fmt: skip
"""Functions of it whose signatures are those of the whole library."""


@pytest.fixture(scope="module", params=MACROS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The product kernels of a level."""
    compiler = find_compiler()
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs a compiler for x86-64")
    out = tmp_path_factory.mktemp("emulated") / "kernels.so"
    macros = [f"-D__AVX512{name}__" for name in MACROS[request.param].split()]
    sources = [*(SOURCE_DIR / f"{name}.cpp" for name in ("linear", "packed", "packing")), HERE / "alone.cpp"]
    # The barrier that keeps a sum in its register names one that this processor may lack.
    command = [*compiler.command, *FLAGS, *macros, "-Dasm(...)=", f"-I{HERE}", f"-I{SOURCE_DIR}", *map(str, sources)]
    subprocess.run([*command, "-o", str(out)], check=True)
    loaded, declared = ctypes.CDLL(str(out)), runtime.kernels()
    for name in NAMES:
        function, model = getattr(loaded, name), getattr(declared, name)
        function.argtypes, function.restype = model.argtypes, model.restype
    return loaded


@full_only("compiles the products twice, half a minute each")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_emulated_products_are_those_of_the_file_s_numbers(
    library: ctypes.CDLL, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "kernels", lambda: library)
    tokens = torch.tensor([0, 69, 33, 31])
    for kind in KINDS:
        blocks, gates = random_blocks(kind, 70, 512), random_blocks(kind, 74, 512, 1)
        weight, bias = plain(blocks, torch.float32), random(74, dtype=dtype)
        head = Panels([blocks], None, dtype, HugePageAllocator(), wide=True)
        gated = Panels([gates], bias, dtype, HugePageAllocator(), gated="silu")
        assert torch.equal(head.rows(tokens), weight.to(dtype)[tokens])
        for rows in (1, 2, 3, 4, 5, 30):
            x = random(rows, 512, dtype=dtype, seed=rows) / 64
            assert_sums(head(x), x, weight)
            exact = TorchOps().gated_linear([plain(gates, torch.float32)], bias.float(), torch.float32, "silu")(
                x.float()
            )
            assert error(gated(x), exact) < {torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]
    if dtype != torch.float32:
        for size in ((97, 80), (96, 578)):
            pairs, x = random(*size, dtype=dtype), random(50, size[1], dtype=dtype, seed=1)
            got = Panels([pairs], None, dtype, HugePageAllocator(), wide=True)(x)
            assert error(got, x.double() @ pairs.double().T) < 1e-5
