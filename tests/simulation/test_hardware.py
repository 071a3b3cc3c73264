"""Hardware of a simulation."""

from __future__ import annotations

import pytest

from quire.config import ClusterConfig, EngineConfig
from quire.simulation.hardware import Target
from quire.timing.devices import DEVICES


@pytest.mark.parametrize(("name", "device", "tp"), [("llama-2-7b", "a100-80g", 1), ("opt-175b", "h200", 8)])
def test_a_flat_cache_holds_as_many_tokens_as_the_memory(name: str, device: str, tp: int) -> None:
    """The second one's cache is larger than page ids reach, so that one byte stands for several."""
    target, config = Target(name, DEVICES[device]), EngineConfig()
    setup = target.setup(target.candidate(config, ClusterConfig(), tp))
    sizes, model = setup.replicas[0].plan.sizes, target.latency(config, tp, 1)
    assert setup.replicas[0].plan.shape.num_layers == 1
    assert sizes.tokens == pytest.approx(model.cache_tokens, rel=0.01)
    seconds = sizes.bytes_per_token / setup.ways.bulk.bytes_per_second
    assert seconds == pytest.approx(model.token_bytes / DEVICES[device].between, rel=0.01)
