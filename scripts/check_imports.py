"""Checks that imports inside quire point downwards, that heavy packages are loaded only where they are needed and not
with what has to do without them, and that some packages have no circle of imports.

Prints one line per violation and exits with 1 if there is any. `make check` runs it;
tests/scripts/test_check_imports.py runs it on made-up violations.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

# A module may import its own layer and those before it. A package is a layer; a dotted name is one module of its own
# layer, without what lies below it: the registry of codecs is read by the configuration. With a star it is a package
# within another one.
LAYERS = (
    "version", "errors", "safe_io", "records", "extras", "interrupt", "rate_limited_warning", "parent_watch",
    "gc_pause", "folders", "cache.codecs", "foreign_flags", "arguments", "options", "config", "kernels", "models",
    "cache", "workload", "timing", "stores", "attention", "offload", "structured", "engine", "offload.planning.*",
    "tools", "placement", "calibrate", "codec_check", "load", "inspection", "diagnosis", "background_calibration",
    "prefixes", "engine_thread", "llm", "prefixes.async_prefixes", "async_llm", "batch_files", "cluster", "simulation",
    "measure", "evaluation", "planning", "server", "cli", "__main__",
)  # fmt: skip

# Packages that cost start-up time or are not installed everywhere, and the modules that may import them at the top.
# All other modules import them inside a function.
HEAVY = {
    "accelerate": (),
    "blake3": ("cluster/*", "stores/*"),
    "fastapi": ("server/*",),
    "gguf": (),
    "grpc": (),
    "httptools": ("server/*",),
    "llguidance": (),
    "matplotlib": (),
    "msgspec": ("cluster/*",),
    "prometheus_client": ("server/*",),
    "pydantic": ("server/*",),
    "ray": (),
    "rich": (),
    "starlette": ("server/*",),
    "transformers": (),
    "triton": ("attention/triton*", "attention/kernels/*", "models/triton*"),
    "uvicorn": ("server/*",),
}

# Packages that a module must not import, even inside functions: the first modules are loaded by the command line, and
# the scheduler runs under a simulator's clock.
NEVER = {
    "__init__.py": ("torch", "numpy"),
    "version.py": ("torch", "numpy"),
    "errors.py": ("torch", "numpy"),
    "interrupt.py": ("torch", "numpy"),
    "options.py": ("torch", "numpy"),
    "config.py": ("torch", "numpy"),
    "kernels/__init__.py": ("torch", "numpy"),
    "kernels/build.py": ("torch", "numpy"),
    "kernels/levels.py": ("torch", "numpy"),
    "models/shape.py": ("torch",),
    **dict.fromkeys(
        (f"engine/{name}.py" for name in ("batch", "policy", "step_builder", "scheduler", "fast_forward")),
        ("torch", "time", "datetime"),
    ),
    "cluster/messages.py": ("torch", "numpy", "time", "datetime", "threading", "socket", "asyncio"),
    "cluster/protocol.py": ("torch", "numpy", "time", "datetime", "threading", "socket", "asyncio"),
}

# Packages that some modules must not load, even indirectly: a simulator runs the control plane without a model, and
# every command loads the configuration.
WITHOUT = ("torch", "tokenizers", "transformers")
CONTROL = ("engine/fast_forward.py", "engine/scheduler.py", "engine/request.py", "cache/manager.py", "cache/tree.py")
LIGHT = ("config.py", "cache/codecs/__init__.py")

# Whose modules import each other in no circle, not even for types.
ACYCLIC = ("cache",)


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name, the line, and whether it is loaded together with the importing module."""

    name: str
    line: int
    is_immediate: bool


def imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """Every import of a module that lies in `package`, with relative names resolved."""
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_type_checking(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            # `from quire import cache` names a module; `from quire.cache import page` lies in quire.cache either way,
            # but `from quire.offload import planning` does not lie in quire.offload.
            inner = [f"{module}.{alias.name}" for alias in node.names]
            is_named = module == "quire" or any(f"{name.removeprefix('quire.')}.*" in LAYERS for name in inner)
            names = inner if is_named else [module]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, id(node) not in lazy)


def offences(root: Path) -> Iterator[str]:
    """One line per import below `root` (the folder `quire`) that breaks a rule."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        package = ".".join(["quire", *relative.parent.parts])
        for found in imports_of(ast.parse(path.read_text(encoding="utf-8")), package):
            reason = _fault(relative, found)
            if reason:
                yield f"{path}:{found.line}: {reason}"


def circles(root: Path) -> Iterator[str]:
    """One line for each circle of imports in the packages of ACYCLIC below `root`, those for types included."""
    for package in ACYCLIC:
        names = {}
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            names[".".join(["quire", *parts]).removesuffix(".__init__")] = path
        targets = {
            name: sorted(
                {
                    found.name
                    for found in imports_of(
                        ast.parse(path.read_text(encoding="utf-8")),
                        ".".join(["quire", *path.relative_to(root).parent.parts]),
                    )
                    if found.name in names
                }
            )
            for name, path in names.items()
        }
        done: set[str] = set()
        for name in targets:
            yield from _circles_from(name, targets, [], done)


def _circles_from(name: str, targets: dict[str, list[str]], way: list[str], done: set[str]) -> Iterator[str]:
    if name in way:
        yield "a circle of imports: " + " -> ".join([*way[way.index(name) :], name])
    elif name not in done:
        for target in targets[name]:
            yield from _circles_from(target, targets, [*way, name], done)
        done.add(name)


def loaded(modules: Sequence[str], packages: Sequence[str] = WITHOUT) -> list[str]:
    """The ones of some packages that a new process loads when it imports some modules of quire."""
    names = [".".join(["quire", *Path(module).with_suffix("").parts]) for module in modules]
    code = f"import sys, {', '.join(names)}; print(*(name for name in {packages!r} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def _fault(module: Path, found: Import) -> str | None:
    top, *rest = found.name.split(".")
    if top in NEVER.get(module.as_posix(), ()):
        return f"{module.as_posix()} must do without {top}"
    if top in HEAVY and found.is_immediate and not any(fnmatch(module.as_posix(), place) for place in HEAVY[top]):
        return f"{top} is imported when the module is; import it inside the function that needs it"
    if top != "quire":
        return None
    own = _layer(module.with_suffix("").parts)
    if own == "__init__":
        immediate = found.is_immediate and rest[:1] != ["version"]
        return (
            f"quire/__init__.py imports {found.name} at once; public names are loaded when used" if immediate else None
        )
    target = _layer(rest) if rest else "__init__"
    if target == "__version__":
        return "import __version__ from quire.version"
    if target not in LAYERS or own not in LAYERS:
        unknown = target if target not in LAYERS else own
        return f"quire.{unknown} has no place in the import order; give it one in {Path(__file__).name}"
    if LAYERS.index(target) > LAYERS.index(own):
        return f"quire.{own} imports quire.{target}, which lies above it"
    return None


def _layer(parts: Sequence[str]) -> str:
    """The layer of a module: the one that is named as it is, or its package."""
    name, inner = ".".join(parts).removesuffix(".__init__"), ".".join([*parts[:2], "*"])
    return next((layer for layer in (name, inner) if layer in LAYERS), parts[0])


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def main() -> None:
    """Checks src/quire, or the folder given."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "src" / "quire"
    found = [*offences(root), *circles(root)]
    if len(sys.argv) == 1:
        found += [f"{module} loads {name}" for module in CONTROL for name in loaded([module])]
        found += [f"{module} loads {name}" for module in LIGHT for name in loaded([module], ("torch", "numpy"))]
    print("\n".join(found) or "imports point downwards")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
