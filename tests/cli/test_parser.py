"""Lines that the parser of a command takes and refuses, and its help."""

import argparse
import ast
import re
from pathlib import Path

import pytest

from quire.cli import COMMANDS, main, parse
from quire.cli.parser import actions_of, parsers_of

ROOT = Path(__file__).parents[2]
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
        (["bench", "latency", "smollm2", "--second", "2"], "unknown flag --second; did you mean --seconds?"),
        (["calibrate", "smollm2", "--export", "a", "--import", "b"], "not allowed with argument"),
        (["simulate", "smollm2", "--rates", "1,2", "--rate", "2"], "not allowed with argument"),
        (["generate", "smollm2", "--", "x", "--chat"], "generate: --chat stands behind --, after which no word is"),
        (["chat", "smollm2", "--", "-x"], "there is no place for '-x'; MODEL is 'smollm2'"),
        (["chat", "smollm2", "--", "--foo"], "there is no place for '--foo'; MODEL is 'smollm2'"),
        (["doctor", "--", "x"], "there is no place for 'x'"),
        (["generate", "smollm2", "x", "--n", "2"], "unknown flag --n; no flag has a name like it"),
        (
            ["bench", "--repeats", "throughput", "m"],
            "--repeats is for quire bench throughput; write the action before its flags",
        ),
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


def test_two_dashes_may_end_a_command_without_words():
    assert parse(["doctor", "--"]).command == "doctor"


def test_values_of_a_list_are_kept_as_they_are_and_those_of_a_set_count_once():
    args = parse(["eval", "retrieval", "m", "--lengths", "64,64", "--depths", "0,0", "--codecs", "g4,g4"])
    assert (args.lengths, args.depths, args.codecs) == ((64, 64), (0.0, 0.0), ("g4", "g4"))
    args = parse(["calibrate", "m", "--bits", "3,2,3", "--books", "own,own"])
    assert (args.bits, args.kinds) == ((3, 2), ("own",))


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


def test_a_switch_does_not_take_the_model_for_its_value():
    for words in (
        ["--allow-public", "smollm2"],
        ["smollm2", "--allow-public"],
        ["--serve.allow_public", "true", "smollm2"],
    ):
        args = parse(["serve", *words])
        assert (args.model, vars(args)["serve.allow_public"]) == ("smollm2", "true")
