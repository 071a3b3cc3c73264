"""Lines of a batch's input: what they may say, and the bad ones."""

import json

import pytest

from quire.cli import main
from tests.generating import generate, read, write


def test_a_line_says_what_becomes_of_its_chunks(fake, files, capsys):
    pin = {"tier": "arena", "seconds": 60}
    hints = {"cache_pin": pin, "cache_priority": -7, "cache_lifetime": 0, "cache_salt": "s"}
    write(files[0], {"prompt": "abc", **hints}, {"prompt": "abc", **dict.fromkeys(hints)})
    assert generate(files) == 0
    first, second = sorted(fake.prompts, key=len, reverse=True)
    assert {name: first[name] for name in hints} == hints
    assert not hints.keys() & second.keys()
    never = {"cache_pin": {"tier": "disk"}, "cache_lifetime": 5}
    for wrong in ({"cache_priority": 101}, {"cache_pin": {"tier": "tape"}}, never, {"pin_tier": "disk"}):
        write(files[0], {"prompt": "abc", **wrong})
        assert generate(files) == 2
        assert next(iter(wrong)) in capsys.readouterr().err


def test_flags_hold_where_a_line_says_nothing(fake, files):
    write(files[0], {"prompt": "abcdef"}, {"prompt": "abcdef", "max_tokens": 4}, {"prompt": "abcdef", "stop": None})
    assert generate(files, "--max-tokens", "5", "--stop", "c") == 0
    assert [read(files[1])[line]["text"] for line in (1, 2, 3)] == ["ab", "ab", "abcde"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "invalid JSON"),
        ("[]", "object"),
        ('{"id": 1}', "prompt, messages, prompt_token_ids"),
        ('{"prompt": "a", "messages": []}', "one of"),
        ('{"prompt": 3}', "string"),
        ('{"prompt": "a", "temprature": 1}', "temprature"),
        ('{"prompt": "a", "temperature": -1}', "temperature"),
        ('{"prompt": "a", "id": 1}', "line 1"),
        ('{"prompt": "a", "id": 1.5}', "id"),
        ('{"prompt_token_ids": ["a"]}', "integers"),
        ('{"messages": ["a"]}', "role"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": 5, "content": "a"}]}', "the role of messages[0] is 5; it must be a string"),
        ('{"messages": {"role": "user"}}', "'messages' must be a list"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "'logit_bias' must be token ids"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"prompt": "\xff"}', "invalid UTF-8: byte 13 is 0xff"),
        ('{"prompt": "a", "%s": 1}' % ("x" * 5000), "xxx…"),
    ],
)
def test_a_bad_line_stops_the_run_before_it_begins(fake, files, capsys, line, said):
    line = line if isinstance(line, bytes) else line.encode()
    files[0].write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    assert generate(files) == 2
    error = capsys.readouterr().err
    assert said in error and "in.jsonl:2: " in error and error.count("\n") == 1 and len(error) < 1000
    assert not files[1].exists() and not fake.loads


def test_bad_lines_are_told_ten_at_a_time(fake, files, capsys):
    good = '{"prompt": "a"}\n'
    files[0].write_text(good + "{\n" + good + '\n{"prompt": 1}\n')
    assert generate(files) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"quire: {files[0]} has 2 invalid lines; nothing was run"
    assert [line.split(":")[1] for line in told[1:]] == ["2", "5"] and "'prompt'" in told[2]
    files[0].write_text("{\n" * 12)
    assert generate(files) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 12 and told[10].startswith(f"{files[0]}:10: ") and told[11] == "and 2 more"
    assert not files[1].exists() and not fake.loads


def test_a_byte_order_mark_and_line_ends_of_windows_are_no_mistakes(fake, files):
    files[0].write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert generate(files) == 0
    assert [read(files[1])[line]["text"] for line in (1, 2)] == ["a", "b"]


def test_lines_come_from_stdin(fake, files, stdin, capfd):
    stdin(b'{"prompt": "a"}\n{"prompt": "b"}\n')
    assert main(["generate", "fake", "--input", "-", "--output", str(files[1])]) == 0
    assert sorted(read(files[1])) == [1, 2]
    stdin(b'{"prompt": "a"}\n')
    assert main(["generate", "fake", "--input", "-", "--output", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["text"] == "a"


@pytest.mark.parametrize("name", [".", "in.jsonl/x", "none", "n" * 300, ""])
def test_an_input_that_cannot_be_read_is_one_line(fake, files, capsys, monkeypatch, name):
    monkeypatch.chdir(files[0].parent)
    write(files[0], {"prompt": "a"})
    assert main(["generate", "fake", "--input", name, "--output", str(files[1])]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"quire: cannot read {name}: ") and error.count("\n") == 1 and not files[1].exists()
