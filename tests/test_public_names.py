"""The names that `import quire` provides, and the cost of the import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

import quire
from quire.extras import DISTRIBUTION


def test_the_public_names_are_these():
    names = "LLM AsyncLLM EngineConfig RequestOutput SamplingParams StructuredOutputsParams __version__"
    assert quire.__all__ == names.split()


@pytest.mark.parametrize("name", quire.__all__)
def test_every_public_name_is_there(name):
    assert getattr(quire, name) is not None
    assert name in dir(quire)


def test_an_unknown_name_is_refused_with_the_public_ones():
    with pytest.raises(AttributeError, match="no attribute 'Engine'; public names: LLM, AsyncLLM"):
        quire.Engine  # noqa: B018 - the access is the test


def test_the_version_is_that_of_the_package():
    try:
        installed = version(DISTRIBUTION)
    except PackageNotFoundError:
        pytest.skip(f"{DISTRIBUTION} is not installed here, only on the path")
    assert installed == quire.__version__


@pytest.mark.parametrize("module", ["quire", "quire.config", "quire.kernels", "quire.cli"])
def test_importing_costs_neither_torch_nor_numpy(module):
    heavy = "torch numpy transformers tokenizers fastapi pydantic gguf rich triton".split()
    code = f"import sys, {module}; print(*(name for name in {heavy} if name in sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == []
