"""The command line: errors, exit codes, interrupts, and fast starts."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import httpx
import pytest

from quire.cli import COMMANDS, main
from quire.errors import ModelError
from tests.tiny_models import save_broken, save_tiny

ROOT = Path(__file__).parents[2]
SMALL = ["--cache.memory", "4MiB", "--runtime.device", "cpu", "--runtime.threads", "1"]


def shell(*words, **kwargs):
    command = [sys.executable, "-c", "import sys; from quire.cli import main; sys.exit(main())", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    return str(save_broken(tmp_path_factory.mktemp("broken")))


@pytest.mark.alone
def test_help_is_fast_and_imports_nothing_heavy():
    code = """
import sys, time
begun = time.process_time()
from quire.cli.parser import COMMANDS, overview
overview().format_help()
heavy = ("torch", "numpy", "fastapi", "rich", *(f"quire.cli.{name}" for name in COMMANDS))
heavy, ended = [name for name in heavy if name in sys.modules], time.process_time()
import numpy  # what a slow machine needs longer for, too
print((ended - begun) / (time.process_time() - ended), heavy)
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(3)]
    ratios, heavy = zip(*(run.strip().split(" ", 1) for run in runs), strict=True)
    assert set(heavy) == {"[]"} and min(map(float, ratios)) < 1.5, runs
    begun = time.perf_counter()
    done = shell("--help")
    assert done.returncode == 0 and all(command in done.stdout for command in COMMANDS)
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "smollm2", "--cache.memory", "lots"], "cache.memory"),
        (["serve", "smollm2", "--cache.memory", "-1GiB"], "cache.memory is '-1GiB'; it must be a size such as 512MiB"),
        (["serve", "--cache.memory", "-.5GiB", "smollm2"], "cache.memory is '-.5GiB'; it must be a size"),
        (["serve", "smollm2", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["serve", "smollm2", "--host", "0.0.0.0"], "allow_public"),
        (["serve", "smollm2", "--api-key-file", "/nowhere"], "api_key_file"),
        (["inspect", "/no/such/model"], "/no/such/model"),
        (["serve", "smollm2", "--max-request-bytes", "0"], "serve.max_request_bytes is 0; it must be at least"),
        (["inspect", "~nosuchuser/x"], "~nosuchuser/x"),
        (["inspect", "smollm2", "--tiers", "--tiers.disk", "~nosuchuser/x:1GiB"], "home folder of ~nosuchuser is"),
        (["cache", "ls", "--disk", "~nosuchuser/x:1GiB"], "home folder of ~nosuchuser is not known"),
        (["inspect", "x" * 5000], "File name too long"),
        (["inspect", "smolm2"], "did you mean smollm2?"),
        (["inspect"], "quire inspect needs a MODEL, or --tree or --tiers for a running server"),
        (["inspect", "--json"], "quire inspect needs a MODEL"),
        (["inspect", "smollm2", "--api-key-file", "x"], "--api-key-file needs --tree"),
        (["inspect", "--tiers", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1 (Connection refused)"),
        (["inspect", "--tiers", "smollm2"], "--tiers: 'smollm2' is not a server address such as http://127"),
        (["inspect", "smollm2", "--tiers", "http://127.0.0.1:1"], "--tiers with a MODEL takes no URL"),
        (["inspect", "smollm2", "--tiers", "--digest"], "it takes no --length and no --digest"),
        (["inspect", "smollm2", "--tiers", "--length", "5"], "it takes no --length and no --digest"),
        (["inspect", "--tiers", "--tree"], "give --tree or --tiers, not both"),
        (["inspect", "--tiers", "--length", "5"], "--tiers asks a running server"),
        (["inspect", "smollm2", "--tiers", "--tiers.disk", "/dev/null:1GiB"], "/dev/null is a file"),
        (["inspect", "smollm2", "--tiers", "--tiers.disk", "/dev/null/x:1GiB"], "/dev/null/x cannot be measured"),
        (["inspect", "smollm2", "--tiers", "--tiers.disk", "x:63MiB"], "its size must be at least 64MiB"),
        (["serve", "smollm2", "--tiers.memory", "63MiB"], "tiers.memory is 63MiB; it must be at least 64MiB"),
        (["inspect", "--tree", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1 (Connection refused)"),
        (["inspect", "--tree", "smollm2"], "--tree: 'smollm2' is not a server address such as http://127"),
        (["inspect", "--tree", "ftp://127.0.0.1"], "is not a server address"),
        (["inspect", "--tree", "http://"], "is not a server address"),
        (["inspect", "--tree", "http://[::1"], "is not a server address"),
        (["inspect", "--tree", "http://127.0.0.1:port"], "is not a server address"),
        (["inspect", "--tree", "http://127.0.0.1:99999"], "is not a server address"),
        (["inspect", "--tree", "http://user@127.0.0.1"], "is not a server address"),
        (["inspect", "--tree", "http://a b"], "is not a server address"),
        (["inspect", "--tree", "http://127.0.0.1/\r\nX: y"], "is not a server address"),
        (["inspect", "smollm2", "--tree", "http://127.0.0.1:1"], "it takes no MODEL, no engine settings"),
        (["inspect", "--tree", "http://127.0.0.1:1", "smollm2"], "it takes no MODEL, no engine settings"),
        (["inspect", "--tree", "--cache.memory", "1GiB"], "it takes no MODEL, no engine settings"),
        (["inspect", "--tree", "--api-key-file", "/nowhere"], "api_key_file"),
        (["pull", "SmolLM2"], "did you mean smollm2?"),
        (["generate", "smollm2", "text", "--output", "a"], "--output needs --input"),
        (["generate", "smollm2", "text", "--max-tokens", "-1"], "--max-tokens is -1; it must be at least 0"),
        (["bench", "throughput", "smollm2", "--json", "/"], "cannot write /"),
        (["bench", "throughput", "smollm2", "--json", "/no/such/x"], "cannot write /no/such/x"),
        (["generate", "smollm2"], "--input"),
        (["generate", "smollm2", "text", "--input", "a"], "PROMPT"),
        (["generate", "smollm2", "--input", "/nowhere.jsonl", "--output", "/tmp/never.jsonl"], "/nowhere.jsonl"),
        (["generate", "smollm2", "text", "--temperature", "-1"], "--temperature"),
        (["generate", "smollm2", "text", "--stop", ""], "--stop"),
        (["chat", "smollm2", "--top-p", "2"], "--top-p"),
        (["bench", "throughput", "smollm2", "--batch", "0"], "at least 1"),
        (["bench", "throughput", "smollm2", "--batch", "0", "--print-config"], "at least 1"),
        (["bench", "latency", "smollm2", "--seconds", "0", "--print-config"], "--seconds is 0; it must be above 0"),
        (["pull", "org/name", "--from", "x.whl"], "--from"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_two(words, said, capsys):
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("quire: ") and said in error and error.count("\n") == 1


LIGHT = """
import sys
from quire.cli import main
status = main(sys.argv[1:])
print("torch" in sys.modules)
sys.exit(status)
"""
"""Runs a command, and says whether it imported torch."""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["calibrate", "smollm2", "--text", "/no/such/text"], "cannot read the text /no/such/text"),
        (["calibrate", "smollm2", "--output", "/no/such/x"], "cannot write /no/such/x: there is no folder"),
        (["calibrate", "smollm2", "--export", "/no/such/x"], "cannot write /no/such/x: there is no folder"),
        (["calibrate", "smollm2", "--export", "/dev/null"], "cannot write /dev/null: it is a device; a regular file"),
        (["eval", "retrieval", "smollm2", "--text", "/no/such/text"], "cannot read the text /no/such/text"),
    ],
)
def test_files_are_checked_before_torch_is_imported(words, said):
    command = [sys.executable, "-c", LIGHT, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "False\n") and said in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("LocalEntryNotFoundError", "it cannot be reached, and the model is not in its cache"),
        ("RepositoryNotFoundError", "it has no such model"),
        ("GatedRepoError", "you must request access to this model"),
    ],
)
def test_what_the_hub_says_is_told_in_words(error, said, monkeypatch, capsys):
    import huggingface_hub

    def failing(*_, **__):
        bases = (Exception,) if error != "GatedRepoError" else (type("RepositoryNotFoundError", (Exception,), {}),)
        raise type(error, bases, {})("Got: ConnectError: [Errno -2]")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert main(["inspect", "owner/name"]) == 2
    told = capsys.readouterr().err
    assert "a folder or file owner/name" in told and said in told and "Errno" not in told


def test_a_hub_that_was_switched_off_is_told(monkeypatch, capsys):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["inspect", "no-owner/no-model"]) == 2
    assert "HF_HUB_OFFLINE is set, and the model is not in its cache" in capsys.readouterr().err


