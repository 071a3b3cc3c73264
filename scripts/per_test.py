"""A pytest plugin: tells coverage which test runs, and records the outcome of each test.

python -m pytest -p per_test, with this folder on PYTHONPATH. `scripts/touching.py` and `scripts/mutants.py` run tests
with it. What it writes goes to the file named by $TEST_RESULTS: {test: [outcome, seconds, reason]}.

Tests of several CPU levels run only for the best level, because a mutant compiles only that one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator
from pathlib import Path

import pytest

RESULTS = "TEST_RESULTS"
"""The variable that names the file."""

TEST = "TEST_AT_HAND"
"""The variable that names the running test: coverage of the processes it starts has that name as its context."""

_results: dict[str, list[str | float]] = {}


def at_hand() -> Path:
    """The file that holds the name of the running test."""
    return Path(os.environ[RESULTS]).with_suffix(".at_hand")


def pytest_configure(config: pytest.Config) -> None:
    """Runs after tests/conftest.py, and before test modules read the levels and make Hypothesis settings.

    Switches off shrinking of failures, which takes minutes. Switches off the tests' time limit of tests/conftest.py,
    because coverage and parallel tests make a test slow.
    """
    from hypothesis import Phase, settings

    from quire.kernels import levels

    settings.register_profile(
        "per_test", settings.default, phases=(Phase.explicit, Phase.reuse, Phase.generate), database=None
    )
    settings.load_profile("per_test")
    for plugin in config.pluginmanager.get_plugins():
        if hasattr(plugin, "LONGEST"):
            plugin.LONGEST = math.inf
    best = levels.supported_levels()[:1]
    levels.supported_levels = lambda: best  # type: ignore[assignment]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that need a GPU, and tests that measure time or memory, which would fail in parallel."""
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in ("alone", "gpu"))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tells the test's name to coverage if it runs, to processes that the test starts, and (in a file) to the reader of
    a crash.
    """
    os.environ[TEST] = item.nodeid
    if "PYTEST_XDIST_WORKER" not in os.environ:
        at_hand().write_text(item.nodeid)
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        measuring = coverage.Coverage.current()
        assert measuring is not None, "coverage did not start with this process"
        measuring.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds one phase of one test. With pytest-xdist the first process receives all reports."""
    result = _results.setdefault(report.nodeid, ["passed", 0.0, ""])
    result[1] += report.duration  # type: ignore[operator]
    if report.outcome != "passed" and result[0] != "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else str(report.longrepr)
        result[0], result[2] = report.outcome, text.strip().partition("\n")[0]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the file."""
    if not hasattr(session.config, "workerinput"):
        Path(os.environ[RESULTS]).write_text(json.dumps(_results))
