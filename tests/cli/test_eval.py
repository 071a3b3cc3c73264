"""`quire eval`: flags, tables, JSON lines, plots and refusals."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from quire.cli import main
from quire.config import EngineConfig
from quire.evaluation import Perplexity, Retrieval, perplexity
from quire.evaluation.plot import save_plot
from quire.planning.quality import Quality
from quire.planning.space import SearchLimits, Space
from quire.timing.latency import Origin

from ..effort import full_only
from ..real_model import embedded_gguf
from ..tiny_models import save_tiny

TEXT = "It was the best of mills, it was the worst of mills. " * 12
CONFIG = EngineConfig.from_options({"model.dtype": "float32", "runtime.threads": 1})
SMALL = ("--model.dtype", "float32", "--runtime.threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept curves."""
    monkeypatch.setattr("quire.planning.quality.curve_folder", lambda: tmp_path / "curves")
    return tmp_path / "curves"


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return str(file)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def point(codec: str, num_bytes: float, ratio: float | None = None, error: float | None = None) -> Perplexity:
    compared = (None, None, None) if ratio is None else (0.01, 0.1, 0.9)
    return Perplexity(codec, 128, 3, 381, 3.0, 0.1, num_bytes, 4.5, *compared, ratio, error)


def test_the_library_and_the_command_say_the_same(folder: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "ppl", folder, "--text", text, "--context", "64", "--json", *SMALL]) == 0
    (line,) = lines(capsys)
    (found,) = perplexity(folder, TEXT, config=CONFIG, context=64)
    assert line["perplexity"] == pytest.approx(found.perplexity)
    assert (line["eval"], line["model"], line["text"]) == ("ppl", folder, text)
    assert (line["codec"], line["num_windows"], line["num_tokens"]) == ("dense", len(TEXT) // 64, len(TEXT) // 64 * 63)
    assert (line["kl_mean"], line["ratio"]) == (0, 1)


@pytest.mark.parametrize(
    ("name", "flags"),
    [("g4", ["--cache.codec", "g4"]), ("budget 0.5", ["--retain.budget", "0.5"])],
)
def test_windows_are_kept_for_plans_and_fewer_do_not_replace_more(
    name: str, flags: list[str], folder: str, text: str, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "ppl", folder, "--text", text, "--context", "300", "--json", *flags, *SMALL]
    assert main(words) == 0
    dense, found = lines(capsys)
    assert len(found["window_nll"]) == 2 and sum(found["window_nll"]) / 2 == pytest.approx(found["nll"])
    space = Space.of(SearchLimits())
    (settings,) = (each for each in space.settings() if space.name(each) == name)
    assert main([*words, "--windows", "1"]) == 0
    loss = Quality(folder, CONFIG, space).losses.of(settings)
    assert loss is not None and loss.origin is Origin.MEASURED and loss.how.startswith("2 windows of 300 tokens")
    assert loss.log_ratio == pytest.approx(found["nll"] - dense["nll"])
    assert len(list(kept.rglob("*.json"))) == 2


@pytest.mark.parametrize(
    ("words", "num_windows"),
    [(["--windows", "2"], 2), (["--tokens", "200"], 3), (["--tokens", "200", "--windows", "9"], 3)],
)
def test_less_of_a_text(
    folder: str, text: str, words: list[str], num_windows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["eval", "ppl", folder, "--text", text, "--context", "64", *words, "--json", "--no-kl", *SMALL]
    assert main(given) == 0
    (line,) = lines(capsys)
    assert line["num_windows"] == num_windows and line["kl_mean"] is None and line["ratio"] is None
    (found,) = perplexity(folder, TEXT[: num_windows * 64], config=CONFIG, context=64, kl=False)
    assert line["nll"] == pytest.approx(found.nll)


@pytest.mark.parametrize("retention", ["budget", "threshold"])
def test_retention_is_measured_and_named(
    folder: str, text: str, retention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reference keeps everything. A window that is all prompt would lose nothing."""
    setting = f"--retain.{retention}"
    words = ["--text", text, "--context", "400", "--continuation", "50", "--codecs", "dense,g4", setting, "0.4"]
    assert main(["eval", "ppl", folder, *words, "--json", *SMALL]) == 0
    dense, kept, both = lines(capsys)
    label = f"retain.{retention} 0.4"
    assert [line["codec"] for line in (dense, kept, both)] == ["dense", f"dense, {label}", f"g4, {label}"]
    assert dense["ratio"] == 1 != kept["ratio"] and both["kl_mean"] > kept["kl_mean"] > 0 == dense["kl_mean"]
    assert dense["bytes_per_token"] > kept["bytes_per_token"] > both["bytes_per_token"]
    assert all((line["continuation"], line["num_tokens"]) == (50, 50) for line in (dense, kept, both))


def test_a_continuation_of_256_tokens_is_retentions_default(
    folder: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--text", text, "--context", "400", "--no-kl", "--retain.budget", "0.4"]
    assert main(["eval", "ppl", folder, *words, *SMALL]) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row.startswith("dense, retain.budget 0.4 ") and row.endswith("1 x 400, last 256")


@pytest.mark.parametrize("context", [40, 65, 66])
@pytest.mark.parametrize("continuation", [[], ["--continuation", "10"]])
def test_a_table_of_windows_within_a_chunk_says_that_none_was_encoded(
    folder: str, text: str, context: int, continuation: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--text", text, "--context", str(context), "--windows", "1", "--codecs", "dense,g4", *continuation]
    assert main(["eval", "ppl", folder, *words, *SMALL]) == 0
    assert ("the last chunk is never encoded" in capsys.readouterr().out) == (context <= 65)


def test_codecs_given_twice_are_measured_once(folder: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--text", text, "--context", "64", "--windows", "1", "--codecs", "dense, dense"]
    assert main(["eval", "ppl", folder, *words, *SMALL]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "codec" and row.split()[0] == "dense" and row.endswith("1 x 64")
    assert "±" not in row, "one window has no standard error"


def test_tables_are_not_cut(monkeypatch: pytest.MonkeyPatch, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    points = [point("dense", 23040.0, 1.0, 0.0), point("nuq4", 6592.4, 1.0123, 0.0045)]
    monkeypatch.setattr("quire.evaluation.perplexity", lambda *_, **__: points)
    monkeypatch.setattr("quire.planning.quality.keep_results", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["eval", "ppl", "fake", "--text", text]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "codec" and head.endswith("windows")
    for said in (
        "nuq4",
        "4.50",
        "6,592",
        "20.086 ± 2.009",
        "1.0123 ± 0.0045",
        "0.01000",
        "0.1000",
        "90.00%",
        "3 x 128",
    ):
        assert said in row


def test_retrieval_is_a_table_of_depths(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {}

    def fake(model: str, text: str | None, **more: Any) -> list[Retrieval]:
        given.update(more, model=model, text=text)
        return [
            Retrieval("dense", length, depth, int(depth * 4), 4)
            for length in more["lengths"]
            for depth in more["depths"]
        ]

    monkeypatch.setattr("quire.evaluation.retrieval", fake)
    words = ["eval", "retrieval", "fake", "--lengths", "64,1024", "--depths", "0.25,1", "--trials", "4"]
    assert main(words) == 0
    assert (given["lengths"], given["depths"], given["num_trials"], given["text"]) == ((64, 1024), (0.25, 1), 4, None)
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == "codec tokens depth 0.25 depth 1 all".split()
    assert first.split() == ["dense", "64", "25%", "100%", "5/8"] and second.split()[1] == "1,024"
    assert main([*words, "--json"]) == 0
    found = lines(capsys)
    assert [(line["length"], line["depth"], line["num_found"], line["num_trials"]) for line in found] == [
        (64, 0.25, 1, 4),
        (64, 1, 4, 4),
        (1024, 0.25, 1, 4),
        (1024, 1, 4, 4),
    ]


@pytest.mark.parametrize(("flags", "name"), [([], "dense"), (["--retain.budget", "0.5"], "dense, retain.budget 0.5")])
def test_retrieval_runs_on_a_model_and_names_the_retention(
    flags: list[str], name: str, folder: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--lengths", "512", "--depths", "0.5", "--trials", "1", "--text", text, "--json", *flags]
    assert main(["eval", "retrieval", folder, *words, *SMALL]) == 0
    (line,) = lines(capsys)
    assert (line["eval"], line["codec"], line["num_trials"]) == ("retrieval", name, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ppl"], "quire eval ppl needs --text FILE"),
        (["ppl", "--text", "/nowhere"], "cannot read the text /nowhere"),
        (["ppl", "--text", "TEXT", "--depths", "0"], "--depths is for quire eval retrieval, not for ppl"),
        (["retrieval", "--no-kl"], "--no-kl is for quire eval ppl, not for retrieval"),
        (["ppl", "--codecs", "dense", "--cache.codec", "dense"], "give --codecs or --cache.codec, not both"),
        (["ppl", "--text", "TEXT", "--codecs", "dense,zip9"], "cache.codec is 'zip9'"),
        (["ppl", "--text", "TEXT", "--context", "1"], "a window of 1 tokens has no token to score"),
        (["ppl", "--text", "TEXT", "--context", "257", "--retain.budget", "0.5"], "no room for a prompt"),
        (["ppl", "--text", "TEXT", "--context", "60", "--continuation", "59"], "give a context of at least 61"),
        (["ppl", "--text", "TEXT", "--context", "513"], "513 tokens exceed the model's context of 512"),
        (["ppl", "--text", "TEXT", "--tokens", "63", "--context", "64"], "has 63 tokens, fewer than a window of 64"),
        (["ppl", "--text", "TEXT", "--plot", "/nowhere/x.png"], "cannot write /nowhere/x.png"),
        (["retrieval", "--lengths", "100"], "a length of 100 tokens has no room"),
        (["retrieval", "--lengths", "513"], "513 tokens exceed the model's context of 512"),
    ],
)
def test_what_cannot_be_is_one_line(
    folder: str, text: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = [text if word == "TEXT" else word for word in words]
    assert main(["eval", name, folder, *rest, *SMALL]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("quire: ") and said in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["perplexity", "m"], "perplexity"),
        (["ppl", "m", "--codecs", "dense,"], "'dense,' has an empty value beside a comma"),
        (["retrieval", "m", "--depths", "0,2"], "'2' is not a number from 0 to 1"),
        (["retrieval", "m", "--lengths", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["eval", *words])
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and said in error and error.count("\n") == 1


def test_settings_of_one_codec_are_checked_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not for dense pages must not refuse a comparison with them."""
    seen = []
    monkeypatch.setattr("quire.cli.shared.printed_config", lambda args: seen.append(vars(args)["cache.codec"]) or True)
    for codecs in ("dense,other", "other,dense", "other,more", "dense", "g4,nuq3", "dense,g4,nuq2,nuq3"):
        assert main(["eval", "ppl", "m", "--codecs", codecs]) == 0
    assert seen == ["other", "other", "other", "dense", "nuq3", "nuq2"]


def test_progress_is_a_bar_on_a_terminal_and_elsewhere_a_line_now_and_then(
    folder: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["eval", "ppl", folder, "--text", text, "--context", "64", "--windows", "2", "--json", *SMALL]
    assert main(short) == 0 and "windows" not in capsys.readouterr().err
    monkeypatch.setattr("quire.cli.shared.PLAIN_SECONDS", 0.0)
    words = ["eval", "ppl", folder, "--text", text, "--codecs", "g4", "--windows", "2", *SMALL]
    assert main([*words, "--context", "64"]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [f"quire: {done}/2 windows done" for done in range(3)]
    assert shown.out.endswith("codecs differ only by rounding\n")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main([*words, "--context", "66"]) == 0
    shown = capsys.readouterr()
    assert "rounding" not in shown.out and "2/2" in shown.err and "windows done" not in shown.err
    assert main(short) == 0 and len(capsys.readouterr().out.splitlines()) == 1


def test_a_plot_without_matplotlib_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["eval", "ppl", "/no/such/model", "--text", text, "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install -c constraints.txt '.[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("is_compared", [True, False])
def test_a_plot_has_a_point_for_each_codec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_compared: bool) -> None:
    figure = MagicMock()
    axes = figure.return_value.subplots.return_value
    axes.errorbar.return_value = (MagicMock(), MagicMock(), MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib", MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", SimpleNamespace(Figure=figure))
    points = [point("dense", 300.0, 1.0, 0.0), point("nuq4", 100.0, 1.02, 0.003)]
    if not is_compared:
        points = [point("dense", 300.0), point("nuq4", 100.0)]
    save_plot(tmp_path / "x.png", points, "title")
    drawn = [(*call.args, call.kwargs["yerr"]) for call in axes.errorbar.call_args_list]
    if is_compared:
        assert drawn == [(300.0, 0.0, 0.0), (100.0, pytest.approx(2.0), pytest.approx(0.3))]
    else:
        value = math.exp(3.0)
        assert drawn == [(each, pytest.approx(value), pytest.approx(0.1 * value)) for each in (300.0, 100.0)]
    assert [call.args[0] for call in axes.annotate.call_args_list] == ["dense", "nuq4"]
    assert figure.return_value.savefig.call_args.kwargs == {"format": "png"}


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    save_plot(tmp_path / "x.png", [point("dense", 300.0, 1.0, 0.0), point("nuq4", 100.0, 1.02, 0.003)], "title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@full_only("tiny models are held to their own losses, the embedded one to its greedy text")
@pytest.mark.slow
@pytest.mark.data
def test_perplexity_of_the_embedded_model_is_what_transformers_has(data_dir: Path) -> None:
    """Of the same file in float32, as transformers 5.23 computes it from the same ids."""
    embedded_gguf()
    wiki = (data_dir / "text" / "wiki.test.raw").read_text(encoding="utf-8")
    (found,) = perplexity(
        "smollm2", wiki, context=1024, max_windows=2, config=EngineConfig.from_options({"model.dtype": "float32"})
    )
    assert found.perplexity == pytest.approx(20.28554, abs=1e-3)
