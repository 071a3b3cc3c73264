"""The check of requests without a model, and what is asked again when one is queued."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.engine.admission import AdmittedRequest, PinLimits, RequestLimits, narrowest
from quire.errors import QueueFullError, RequestError

from ..engines import GREEDY, make_engine
from ..tiny_models import tiny_shape

LIMITS = RequestLimits(256, 1000, "model.max_context", 4, PinLimits(8, has_disk=True))


def test_a_cluster_has_the_shortest_context_of_its_instances_and_pins_where_prompts_are_computed():
    decode = replace(LIMITS, max_context=500, context_limit="the cache", pins=PinLimits(1))
    prefill = [LIMITS, replace(LIMITS, pins=PinLimits(5, has_disk=True))]
    found = narrowest([*prefill, decode], prefill)
    assert (found.max_context, found.context_limit) == (500, "the cache")
    assert found.pins == PinLimits(5, has_disk=True)


def test_where_one_instance_does_not_share_nobody_pins_and_where_one_has_no_disk_none_pins_there():
    without = replace(LIMITS, pins=PinLimits(None))
    assert narrowest([LIMITS, without], [LIMITS, without]).pins == PinLimits(None)
    no_disk = replace(LIMITS, pins=PinLimits(9))
    assert narrowest([LIMITS, no_disk], [LIMITS, no_disk]).pins == PinLimits(8)


def test_a_queue_takes_what_fits_and_not_one_more():
    LIMITS.check_queue(2, 2)
    with pytest.raises(QueueFullError, match="3 sequences wait and scheduler.max_queue is 4"):
        LIMITS.check_queue(3, 2)


@pytest.mark.parametrize("length", [100, 101])
def test_an_engine_whose_context_became_too_short_refuses_what_another_admitted(length):
    engine = make_engine(tiny_shape("llama"))
    admitted = AdmittedRequest(None, [1] * length, GREEDY)
    engine.max_context = 100
    with pytest.raises(RequestError, match="the context holds 100 tokens now; send the request again"):
        engine.queue("a", admitted)
    engine.queue("b", AdmittedRequest(None, [1] * 99, GREEDY))
