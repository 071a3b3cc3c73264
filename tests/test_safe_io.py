"""Files that users name: what is no regular file is refused at once, and no text ends in a traceback."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.batch_files.lines import read_input
from quire.cli import main
from quire.config import ConfigError, EngineConfig
from quire.engine.calibration import Calibration
from quire.engine.pins import read_pin_lines
from quire.engine.step_log import read_steps
from quire.errors import MOST_CHARS, MOST_WORD_CHARS, ModelError, QuireError, shown
from quire.models.embedded import pull
from quire.models.fingerprint import fingerprint
from quire.models.tokenizer import load_tokenizer
from quire.models.weights import open_model
from quire.offload.planning.profile import read_profile
from quire.offload.policy import read_policy
from quire.placement.cluster_file import read_cluster
from quire.placement.placement_file import read_placement
from quire.planning.curves import read_curve
from quire.planning.quality import Text
from quire.prefixes.importing import open_archive
from quire.safe_io import NotRegularError, atomic_write, open_file, parse_json
from quire.server.auth import ApiKeys
from quire.timing.latency import LatencyModel
from quire.workload.traces import read_trace, read_workload
from tests.tiny_models import save_tokenizer

Reader = Callable[[Path], object]


def in_folder(name: str, reader: Reader) -> Reader:
    """The reader of a model folder in which one file is the given one."""

    def read(path: Path) -> object:
        folder = path.parent / "model"
        folder.mkdir()
        save_tokenizer(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (folder / name).unlink(missing_ok=True)
        path.rename(folder / name)
        return reader(folder)

    return read


READERS: dict[str, Reader] = {
    "configuration": lambda path: EngineConfig.from_options({}, path),
    "machines": read_cluster,
    "trace": read_trace,
    "workload": read_workload,
    "prompts": lambda path: read_input(str(path), {}),
    "pins": read_pin_lines,
    "placement": read_placement,
    "latency model": LatencyModel.read,
    "steps": lambda path: read_steps([path]),
    "policy": lambda path: read_policy(path, ("cpu",)),
    "hardware": read_profile,
    "curve": read_curve,
    "text": Text.read,
    "calibration": lambda path: Calibration.load(path, "model"),
    "parcel": open_archive,
    "keys": ApiKeys.from_file,
    "tokenizer": lambda path: load_tokenizer(path.parent, path),
    "chat template": in_folder("chat_template.jinja", load_tokenizer),
    "tokenizer in a folder": in_folder("tokenizer_config.json", load_tokenizer),
    "settings of a model": in_folder("config.json", open_model),
    "weights": lambda path: open_model(path.rename(path.with_suffix(".gguf"))),
    "vocabulary": lambda path: load_tokenizer(path.rename(path.with_suffix(".gguf"))),
}


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path for the file, short enough for a socket."""
    monkeypatch.chdir(tmp_path)
    yield Path("given")


def in_time(work: Callable[[], Any], seconds: float = 5.0) -> BaseException | None:
    """The error that work ends with. Fails if it does not end."""
    found: list[BaseException | None] = [None]

    def run() -> None:
        try:
            work()
        except BaseException as error:
            found[0] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the file is waited for, or read without end"
    return found[0]


@pytest.mark.parametrize("make", [make_pipe, make_socket, make_device], ids=["pipe", "socket", "device"])
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_every_reader_refuses_what_is_no_regular_file_at_once(
    reader: Reader, make: Callable[[Path], None], short: Path
) -> None:
    make(short)
    error = in_time(lambda: reader(short))
    assert isinstance(error, QuireError), repr(error)
    assert "\n" not in str(error)
    assert "regular file" in str(error) or "neither a folder" in str(error) or "no such tokenizer" in str(error)


def test_a_file_to_pull_from_and_a_fingerprint_too(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path.cwd() / "cache"))
    make_pipe(short)
    assert isinstance(in_time(lambda: pull(False, source=short)), ModelError)
    assert isinstance(in_time(lambda: fingerprint(short)), OSError)


