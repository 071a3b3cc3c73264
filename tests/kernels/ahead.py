"""Triton kernels compiled ahead of time for one GPU architecture, on a machine without one, and what the compiler made
of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}


@dataclass(frozen=True)
class Compiled:
    ptx: str = field(repr=False)
    sass: str = field(repr=False)
    registers: int
    stack_bytes: int  # local memory: arrays the compiler could not keep in registers, and spills
    shared_bytes: int

    def count(self, pattern: str) -> int:
        """Instructions of the machine code that match."""
        return len(re.findall(pattern, self.sass))


def compile_for(capability: int, kernel: Any, arguments: dict[str, Any], *, warps: int, stages: int = 3) -> Compiled:
    """Compiles as a launch would: pointers and row strides are known to be multiples of 16, other integers are not.

    arguments  by name: "*bf16", "i32", "i32:16" (a multiple of 16), or a value, which becomes a compile-time constant
    """
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if not isinstance(value, str):
            signature[name] = "constexpr"
            constants[name] = value
            continue
        signature[name] = value.removesuffix(":16")
        if value.startswith("*") or value.endswith(":16"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    built = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True},
    )
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        usage = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run(
            [tools / "cuobjdump", "--dump-sass", cubin], capture_output=True, text=True, check=True
        ).stdout
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return Compiled(
        built.asm["ptx"],
        sass,
        int(numbers["REG"]),
        int(numbers["STACK"]) + int(numbers["LOCAL"]),
        built.metadata.shared,
    )
