"""Options of other engines are answered with Quire's option, or `not yet`, in one line."""

import re

import pytest

from quire.cli import COMMANDS, main, parse
from quire.cli.parser import parsers_of
from quire.config import SECTIONS, EngineConfig
from quire.config import _groups_of as groups_of
from quire.errors import ConfigError
from quire.foreign_flags import (
    FOREIGN_COMMANDS,
    FOREIGN_FLAGS,
    FOREIGN_PARAMETERS,
    find_hint,
    flag_hint,
    parameter_hint,
)
from quire.options import nearest, settings_of

# As users of vLLM, SGLang and llama.cpp type them.
TYPED = [
    ("--max-model-len 4096", "--model.max_context"),
    ("--max-model-len=4096", "--model.max_context"),
    ("--ctx-size 4096", "--model.max_context"),
    ("-c 4096", "--model.max_context"),
    ("-c4096", "--model.max_context"),
    ("--context-length 4096", "--model.max_context"),
    ("--tensor-parallel-size 2", "not yet"),
    ("-tp 2", "not yet"),
    ("--tp 2", "not yet"),
    ("--gpu-memory-utilization 0.9", "--cache.memory"),
    ("--mem-fraction-static 0.8", "--cache.memory"),
    ("-ngl 99", "--runtime.device"),
    ("-ngl99", "--runtime.device"),
    ("--n-gpu-layers 99", "--runtime.device"),
    ("--served-model-name x", "--model.name"),
    ("--dtype bfloat16", "--model.dtype"),
    ("--kv-cache-dtype fp8", "--cache.codec"),
    ("--enable-prefix-caching", "--cache.share"),
    ("--no-enable-prefix-caching", "--cache.share"),
    ("--max-num-seqs 8", "--scheduler.max_running"),
    ("--parallel 8", "--scheduler.max_running"),
    ("-np 8", "--scheduler.max_running"),
    ("--max-num-batched-tokens 8192", "--scheduler.token_budget"),
    ("--chunked-prefill-size 8192", "--scheduler.token_budget"),
    ("--swap-space 4", "--tiers.memory"),
    ("--cpu-offload-gb 4", "--offload.mode"),
    ("--hicache-size 8", "--tiers.memory"),
    ("--kv-transfer-config {}", "--cluster.prefill"),
    ("--data-parallel-size 2", "--cluster.mixed"),
    ("--enable-auto-tool-choice", "always on"),
    ("--tool-call-parser hermes", "always on"),
    ("--reasoning-parser qwen3", "always on"),
    ("--allowed-origins *", "--cors-origins"),
    ("--disable-log-requests", "--access-log"),
    ("--mlock", "not locked"),
    ("--draft-model x", "not yet"),
    ("--quantization awq", "--model.weights"),
    ("--api-key secret", "--api-key-file"),
    ("--trust-remote-code", "not needed"),
    ("--threads 2", "--runtime.threads"),
    ("-t 2", "--runtime.threads"),
    ("--chat-template x.jinja", "--model.chat_template"),
    ("--seed 1", "unknown flag --seed; quire chat and quire generate"),
    ("--temp 0.5", "a parameter of each request"),
    ("--generation-config vllm", "--sampling-defaults"),
    ("--max-new-tokens 10", "--max-output-tokens"),
]


@pytest.mark.parametrize("typed, answer", TYPED, ids=[typed for typed, _ in TYPED])
def test_a_flag_of_another_engine_is_answered_in_one_line(typed, answer, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "smollm2", *typed.split()])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert typed.replace("=", " ").split()[0] in error and error.count("\n") == 1
    assert answer in error and "did you mean" not in error


@pytest.mark.parametrize("typed", ["-m smollm2", "--model smollm2", "--model=smollm2", "--model-path smollm2"])
def test_a_model_given_by_a_flag_is_told_its_place(typed, capsys):
    with pytest.raises(SystemExit):
        main(["serve", *typed.split()])
    assert "the model is the first argument here, not a flag, as in quire serve smollm2" in capsys.readouterr().err


