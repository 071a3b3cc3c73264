"""Compiles Triton kernels for one GPU architecture on a machine without a GPU, and reports the compiler's result.

Triton chooses between interpreter and compiler when a kernel is decorated, so a process has only one of them.
Without a GPU, the test processes have the interpreter. A child process, which runs this module, has the compiler.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
ROOT = Path(__file__).parents[2]


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


_child: subprocess.Popen[bytes] | None = None


def compile_for(capability: int, kernel: Any, arguments: dict[str, Any], *, warps: int, stages: int = 3) -> Compiled:
    """Compiles as a launch would: pointers and row strides are known to be multiples of 16, other integers are not.

    arguments  by name: "*bf16", "i32", "i32:16" (a multiple of 16), or a value, which becomes a compile-time constant
    """
    global _child
    if _child is None:
        # The compiler must be a process that has never been told of the interpreter.
        settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        _child = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.ahead"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
            env=settings | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        atexit.register(_child.kill)
    assert _child.stdin is not None and _child.stdout is not None
    pickle.dump((capability, kernel.fn.__module__, kernel.fn.__name__, arguments, warps, stages), _child.stdin)
    _child.stdin.flush()
    found = pickle.load(_child.stdout)
    if isinstance(found, str):
        raise AssertionError(f"{kernel.fn.__name__} does not compile: {found}")
    assert isinstance(found, Compiled)
    return found


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Compiles what the parent asks for until it ends."""
    # The child is `__main__`; the parent knows its results by the module's name.
    from tests.kernels.ahead import _compile

    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Compiled | str = _compile(*request)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


def _compile(capability: int, module: str, name: str, arguments: dict[str, Any], warps: int, stages: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), name)
    signature, constants, attributes = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        value = arguments[argument]
        if not isinstance(value, str):
            signature[argument] = "constexpr"
            constants[argument] = value
            continue
        signature[argument] = value.removesuffix(":16")
        if value.startswith("*") or value.endswith(":16"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    built = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True},
    )
    text = _disassembled(built.asm["cubin"])
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return Compiled(
        built.asm["ptx"],
        text,
        int(numbers["REG"]),
        int(numbers["STACK"]) + int(numbers["LOCAL"]),
        built.metadata.shared,
    )


def _disassembled(cubin: bytes) -> str:
    """Resource usage and machine code, kept beside what Triton keeps: a disassembly takes as long as all else."""
    import triton

    kept = Path(triton.knobs.cache.dir) / "disassembled" / hashlib.sha256(cubin).hexdigest()
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            source, made = Path(folder) / "kernel.cubin", Path(folder) / "text"
            source.write_bytes(cubin)
            with made.open("w") as file:
                subprocess.run([dump, "--dump-resource-usage", "--dump-sass", source], stdout=file, check=True)
            made.rename(kept)
    return kept.read_text()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
