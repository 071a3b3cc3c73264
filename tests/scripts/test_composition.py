"""The composition matrix is closed: every pair of the five systems, and all five, have tests that exist."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmark_scripts import benchmark
from tests.composition import MATRIX, Test

five = benchmark("systems")
CONFIGURATIONS, NAMES, PAIRS, name_of = five.CONFIGURATIONS, five.NAMES, five.PAIRS, five.name_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "composition.py"

TESTS = tuple(dict.fromkeys(test for proof in MATRIX.values() for test in proof.tests))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("composition_page", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """The ids of all cases of the files that the matrix names, as pytest collects them in a quick run."""
    files = sorted({test.node.partition("::")[0] for test in TESTS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "QUIRE_EFFORT": "quick"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_every_pair_and_all_five_have_tests() -> None:
    assert len(PAIRS) == 10 and set(MATRIX) == {*itertools.combinations(NAMES, 2), NAMES}
    for systems, proof in MATRIX.items():
        assert proof.tests and proof.claim.endswith("."), name_of(systems)


@pytest.mark.slow
def test_every_named_test_is_collected_with_its_parameters(collected: list[str]) -> None:
    for test in TESTS:
        cases = [line.removeprefix(test.node) for line in collected if re.split(r"\[", line)[0] == test.node]
        assert cases, f"{test.node} is not collected"
        chosen = [case for case in cases if {*test.words} <= {*case.strip("[]").split("-")}]
        assert chosen, f"no case of {test.node} has {test.words}: {cases}"


def test_parameters_are_compared_as_words() -> None:
    assert Test("a.py", "b", ("nuq3",)).node == "tests/a.py::b"
    for test in TESTS:
        assert not any("-" in word for word in test.words), "ids are divided at dashes"


def test_the_page_is_up_to_date(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--check"])
    assert script.main() == 0, "python scripts/composition.py"
    monkeypatch.setattr(script, "PAGE", tmp_path / "none.md")
    assert script.main() == 1


def results(**changes: dict[str, Any]) -> dict[str, Any]:
    """What a benchmark might have found. changes: of rows, by their number."""
    load = {"prompt": 100, "shared": 50, "prefixes": 2, "output": 9, "clients": [1, 2], "seconds": 3.0, "trace": None}
    about = {
        "model": "tiny", "memory": 1 << 30, "load": load, "slo": {"ttft": 1.5, "tpot": 0.02},
        "codec": {"cache.codec": "nuq3"}, "retention": {"retain.budget": 0.5}, "offload": {"offload.mode": "auto"},
        "processor": "a processor", "cores": 2, "version": "1", "date": "2026-01-01",
    }  # fmt: skip
    rows = [
        {
            "configuration": name_of(systems), "refused": "", "note": "", "ratio": 1.0, "ratio_error": 0.0,
            "sequences": 10 + place, "goodput": 1.0 + place, "clients": 2, "weights": 1 << 20, "cache": 1 << 21,
            "pss": 1 << 22, "gain_sequences": 1 + place / 10, "gain_goodput": 1.0 + place,
        } | changes.get(f"row_{place}", {})
        for place, systems in enumerate(CONFIGURATIONS)
    ]  # fmt: skip
    return {"about": about, "rows": rows}


def test_the_page_has_every_configuration_with_its_gains(script: ModuleType) -> None:
    found = script.page(results(row_6={"ratio": 1.0125}, row_16={"refused": "no room", "gain_goodput": None}))
    for systems in (*PAIRS, NAMES):
        for test in MATRIX[systems].tests:
            assert f"`{test.name}`" in found
    pair = name_of(CONFIGURATIONS[6])
    assert pair == "sharing + codec" and "| 1.60, 7.00, 1.012 |" in found
    assert f"| {pair} | 16 | 1.60 | 7.000 | 7.00 | 2 | 1.0125 ± 0.0000 | 1MiB | 2MiB | 4MiB |" in found
    assert "All five: refused." in found and "- all five: no room" in found


def test_without_results_the_page_has_the_proofs_alone(script: ModuleType) -> None:
    found = script.page(None)
    assert "Not measured yet." in found and "All five:" not in found
    assert found.count("](../../tests/") == sum(len(proof.tests) for proof in MATRIX.values())


def test_links_of_the_page_lead_to_files(script: ModuleType) -> None:
    for link in re.findall(r"\]\(([^)#]+)", script.page(results())):
        assert (ROOT / "docs" / "lab" / link).is_file(), link
