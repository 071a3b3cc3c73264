"""Shared by all tests: one compute thread, a printed seed, the effort, the data folder, and skips with a reason."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.effort import EFFORT, FACTORS, tries

try:
    import hypothesis
except ImportError:  # on machines that run tests/gpu alone
    hypothesis = None  # type: ignore[assignment]

# Before anything imports torch: tests run side by side, one for each core, and results must not depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before anything imports triton, which decides for a whole process: kernels run in the interpreter where no GPU can run
# them. tests/kernels/ahead.py has the compiler, in a process of its own.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).parents[1]

LONGEST = 10.0
"""Seconds that a test may take in a quick run on a fast machine that has nothing else to do, unless it is marked slow.
"""

LOOP_SECONDS = 0.01
"""What the loop of `_slowness` takes on such a machine."""


PROCESSOR_SECONDS = "processor_seconds"
"""The property of a test in the JUnit record: its processor time and that of child processes that ended meanwhile."""

_BEGUN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of every random generator; a new one by default")
    parser.addoption("--alone", choices=("only", "without"), help="the tests marked alone only, or all others")
    parser.addoption("--shuffle", action="store_true", help="run the tests in an order that the seed decides")
    parser.addoption("--seconds", type=float, default=None, help="skip what has not begun after so many seconds")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Jobs in the background of a script ignore it, and so would all that tests start and interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        config.option.seed, config.option.seconds = config.workerinput["seed"], config.workerinput["seconds"]
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(2**32)
    if config.option.seconds is not None and not hasattr(config, "workerinput"):
        config.option.seconds += time.time()
    if getattr(config.option, "timeout", 0) is None:  # 0 where pytest-timeout is not installed
        # A hang is told from a test that takes what the effort allows.
        config.option.timeout = max(float(config.getini("timeout") or 0), 2 * LONGEST * max(1, FACTORS[EFFORT]))
    config.option.hypothesis_seed = str(config.option.seed)
    if hasattr(config, "workerinput"):
        # A core for each process and for what it starts: threads that two processes have together wait for each other.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(config.workerinput["workerid"].removeprefix("gw")) % len(cores)]})
    if hypothesis is None:
        return
    # On a busy machine the time of one example says nothing; pytest-timeout catches what hangs.
    hypothesis.settings.register_profile("quire", deadline=None, max_examples=tries(100))
    hypothesis.settings.load_profile("quire")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a process of pytest-xdist, which reads the command line again, the seed and the end of this run."""
    node.workerinput.update(seed=node.config.option.seed, seconds=node.config.option.seconds)


def pytest_report_header(config: pytest.Config) -> str:
    return (
        f"quire: seed {config.option.seed} (repeat with --seed {config.option.seed}), effort {EFFORT},"
        f" data in {_data_path()}"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.alone:
        chosen = [bool(item.get_closest_marker("alone")) == (config.option.alone == "only") for item in items]
        config.hook.pytest_deselected(items=[item for item, kept in zip(items, chosen, strict=True) if not kept])
        items[:] = [item for item, kept in zip(items, chosen, strict=True) if kept]
    if config.option.shuffle:
        # Files, and tests within each: mixed, every test would make its file's fixtures anew.
        draw, places = random.Random(config.option.seed), dict[str, float]()
        items.sort(key=lambda item: (places.setdefault(item.nodeid.partition("::")[0], draw.random()), draw.random()))
    if EFFORT == "short":
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: left to QUIRE_EFFORT=quick"))
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    _freeze_modules(item)
    if item.config.option.seconds is not None and time.time() > item.config.option.seconds:
        pytest.skip("the time of --seconds is over")
    if (level := getattr(item, "callspec", None) and item.callspec.params.get("level")) is not None:
        # Here and not in the test, which the time of a compiler says nothing of.
        from quire.kernels import load

        load(level)


_frozen: dict[str, Any] = {"file": None, "most_blocks": 0, "is_thawed": True}
"""The file of the last test, how many blocks of memory may be in use before their objects are frozen again, and whether
a server has ended the freeze since then.
"""

FREEZE_BLOCKS = 50_000
"""Blocks of memory of objects that live on: some hundred modules, or ten applications, whose routes FastAPI caches."""


def _freeze_modules(item: pytest.Item) -> None:
    """Freezes the objects that live longer than a test, so that the garbage collector skips them.

    `LLM.close` runs the collector. With all libraries loaded, this takes half a second, longer than most tests take.
    """
    is_new, _frozen["file"] = _frozen["file"] != item.path, item.path
    has_grown = sys.getallocatedblocks() > _frozen["most_blocks"]
    if (is_new and _frozen["is_thawed"]) or has_grown:
        gc.collect()
    elif _frozen["is_thawed"]:
        gc.collect(1)  # Only objects younger than the freeze may be garbage.
    else:
        return
    _frozen.update(most_blocks=sys.getallocatedblocks() + FREEZE_BLOCKS, is_thawed=False)
    gc.freeze()


def _unfreeze(unfreeze: Callable[[], None] = gc.unfreeze) -> None:
    _frozen["is_thawed"] = True
    unfreeze()


gc.unfreeze = _unfreeze  # `gc.get_freeze_count` visits all frozen objects, so it cannot be asked before each test.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Notes the processor time of each test, for scripts/tests.py."""
    if call.when == "setup":
        item.stash[_BEGUN] = _processor_seconds() - call.duration
    elif call.when == "teardown":
        item.user_properties.append((PROCESSOR_SECONDS, f"{_processor_seconds() - item.stash[_BEGUN]:.3f}"))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds, most = time.perf_counter() - begun, LONGEST * max(1, FACTORS[EFFORT])
    # Where other programs keep the cores, or coverage follows every line, seconds say nothing of the test.
    is_busy = os.getloadavg()[0] > 2 * (os.cpu_count() or 1) or sys.gettrace() is not None
    # Tests on a GPU mostly wait for its compiler.
    if seconds <= most or is_busy or any(item.get_closest_marker(name) for name in ("slow", "gpu")):
        return
    if seconds > (most := most * _slowness()):
        pytest.fail(f"took {seconds:.1f} s; a test above {most:.0f} s is made faster or marked slow", pytrace=False)


def _processor_seconds() -> float:
    times = os.times()
    return sum(times[:4])


def _slowness() -> float:
    """How many times longer than on a fast machine that is idle a loop takes here and now, at least once."""
    took = []
    for _ in range(5):
        begun = time.perf_counter()
        total = 0
        for number in range(200_000):
            total += number * number % 7
        took.append(time.perf_counter() - begun)
    return max(1.0, sorted(took)[2] / LOOP_SECONDS)


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


@pytest.fixture
def toy_codec() -> Iterator[None]:
    """Adds a codec of the tests to the registry. Afterwards restores the registry, including its order."""
    from quire.cache.codecs import CODECS
    from tests.codecs import TOY

    before = dict(CODECS)
    CODECS[TOY.name] = TOY
    yield
    CODECS.clear()
    CODECS.update(before)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of a module's own. Kernels are built in the user's."""
    from quire.kernels import load

    load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of texts, traces and tokenizers outside the repository: $QUIRE_DATA, or shared/data beside it."""
    path = _data_path()
    if not path.is_dir():
        pytest.skip(f"no data folder at {path}; set QUIRE_DATA")
    return path


def _data_path() -> Path:
    return Path(os.environ.get("QUIRE_DATA") or ROOT.parent / "shared" / "data")
