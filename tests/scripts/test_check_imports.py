"""Imports point downwards: the package passes, and the check finds made-up offenders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check_imports.py"


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True)


def test_the_package_keeps_the_order():
    done = check(ROOT / "src" / "quire")
    assert done.returncode == 0, done.stdout


@pytest.mark.alone
def test_the_control_plane_is_imported_without_a_model_in_little_time():
    """What a simulator needs takes less than one and a half times what numpy takes, which it needs too."""
    modules = "quire.engine.scheduler, quire.cache.manager, quire.cache.tree"
    code = (
        "import sys, time; begun = time.process_time(); import numpy; base = time.process_time();"
        f" import {modules}; print((time.process_time() - base) / (base - begun));"
        " print(*(name for name in ('torch', 'tokenizers', 'transformers') if name in sys.modules))"
    )
    tries = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(4)]
    told = [done.stdout.splitlines() for done in tries]
    assert {heavy for _, heavy in told} == {""} and min(float(ratio) for ratio, _ in told) < 1.5, told


@pytest.mark.parametrize(
    ("module", "code", "complaint"),
    [
        (
            "cache/page.py",
            "from quire.engine.scheduler import Scheduler",
            "quire.cache imports quire.engine, which lies above it",
        ),
        ("cache/page.py", "import quire.attention.plan", "quire.cache imports quire.attention"),
        ("models/decoder.py", "from quire import attention", "quire.models imports quire.attention"),
        ("models/decoder.py", "from ..attention.plan import Plan", "quire.models imports quire.attention"),
        ("models/sub/deep.py", "from ...cache import page", "quire.models imports quire.cache"),
        (
            "offload/model.py",
            "from quire.offload import units, planning",
            "quire.offload imports quire.offload.planning.*",
        ),
        ("offload/model.py", "from .planning.costs import Form", "quire.offload imports quire.offload.planning.*"),
        (
            "engine/engine.py",
            "from quire.offload.planning import plan",
            "quire.engine imports quire.offload.planning.*",
        ),
        ("models/decoder.py", "def f():\n    from quire.cache import page", "quire.models imports quire.cache"),
        ("errors.py", "from quire.config import EngineConfig", "quire.errors imports quire.config"),
        ("cache/new/thing.py", "import quire.novelty", "quire.novelty has no place in the import order"),
        ("engine/engine.py", "from quire import __version__", "import __version__ from quire.version"),
        ("__init__.py", "from quire.llm import LLM", "public names are loaded when used"),
        ("models/tokenizer.py", "import transformers", "transformers is imported when the module is"),
        ("engine/engine.py", "class A:\n    from fastapi import FastAPI", "fastapi is imported when the module is"),
        ("config.py", "def f():\n    import torch", "config.py must do without torch"),
        ("engine/scheduler.py", "from time import monotonic", "engine/scheduler.py must do without time"),
    ],
)
def test_an_offender_is_found(module, code, complaint, tmp_path):
    path = tmp_path / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    done = check(tmp_path)
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert complaint in done.stdout


@pytest.mark.parametrize("guard", ["", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "])
def test_a_circle_of_imports_in_the_cache_is_found(guard: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "deep"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder.parent / "tree.py").write_text("from quire.cache.path import Path")
    (folder.parent / "path.py").write_text("import quire.cache.deep.part\nimport quire.cache.ledger")
    (folder.parent / "ledger.py").write_text("")
    (folder / "part.py").write_text(guard + "from ..tree import PrefixTree")
    done = check(tmp_path)
    assert (done.returncode, done.stdout.count("\n")) == (1, 1), done.stdout
    assert "quire.cache.deep.part -> quire.cache.tree -> quire.cache.path -> quire.cache.deep.part" in done.stdout


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("engine/engine.py", "from quire.cache.ledger import PageLedger\nfrom . import scheduler\nimport torch"),
        ("server/app.py", "import fastapi\nfrom quire.async_llm import AsyncLLM"),
        ("attention/triton.py", "import triton"),
        ("models/tokenizer.py", "def f():\n    import transformers"),
        ("__init__.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from quire.llm import LLM"),
    ],
)
def test_what_is_in_order_passes(module, code, tmp_path):
    path = tmp_path / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    done = check(tmp_path)
    assert done.returncode == 0, done.stdout
