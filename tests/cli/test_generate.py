"""`quire generate`: JSON lines in and out, resuming, and one prompt streamed."""

import errno
import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.cli import main
from quire.config import EngineConfig
from quire.engine.outputs import CompletionOutput
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake(monkeypatch):
    """The fake engine in place of a model; its `loads` counts how often one was loaded."""
    engine = FakeEngine(max_context=200)
    engine.loads = 0

    @asynccontextmanager
    async def loaded(_, options=None):
        engine.loads += 1
        yield engine

    monkeypatch.setattr("quire.cli.shared.engine", loaded)
    yield engine
    assert not engine.live


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path, *lines):
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_bytes(text.encode("utf-8", "backslashreplace"))


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
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 4,
            "cached_tokens": 3,
            "cached_tokens_by_tier": {"arena": 1, "disk": 2},
        },
    }
    assert answers["chat"]["text"] == "user: hé 🌍\nassistant:"
    assert (answers[7]["text"], answers[7]["finish_reason"]) == ("hih", "length")
    assert [choice["text"] for choice in answers["two"]["choices"]] == ["xy", "yz"]
    assert answers["scored"]["logprobs"] == [{"113": -0.5, "114": -1.5}]
    assert "5 done" in capsys.readouterr().err


def test_a_line_says_what_retention_kept_of_its_prompt(fake, files, monkeypatch):
    """Once it has decided: not yet with the first items."""
    original = fake._generate

    async def generate_retaining(ids, params, request_id):
        number = 0
        async for item in original(ids, params, request_id):
            item.kept_fraction = None if number == 0 else 0.43219
            number += 1
            yield item

    monkeypatch.setattr(fake, "_generate", generate_retaining)
    write(files[0], {"prompt": "abc"})
    assert generate(files) == 0
    assert read(files[1])[1]["usage"]["kept_fraction"] == 0.4322


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
    assert capsys.readouterr().err == "0 done, 3 done before\n"


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
    assert fake.started == 4 + 2 and "failed lines, tried again: 2" in capsys.readouterr().err
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


@pytest.mark.parametrize("content", ["hello\n", '{"text": "a"}\n', "[1]\n", '{"id": [1]}\n', "hello"])
def test_a_file_of_something_else_is_not_written_to(fake, files, capsys, content):
    write(files[0], {"prompt": "a"})
    files[1].write_text(content)
    assert generate(files) == 2
    assert "out.jsonl:1: " in capsys.readouterr().err and files[1].read_text() == content


def test_input_and_output_must_differ(fake, files, capsys):
    write(files[0], {"prompt": "a"})
    assert main(["generate", "fake", "--input", str(files[0]), "--output", str(files[0])]) == 2


def test_a_prompt_streams_to_stdout(fake, capsys):
    assert main(["generate", "fake", "Ünï 🌍"]) == 0
    assert capsys.readouterr().out == "Ünï 🌍\n"
    assert main(["generate", "fake", "hi", "--chat"]) == 0
    assert capsys.readouterr().out == "user: hi\nassistant:\n"


