"""The output of a batch: resumed, locked, and whole whatever happens."""

import errno
import fcntl
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.cli import main
from tests.generating import generate, read, read_all, write


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


def test_failed_lines_stay_where_the_input_is_bad(failing, files):
    write(files[0], {"prompt": "x"})
    assert generate(files) == 1
    before = files[1].read_bytes()
    files[0].write_text("{\n")
    assert generate(files) == 2
    assert files[1].read_bytes() == before


@pytest.mark.parametrize("content", ["hello\n", '{"text": "a"}\n', "[1]\n", '{"id": [1]}\n', "hello"])
def test_a_file_of_something_else_is_not_written_to(fake, files, capsys, content):
    write(files[0], {"prompt": "a"})
    files[1].write_text(content)
    assert generate(files) == 2
    assert "out.jsonl:1: " in capsys.readouterr().err and files[1].read_text() == content


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


@pytest.mark.parametrize("name", [".", "in.jsonl/x", "none/x", "n" * 300])
def test_an_output_that_cannot_be_written_is_one_line(fake, files, capsys, monkeypatch, name):
    monkeypatch.chdir(files[0].parent)
    write(files[0], {"prompt": "a"})
    assert main(["generate", "fake", "--input", str(files[0]), "--output", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"quire: cannot write {name}: ") and error.count("\n") == 1 and not fake.loads


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
