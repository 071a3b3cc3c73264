"""The cost model of offloading, with numbers of the paper."""

from __future__ import annotations

import dataclasses

import pytest

from quire.offload.planning.costs import BlockWorkload, Form, TierLink, Traffic
from quire.offload.planning.paper import FORMS
from quire.offload.planning.program import predict
from quire.offload.policy import OffloadPolicy
from quire.offload.units import Share
from tests.offload.planning.test_program import ROOM, WORK
from tests.opt_paper import OPT_30B, cost_model, percents

GIVEN = OffloadPolicy(48, 3, percents(20, 80, 0), percents(0, 100, 0), percents(0, 100, 0), attended=Share(1.0))
"""The paper's policy for OPT-30B."""


def test_the_paper_s_policy_has_the_published_times() -> None:
    sums = predict(cost_model(OPT_30B, WORK, 48, 3, ROOM, FORMS[Form.SUMS]), GIVEN)
    assert sums.prefill_seconds / 48 == pytest.approx(4.389, rel=1e-3)
    assert sums.decode_seconds / 48 / 31 == pytest.approx(0.2924, rel=1e-3)
    assert sums.throughput == pytest.approx(7.136, rel=1e-3)
    most = predict(cost_model(OPT_30B, WORK, 48, 3, ROOM), GIVEN)
    assert most.decode_seconds / 48 / 31 == pytest.approx(0.221, rel=1e-2)
    assert most.throughput == pytest.approx(8.54, rel=1e-3)


def test_attention_on_the_cpu_moves_a_row_and_not_the_cache() -> None:
    """4 h1 bytes a sequence and layer cross the bus, instead of 4 h1 (s + n/2)."""
    model = cost_model(OPT_30B, WORK, 48, 3, ROOM)
    one_way = Traffic.alike(1.0)
    first, second = model.machine.decode.links
    machine = dataclasses.replace(
        model.machine, decode=dataclasses.replace(model.machine.decode, links=(TierLink(one_way, one_way), second))
    )
    counted = dataclasses.replace(model, machine=machine)

    def crossed(attended: float) -> float:
        policy = dataclasses.replace(GIVEN, weights=percents(100, 0, 0), attended=Share(attended))
        stages = predict(counted, policy).stages["decode"]
        return stages["cpu to gpu"] + stages["gpu to cpu"]

    row, cache = 4 * 7168 * 144, 4 * 7168 * 144 * (512 + 16)
    assert crossed(1) == pytest.approx(row)
    # Its new keys and values are written back.
    assert crossed(0) == pytest.approx(row + cache + 4 * 7168 * 144)
    assert first != TierLink(one_way, one_way)


def test_a_shared_beginning_is_computed_and_stored_once() -> None:
    alone = BlockWorkload(prompt_tokens=100, output_tokens=10)
    shared = BlockWorkload(prompt_tokens=100, output_tokens=10, shared_tokens=64, num_prefixes=2)
    assert shared.computed_tokens(8) == 8 * 36 + 2 * 64
    assert shared.cached_tokens(8, 10) == 8 * 46 + 2 * 64
    assert shared.pairs(8) == 8 * 100**2 - 6 * 64**2
    assert shared.attended_tokens(8, 10) == alone.attended_tokens(8, 10)
    assert alone.computed_tokens(8) == 800 and alone.pairs(8) == 8 * 100**2
    assert shared.cached_tokens(1, 0) == alone.cached_tokens(1, 0)  # one sequence shares with nobody


def test_retention_reduces_the_cache_and_nothing_else() -> None:
    kept = BlockWorkload(prompt_tokens=100, output_tokens=10, kept=Share(0.5), growth=Share(0.2))
    assert kept.cached_tokens(4, 10) == 4 * (50 + 2) and kept.computed_tokens(4) == 400
    assert kept.attended_tokens(4, 10) == 4 * 52
