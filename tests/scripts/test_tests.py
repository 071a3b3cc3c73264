"""scripts/tests.py and tests/conftest.py: the arguments of pytest, the data shared by its processes, and failures."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "tests.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("tests_script", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "codes, status",
    [((0, 0), 0), ((0, 5), 0), ((5, 0), 0), ((5, 5), 5), ((1, 0), 1), ((5, 1), 1), ((0, -11), 11), ((-9, 5), 9)],
)
def test_a_group_that_failed_or_was_killed_is_a_failure_and_an_empty_one_is_not(
    script: ModuleType, codes: tuple[int, int], status: int
) -> None:
    assert script.exit_status(codes) == status


def test_the_last_lines_name_what_failed(script: ModuleType, tmp_path: Path) -> None:
    record = tmp_path / "record.xml"
    assert script.failures(record) == []
    record.write_text("<testsuites><testsuite><testcase")
    assert script.failures(record) == []
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\n\n"
        "@pytest.fixture\n"
        "def broken():\n"
        "    raise ValueError\n\n"
        "def test_good(): pass\n"
        "@pytest.mark.parametrize('number', [1, 2])\n"
        "def test_bad(number): assert number == 1\n"
        "def test_error(broken): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", "/dev/null"]
    subprocess.run([*command, f"--junitxml={record}", str(tests)], cwd=tmp_path, capture_output=True, text=True)
    assert script.failures(record) == ["test_some::test_bad[2]", "test_some::test_error"]


TOUCHED = {
    "kernels": {"tests": ["tests/kernels", "tests/test_one.py"], "sources": ["src/kernels", "src/cache/table.py"]},
    "plans": {"tests": ["tests/plans"], "sources": ["src/plans"]},
}


@pytest.mark.parametrize(
    "changed, left_out",
    [
        ([], ["tests/kernels", "tests/test_one.py", "tests/plans"]),
        (["CHANGELOG.md"], ["tests/kernels", "tests/test_one.py", "tests/plans"]),
        (["src/kernels/deep/one.py"], ["tests/plans"]),
        (["src/cache/table.py"], ["tests/plans"]),
        (["src/cache/table.pyi", "src/kernels_too/one.py"], ["tests/kernels", "tests/test_one.py", "tests/plans"]),
        (["tests/test_one.py"], ["tests/plans"]),
        (["src/plans/one.py", "CHANGELOG.md"], ["tests/kernels", "tests/test_one.py"]),
        (["tests/conftest.py"], []),
        (["tests/engines.py"], []),
        (["tests/cache/pages.py"], []),
        (["tests/cache/test_tree.py"], ["tests/kernels", "tests/test_one.py", "tests/plans"]),
        (["constraints.txt"], []),
        (None, []),
    ],
)
def test_a_group_is_left_out_if_nothing_that_it_runs_has_changed(
    script: ModuleType, changed: list[str] | None, left_out: list[str]
) -> None:
    assert script.untouched(TOUCHED, changed) == left_out


def test_changes_are_those_since_the_upstream_branch_and_what_is_not_committed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(name: str) -> None:
        (tmp_path / name).write_text("")
        git("add", name)
        git("commit", "-m", name)

    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.changed_files(None) is None, "there is no repository"
    git("init")
    commit("first")
    assert script.changed_files(None) is None, "there is one commit only"
    commit("second")
    (tmp_path / "new").write_text("")
    assert script.changed_files(None) == {"second", "new"}
    git("checkout", "-b", "own")
    git("branch", "--set-upstream-to", "main")
    assert script.changed_files(None) == {"new"}
    commit("third")
    commit("fourth")
    (tmp_path / "first").write_text("changed")
    assert script.changed_files(None) == {"first", "third", "fourth", "new"}
    assert script.changed_files("HEAD~1") == {"first", "fourth", "new"}
    assert script.changed_files("nowhere") is None


def test_the_groups_and_budgets_name_what_there_is(script: ModuleType) -> None:
    root = SCRIPT.parents[1]
    for group in json.loads(script.TOUCHED.read_text()).values():
        assert set(group["declared"]) < set(group["sources"])
        assert all((root / each).exists() for each in (*group["tests"], *group["sources"]))
    folders = {file.relative_to(root).parts[1] for file in (root / "tests").rglob("test_*.py")}
    names = {"root" if each.endswith(".py") else each for each in folders}
    assert set(script.BUDGETS) == names - {"gpu"}


def test_the_cost_of_each_folder_is_added_up(script: ModuleType, tmp_path: Path) -> None:
    record = tmp_path / "record.xml"
    costs = defaultdict(script.Cost)
    script.add_costs(record, costs)
    assert not costs
    case = (
        '<testcase classname="tests.{}" time="{}"><properties><property name="{}" value="{}"/></properties></testcase>'
    )
    cases = [
        case.format("cache.test_tree.TestTree", 2, "processor_seconds", 3.5),
        case.format("cache.test_ledger", 1, "processor_seconds", 0.5),
        case.format("test_llm", 7, "processor_seconds", 1),
        case.format("test_llm", 7, "other", 100),
    ]
    record.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    script.add_costs(record, costs)
    assert costs == {"cache": script.Cost(2, 3.0, 4.0), "root": script.Cost(2, 14.0, 1.0)}
    lines = list(script.cost_table(costs, {"cache": 3, "root": 2}))
    assert [line.split() for line in lines[1:]] == [
        ["cache", "2", "3", "4", "3", "over"],
        ["root", "2", "14", "1", "2"],
    ]


def test_both_groups_share_the_seconds(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now, commands = [1000.0], []

    def run(command: list[str], *, is_typed: bool) -> int:
        assert not is_typed
        commands.append(command)
        now[0] += 90.0
        return 0

    monkeypatch.setattr(script.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(script, "run", run)
    for words, seconds in ((["--seconds", "100"], ["80", "10"]), (["--seconds=80"], ["64", "0"]), ([], [])):
        commands.clear()
        monkeypatch.setattr(script.sys, "argv", ["tests.py", "-k", "name", *words, "--seed", "3"])
        assert script.main() == 0
        given = [word.removeprefix("--seconds=") for command in commands for word in command if "--seconds" in word]
        assert given == seconds
        assert all(command[4:8] == ["-k", "name", "--seed", "3"] for command in commands)
        assert [word for command in commands for word in command if "--alone" in word] == [
            "--alone=without",
            "--alone=only",
        ]


def test_processes_side_by_side_have_the_printed_seed_one_order_and_one_end(tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\n\n"
        "@pytest.mark.parametrize('number', range(20))\n"
        "def test_it(seed, number, pytestconfig, worker_id):\n"
        "    with open(f'{__file__}.{worker_id}', 'a') as file:\n"
        "        print(seed, pytestconfig.option.seconds, number, file=file)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    command += [f"--rootdir={tmp_path}", "--numprocesses=2", "--shuffle", "--seconds=600", str(tests)]
    begun = time.time()
    done = subprocess.run(command, cwd=SCRIPT.parents[1], capture_output=True, text=True)
    assert done.returncode == 0 and "20 passed" in done.stdout, done.stdout
    printed = re.search(r"quire: seed (\d+)", done.stdout)
    rows = [line.split() for file in tmp_path.glob("test_some.py.*") for line in file.read_text().splitlines()]
    (seed,), (end,) = {row[0] for row in rows}, {row[1] for row in rows}
    assert printed is not None and printed[1] == seed
    assert begun < float(end) - 600 < time.time()
    numbers = [int(row[2]) for row in rows]
    assert sorted(numbers) == list(range(20)) != numbers


@pytest.mark.parametrize(("moment", "number"), [("collecting", signal.SIGINT), ("running", signal.SIGTERM)])
def test_an_interrupt_ends_all_processes_without_a_traceback(moment: str, number: int, tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    begun = "with open(__file__ + '.pids', 'a') as file: print(os.getpid(), file=file)"
    wait = "while True: time.sleep(0.1)"  # as imports of all tests, or a test, that goes on after Ctrl-C
    hold = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    body = {
        "collecting": f"{hold}\n{begun}\n{wait}\n",
        "running": f"def test_it():\n    {hold}\n    {begun}\n    {wait}\n",
    }[moment]
    tests.write_text(f"import os, signal, time\n{body}")
    pids = Path(f"{tests}.pids")
    command = [sys.executable, str(SCRIPT), "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={tmp_path}"]
    command += ["-p", "tests.conftest", str(tests)]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    while not pids.exists() or not pids.read_text().strip():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(number)
    begun_at = time.monotonic()
    said, _ = process.communicate(timeout=15)
    assert time.monotonic() - begun_at < 10
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said, said
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
