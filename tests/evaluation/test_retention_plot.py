"""Pictures of what retention keeps."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from quire.cache.retention.policies import MEMBERS
from quire.engine.retention_report import RetentionReport
from quire.errors import ConfigError
from quire.evaluation.retention_plot import COLORS, save_retention
from tests.cli.test_profile import NAN, report
from tests.cli.test_profile import made as made


def test_every_member_has_a_color_of_its_own() -> None:
    assert set(COLORS) == {*MEMBERS, "full"} and len(set(COLORS.values())) == len(COLORS)


def test_a_cell_has_the_color_of_its_policy_and_what_it_keeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure, heads, layers = MagicMock(), MagicMock(), MagicMock()
    figure.return_value.subplots.return_value = (heads, layers)
    heads.get_legend_handles_labels.return_value = ([], [])
    monkeypatch.setitem(sys.modules, "matplotlib", MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", SimpleNamespace(Figure=figure))
    save_retention(tmp_path / "x.png", report(400), "m")
    pixels = heads.imshow.call_args.args[0]
    assert pixels.shape == (3, 2, 3), "a row is a head, a column a layer"
    shown = [["#" + "".join(f"{round(255 * part):02x}" for part in pixel) for pixel in row] for row in pixels]
    wanted = [["special", "local"], ["local", "full"], ["full", "special"]]
    assert shown == [[COLORS[name] for name in row] for row in wanted]
    assert [call.args for call in heads.text.call_args_list] == [
        (0, 0, "<1"), (0, 1, "2"), (1, 0, "3"), (1, 2, "1"),
    ]  # fmt: skip
    assert [call.kwargs["label"] for call in heads.plot.call_args_list] == ["special (2)", "+ local (2)", "full (2)"]
    means = [call.args[1] for call in layers.plot.call_args_list]
    assert [each.tolist() for each in means] == [pytest.approx([0.62, 1.69 / 3]), pytest.approx([0.935, 0.59])]
    _, low, high = layers.vlines.call_args.args
    assert (low.tolist(), high.tolist()) == ([0.9, 0.2], [0.97, 0.98])
    assert figure.return_value.suptitle.call_args.args[0] == "m: 400 tokens, T 0.95, 34.5% kept, in 12MiB of 24MiB"


def test_a_picture_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path, content: bytes) -> None:
        file.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    file = tmp_path / "x.PNG"
    save_retention(file, report(), "m")
    before = file.read_bytes()
    assert before.startswith(b"\x89PNG")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"cannot write .*/x.PNG: No space left on device"):
        save_retention(file, report(), "m")
    assert list(tmp_path.iterdir()) == [file] and file.read_bytes() == before


@pytest.mark.parametrize("size", [(1, 1), (30, 3), (80, 8)])
def test_a_picture_of_any_model(size: tuple[int, int], tmp_path: Path) -> None:
    num_policies = len(MEMBERS) + 1
    policies = np.random.randint(0, num_policies, size).astype(np.uint8)
    recovery = np.where(np.arange(num_policies) > policies[..., None], NAN, np.random.random((*size, num_policies)))
    drawn = RetentionReport(100, MEMBERS, 0.9, 0.3, 0.3, policies, 20 * policies.astype(np.int64), recovery, 2, 1)
    save_retention(tmp_path / "x.png", drawn, "m$1$")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
