"""The fit of corrections to measured runs."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from quire.measure.offload_profile import fitted, predict_run
from quire.offload.planning.costs import BlockWorkload
from quire.offload.planning.fit import fit
from quire.offload.planning.planner import predict
from quire.offload.planning.profile import Corrections, ProfiledRun
from quire.offload.units import Share
from tests.offload.planning.test_profile import BUDGET, MIB, SIZES, on_disk, profile_with, with_device


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_fit_recovers_known_corrections(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    """No run without a GPU shows the correction of the bus. With one, copies are slower than products."""
    made, layer_bytes, places = profile_with(), SIZES.layer_bytes, [(0.0, 0.0), (0.1, 0.0), (0.5, 0.0), (1.0, 0.0)]
    if has_gpu:
        made, layer_bytes = with_device(), 20.0 * MIB
        places = [(0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (0.2, 0.8), (1.0, 0.0)]
    sizes = dataclasses.replace(SIZES, layer_bytes=layer_bytes, decode=(1.0,))
    truth = Corrections(1.3, 0.8, 1.6, 0.3, 0.004, 0.0005, bus=2.5)
    shapes = [(1, 32, 8), (4, 320, 2), (8, 96, 6), (32, 32, 6)]
    blank = [
        ProfiledRun(Share(disk), *shape, BUDGET, 1.0, host_share=Share(host))
        for disk, host in places
        for shape in shapes
    ]
    known = dataclasses.replace(made, corrections=truth)
    runs = [dataclasses.replace(run, seconds=predict_run(known, sizes, run).seconds) for run in blank]
    found = fitted(made, sizes, runs)
    assert [run.predicted / run.seconds for run in found.runs] == pytest.approx([1] * len(runs), rel=0.05)
    monkeypatch.setattr(sys.modules[fit.__module__], "PULL", 1e-4)
    corrections = fitted(made, sizes, runs).corrections
    for name in ("disk", "prefill", "decode", "exposed", "step_seconds", "sequence_seconds", *["bus"] * has_gpu):
        assert getattr(corrections, name) == pytest.approx(getattr(truth, name), rel=0.02), corrections


def test_one_run_leaves_what_it_does_not_show() -> None:
    made = profile_with()

    def seconds_of(run: ProfiledRun, corrections: Corrections) -> float:
        return corrections.disk

    found = fit([dataclasses.replace(made.runs[0], seconds=2.0)], seconds_of)
    assert 1.9 < found.disk <= 2
    assert (found.prefill, found.decode) == pytest.approx((1, 1), abs=1e-3)


def test_the_scratch_of_products_is_what_explains_the_largest_memory() -> None:
    made, rows = profile_with(), 256
    sizes = dataclasses.replace(SIZES, decode=(1000.0, 3000.0))

    def memory(share: float, shape: tuple[int, int, int], factor: float) -> float:
        chosen = dataclasses.replace(made, corrections=Corrections(scratch=factor))
        work = BlockWorkload(shape[1], shape[2])
        return predict(chosen, sizes, work, on_disk(share, shape[0]), budget=BUDGET).memory["cpu"]

    def shape_of(run: ProfiledRun) -> tuple[int, int, int]:
        return run.sequences, run.prompt_tokens, run.output_tokens

    shapes = [(1, 32, 8), (4, 64, 2)]
    runs = [ProfiledRun(Share(share), *shape, BUDGET, 1.0) for share in (0.0, 0.5, 1.0) for shape in shapes]
    runs = [dataclasses.replace(run, memory=memory(run.disk_share, shape_of(run), 2.5)) for run in runs]
    assert memory(0.0, (4, 64, 2), 2.5) - memory(0.0, (4, 64, 2), 1.0) == pytest.approx(1.5 * 3000 * rows)
    assert fitted(made, sizes, runs).corrections.scratch == pytest.approx(2.5)
