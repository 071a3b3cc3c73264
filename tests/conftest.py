"""What every test shares: two compute threads, a printed seed, the data folder, and skips that say why."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

try:
    import hypothesis
except ImportError:  # on machines that run tests/gpu alone
    hypothesis = None  # type: ignore[assignment]

# Before anything imports torch: as many threads everywhere, so that results and timings do not depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "2")

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of every random generator; a new one by default")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(2**32)
    config.option.hypothesis_seed = str(config.option.seed)
    if hypothesis is None:
        return
    # On a busy machine the time of one example says nothing; pytest-timeout catches what hangs.
    hypothesis.settings.register_profile("quire", deadline=None)
    hypothesis.settings.load_profile("quire")


def pytest_report_header(config: pytest.Config) -> str:
    return f"quire: seed {config.option.seed} (repeat with --seed {config.option.seed}), data in {_data_path()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds Python's, numpy's and torch's generators before each test; the same in every test of a run."""
    value: int = request.config.option.seed
    random.seed(value)
    # A test that uses neither does not wait for them to load.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(value)
    return value


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of texts, traces and tokenizers outside the repository: $QUIRE_DATA, or shared/data beside it."""
    path = _data_path()
    if not path.is_dir():
        pytest.skip(f"no data folder at {path}; set QUIRE_DATA")
    return path


def _data_path() -> Path:
    return Path(os.environ.get("QUIRE_DATA") or ROOT.parent / "shared" / "data")