def test_all_flags_of_a_pasted_command_are_answered_at_once(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--model", "x", "--max-model-len", "9", "--tensor-parallel-size=2", "--port", "0"])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(answer in error for answer in ("first argument", "--model.max_context", "not yet"))


def test_a_commands_own_flag_and_what_stands_behind_dashes_are_not_foreign():
    args = parse(["generate", "smollm2", "--seed", "3", "--temperature", "0.5", "--", "--max-model-len"])
    assert (args.seed, args.temperature, args.prompt) == (3, 0.5, "--max-model-len")


def test_a_foreign_flag_is_answered_with_the_commands_own(capsys):
    for command, answer in (("chat", "--temp is --temperature here"), ("serve", "--temp: a parameter of each request")):
        with pytest.raises(SystemExit):
            main([command, "smollm2", "--temp", "0.3"])
        assert answer in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["pull", "smollm2", "--ctx-size", "3"])
    assert "--ctx-size is --model.max_context in other quire commands" in capsys.readouterr().err


def test_a_setting_of_another_engine_is_answered_in_python_and_in_a_file(tmp_path):
    with pytest.raises(ConfigError, match="unknown setting 'max_model_len'; it is model.max_context here"):
        EngineConfig.from_options({"max_model_len": 4096})
    file = tmp_path / "quire.toml"
    file.write_text("[cache]\ngpu_memory_utilization = 0.9\n")
    with pytest.raises(ConfigError, match="it is cache.memory here"):
        EngineConfig.from_options({}, file)
    with pytest.raises(ConfigError, match="not yet"):
        EngineConfig.from_options({"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="did you mean cache.memory"):
        EngineConfig.from_options({"cache.memry": 1})


def test_what_the_table_names_exists():
    """The settings in the remarks, too."""
    settings = {setting.key for group in groups_of(SECTIONS) for setting in settings_of(group)}
    flags = {flag for command in COMMANDS for parser in parsers_of(command) for flag in parser.flags}
    for name, hint in FOREIGN_FLAGS.items():
        for key in hint.keys:
            assert key in settings or f"--{key.replace('_', '-')}" in flags, (name, key)
        assert hint.keys or hint.text
    texts = [
        *(hint.text for hint in (*FOREIGN_FLAGS.values(), *FOREIGN_PARAMETERS.values())),
        *FOREIGN_COMMANDS.values(),
    ]
    named = {word for text in texts for word in re.findall(rf"\b(?:{'|'.join(SECTIONS)})\.\w+", text)}
    assert named and named <= settings
    for text in FOREIGN_COMMANDS.values():
        assert set(re.findall(r"quire ([a-z]\w*)", text)) <= set(COMMANDS), text
    assert not set(FOREIGN_COMMANDS) & set(COMMANDS)


@pytest.mark.parametrize("name", FOREIGN_PARAMETERS)
def test_a_parameter_of_other_servers_is_answered_with_one_that_exists(name):
    from quire.server.chat_schema import ChatRequest
    from quire.server.schema import CompletionRequest

    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    hint = FOREIGN_PARAMETERS[name]
    assert set(hint.keys) <= fields
    answer = parameter_hint(name)
    assert answer == hint.text or answer.startswith(f"it is '{hint.keys[0]}' here")
    assert parameter_hint("no_such_thing") is None


@pytest.mark.parametrize("word", ["run", "ls", "launch", "help", "quantize"])
def test_a_command_of_another_program_is_answered(word, capsys):
    with pytest.raises(SystemExit):
        main([word, "smollm2"])
    error = capsys.readouterr().err
    assert error.startswith(f"quire: unknown command {word!r}; {FOREIGN_COMMANDS[word]}") and error.count("\n") == 1


FLAGS = ("--cache.memory", "--model.tokenizer", "--drain-seconds", "--retain.local", "--cache.share", "--port")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--cache.memry", "--cache.memory"),
        ("--tokeniser", "--model.tokenizer"),
        ("--drain_second", "--drain-seconds"),
        ("--prot", "--port"),
        ("--mlock", None),
        ("--draft-model", None),
        ("--cache.size", None),
        ("--numa", None),
    ],
)
def test_only_a_name_that_is_near_is_proposed(typed, meant):
    assert nearest(typed, FLAGS, "none is near") == (f"did you mean {meant}?" if meant else "none is near")
    assert nearest("zzz", ("serve", "chat")) == "valid are serve, chat"


def test_no_foreign_flag_hides_one_of_ours():
    assert find_hint("--cache.memory") is None and find_hint("--no-such-thing") is None
    assert flag_hint("--memory", ()) is None


def test_one_letter_behind_two_dashes_is_no_short_flag():
    assert find_hint("-n") is not None and find_hint("--n") is None and find_hint("n") is None
