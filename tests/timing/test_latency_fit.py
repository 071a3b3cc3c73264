"""The fit of a latency model to measured steps."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.timing.kept_latencies import unmeasured
from quire.timing.latency import LatencyModel, StepWork
from quire.timing.latency_fit import Record, describe, fit, told
from tests.timing.test_latency import TRUE, random_records


def errors(model: LatencyModel, records: list[Record]) -> np.ndarray:
    return np.array([model.seconds(work) / seconds - 1 for work, seconds in records])


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
