"""The latency model: its fit, its file, and the work that it counts of a step."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cache.ledger import PAGE_TOKENS
from quire.engine.params import SamplingParams
from quire.engine.step import Result, Slice, Step
from quire.errors import ConfigError
from quire.planning.kept_latencies import unmeasured
from quire.planning.latency import LatencyModel, Link, Origin, StepWork, mismatch
from quire.planning.latency_fit import Record, describe, fit, told
from quire.planning.work import WorkMeter
from tests.engines import make_engine

TRUE = LatencyModel(
    about={},
    coefficients={
        "base": 8e-3,
        "rows_from_1": 1e-5,
        "rows_from_8": 4e-4,
        "rows_from_64": 1.2e-4,
        "prompt_pairs": 3e-8,
        "context": 6e-8,
        "unique": 2.5e-7,
        "num_prompts": 5e-4,
        "decode_rows": 9e-5,
    },
    knots=(1, 8, 64),
    residuals={},
    ranges={},
)
"""Flat while weights are read, steep where caches are too small, less steep where products are large."""


def random_work(draw: np.random.Generator) -> StepWork:
    prompts, decodes = int(draw.integers(0, 4)), int(2 ** draw.uniform(0, 6)) * int(draw.integers(0, 2))
    if not prompts and not decodes:
        return random_work(draw)
    rows = [int(2 ** draw.uniform(0, 9)) for _ in range(prompts)]
    pairs = sum(count * (draw.integers(0, 2000) + count / 2) for count in rows)
    context = float(decodes * draw.integers(1, 2000))
    return StepWork(sum(rows), float(pairs), decodes, context, context * draw.uniform(0.1, 1), prompts)


def random_records(count: int, seed: int = 0, model: LatencyModel = TRUE) -> list[Record]:
    draw = np.random.default_rng(seed)
    return [(work, model.seconds(work)) for work in (random_work(draw) for _ in range(count))]


def errors(model: LatencyModel, records: list[Record]) -> np.ndarray:
    return np.array([model.seconds(work) / seconds - 1 for work, seconds in records])


# ---- the form --------------------------------------------------------------------------------------------------------


def test_seconds_are_the_sum_of_the_terms() -> None:
    work = StepWork(prompt_rows=70, prompt_pairs=7000.0, decode_rows=10, context=5000.0, unique=2000.0, num_prompts=2)
    rows = 1e-5 * 7 + 4e-4 * 56 + 1.2e-4 * 16
    terms = 3e-8 * 7000 + 6e-8 * 5000 + 2.5e-7 * 2000 + 5e-4 * 2 + 9e-5 * 10
    assert TRUE.seconds(work) == pytest.approx(8e-3 + rows + terms, rel=1e-12)
    assert TRUE.occupancy(work) == TRUE.seconds(work)
    assert TRUE.origin is Origin.FITTED


def test_more_rows_never_take_less_time() -> None:
    seconds = [TRUE.seconds(StepWork(prompt_rows=rows, num_prompts=1)) for rows in range(1, 300)]
    assert all(after >= before for before, after in itertools.pairwise(seconds))


@pytest.mark.parametrize("count", [0, 1, 2, 63, 1000])
def test_quiet_seconds_are_the_sum_over_the_steps(count: int) -> None:
    first = StepWork(decode_rows=12, context=6000.0, unique=900.0)
    steps = (
        first._replace(context=first.context + 12 * step, unique=first.unique + 12 * step) for step in range(count)
    )
    assert TRUE.quiet(first, count) == pytest.approx(sum(map(TRUE.seconds, steps)), rel=1e-12)


def test_a_link_is_latency_and_bytes() -> None:
    assert Link(0.002, 1e9).seconds(5e8) == pytest.approx(0.502)
    with pytest.raises(ConfigError, match="bytes_per_second is 0"):
        Link(0.0, 0)


# ---- the fit ---------------------------------------------------------------------------------------------------------


def test_a_fit_recovers_the_terms_of_exact_steps() -> None:
    found = fit(random_records(400), {"model": "made up"})
    for name in ("base", "prompt_pairs", "context", "unique", "num_prompts", "decode_rows"):
        assert found.coefficients[name] == pytest.approx(TRUE.coefficients[name], rel=1e-3), name
    slopes = [found.coefficients[f"rows_from_{knot}"] for knot in found.knots]
    assert found.knots == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert slopes == pytest.approx([1e-5] * 3 + [4e-4] * 3 + [1.2e-4] * 4, rel=1e-3)
    assert np.abs(errors(found, random_records(100, seed=1))).max() < 1e-6
    assert found.about == {"model": "made up"} and found.counts["outliers"] == 0
    assert found.residuals["p99"] == pytest.approx(1) and found.residuals["mixed.total"] == pytest.approx(1)


def test_a_fit_is_robust_against_noise_and_other_programs() -> None:
    draw, exact = np.random.default_rng(3), random_records(1500, seed=2)
    noisy = [(work, seconds * math.exp(draw.normal(0, 0.05))) for work, seconds in exact]
    slow = set(draw.choice(len(noisy), 100, replace=False).tolist())
    noisy = [(work, t * draw.uniform(2, 9)) if i in slow else (work, t) for i, (work, t) in enumerate(noisy)]
    found = fit(noisy, {})
    assert 90 <= found.counts["outliers"] <= 115
    assert found.counts["steps"] == 1500 - found.counts["outliers"]
    held_out = errors(found, random_records(500, seed=4))
    assert np.quantile(np.abs(held_out), 0.9) < 0.03 and abs(np.median(held_out)) < 0.01
    assert found.residuals["p10"] == pytest.approx(0.94, abs=0.02)
    assert found.residuals["p90"] == pytest.approx(1.06, abs=0.02)
    assert found.residuals["total"] > 1.1, "time that other programs took is told"


@pytest.mark.parametrize("seed", range(4))
def test_few_noisy_steps_do_not_bend_a_line(seed: int) -> None:
    """Without the pull between neighbouring pieces some slopes would be 0, and predictions beyond wrong by a factor."""
    draw, records = np.random.default_rng(seed), list[Record]()
    for rows in (2 ** draw.uniform(0, 10, 80)).astype(int).tolist():
        seconds = (0.02 + 1e-3 * rows) * math.exp(draw.normal(0, 0.3))
        records.append((StepWork(rows, rows**2 / 2, num_prompts=1), seconds))
    found = fit(records, {})
    assert found.coefficients["rows_from_512"] == pytest.approx(1e-3, rel=0.4)
    assert found.seconds(StepWork(2000, num_prompts=1)) == pytest.approx(2.02, rel=0.3)


def test_steps_that_are_always_slow_are_no_outliers() -> None:
    """What the form cannot say shows in the residuals, and is not left out."""
    draw = np.random.default_rng(5)
    slow = StepWork(decode_rows=16, context=16000.0, unique=16000.0)
    records = random_records(300) + [(slow, 4 * TRUE.seconds(slow) * draw.uniform(0.99, 1.01)) for _ in range(20)]
    found = fit(records, {})
    assert found.counts["outliers"] <= 6
    assert found.residuals["decode.within"] > 0.5


def test_terms_that_steps_do_not_tell_apart_are_dropped() -> None:
    alone = [(work._replace(unique=work.context), seconds) for work, seconds in random_records(200)]
    found = fit(alone, {})
    assert found.dropped == ("unique",) and "unique" not in found.coefficients
    assert ("distinct token of context", "not told apart", "") in describe(found)
    decodes = [(work, seconds) for work, seconds in random_records(400) if not work.prompt_rows]
    assert {"prompt_pairs", "num_prompts", "decode_rows"} == {*fit(decodes, {}).dropped}


def test_knots_are_where_rows_were_measured() -> None:
    works = [StepWork(decode_rows=rows) for rows in (3, 5, 40) for _ in range(4)]
    found = fit([(work, 1e-3 * work.decode_rows) for work in works], {})
    assert found.knots == (3, 8)
    assert found.seconds(StepWork(decode_rows=40)) == pytest.approx(0.04)
    assert fit([(StepWork(decode_rows=7), 0.5)], {}).seconds(StepWork(decode_rows=7)) == pytest.approx(0.5)


def test_the_form_contains_the_paper_s() -> None:
    draw, records = np.random.default_rng(6), list[Record]()
    for _ in range(300):
        length, batch = int(draw.integers(16, 2000)), int(draw.integers(1, 60))
        context = float(batch * draw.integers(1, 900))
        records.append((StepWork(length, length**2 / 2, 0, 0.0, 0.0, 1), 1e-4 * length + 7e-9 * length**2 + 0.018))
        records.append((StepWork(0, 0.0, batch, context, context, 0), 0.02 + 6e-7 * context))
    found = fit(records, {})
    constants = {"C1": 1e-4, "C2": 7e-9, "C3": 0.018, "C4": 0.02, "C5": 6e-7}
    assert {name: found.paper[name] for name in constants} == pytest.approx(constants, rel=1e-6)
    assert found.paper["prompt.within"] < 1e-9 and found.paper["decode.within"] < 1e-9
    assert found.residuals["within"] < 0.02


def test_a_description_shows_both_forms_and_their_residuals() -> None:
    rows = {what: (ours, theirs) for what, ours, theirs in describe(fit(random_records(400), {}))}
    ours, theirs = rows["step"]
    assert ours == "8 ms" and theirs.startswith("C3 ") and "; C4 " in theirs
    assert rows["row, 16 to 32"][0] == "400 us" and rows["pair of query and token, prompts"][0] == "30 ns"
    residuals = "decode steps: measured / predicted"
    assert rows[residuals][0] == "1.00 / 1.00 / 1.00 / 1.00" != rows[residuals][1]
    assert rows["mixed steps: measured / predicted"][1] == "no such steps"
    assert [told(value) for value in (0, 2.5, 3e-8)] == ["0", "2.5 s", "30 ns"]


def test_no_steps_are_an_error() -> None:
    with pytest.raises(ConfigError, match="there are none; measure longer"):
        fit([], {})


@pytest.mark.parametrize(
    ("kinds", "lacking"),
    [
        (("prompt",), {"mixed": "steps that decode", "decode": "steps that decode", "prefill": ""}),
        (("decode",), {"mixed": "steps with prompts", "decode": "", "prefill": "steps with prompts"}),
        (("prompt", "decode"), dict.fromkeys(("mixed", "decode", "prefill"), "")),
        (("mixed",), dict.fromkeys(("mixed", "decode", "prefill"), "")),
    ],
)
def test_what_was_not_measured_of_a_role_is_told(kinds: tuple[str, ...], lacking: dict[str, str]) -> None:
    model = fit([each for each in random_records(200) if each[0].kind in kinds], {})
    assert {role: unmeasured(model, role) for role in lacking} == lacking
    by_hand = dataclasses.replace(model, counts={})
    assert not unmeasured(by_hand)


def test_a_model_covers_what_was_measured() -> None:
    found = fit(random_records(400), {})
    inside = StepWork(100, 20000.0, 8, 4000.0, 2000.0, 1)
    assert found.covers(inside)
    for change in (
        {"prompt_rows": 5000}, {"prompt_pairs": 1e9}, {"decode_rows": 70}, {"context": 1e6, "unique": 1e6},
        {"num_prompts": 9}, {"unique": 100.0},
    ):  # fmt: skip
        assert not found.covers(inside._replace(**change)), change


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_holds_all_of_a_model(tmp_path: Path) -> None:
    about: dict[str, Any] = {"model": "made up", "threads": 2, "level": None, "sparse_values": 0.5, "is_real": False}
    found = fit(random_records(200), about, {"disk": Link(0.002, 5e8)})
    found.write(tmp_path / "model.json")
    assert LatencyModel.read(tmp_path / "model.json") == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "not a latency model of format 1"),
        ({"coefficients": {"base": -1.0}}, "coefficients.base is -1.0; it must be a number of at least 0"),
        ({"coefficients": {"bass": 1.0}}, "coefficients.bass is no term; the terms are base, "),
        ({"coefficients": {"base": 0.0}}, "coefficients are all 0"),
        ({"coefficients": {"base": "fast"}}, "coefficients.base is 'fast'; it must be a number"),
        ({"knots": [4, 2]}, "knots are [4, 2]; they must increase"),
        ({"ranges": {"rows": [3.0]}}, "ranges.rows is [3.0]"),
        ({"links": {"disk": {"latency": 0.1, "bytes_per_second": 0.0}}}, "links.disk: bytes_per_second is 0.0"),
        ({"colour": "red"}, "unknown field 'colour'"),
    ],
)
def test_a_bad_file_is_told_in_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(json.loads(TRUE.to_json()) | change))
    with pytest.raises(ConfigError) as raised:
        LatencyModel.read(path)
    assert str(raised.value).startswith(f"latency model {path}: ")
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_what_is_no_json_and_what_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        LatencyModel.read(tmp_path / "text")
    with pytest.raises(ConfigError, match="No such file"):
        LatencyModel.read(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot write"):
        TRUE.write(tmp_path / "no" / "folder")


def test_a_model_of_other_settings_is_told() -> None:
    about: dict[str, Any] = {"fingerprint": "ab", "codec": "nuq4", "threads": 2, "date": "today"}
    assert mismatch(about, {"fingerprint": "ab", "codec": "nuq4", "threads": 2}) is None
    assert "made with cache.codec nuq4, not dense" in str(mismatch(about, {"fingerprint": "ab", "codec": "dense"}))
    assert "made with retain an unknown value, not off" in str(mismatch(about, {"retain": "off"}))


# ---- the work of a step ----------------------------------------------------------------------------------------------


def step_of(*slices: Slice) -> Step:
    rows = [place for piece in slices for place in range(piece.start, piece.start + piece.num_rows)]
    return Step([*slices], np.zeros(len(rows), np.int64), np.array(rows))


def work_of(step: Step, window: int | None = None) -> StepWork:
    return WorkMeter(window).of(step)


def row(start: int, *shared: tuple[int, int], **fields: Any) -> Slice:
    return Slice(start, 1, np.zeros(200, np.int32), shared=shared, samples=True, **fields)


def prompt(start: int, rows: int) -> Slice:
    return Slice(start, rows, np.zeros(200, np.int32))


def test_rows_of_prompts_and_decoding_rows_are_told_apart() -> None:
    found = work_of(step_of(row(99), row(639, reads_all=True), prompt(0, 100), prompt(1024, 50)))
    assert found == StepWork(151, 639.5 + 5000 + 50 * 1049, 1, 100.0, 100.0, 3)
    assert found.kind == "mixed" and found.rows == 152


def test_shared_chunks_count_once() -> None:
    """Two sequences share 3 + 2 chunks, a third one the first 3, and a fourth one nothing."""
    step = step_of(row(400, (1, 3), (2, 2)), row(500, (1, 3), (2, 2)), row(450, (1, 3), (7, 1)), row(300, (9, 4)))
    found = work_of(step)
    assert found.context == 401 + 501 + 451 + 301
    assert found.unique == found.context - 5 * PAGE_TOKENS - 3 * PAGE_TOKENS


def test_tokens_that_retention_dropped_are_not_attended_to() -> None:
    assert work_of(step_of(row(1000, num_dropped=10))).context == 1001 - 640


def test_a_window_bounds_what_is_attended_to() -> None:
    found = work_of(step_of(row(1000), row(99), prompt(2000, 10)), window=256)
    assert (found.context, found.prompt_pairs) == (256 + 100, 2560.0)


def test_what_a_window_has_passed_is_not_shared() -> None:
    """Three rows share five chunks, 320 tokens. Windows of 256 tokens begin behind them, or amid them."""
    step = step_of(row(999, (1, 5)), row(999, (1, 5)), row(399, (1, 5)), row(349, (1, 5)))
    found = work_of(step, window=256)
    assert found.context == 4 * 256
    # The first two see nothing of it. The last two see the tokens from 144 and from 94 on: 176 are common.
    assert found.unique == found.context - 176


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "retention": {"retain.budget": 0.5, "retain.profile_rows": 16}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_meter_counts_an_engine_s_steps_as_if_each_were_the_first(options: dict[str, Any]) -> None:
    """Shared beginnings, joining prompts, sequences that end: what grows from step to step equals a new count. Without
    retention the distinct tokens are those of distinct slots of chunks.
    """
    engine, meter = make_engine(**options), WorkMeter()
    runner, num_moved = engine.any_runner, 0

    class Checked:
        vocab_size, check = runner.vocab_size, runner.check

        def run(self, step: Step) -> Result:
            nonlocal num_moved
            found = meter.of(step)
            num_moved += step.moved is not None
            assert found == work_of(step)
            singles = [piece for piece in step.slices if piece.num_rows == 1 and not piece.reads_all]
            if not options:
                slots = {
                    (int(piece.chunks[at // PAGE_TOKENS]), at % PAGE_TOKENS)
                    for piece in singles
                    for at in range(piece.start + 1)
                }
                assert found.unique == len(slots)
            assert found.decode_rows == len(singles) and found.rows == len(step.tokens)
            return runner.run(step)

    engine.any_runner = Checked()
    draw = np.random.default_rng(0)
    beginnings = [draw.integers(0, 250, length).tolist() for length in (150, 80)]
    for index in range(10):
        own = draw.integers(0, 250, 5 + 9 * index).tolist()
        params = SamplingParams(max_tokens=40 + 13 * (index % 4), temperature=0.0, ignore_eos=True)
        engine.add(f"{index}", [*beginnings[0], *beginnings[1]][: 80 * (index % 4)] + own, params)
        for _ in range(7):
            engine.step()
    while engine.has_work:
        engine.step()
    assert num_moved > 40
