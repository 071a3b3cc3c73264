"""The command line: parsing, errors, exit codes, and fast starts."""

import argparse
import ast
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import httpx
import pytest

from quire.cli import COMMANDS, main, parse
from quire.cli.parser import actions_of, parsers_of
from quire.errors import ModelError
from tests.tiny_models import save_tiny, tiny_shape, write_gguf

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
    """A model whose logits are NaN."""
    from safetensors.torch import load_file, save_file

    folder = save_tiny(tmp_path_factory.mktemp("broken"))
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    return str(folder)


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


ACTIVE = ("plan", "bench", "eval")
"""Commands with actions."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse([command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "--debug" in text and (
        "--cache.memory" in text or command in ("calibrate", "pull", "cache", "cluster", "doctor")
    )


def private_names(code):
    """Names with one underscore in front that a module defines, or sets on its objects."""
    for node in ast.walk(ast.parse(code)):
        name = getattr(node, "name", None) if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
        name = node.attr if isinstance(node, ast.Attribute) else name
        if name is not None and name.startswith("_") and not name.startswith("__"):
            yield name


def private_uses(code, private):
    """Places of a module that use one of the names on something other than itself, or as a text."""
    for node in ast.walk(ast.parse(code)):
        name = node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else None
        if isinstance(name, str) and name in private:
            yield f"line {node.lineno}: {name}"


def test_nothing_of_argparse_is_used_that_is_private():
    private = set(private_names(Path(argparse.__file__).read_text())) - {"_"}  # which is anybody's
    assert {"_actions", "_option_string_actions", "_SubParsersAction", "_ArgumentGroup"} <= private
    offender = "parser._actions; argparse._SubParsersAction; getattr(parser, '_defaults')"
    assert len(list(private_uses(offender, private))) == 3
    code = {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}
    parsing = {path: text for path, text in code.items() if "argparse" in text or "Arguments" in text}
    assert len(parsing) > len(COMMANDS)
    assert {path.name: found for path, text in parsing.items() if (found := list(private_uses(text, private)))} == {}


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("quire ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--debug"], "COMMAND"),
        (["fly"], "quire: unknown command 'fly'; valid are serve, chat,"),
        (["srve", "smollm2"], "quire: unknown command 'srve'; did you mean serve? (see quire --help)"),
        (["serve"], "MODEL"),
        (["serve", "smollm2", "--cache.memry", "1GiB"], "--cache.memory"),
        (["generate", "smollm2", "--temprature=1"], "--temperature"),
        (["serve", "smollm2", "--por", "1"], "--port"),
        (
            ["serve", "smollm2", "--temperature", "0"],
            "unknown flag --temperature; quire chat and quire generate have",
        ),
        (
            ["generate", "smollm2", "text", "--port", "1"],
            "unknown flag --port; quire serve has it (see quire generate",
        ),
        (
            ["calibrate", "smollm2", "--cache.sink_tokens", "2"],
            "unknown flag --cache.sink_tokens; the flag is --sink-tokens",
        ),
        (
            ["serve", "smollm2", "--temprature", "0"],
            "quire serve: unknown flag --temprature; no flag has a name like it",
        ),
        (["generate", "smollm2", "one", "--seed", "1", "two"], "'two'"),
        (["generate", "smollm2", "--seed", "1", "one", "two"], "'two'"),
        (["generate", "smollm2", "--seed", "1", "-one"], "unknown flag -one; write a text that begins with - after --"),
        (["serve", "smollm2", "--hlp"], "unknown flag --hlp; did you mean --help?"),
        (["bench", "trace", "smollm2", "--concurency", "2"], "unknown flag --concurency; did you mean --concurrency?"),
        (["bench", "trace", "smollm2", "--speed", "2", "--concurrency", "2"], "not allowed with argument"),
        (["bench", "trace", "smollm2", "--concurrency", "1", "--speed", "2"], "not allowed with argument"),
        (["generate", "smollm2", "--", "x", "--chat"], "generate: --chat stands behind --, after which no word is"),
        (["bench", "--speed", "trace", "m"], "--speed is for quire bench trace; write the action before its flags"),
        (
            ["serve", "smollm2", "other.gguf"],
            "MODEL is 'smollm2', and a process has one",
        ),
        (["chat", "smollm2", "--port", "1", "other"], "unknown flag --port"),
        (["inspect", "smollm2", "--length", "0"], "'0' is not a whole number of at least 1"),
        (["inspect", "smollm2", "--length", "8", "many"], "'many' is not a whole number of at least 1"),
        (["bench", "latencies", "smollm2"], "latencies"),
        (
            ["serve", "smollm2", "--cache.share", "maybe"],
            "quire serve: --cache.share is 'maybe'; it must be true or false",
        ),
        (
            ["serve", "--cache.share", "maybe", "smollm2"],
            "quire serve: --cache.share takes true or false; 'maybe' was read as MODEL, and 'smollm2' is left over",
        ),
        (
            ["generate", "smollm2", "--cache.share", "hello", "world"],
            "quire generate: there is no place for 'world'; a text of several words needs quotes (see",
        ),
    ],
)
def test_wrong_words_are_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(words)
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert said in error and error.count("\n") == 1


def test_without_a_command_all_of_them_are_listed(capsys):
    with pytest.raises(SystemExit) as exit_:
        main([])
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert all(f"\n    {name}" in error for name in COMMANDS)


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
        (["bench", "trace", "smollm2", "--print-config"], "quire bench trace needs --trace FILE"),
        (["bench", "latency", "smollm2", "--seconds", "0", "--print-config"], "--seconds is 0; it must be above 0"),
        (["bench", "compose", "smollm2", "--ttft", "0", "--print-config"], "--ttft is 0; it must be above 0"),
        (["pull", "org/name", "--from", "x.whl"], "--from"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_two(words, said, capsys):
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("quire: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize("prompt", ["Hello", "", "-", "- one", "--one two", "-5", "-.5", "two words"])
def test_the_prompt_may_stand_behind_flags(prompt):
    flags = ["--max-tokens", "5", "--cache.memory", "1GiB", "--chat"]
    for place in range(0, 5, 2):
        args = parse(["generate", "smollm2", *flags[:place], prompt, *flags[place:]])
        assert (args.model, args.prompt, args.max_tokens, args.chat) == ("smollm2", prompt, 5, True)
    assert parse(["generate", *flags, "smollm2", prompt]).prompt == prompt
    assert parse(["generate", "smollm2", *flags]).prompt is None


@pytest.mark.parametrize("flags", [[], ["--max-tokens", "5"]])
def test_a_prompt_behind_two_dashes_may_look_like_a_flag(flags):
    for dashes in (["--"], ["--", "--"], ["--", "--", "--"]):
        assert parse(["generate", "smollm2", *flags, *dashes, "--no-flag"]).prompt == "--no-flag"
        assert parse(["generate", "smollm2", *flags, *dashes, "x"]).prompt == "x"
        assert parse(["generate", "smollm2", *flags, *dashes]).prompt is None


def test_values_of_a_list_are_kept_as_they_are_and_those_of_a_set_count_once():
    args = parse(["eval", "retrieval", "m", "--lengths", "64,64", "--depths", "0,0", "--codecs", "g4,g4"])
    assert (args.lengths, args.depths, args.codecs) == ((64, 64), (0.0, 0.0), ("g4", "g4"))
    args = parse(["calibrate", "m", "--bits", "3,2,3", "--books", "own,own"])
    assert (args.bits, args.kinds) == ((3, 2), ("own",))


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
        (["--text", "/no/such/text"], "cannot read the text /no/such/text"),
        (["--output", "/no/such/x"], "cannot write /no/such/x: there is no folder"),
        (["--export", "/no/such/x"], "cannot write /no/such/x: there is no folder"),
    ],
)
def test_files_of_a_calibration_are_checked_before_torch_is_imported(words, said):
    command = [sys.executable, "-c", LIGHT, "calibrate", "smollm2", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "False\n") and said in done.stderr


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_a_usage_line_and_then_says_what_the_command_does(command, capsys):
    usage, empty, about, *_ = help_of(capsys, command).splitlines()
    assert usage.startswith(f"usage: quire {command} ") and len(usage) < 120 and not empty and about


def test_help_of_a_server_has_its_common_settings_first_and_each_flag_once(capsys):
    text = help_of(capsys, "serve")
    common = text[text.index("common settings:") :].split("\n\n")[0]
    assert all(flag in common for flag in ("--port", "--cache.memory", "--cache.codec", "--tiers.disk"))
    flags = re.findall(r"^  (--\S+)", text, re.MULTILINE)
    assert len(flags) == len(set(flags)) and text.index("common settings:") < text.index("model settings:")


@pytest.mark.parametrize(
    "words",
    [
        ["ppl", "m", "--text", "retrieval"],
        ["--text", "retrieval", "ppl", "m"],
        ["--json", "ppl", "--text=retrieval", "m"],
        ["m", "--context", "9", "ppl", "--text", "retrieval"],
    ],
)
def test_an_action_may_stand_behind_flags_whose_values_are_called_like_others(words):
    args = parse(["eval", *words])
    assert (args.action, args.model, str(args.text)) == ("ppl", "m", "retrieval")


@pytest.mark.parametrize("command", ACTIVE)
def test_help_of_an_action_has_its_own_flags_and_no_others(command, capsys):
    text = help_of(capsys, command)
    assert f"quire {command} ACTION --help shows the flags of an action" in text
    flags = {each.action: {flag for flag in each.flags if flag.startswith("--")} for each in parsers_of(command)}
    assert [*flags] == [*actions_of(command)] and all(action in text for action in flags)
    for action, own in flags.items():
        lines = re.findall(r"^  (-.+?)(?:  |$)", help_of(capsys, command, action), re.MULTILINE)
        shown = {flag for line in lines for flag in re.findall(r"--[\w.-]+", line)}
        assert shown == own
        assert any(own - others for name, others in flags.items() if name != action)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["serve", "m", "--cache.sink-tokens", "2"], "cache.sink_tokens"),
        (["serve", "m", "--api_key_file=2"], "serve.api_key_file"),
        (["generate", "m", "--max_tokens", "2"], "max_tokens"),
        (["bench", "throughput", "m", "--output_tokens", "2"], "output_tokens"),
    ],
)
def test_flags_take_hyphens_for_underscores_and_the_other_way_round(words, name):
    assert str(vars(parse(words))[name]) == "2"
    assert parse(["generate", "m", "--", "--max_tokens"]).prompt == "--max_tokens"


def test_help_says_what_no_limit_is(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "0: the rest of the context" in " ".join(capsys.readouterr().out.split())


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


def test_an_output_on_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "quire", "serve", "smollm2", "--print-config"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
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


def test_a_switch_does_not_take_the_model_for_its_value():
    for words in (
        ["--allow-public", "smollm2"],
        ["smollm2", "--allow-public"],
        ["--serve.allow_public", "true", "smollm2"],
    ):
        args = parse(["serve", *words])
        assert (args.model, vars(args)["serve.allow_public"]) == ("smollm2", "true")


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


def test_inspect_prints_what_fits(folder, capsys):
    assert main(["inspect", folder, "--cache.memory", "1MiB", "--model.dtype", "float32", "--length", "64", "200"]) == 0
    text = capsys.readouterr().out
    for said in ("bytes per token", "tokens that fit", "sequences of 64", "sequences of 200", "weights", "fails first"):
        assert said in text
    assert (
        main(["inspect", folder, "--cache.memory", "1MiB", "--model.dtype", "float32", "--length", "64", "--json"]) == 0
    )
    facts = json.loads(capsys.readouterr().out)
    # 2 layers, 2 kv heads of 12, keys and values of 4 bytes: 384 bytes a token.
    assert facts["bytes_per_token"] == 2 * 2 * 12 * 2 * 4
    assert facts["sequences"]["64"] == facts["num_chunks"] == facts["tokens"] // 64
    assert facts["cache_bytes"] <= 2**20


def test_inspect_says_that_a_length_is_too_long(folder, capsys):
    words = ["inspect", folder, "--cache.memory", "1MiB", "--length", "64", "99999999"]
    assert main(words) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "99,999,999" in line]
    assert row[3] == "0" and " ".join(row[4:]) == "the longest request has 512 tokens"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequences"]["99999999"] == 0


@pytest.mark.parametrize(("how", "share"), [("budget", 0.5), ("threshold", 0.9)])
def test_inspect_says_that_its_numbers_are_without_retention(folder, capsys, how, share):
    words = ["inspect", folder, "--cache.memory", "1MiB", f"--retain.{how}", str(share)]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f" retention {how} {share} shrinks sequences after their prompt; not counted here " in printed
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["retain"][how] == share


def test_inspect_shows_the_calibration_below_the_cache(tmp_path, capsys):
    folder = save_tiny(tmp_path, head_dim=64)
    assert main(["inspect", str(folder), "--cache.memory", "4MiB", "--cache.codec", "nuq3"]) == 0
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names[names.index("cache") + 1] == "calibration"


def test_inspect_shows_weights_by_type(tmp_path, capsys):
    shape = tiny_shape("llama", hidden_size=256, head_dim=64, ffn_size=256, vocab_size=272, tied_embeddings=False)
    write_gguf(tmp_path / "mixed.gguf", shape, kind={"": "Q4_K", "v": "Q6_K", "embed": "Q2_K"})
    vectors, head = ("F32", "bfloat16"), ("Q4_K", "Q4_K")
    for weights, held in (
        ("native", {head, ("Q6_K", "Q6_K"), ("Q2_K", "bfloat16"), vectors}),
        ("g4", {head, ("Q4_K", "G4"), ("Q6_K", "G4"), ("Q2_K", "Q8_0"), vectors}),
    ):
        words = ["inspect", str(tmp_path / "mixed.gguf"), "--cache.memory", "4MiB", "--model.weights", weights]
        assert main([*words, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        parts = facts["weights"]
        assert {(part["stored"], part["held"]) for part in parts} == held
        assert sum(part["numbers"] for part in parts) == facts["num_parameters"]
        assert sum(part["num_bytes"] for part in parts) == facts["weight_bytes"]
        assert [part["num_bytes"] for part in parts] == sorted((part["num_bytes"] for part in parts), reverse=True)
        assert {part["tensors"] for part in parts if part["stored"] == "Q6_K"} == {shape.num_layers}
        assert main(words) == 0
        text = capsys.readouterr().out
        assert "Q6_K" in text and "M numbers in" in text


def test_inspect_refuses_a_cache_that_holds_nothing(folder, capsys):
    assert main(["inspect", folder, "--cache.memory", "1KiB"]) == 2
    assert "cache.memory" in capsys.readouterr().err


def test_bench_measures(folder, tmp_path, capsys):
    out = tmp_path / "bench.jsonl"
    words = ["--batch", "2", "--prefill", "64", "--input-tokens", "16", "--output-tokens", "256", "--repeats", "3"]
    assert main(["bench", "throughput", folder, *words, *SMALL, "--json", str(out)]) == 0
    assert capsys.readouterr().out.count("tokens/s") == 2
    assert [line.split('"')[3] for line in out.read_text().splitlines()] == ["prefill", "decode"]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_bench_measures_no_answer_that_is_cut_short(folder, phase, tmp_path, capsys):
    out = tmp_path / "bench.jsonl"
    # 4 MiB hold more than the model's context of 512 tokens.
    words = ["--prefill"] if phase == "decode" else ["--batch", "--prefill", "600"]
    lengths = ["--input-tokens", "400", "--output-tokens", "200", "--repeats", "1"]
    assert main(["bench", "throughput", folder, *words, *lengths, *SMALL, "--json", str(out)]) == 2
    error = capsys.readouterr().err
    assert "512" in error and error.count("\n") == 1 and not out.exists()


def test_bench_measures_no_model_that_fails(broken, tmp_path, capsys):
    out = tmp_path / "bench.jsonl"
    assert main(["bench", "throughput", broken, "--repeats", "1", *SMALL, "--json", str(out)]) == 2
    found = capsys.readouterr()
    assert "NaN" in found.err and "tokens/s" not in found.out and not out.exists()


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
