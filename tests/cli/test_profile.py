"""`quire profile`: reports as tables, JSON and pictures, from a made-up model."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from quire.cli import main
from quire.engine.retention_report import RetentionReport, as_json
from quire.errors import RequestError
from quire.models.chat import ChatTemplate
from quire.models.tokenizer import Tokenizer
from tests.tiny_models import BOS, CHATML, byte_tokenizer

NAN = float("nan")
CONTEXT = 64


def report(num_tokens: int = 40) -> RetentionReport:
    """Two layers of three heads with a chain of two members."""
    recovery = [
        [[0.96, NAN, NAN], [0.5, 0.97, NAN], [0.4, 0.9, 1.0]],
        [[0.6, 0.98, NAN], [0.1, 0.2, 1.0], [0.99, NAN, NAN]],
    ]
    return RetentionReport(
        num_tokens,
        ("special", "local"),
        0.95,
        0.3,
        0.25,
        np.array([[0, 1, 2], [1, 2, 0]], np.uint8),
        np.array([[2, 10, num_tokens], [12, num_tokens, 4]]),
        np.array(recovery),
        24 * 2**20,
        12 * 2**20,
    )


class FakeLLM:
    """Profiles every prompt as `report` and keeps what it was given."""

    made: list[FakeLLM]

    def __init__(self, model: str, options: dict[str, Any], config_file: Path | None) -> None:
        self.made.append(self)
        self.options = options
        pipeline = byte_tokenizer()
        pipeline.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 256)])
        self.tokenizer = Tokenizer(pipeline, ChatTemplate(CHATML), BOS)
        self.engine = self.limits = self
        self.prompts: list[bytes] = []
        self.is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False

    def check(self, prompt_ids: list[int], params: Any) -> None:
        if len(prompt_ids) + params.max_tokens > CONTEXT:
            raise RequestError(f"the prompt has {len(prompt_ids)} tokens and the context holds {CONTEXT}", "prompt")

    def profile(self, prompt: list[int]) -> RetentionReport:
        assert self.is_open
        self.prompts.append(bytes(ord("^") if token_id == 256 else token_id for token_id in prompt))
        return report(len(prompt))


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """The models that were loaded."""
    FakeLLM.made = []
    monkeypatch.setattr("quire.llm.LLM", FakeLLM)
    return FakeLLM.made


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "prompt.txt"
    file.write_text("What is it?\n" + "x" * 27)
    return str(file)


@pytest.fixture
def lines(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "one"},
        {"id": "[b]two", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "cache_salt": "s"},
        {"id": "a\nb", "prompt_token_ids": [65, 66]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def test_settings_of_a_threshold_are_for_the_default_one_too(
    text: str, made: list[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "quire.toml"
    config.write_text('[retain]\nthreshold = "off"\n')
    for words in ([], ["--config", str(config)]):
        assert main(["profile", "m", "--input", text, "--retain.chain", "special", *words]) == 0
        assert made[-1].options == {"retain.threshold": 0.95, "retain.chain": "special"}


def test_the_printed_threshold_has_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    for words, origin in (([], "default of quire profile"), (["--retain.threshold", "0.9"], "flag")):
        assert main(["profile", "m", "--print-config", *words]) == 0
        (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("threshold = 0.9")]
        assert line.partition("# ")[2] == origin


def test_a_prompt_is_a_table_of_policies(text: str, made: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "m", "--input", text, "--cache.memory", "1MiB"]) == 0
    assert made[0].prompts == [b"^What is it?\n" + b"x" * 27] and not made[0].is_open
    assert made[0].options == {"cache.memory": "1MiB", "retain.threshold": 0.95}
    about, head, *rows, last = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert about == "m: 40 tokens, threshold 0.95, frequent 0.3, local 0.25"
    assert head == "policy heads kept tried recovery"
    assert rows == ["special 2 7.5% 6 0.5917", "+ local 2 27.5% 4 0.7625", "full 2 100.0% 2 1.0000"]
    assert last == "kept: 45.0% of the tokens, in 12MiB of 24MiB"


def test_a_policy_that_no_head_tried_has_no_numbers(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = RetentionReport(
        10, ("special", "local"), 0.5, 0.3, 0.3, np.zeros((1, 1), np.uint8), np.array([[3]]),
        np.array([[[0.7, NAN, NAN]]]), 2048, 1024,
    )  # fmt: skip
    monkeypatch.setattr(FakeLLM, "profile", lambda *_: alone)
    assert main(["profile", "m", "--input", text]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:-1]]
    assert rows == [["special", "1", "30.0%", "1", "0.7000"], ["+", "local", "0", "0"], ["full", "0", "0"]]
    assert as_json(alone)["mean_recovery"] == [0.7, None, None]


def test_a_message_goes_through_the_template(text: str, made: list[FakeLLM]) -> None:
    assert main(["profile", "m", "--input", text, "--chat"]) == 0
    assert made[0].prompts == [b"<user>What is it?\n" + b"x" * 27 + b"\n<assistant>"]


def test_a_text_comes_from_stdin(made: list[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"from \xc3\xa9")))
    assert main(["profile", "m", "--input", "-"]) == 0
    assert made[0].prompts == [b"^from \xc3\xa9"]


def test_several_prompts_have_a_line_each(lines: str, made: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "m", "--input", lines]) == 0
    (llm,) = made
    assert llm.prompts == [b"^one", b"<user>hi\n<assistant>", b"AB"]
    head, *rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert head == "prompt tokens kept special + local full bytes of"
    assert [row.split()[:2] for row in rows] == [["1", "4"], ["[b]two", "20"], [r"'a\nb'", "2"]]
    assert rows[1].endswith(" 2 2 2 12MiB 24MiB")


def test_json_has_every_head(
    text: str, lines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.json"
    assert main(["profile", "m", "--input", text, "--json", str(file)]) == 0
    assert "policy" in capsys.readouterr().out
    written = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert written["model"] == "m"
    (found,) = written["prompts"]
    assert found["id"] == text and found["policy_names"] == ["special", "+ local", "full"]
    assert found["policies"] == [[0, 1, 2], [1, 2, 0]] and found["kept"] == [[2, 10, 40], [12, 40, 4]]
    assert found["recovery"][0] == [[0.96, None, None], [0.5, 0.97, None], [0.4, 0.9, 1.0]]
    assert found["kept_fraction"] == pytest.approx(0.45) and found["mean_recovery"][2] == 1
    assert (found["num_tokens"], found["threshold"], found["local"]) == (40, 0.95, 0.25)
    assert (found["bytes_full"], found["bytes_kept"]) == (24 * 2**20, 12 * 2**20)
    assert main(["profile", "m", "--input", lines, "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["id"] for each in printed["prompts"]] == [1, "[b]two", "a\nb"]


def test_the_picture_is_of_the_first_prompt(lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("quire.evaluation.plot.load_figure", lambda: None)
    monkeypatch.setattr("quire.evaluation.retention_plot.save_retention", lambda *given: drawn.append(given))
    assert main(["profile", "some/folder", "--input", lines, "--plot", str(tmp_path / "x.svg")]) == 0
    ((file, shown, title),) = drawn
    assert (file, shown.num_tokens, title) == (tmp_path / "x.svg", 4, "folder")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "quire profile needs --input FILE"),
        (["--input", "/nowhere.txt"], "cannot read the text /nowhere.txt"),
        (["--input", "/nowhere.jsonl"], "cannot read /nowhere.jsonl"),
        (["--input", "LINES", "--chat"], "--chat is for a text"),
        (["--input", "TEXT", "--json", "/nowhere/x.json"], "cannot write /nowhere/x.json: there is no folder /nowhere"),
        (["--input", "TEXT", "--plot", "/nowhere/x.png"], "cannot write /nowhere/x.png: there is no folder /nowhere"),
        (["--input", "TEXT", "--json", "/tmp"], "cannot write /tmp: it is a folder"),
        (["--input", "TEXT", "--plot", "-"], "cannot draw -: its ending selects the format and must be one of .png"),
        (["--input", "TEXT", "--plot", "x.txt"], "cannot draw x.txt: its ending selects the format"),
        (["--input", "TEXT", "--cache.codec", "zip9"], "cache.codec is 'zip9'"),
        (["--input", "EMPTY"], "empty.jsonl has no prompts"),
        (["--input", "WRONG"], "wrong.jsonl:1: a line must have exactly one of prompt, messages, prompt_token_ids"),
        (["--input", "BYTES"], "bytes.txt: 'utf-8' codec"),
    ],
)
def test_what_cannot_be_is_told_before_a_model_is_loaded(
    text: str, lines: str, tmp_path: Path, words: list[str], said: str, made: list[FakeLLM],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    contents = {"EMPTY": ("empty.jsonl", b"\n\n"), "WRONG": ("wrong.jsonl", b"{}"), "BYTES": ("bytes.txt", b"\xff")}
    files = {"TEXT": text, "LINES": lines} | {word: str(tmp_path / name) for word, (name, _) in contents.items()}
    for name, content in contents.values():
        (tmp_path / name).write_bytes(content)
    assert main(["profile", "m", *(files.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: ") and said in error and error.count("\n") == 1 and made == []


def test_a_prompt_that_is_too_long_is_refused_with_its_length(
    text: str, tmp_path: Path, made: list[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(text).write_text("x" * (CONTEXT - 1))
    assert main(["profile", "m", "--input", text]) == 2
    assert capsys.readouterr().err == "quire: the prompt has 64 tokens and the context holds 64\n"
    file = tmp_path / "long.jsonl"
    file.write_text('{"prompt": "short"}\n' + json.dumps({"id": "b", "prompt": "x" * 98}))
    assert main(["profile", "m", "--input", str(file)]) == 2
    assert capsys.readouterr().err == "quire: prompt 'b': the prompt has 99 tokens and the context holds 64\n"
    assert [llm.prompts for llm in made] == [[], []], "one that cannot be run stops all before the first"


def test_a_plot_without_matplotlib_is_refused_before_the_work(
    text: str, made: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["profile", "m", "--input", text, "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install -c constraints.txt '.[plot]'" in capsys.readouterr().err and made == []