def test_debug_shows_the_traceback():
    with pytest.raises(ModelError):
        main(["inspect", "/no/such/model", "--debug"])


SLOW = """
import os
import re
os.write(1, b"importing\\n")
try:
    while True:
        pass
except BaseException as error:  # as libraries do
    raise ImportError("not installed", name="slow") from error
"""
"""A module whose import never ends, and hides the interrupt."""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("typing", ["--help"]),
        ("argparse", ["--help"]),
        ("fastapi", ["serve", "smollm2", "--port", "0"]),
        ("torch", ["generate", "smollm2", "hi"]),
        ("torch", ["chat", "smollm2"]),
        ("torch", ["calibrate", "smollm2"]),
    ],
)
def test_an_interrupted_import_is_one_line_and_code_130(module, words, tmp_path):
    (tmp_path / f"{module}.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", *words],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=10)
    finally:
        process.kill()
    assert (process.returncode, said) == (130, b"quire: interrupted\n")


def test_the_installed_command_takes_care_of_interrupts_before_it_imports():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"quire": "quire.__main__:main"}


def test_a_full_disk_that_no_command_foresaw_is_one_line(monkeypatch, capsys):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere/file")

    monkeypatch.setattr("quire.cli.pull.run", full)
    assert main(["pull", "smollm2"]) == 2
    assert capsys.readouterr().err == "quire: /somewhere/file cannot be written: No space left on device\n"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EPIPE])
