"""The cost model of offloading, with numbers of the paper."""

from __future__ import annotations

import dataclasses

import pytest

from quire.offload.planning import paper
from quire.offload.planning.costs import BlockWorkload, CostModel, Form, TierLink, Traffic
from quire.offload.planning.paper import FORMS, GIB, t4
from quire.offload.planning.program import predict
from quire.offload.policy import OffloadPolicy
from quire.offload.units import Share
from tests.offload.planning.test_program import ROOM, WORK
from tests.opt_paper import OPT_30B, OPT_175B, Opt, cost_model, percents, sizes

GIVEN = OffloadPolicy(48, 3, percents(20, 80, 0), percents(0, 100, 0), percents(0, 100, 0), attended=Share(1.0))
"""The paper's policy for OPT-30B."""


def counting(model: CostModel) -> CostModel:
    """The same with links of a byte a second: their seconds are bytes."""
    link, machine = TierLink(Traffic.alike(1.0), Traffic.alike(1.0)), model.machine
    prefill, decode = (dataclasses.replace(each, links=(link, link)) for each in (machine.prefill, machine.decode))
    return dataclasses.replace(model, machine=dataclasses.replace(machine, prefill=prefill, decode=decode))


def test_the_speeds_of_the_paper_s_machine() -> None:
    """In GiB/s. Attention on the CPU is slower with few sequences of a narrow model."""
    sums, most = (t4(2048, 16, ROOM, form) for form in (Form.SUMS, Form.MAX))
    (bus, disk), (_, later) = sums.prefill.links, sums.decode.links
    stores = [bus.down.cache, bus.down.hidden, disk.down.cache, disk.down.hidden, later.down.cache]
    assert [each / GIB for each in stores] == pytest.approx([0.97, 4.82, 0.746, 2.015, 2.015])
    loads = [disk.up.cache, later.up.weights, most.decode.links[1].up.weights]
    assert [each / GIB for each in loads] == pytest.approx([0.473, 0.95 * 0.473, 0.473])
    assert sums.decode.far_flops == pytest.approx(0.9059 * 0.0123e12)


def test_the_bytes_of_a_block() -> None:
    """4 layers of width 4, and 6 sequences with 4 tokens of a prompt and 5 of an answer."""
    model = counting(cost_model(Opt(4, 4, 16, 1), BlockWorkload(4, 5), 2, 3, ROOM))
    near, far = percents(100, 0, 0), percents(0, 100, 0)
    hidden, cache = (predict(model, OffloadPolicy(2, 3, near, *places)).stages for places in ((near, far), (far, near)))
    ways = "cpu to gpu", "gpu to cpu"
    assert 4 * sum(hidden["prefill"][way] + 4 * hidden["decode"][way] for way in ways) == 3072
    # The paper's 11,520 B include the prompt's own keys and values, which are computed and not loaded.
    assert 4 * 4 * cache["decode"]["cpu to gpu"] == 11_520 - 16 * 6 * 4 * 4 == 9984
    assert cache["prefill"]["cpu to gpu"] == 0


def test_the_bytes_of_opt_175b() -> None:
    """With 512 sequences the cache is 3.8 times as large as the weights."""
    found = sizes(OPT_175B, WORK, Form.MAX)
    assert found.num_layers * found.layer_bytes == 324 * GIB
    assert found.num_layers * found.cache_bytes * WORK.cached_tokens(512, 32) == 1.1953125 * 1024 * GIB


def test_memory_and_stores_are_those_of_the_appendix() -> None:
    """Beside what resides on a tier: weights of two layers on the GPU and of one on the CPU, and a micro-batch's
    activations.
    """
    model = cost_model(OPT_30B, WORK, 48, 3, ROOM)
    layer, row, said = OPT_30B.layer_bytes, 2 * 7168, predict(model, GIVEN)
    cached, passing = 2 * row * 544, row * 512 * 48
    resident = 0.8 * 48 * layer + row * 512 * 144 + cached * 144 * 48
    assert said.memory["cpu"] == pytest.approx(resident + 0.8 * layer + passing)
    scratch = 2 * (7168 + 28672) * 512 * 48
    assert said.memory["gpu"] == pytest.approx((0.2 * 48 + 2 * 0.8) * layer + passing + scratch)
    stored = 2 * row * 144 * 513 / paper.STORE_CACHE + row * 144 * 512 / paper.STORE_HIDDEN
    assert said.stages["prefill"]["gpu to cpu"] == pytest.approx(stored)
    # While decoding, the GPU has the loaded cache of two micro-batches; or the CPU has the scores of one.
    gpu, cpu = (model.memory()[tier][1] for tier in ("gpu", "cpu"))
    loads = dataclasses.replace(GIVEN, attended=Share(0.0))
    assert gpu @ (model.vector(loads) - model.vector(GIVEN)) == pytest.approx(2 * 48 * cached)
    assert cpu[-1] == pytest.approx(2 * 56 * 48 * 544 + row * 48)


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
    counted = counting(cost_model(OPT_30B, WORK, 48, 3, ROOM))

    def crossed(attended: float) -> float:
        policy = dataclasses.replace(GIVEN, weights=percents(100, 0, 0), attended=Share(attended))
        stages = predict(counted, policy).stages["decode"]
        return stages["cpu to gpu"] + stages["gpu to cpu"]

    row, cache = 4 * 7168 * 144, 4 * 7168 * 144 * (512 + 16)
    assert crossed(1) == pytest.approx(row)
    # Its new keys and values are written back.
    assert crossed(0) == pytest.approx(row + cache + 4 * 7168 * 144)


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
