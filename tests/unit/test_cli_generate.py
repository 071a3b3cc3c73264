"""`quire generate`: JSON lines in and out, resuming, and one prompt streamed."""

import io
import json
from contextlib import asynccontextmanager

import pytest

from quire.cli import main
from quire.engine.outputs import CompletionOutput
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def fake(monkeypatch):
    """The fake engine in place of a model; its `loads` counts how often one was loaded."""
    engine = FakeEngine(max_context=200)
    engine.loads = 0

    @asynccontextmanager
    async def loaded(_):
        engine.loads += 1
        yield engine

    monkeypatch.setattr("quire.cli.shared.engine", loaded)
    yield engine
    assert not engine.live


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path, *lines):
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def read(path):
    return {line["id"]: line for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def read_all(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def generate(files, *words):
    return main(["generate", "fake", "--input", str(files[0]), "--output", str(files[1]), *words])


def test_every_kind_of_line_is_answered(fake, files, capsys):
    write(
        files[0],
        {"prompt": "abc"},
        {"id": "chat", "messages": [{"role": "user", "content": "hé 🌍"}]},
        {"id": 7, "prompt_token_ids": [104, 105], "max_tokens": 3, "ignore_eos": True},
        {"id": "two", "prompt": "xyz", "n": 2, "max_tokens": 2},
        {"id": "scored", "prompt": "q", "logprobs": 1, "max_tokens": 1},
    )
    assert generate(files) == 0
    answers = read(files[1])
    assert answers[1] == {
        "id": 1,
        "text": "abc",
        "token_ids": [97, 98, 99, 257],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 4, "completion_tokens": 4, "cached_tokens": 3},
    }
    assert answers["chat"]["text"] == "user: hé 🌍\nassistant:"
    assert (answers[7]["text"], answers[7]["finish_reason"]) == ("hih", "length")
    assert [choice["text"] for choice in answers["two"]["choices"]] == ["xy", "yz"]
    assert answers["scored"]["logprobs"] == [{"113": -0.5, "114": -1.5}]
    assert "5 done" in capsys.readouterr().err


def test_flags_hold_where_a_line_says_nothing(fake, files):
    write(files[0], {"prompt": "abcdef"}, {"prompt": "abcdef", "max_tokens": 4}, {"prompt": "abcdef", "stop": None})
    assert generate(files, "--max-tokens", "5", "--stop", "c") == 0
    assert [read(files[1])[line]["text"] for line in (1, 2, 3)] == ["ab", "ab", "abcde"]


def test_a_second_run_does_only_what_is_missing(fake, files, capsys):
    write(files[0], {"prompt": "a"}, {"prompt": "b"})
    assert generate(files) == 0
    write(files[0], {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    assert generate(files) == 0
    assert sorted(read(files[1])) == [1, 2, 3] and len(files[1].read_text().splitlines()) == 3
    assert (fake.started, fake.loads) == (3, 2)
    capsys.readouterr()
    assert generate(files) == 0
    assert fake.loads == 2, "a model was loaded for nothing"
    assert capsys.readouterr().err == "0 done, 3 were there already\n"


def test_a_run_stopped_at_any_byte_is_completed(fake, files):
    write(files[0], *({"id": f"é{number}", "prompt": "x" * number} for number in range(1, 5)))
    assert generate(files) == 0
    whole, expected = files[1].read_bytes(), read(files[1])
    for length in range(0, len(whole) + 1, 7):
        files[1].write_bytes(whole[:length])
        assert generate(files) == 0
        assert read(files[1]) == expected, f"torn at byte {length}"
        assert files[1].read_bytes().startswith(whole[: whole.rfind(b"\n", 0, length) + 1])


def test_an_interruption_keeps_what_is_done(fake, files, monkeypatch):
    write(files[0], *({"id": number, "prompt": "x" * number} for number in range(1, 30)))
    original, calls = fake._generate, 0

    def interrupted(*args):
        nonlocal calls
        calls += 1
        if calls > 20:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(fake, "_generate", interrupted)
    fake.config = type(fake.config).from_options({"scheduler.max_running": 4})
    assert generate(files) == 130
    monkeypatch.undo()
    done = read(files[1])
    assert 1 < len(done) <= 20 and all(answer["text"] == "x" * line for line, answer in done.items())


def test_a_line_that_cannot_run_fails_alone(fake, files, capsys):
    write(files[0], {"prompt": "x" * 300}, {"prompt": "ok"}, {"messages": [{"role": "user", "content": "a"}] * 2})
    assert generate(files) == 1
    answers = read(files[1])
    assert "too long" in answers[1]["error"] and answers[2]["text"] == "ok" and "alternate" in answers[3]["error"]
    assert "2 of them failed" in capsys.readouterr().err


@pytest.fixture
def failing(fake, monkeypatch):
    """Prompts that hold an x end in an error after two tokens, as numbers that are not finite do."""
    original = fake._generate

    async def generate(ids, params, request_id):
        step = 0
        async for item in original(ids, params, request_id):
            if b"x"[0] in ids and step == 1:
                item.outputs, item.finished = [CompletionOutput(0, "", [], None, "error", "NaN in the logits")], True
            step += 1
            yield item
            if item.finished:
                return

    def repair():
        monkeypatch.setattr(fake, "_generate", original)

    monkeypatch.setattr(fake, "_generate", generate)
    return repair


def test_a_prompt_that_fails_says_why_and_exits_with_one(failing, capsys):
    assert main(["generate", "fake", "abcx"]) == 1
    assert capsys.readouterr() == ("a\n", "quire: NaN in the logits\n")


def test_a_line_that_fails_says_why_and_is_tried_again(failing, fake, files, capsys):
    # U+2028 and U+0085 end lines for Python's text, not for JSON lines.
    write(files[0], {"prompt": "x"}, {"prompt": "ab\u2028\u0085"}, {"id": "c", "prompt": "xyz"}, {"prompt": "q"})
    assert generate(files) == 1
    answers = read_all(files[1])
    assert {line["id"] for line in answers if line.get("error") == "NaN in the logits"} == {1, "c"}
    good = [raw for raw in files[1].read_bytes().split(b"\n") if raw and b"error" not in raw]
    assert "2 of them failed" in capsys.readouterr().err

    assert generate(files) == 1, "what still fails is no success"
    assert fake.started == 4 + 2 and "failed before, tried again: 2" in capsys.readouterr().err
    assert len(read_all(files[1])) == 4

    failing()
    files[1].chmod(0o640)
    assert generate(files) == 0
    assert fake.started == 4 + 2 + 2 and fake.loads == 3
    answers = read_all(files[1])
    assert {line["id"]: line["text"] for line in answers} == {1: "x", 2: "ab\u2028\u0085", "c": "xyz", 4: "q"}
    assert len(answers) == 4 and files[1].read_bytes().split(b"\n")[: len(good)] == good
    assert files[1].stat().st_mode & 0o777 == 0o640
    assert sorted(files[1].parent.iterdir()) == sorted(files), "something else is left"
    assert generate(files) == 0 and fake.loads == 3


def test_failed_lines_stay_where_the_input_is_bad(failing, files):
    write(files[0], {"prompt": "x"})
    assert generate(files) == 1
    before = files[1].read_bytes()
    files[0].write_text("{\n")
    assert generate(files) == 2
    assert files[1].read_bytes() == before


def test_a_full_queue_is_waited_for(fake, files):
    fake.queue_limit = 1
    fake.retry_after = 0.001
    write(files[0], *({"prompt": "abc"} for _ in range(5)))
    assert generate(files) == 0
    assert len(read(files[1])) == 5


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
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
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 2"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_bad_line_stops_the_run_before_it_begins(fake, files, capsys, line, said):
    files[0].write_text('{"prompt": "a"}\n' + line + "\n")
    assert generate(files) == 2
    error = capsys.readouterr().err
    assert said in error and "in.jsonl line 2" in error and error.count("\n") == 1
    assert not files[1].exists() and not fake.loads


@pytest.mark.parametrize("content", ["hello\n", '{"text": "a"}\n', "[1]\n", '{"id": [1]}\n'])
def test_a_file_of_something_else_is_not_written_to(fake, files, capsys, content):
    write(files[0], {"prompt": "a"})
    files[1].write_text(content)
    assert generate(files) == 2
    assert "line 1" in capsys.readouterr().err and files[1].read_text() == content


def test_input_and_output_must_differ(fake, files, capsys):
    write(files[0], {"prompt": "a"})
    assert main(["generate", "fake", "--input", str(files[0]), "--output", str(files[0])]) == 2


def test_a_prompt_streams_to_stdout(fake, capsys):
    assert main(["generate", "fake", "Ünï 🌍"]) == 0
    assert capsys.readouterr().out == "Ünï 🌍\n"
    assert main(["generate", "fake", "hi", "--chat"]) == 0
    assert capsys.readouterr().out == "user: hi\nassistant:\n"


def test_a_prompt_comes_from_stdin(fake, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    assert main(["generate", "fake", "-", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "pipe\n"