def test_a_command_that_fails_to_write_while_stdout_is_closed_is_no_traceback(error, monkeypatch, capsys):
    def failing(_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("quire.cli.serve.run", failing)
    monkeypatch.setattr("sys.stdout", None)
    assert main(["serve", "smollm2"]) == (2 if error == errno.ENOSPC else 1)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["serve", "smollm2", "--print-config"], ["cache", "ls"]], ids=" ".join)
def test_an_output_on_a_full_disk_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "quire", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "quire: the output cannot be written: No space left on device\n")


def test_a_second_interruption_while_the_first_is_told_is_no_traceback(tmp_path):
    file = tmp_path / "twice.py"
    file.write_text(
        "import os, signal, sys\n"
        "from quire.interrupt import install\n"
        "install()\n"
        "from quire import cli\n"
        "from quire.cli import pull\n"
        "def run(args):\n"
        "    raise KeyboardInterrupt\n"
        "pull.run = run\n"
        "leave = cli._leave_if_loading\n"
        "def told(text):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    leave(text)\n"
        "cli._leave_if_loading = told\n"
        "sys.exit(cli.main(['pull', 'smollm2']))\n"
    )
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_an_interruption_is_no_traceback(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("quire.cli.pull.run", interrupted)
    assert main(["pull", "smollm2"]) == 130
    assert capsys.readouterr().err == "quire: interrupted\n"


def test_print_config_shows_values_and_where_they_come_from(tmp_path, capsys):
    file = tmp_path / "quire.toml"
    file.write_text('[cache]\nmemory = "1GiB"\n[serve]\nport = 9000\n')
    words = ["serve", "smollm2", "--config", str(file), "--scheduler.max_running", "7", "--print-config"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith('memory = "1GiB"') and str(file) in line for line in lines)
    assert any(line.startswith("max_running = 7") and "flag" in line for line in lines)
    assert any(line.startswith("port = 9000") and str(file) in line for line in lines)
    assert any(line.startswith("max_queue = 1024") and "default" in line for line in lines)


def test_generate_says_why_a_model_fails(broken, capsys):
    assert main(["generate", broken, "Hi", *SMALL]) == 1
    found = capsys.readouterr()
    assert found.out == "" and "NaN" in found.err


def test_pull_prints_the_path_of_a_model_that_is_here(folder, capsys):
    assert main(["pull", folder]) == 0
    assert capsys.readouterr().out == f"{folder}\n"


def test_output_into_a_closed_pipe_is_no_traceback(folder):
    command = f'{sys.executable} -c "import sys; from quire.cli import main; sys.exit(main())"'
    line = f"{command} inspect {folder} --cache.memory 1MiB --json | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


STDOUT_IS_CLOSED = "stdout is closed, and this command needs it; redirect it with > FILE"
STDIN_IS_CLOSED = "stdin is closed, and this command needs it; redirect it with < FILE"


@pytest.mark.parametrize(
    ("closed", "words", "found"),
    [
        ("<&- 2>&-", ["Hi"], (0, True, "")),
        (">&-", ["Hi"], (2, False, f"quire: {STDOUT_IS_CLOSED}\n")),
        ("2>&-", ["Hi", "--output", "a"], (2, False, "")),
    ],
)
def test_a_closed_stream_is_no_crash(closed, words, found, folder):
    words = ["generate", folder, *words, "--max-tokens", "3", *SMALL]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {closed}', "", sys.executable, "-m", "quire", *words], capture_output=True, text=True
    )
    assert (done.returncode, bool(done.stdout), done.stderr) == found


