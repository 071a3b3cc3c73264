"""The samples of calibration: what was gathered comes back, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from quire.calibrate import samples
from quire.calibrate.gradients import GradientOps
from quire.calibrate.samples import SampleStore, gather
from quire.kernels.memory import HugePageAllocator
from quire.models.cpu_panels import GATE_LANES, Panels
from quire.models.decoder import build_model
from quire.models.plan import Model

from ..tiny_models import RandomWeights, tiny_shape


def test_a_product_without_its_gate_has_the_gates_and_their_ups() -> None:
    weight, bias = torch.randn(2 * 40, 64).bfloat16(), torch.randn(2 * 40).bfloat16()
    panels = Panels([weight], bias, torch.bfloat16, HugePageAllocator(), gated="silu")
    both = panels.without_gate()
    x = torch.randn(5, 64).bfloat16()
    sums = both(x).view(5, -1, 2, GATE_LANES)
    wanted = functional.linear(x.float(), weight.float(), bias.float())
    for part, half in zip((0, 1), wanted.chunk(2, 1), strict=True):
        found = sums[:, :, part].flatten(1)
        torch.testing.assert_close(found[:, :40].float(), half, atol=0.1, rtol=0.02)
        assert not found[:, 40:].any()
    rows = torch.cat(list(both.decoded(7, torch.float32))).view(-1, 2, GATE_LANES, 64)
    assert torch.equal(rows[:, 0].flatten(0, 1)[:40], weight[:40])
    assert torch.equal(rows[:, 1].flatten(0, 1)[:40], weight[40:])


def tiny() -> Model:
    shape = tiny_shape("qwen3")
    return build_model(shape, RandomWeights(shape), GradientOps(), torch.float32)


def test_a_store_gives_back_what_was_gathered(tmp_path: Path) -> None:
    model, store = tiny(), SampleStore(tmp_path / "work", skip=3)
    windows = torch.randint(0, 256, (2, 20))
    store.put_tokens(windows)
    progress: list[int] = []
    for window, tokens in enumerate(windows):
        assert not store.has(window)
        store.put(window, model, tokens, progress.append)
        assert store.has(window)
    # Also between the layers, so that whoever gives up does not wait for a window.
    assert list(dict.fromkeys(progress)) == [0, 1, 2] and progress.count(0) > 4
    again = SampleStore(tmp_path / "work", skip=3)
    found = again.tokens()
    assert found is not None and torch.equal(found, windows)
    wanted = [dict(gather(model, tokens)) for tokens in windows]
    for layer in range(2):
        got = again.layer(layer, 2)
        for name, power in (("keys", 1), ("values", 1), ("key_grads", 2), ("value_grads", 2)):
            whole = torch.cat([each[layer][name][3:].bfloat16().float() ** power for each in wanted])
            assert torch.equal(getattr(got, name.replace("grads", "cost")), whole), name
    first, rest = again.layer(0, 2).split(20)
    assert len(first.keys) == 20 and len(rest.value_cost) == 14
    again.clear()
    assert not (tmp_path / "work").exists()


def test_half_a_window_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = tiny(), SampleStore(tmp_path / "work", skip=1)

    def interrupted(*given: Any) -> Iterator[Any]:
        yield next(iter(gather(*given)))
        raise KeyboardInterrupt

    monkeypatch.setattr(samples, "gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put(0, model, torch.arange(20), lambda done: None)
    assert not store.has(0)
