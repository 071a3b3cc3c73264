"""Failures are told when they happen: time on a GPU may be over before the tests are."""

from __future__ import annotations

import os
import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} ({report.when}, {report.duration:.0f} s)\n{report.longreprtext}", file=sys.stderr)