@pytest.mark.parametrize(
    ("words", "closed", "said"),
    [
        (["chat", "smollm2"], "<&-", STDIN_IS_CLOSED),
        (["chat", "smollm2"], ">&-", STDOUT_IS_CLOSED),
        (["cache", "ls"], ">&-", STDOUT_IS_CLOSED),
        (["serve", "smollm2", "--print-config"], ">&-", STDOUT_IS_CLOSED),
        (["bench", "latency", "smollm2"], ">&-", STDOUT_IS_CLOSED),
    ],
)
def test_a_command_without_the_streams_that_it_needs_says_so(words, closed, said):
    command = [sys.executable, "-m", "quire", *words]
    done = subprocess.run(["bash", "-c", f'"$@" {closed}', "", *command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"quire: {said}\n")


def test_a_server_with_closed_streams_answers(folder, tmp_path):
    # A name that no other server has: the port may be another one's by the time that this one takes it.
    model = tmp_path / f"model-{os.getpid()}"
    model.symlink_to(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "quire", "serve", str(model), "--port", port, *SMALL]
    process = subprocess.Popen(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "", *command])
    try:
        until = time.monotonic() + 60
        while True:
            try:
                (found,) = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
                assert found["id"] == model.name
                break
            except httpx.TransportError:
                assert time.monotonic() < until and process.poll() is None
                time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()


def test_serving_answers_and_ends_on_sigterm(folder):
    command = [sys.executable, "-c", "import sys; from quire.cli import main; sys.exit(main())", "serve", folder]
    process = subprocess.Popen(
        [*command, "--port", "0", *SMALL], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        ready = process.stdout.readline()
        assert "ready" in ready, process.stderr.read()
        url = ready.split()[-1]
        answer = httpx.post(f"{url}/completions", json={"prompt": "abc", "max_tokens": 3}, timeout=30)
        assert answer.status_code == 200 and answer.json()["model"] == Path(folder).name
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("given", ["debgu", "INFOO", "5", "x" * 100_000])
def test_an_unknown_log_level_is_refused_by_name(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_LOG", given)
    assert main(["cache", "ls"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"quire: QUIRE_LOG is '{given[:50]}") and error.count("\n") == 1
    assert "it must be debug, info, warning, error or critical" in error


def test_every_log_line_has_its_time() -> None:
    """Whatever the level is. In a process of its own: pytest has handlers already."""
    code = (
        "import logging, quire.cli as cli\n"
        "cli._set_up_output('serve', logging.getLogger('quire'))\n"
        "logging.getLogger('quire').warning('a line')"
    )
    for level in ("", "debug", "Info", "warning"):
        environment = {**os.environ, "QUIRE_LOG": level}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert re.fullmatch(r"quire: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} a line\n", done.stderr), done.stderr