@pytest.fixture
def stdin(monkeypatch):
    """Gives the command bytes to read."""
    return lambda content: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_prompt_comes_from_stdin(fake, capsys, stdin):
    stdin(b"piped")
    assert main(["generate", "fake", "-", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "pipe\n"
    stdin(b"piped")
    assert main(["generate", "fake", "--max-tokens", "4", "-"]) == 0
    assert capsys.readouterr().out == "pipe\n"


def test_what_stdin_cannot_give_is_told(fake, capsys, stdin, monkeypatch):
    stdin(b"\xff")
    assert main(["generate", "fake", "-"]) == 2
    assert "stdin is not UTF-8" in capsys.readouterr().err
    stdin(b"\xff")
    assert main(["generate", "fake", "--input", "-"]) == 2
    assert capsys.readouterr().err == "quire: stdin:1: invalid UTF-8: byte 1 is 0xff\n"
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", "fake", "-"]) == main(["generate", "fake", "--input", "-"]) == 2
    assert capsys.readouterr().err.count("closed") == 2


@pytest.mark.parametrize("words", [[], ["--output", "-"]])
def test_answers_go_to_stdout(fake, files, capfd, monkeypatch, words):
    monkeypatch.chdir(files[0].parent)
    write(files[0], {"prompt": "é 🌍"}, {"id": "\ud800", "prompt": "b"}, {"prompt": "x" * 300})
    for _ in range(2):
        assert main(["generate", "fake", "--input", str(files[0]), *words]) == 1
        out, error = capfd.readouterr()
        answers = {line["id"]: line for line in map(json.loads, out.splitlines())}
        assert answers[1]["text"] == "é 🌍" and answers["\ud800"]["text"] == "b" and "too long" in answers[3]["error"]
        assert "3 done, 1 of them failed (the output has the reasons)" in error
    assert sorted(files[0].parent.iterdir()) == [files[0]]


def test_lines_come_from_stdin(fake, files, stdin, capfd):
    stdin(b'{"prompt": "a"}\n{"prompt": "b"}\n')
    assert main(["generate", "fake", "--input", "-", "--output", str(files[1])]) == 0
    assert sorted(read(files[1])) == [1, 2]
    stdin(b'{"prompt": "a"}\n')
    assert main(["generate", "fake", "--input", "-", "--output", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["text"] == "a"


@pytest.mark.parametrize("name", [".", "in.jsonl/x", "none/x", "n" * 300])
def test_an_output_that_cannot_be_written_is_one_line(fake, files, capsys, monkeypatch, name):
    monkeypatch.chdir(files[0].parent)
    write(files[0], {"prompt": "a"})
    assert main(["generate", "fake", "--input", str(files[0]), "--output", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"quire: cannot write {name}: ") and error.count("\n") == 1 and not fake.loads


@pytest.mark.parametrize("name", [".", "in.jsonl/x", "none", "n" * 300, ""])
def test_an_input_that_cannot_be_read_is_one_line(fake, files, capsys, monkeypatch, name):
    monkeypatch.chdir(files[0].parent)
    write(files[0], {"prompt": "a"})
    assert main(["generate", "fake", "--input", name, "--output", str(files[1])]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"quire: cannot read {name}: ") and error.count("\n") == 1 and not files[1].exists()


class Filling(io.FileIO):
    """A file on a disk that has room for 150 bytes."""

    left = 150

    def write(self, content):
        if not Filling.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = bytes(content[: Filling.left])
        Filling.left -= len(part)
        return super().write(part)


def test_a_disk_that_fills_up_keeps_whole_lines(fake, files, monkeypatch, capsys):
    monkeypatch.setattr("quire.batch_files.output.FileIO", Filling)
    monkeypatch.setattr(Filling, "left", 250)
    write(files[0], *({"prompt": "abc"} for _ in range(5)))
    assert generate(files, "--max-tokens", "1") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert 0 < len(read_all(files[1])) < 5 and files[1].read_bytes().endswith(b"}\n")


def test_failures_stay_in_the_output_if_there_is_no_room_to_take_them_out(fake, files, monkeypatch, capsys):
    write(files[0], {"id": 1, "prompt": "abc"}, {"id": 2, "prompt": "abc"})
    write(files[1], {"id": 1, "text": "x" * 300}, {"id": 2, "error": "failed"})
    before = files[1].read_bytes()
    monkeypatch.setattr("quire.batch_files.output.FileIO", Filling)
    monkeypatch.setattr(Filling, "left", 150)
    assert generate(files) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not list(files[1].parent.glob("*.new"))
    assert files[1].read_bytes() == before


def test_a_full_disk_is_one_line(fake, files, capsys):
    write(files[0], *({"prompt": "abc"} for _ in range(5)))
    assert generate((files[0], "/dev/full")) == 2
    assert capsys.readouterr().err == "quire: cannot write /dev/full: No space left on device\n"


def test_an_output_belongs_to_one_run(failing, fake, files, capsys, monkeypatch):
    write(files[0], {"prompt": "x"}, {"prompt": "abc"})
    assert generate(files) == 1
    original, others = fake._generate, []

    def meanwhile(*args):
        """In the first run, which has put a new file in the output's place, a second one is started."""
        if not others:
            others.append(None)
            before = files[1].read_bytes()
            with ThreadPoolExecutor(1) as pool:
                others.append(pool.submit(generate, files).result())
            assert files[1].read_bytes() == before
        return original(*args)

    monkeypatch.setattr(fake, "_generate", meanwhile)
    capsys.readouterr()
    assert generate(files) == 1
    assert others == [None, 2] and len(read_all(files[1])) == 2
    assert f"another quire generate is writing {files[1]}; wait for it" in capsys.readouterr().err
    failing()
    assert generate(files) == 0


def test_a_run_that_waited_to_open_a_file_that_was_replaced_takes_the_new_one(fake, files, monkeypatch):
    write(files[0], {"prompt": "a"}, {"prompt": "b"})
    files[1].write_text('{"id": 1, "text": "old"}\n')
    flock, calls = fcntl.flock, []

    def late(file, operation):
        if not calls:
            new = files[1].with_name("x")
            new.write_text('{"id": 1, "text": "new"}\n')
            new.replace(files[1])
        calls.append(operation)
        flock(file, operation)

    monkeypatch.setattr("fcntl.flock", late)
    assert generate(files) == 0
    assert len(calls) == 2 and [line["text"] for line in read_all(files[1])] == ["new", "b"]


def test_a_file_system_without_locks_is_told_and_used(fake, files, monkeypatch, caplog):
    def without(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without)
    write(files[0], {"prompt": "a"})
    assert generate(files) == 0
    assert "cannot be locked (No locks available)" in caplog.text


def test_failures_of_other_inputs_stay(failing, files, capsys):
    write(files[0], {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"})
    assert generate(files) == 1
    assert "2 of them failed (the output has the reasons; the same command tries them again)" in capsys.readouterr().err
    failing()
    write(files[0], {"id": "b", "prompt": "x"})
    assert generate(files) == 0
    assert "failed lines, tried again: 1" in capsys.readouterr().err
    answers = read(files[1])
    assert "NaN" in answers["a"]["error"] and answers["b"]["text"] == "x" and len(read_all(files[1])) == 2


def test_with_offloading_prompts_that_begin_alike_are_neighbours(fake, files):
    prompts = ["the cat", "a dog", "the cow", "a dove", "the cat sat", "zebra"]
    write(files[0], {"prompt_token_ids": [1], "id": "ids"}, *({"prompt": prompt} for prompt in prompts))
    fake.config = type(fake.config).from_options({"offload.mode": "auto", "scheduler.max_running": 100})
    assert generate(files) == 0
    given = [prompt["prompt_token_ids"] for prompt in fake.prompts]
    assert given == sorted(given) and len(given) == 7
    assert {read(files[1])[n]["text"] for n in range(1, 8) if n > 1} == set(prompts)


PROGRESS = r"quire: [0-5]/5 done, \d+ tokens/s(, \d+ s left)?"


def test_without_a_terminal_progress_is_a_line_now_and_then(fake, files, capsys, monkeypatch):
    write(files[0], *({"prompt": "abcd"} for _ in range(5)))
    assert generate(files) == 0
    assert capsys.readouterr().err.count("\n") == 1, "a short run needs no progress"
    files[1].unlink()
    monkeypatch.setattr("quire.cli.shared.PLAIN_SECONDS", 0.02)
    fake.config = type(fake.config).from_options({"scheduler.max_running": 1})
    fake.step_seconds = 0.01
    assert generate(files) == 0
    *progress, summary = capsys.readouterr().err.splitlines()
    assert len(progress) >= 3 and all(re.fullmatch(PROGRESS, line) for line in progress)
    assert summary.startswith("5 done")


class Interrupted(FakeEngine):
    """Sends this process a signal once so many tokens are decoded, as a user's Ctrl-C would."""

    at = 1000

    async def _generate(self, ids, params, request_id):
        async for item in super()._generate(ids, params, request_id):
            if self.decoded == self.at:
                os.kill(os.getpid(), signal.SIGINT)
            yield item


def test_early_interrupts_leave_whole_lines_and_the_next_run_goes_on_with_the_others(files, monkeypatch, capsys):
    """600 lines of 10 tokens: 256 begun together would have no line finished after 1,000 tokens."""
    engine = Interrupted()

    @asynccontextmanager
    async def loaded(_, options=None):
        yield engine

    monkeypatch.setattr("quire.cli.shared.engine", loaded)
    write(files[0], *({"prompt": f"line {number:03}x"[:9], "max_tokens": 10} for number in range(600)))
    num_before = 0
    for _ in range(2):
        engine.decoded = 0
        assert generate(files) == 130
        assert files[1].read_bytes().endswith(b"\n")
        num_kept = len(read_all(files[1]))
        assert num_kept >= num_before + 8
        assert f"{600 - num_kept} not done; the same command resumes" in capsys.readouterr().err
        num_before = num_kept
    engine.at = None
    assert generate(files) == 0
    assert sorted(each["id"] for each in read_all(files[1])) == list(range(1, 601))
    assert engine.started <= 600 + 2 * 256, "an interrupt costs no more than the lines under way"


def test_as_many_lines_run_at_once_as_the_engine_takes_after_the_first_ones(fake, files, monkeypatch):
    running = most = 0
    original = fake._generate

    async def watched(ids, params, request_id):
        nonlocal running, most
        running += 1
        most = max(most, running)
        async for item in original(ids, params, request_id):
            running -= item.finished
            yield item

    monkeypatch.setattr(fake, "_generate", watched)
    monkeypatch.setattr(fake, "config", EngineConfig.from_options({"scheduler.max_running": 50}))
    write(files[0], *({"prompt": "abc"} for _ in range(150)))
    assert generate(files) == 0
    assert most == 50


def test_a_planned_block_runs_at_once_wherever_it_is(fake, files, monkeypatch):
    """With its cache and weights in memory, too: its seconds were predicted for the whole block."""
    begun, original = [], fake._generate

    async def watched(ids, params, request_id):
        begun.append(request_id)
        async for item in original(ids, params, request_id):
            begun.extend(["end"] * item.finished)
            yield item

    @contextmanager
    def planned(model, config, batch):
        yield SimpleNamespace(options=None, plan=True, announcement=lambda: None, report=lambda batch, stats: [])

    monkeypatch.setattr(fake, "_generate", watched)
    monkeypatch.setattr("quire.batch_files.placement.planned", planned)
    fake.config = EngineConfig.from_options({"scheduler.max_running": 20})
    write(files[0], *({"prompt": "abc"} for _ in range(30)))
    assert generate(files) == 0
    assert begun.index("end") == 20


SCRIPT = """
import sys
from contextlib import asynccontextmanager
from quire.cli import main, shared
from tests.server.fake_engine import FakeEngine

@asynccontextmanager
async def loaded(_, options=None):
    yield FakeEngine(step_seconds=0.01)

shared.engine = loaded
sys.exit(main(["generate", "fake", "--input", sys.argv[1], "--output", sys.argv[2]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_to_the_process_leaves_whole_lines(fake, files, number):
    write(files[0], *({"id": each, "prompt": "abcdefgh"} for each in range(100)))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *map(str, files)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until = time.monotonic() + 30
    while not (files[1].exists() and files[1].read_bytes().count(b"\n")) and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(number)
    error = process.communicate(timeout=30)[1].decode()
    assert process.returncode == (130 if number == signal.SIGINT else -number), error
    kept = files[1].read_bytes()
    assert kept.endswith(b"\n")
    num_kept = len(read_all(files[1]))
    assert 1 <= num_kept < 100
    assert generate(files) == 0
    assert files[1].read_bytes().startswith(kept)
    assert sorted(each["id"] for each in read_all(files[1])) == list(range(100))
    assert fake.started == 100 - num_kept