def test_a_pipe_that_takes_the_place_of_the_file_is_not_waited_for(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check of the path and its opening."""
    make_pipe(short)
    monkeypatch.setattr("quire.safe_io.check_regular", lambda path: None)
    assert isinstance(in_time(lambda: open_file(short)), OSError)


BRACKETS, DIGITS = 100_000, 5_000
TEXTS = {
    "brackets": "[" * BRACKETS + "]" * BRACKETS,
    "objects": '{"a":' * BRACKETS + "1" + "}" * BRACKETS,
    "digits": '{"a": ' + "9" * DIGITS + "}",
    "lone brackets": "[" * BRACKETS,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(
    "reader", [each for name, each in READERS.items() if name not in ("text", "keys", "chat template")]
)
def test_every_reader_names_what_cannot_be_parsed_in_one_line(reader: Reader, text: str, short: Path) -> None:
    short.write_text(text)
    with pytest.raises(QuireError) as caught:
        reader(short)
    message = str(caught.value)
    assert "\n" not in message and len(message) <= MOST_CHARS
    assert "set_int_max_str_digits" not in message and "recursion" not in message


TOMLS = {
    "digits": f"[scheduler]\nmax_running = {'9' * DIGITS}\n",
    "many digits": f"[scheduler]\nmax_running = {'9' * 4000}\n",
    "hexadecimal": f"[scheduler]\nmax_running = 0x{'f' * DIGITS}\n",
    "number for a float": f"[cache]\nlifetime = {'9' * 400}\n",
    "number for bytes": f'[cache]\nmemory = "{"9" * DIGITS}.5GiB"\n',
    "brackets": f"[cache]\nmemory = {'[' * 20_000}{']' * 20_000}\n",
    "a few brackets": f"[cache]\nmemory = {'[' * 300}{']' * 300}\n",
    "tables": f"[cache]\nmemory = {'{a=' * 20_000}1{'}' * 20_000}\n",
    "dotted keys": f"[cache]\nmemory{'.a' * 2_000} = 1\n",
    "section": f"[{'a' * 100_000}]\nmemory = 1\n",
    "key": f"[cache]\n{'a' * 100_000} = 1\n",
    "value": f'[cache]\nmemory = "{"a" * 100_000}"\n',
}


@pytest.mark.parametrize("text", TOMLS.values(), ids=TOMLS)
def test_a_configuration_that_cannot_be_used_is_named_in_one_line(
    text: str, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short.write_text(text)
    assert main(["generate", "smollm2", "text", "--config", str(short)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: ") and error.count("\n") == 1 and len(error) <= MOST_CHARS + 20
    assert "set_int_max_str_digits" not in error and "recursion" not in error


@pytest.mark.parametrize(
    "value",
    [10**5000, float("inf"), [[10**5000]], "9" * 5000 + "GiB", "9" * 400 + ".5GiB"],
    ids=["long", "infinite", "list", "text", "fraction"],
)
@pytest.mark.parametrize("key", ["cache.memory", "scheduler.max_running", "cache.lifetime"])
def test_values_from_python_that_no_setting_has_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options({key: value})
    assert key in str(caught.value) or "bytes" in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x" * 100_000, "text"],
        ["generate", "/" + "x" * 5_000 + ".gguf", "text"],
        ["generate", "smollm2", "text", "--config", "y" * 100_000],
        ["generate", "smollm2", "--input", "y" * 100_000],
        ["generate", "smollm2", "text", "--cache.memory", "z" * 100_000],
        ["generate", "smollm2", "text", "--cache.pin", "z" * 100_000],
        ["generate", "smollm2", "text", "--" + "f" * 100_000],
        ["generate", "smollm2", "text", "left over " * 10_000],
        ["c" * 100_000],
        ["plan", "p" * 100_000, "smollm2"],
    ],
    ids=lambda arguments: arguments[0][:10] + arguments[-1][:5],
)
def test_long_names_are_cut_in_messages(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(arguments))
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert (len(error) <= MOST_CHARS + 100 and "..." in error) or "…" in error


def test_a_word_keeps_its_two_ends() -> None:
    message = str(ConfigError(f"cannot read {'a' * 600}{'b' * 600}: no such file"))
    assert message.startswith("cannot read aaa") and message.endswith("bbb: no such file")
    assert len(message) <= MOST_WORD_CHARS + len("cannot read no such file")
    assert str(ConfigError("short")) == "short"


def test_values_that_python_cannot_write_are_shown_by_their_type() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(10**5000) == "a very long int"
    assert shown(nested) == "a very long list"
    assert shown("a") == "'a'"


def test_json_is_parsed_as_before() -> None:
    assert parse_json('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    with pytest.raises(json.JSONDecodeError):
        parse_json("{")


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.json"
    with atomic_write(path) as draft:
        draft.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as draft:
        draft.write_text("hal")
        raise KeyboardInterrupt
    assert path.read_text() == "whole" and list(path.parent.iterdir()) == [path]


def test_a_link_to_a_file_that_is_written_whole_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for text in ("first", "second"):
        with atomic_write(link) as draft:
            draft.write_text(text)
        assert link.is_symlink() and target.read_text() == text and not target.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(NotRegularError, match="it is a pipe"), atomic_write(path) as draft:
            draft.write_text("text")
    assert pipe.is_fifo() and sorted(tmp_path.iterdir()) == [link, pipe]
