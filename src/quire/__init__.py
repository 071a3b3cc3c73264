"""Quire: an LLM inference engine whose centre is the key-value cache.

Importing this package imports neither torch nor numpy. Each public name loads its module on first use.
"""

from __future__ import annotations

import importlib

from quire.version import __version__

TYPE_CHECKING = False  # typing takes a while to import, and Ctrl-C is not handled yet; see quire.interrupt
if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.config import EngineConfig
    from quire.engine.outputs import RequestOutput
    from quire.engine.params import SamplingParams
    from quire.llm import LLM
    from quire.structured.params import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_MODULES = {
    "LLM": "quire.llm",
    "AsyncLLM": "quire.async_llm",
    "EngineConfig": "quire.config",
    "RequestOutput": "quire.engine.outputs",
    "SamplingParams": "quire.engine.params",
    "StructuredOutputsParams": "quire.structured.params",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
