"""`benchmarks/kv_ablation.py`: samples and tables equal those of `quire calibrate`, and its simulation equals the
engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quire.calibrate import calibrate
from quire.calibrate.fit import quantize_dequantize
from quire.config import EngineConfig
from quire.evaluation.perplexity import measure
from quire.kernels import runtime

from ..engines import made_up_calibration, make_engine
from ..tiny_models import save_tiny, tiny_shape

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TEXT = "Of all the mills on the river, the oldest made no flour. " * 80
WINDOW = 201


def benchmark(name: str) -> ModuleType:
    """A script of the benchmarks, which import each other by their bare names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        return importlib.import_module(name)


ablation = benchmark("kv_ablation")
simulation = benchmark("kv_simulation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runtime.kernels()
    return save_tiny(tmp_path_factory.mktemp("tiny"), head_dim=16, max_position_embeddings=256)


@pytest.fixture(scope="module")
def samples(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ablation.Samples(str(folder), TEXT, tmp_path_factory.mktemp("work"), 1)


def window(seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(WINDOW)]


# The simulation


@pytest.mark.parametrize("sinks", [0, 3])
def test_a_simulated_codec_gives_the_engines_perplexity(sinks: int) -> None:
    """Widths, slots, an open chunk, sinks; float32, so that nothing but the arithmetic's order differs."""
    shape = tiny_shape("qwen3")
    options = {"cache.codec": "nuq3", "cache.sink_tokens": sinks}
    engine = make_engine(shape, **options, **{"attention.backend": "reference"})
    (tables,) = made_up_calibration(shape, EngineConfig.from_options(options)).tables.values()
    stored = simulation.per_channel(tables)
    plan = simulation.SimulatedPlan(shape, WINDOW - 1, stored, rotated=False, sinks=sinks)
    (found,) = measure({"nuq3": engine}, [window()])
    (dense,) = measure({"dense": make_engine(shape)}, [window()])
    assert simulation.simulated_loss(engine.runner.model, window(), plan) == pytest.approx(found.nll, abs=2e-6)
    assert abs(found.nll - dense.nll) > 1e-3, "this codec loses nothing: it would not be told from dense"


@pytest.mark.parametrize("rotated", [False, True])
def test_a_cache_that_loses_nothing_is_dense(rotated: bool) -> None:
    shape = tiny_shape("mistral", sliding_window=100)
    seen = []

    def stored(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(keys)
        return keys.clone(), values.clone()

    engine = make_engine(shape)
    plan = simulation.SimulatedPlan(shape, WINDOW - 1, stored, rotated=rotated, sinks=0)
    (found,) = measure({"dense": engine}, [window()])
    assert simulation.simulated_loss(engine.runner.model, window(), plan) == pytest.approx(found.nll, abs=2e-6)
    # Token 0 is at position 0, where rotation does nothing; its neighbour turns.
    other = simulation.SimulatedPlan(shape, WINDOW - 1, stored, rotated=not rotated, sinks=0)
    simulation.simulated_loss(engine.runner.model, window(), other)
    first, second = seen[0], seen[len(seen) // 2]
    assert torch.equal(first[0], second[0]) and not torch.allclose(first[1], second[1])


def test_bits_go_where_they_save_most() -> None:
    """Four heads at 3 bits on average: one is exact with 2, one wants all, two are alike."""
    falling = [math.inf, 64.0, 16.0, 4.0, 1.0, 0.25]
    cost = torch.tensor([[[0.0] * 6, [1e3 * each for each in falling]], [falling, falling]], dtype=torch.float64)
    assert simulation.spread_bits(cost, 3).tolist() == [[2, 5], [3, 2]]
    assert simulation.spread_bits(cost, 2).tolist() == [[2, 2], [2, 2]]
    assert simulation.spread_bits(cost, 4).tolist() == [[3, 5], [4, 4]]
    rising = [0.0, 0.0, 0.0, 1.0, 2.0, 3.0]
    assert simulation.spread_bits(torch.tensor([[0.0] * 6, rising, rising]).double(), 4).tolist() == [5, 4, 3]


@pytest.mark.parametrize("spends", [False, True])
def test_keys_per_token_are_stored_as_values_are(samples: Any, spends: bool) -> None:
    """What a key loses goes with its own size: its range is its own. Without spending, the codec's tables with keys in
    the place of values give the same.
    """
    key_fits, value_fits = (samples.fits(ablation.Fits(swapped=swapped)) for swapped in (True, False))
    stored = simulation.per_token(key_fits, value_fits, 3, 1, kinds=("plain",), spends=spends)
    layer = samples.layer(1, ablation.Fits())
    keys, values = stored(1, layer.keys, layer.values)
    large, same = stored(1, 64 * layer.keys, layer.values)  # a power of two: float16 rounds alike
    torch.testing.assert_close(large, 64 * keys, rtol=1e-3, atol=1e-2)
    assert torch.equal(same, values)
    for found, exact in ((keys, layer.keys), (values, layer.values)):
        assert 0 < float((found - exact).square().mean()) < 0.1 * float(exact.var())
    if not spends:
        variant = ablation.Variant(kinds=("plain",), spends=False, fits=ablation.Fits(swapped=True))
        tables = samples.calibration(variant).tables["nuq3"]
        names = tables.__dataclass_fields__
        of_layer = dataclasses.replace(tables, **{name: getattr(tables, name)[1:2] for name in names})
        assert torch.equal(quantize_dequantize(of_layer, layer.values, layer.keys)[1], keys)


def test_keys_and_values_get_their_own_widths(samples: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = [samples.fits(ablation.Fits(swapped=swapped)) for swapped in (True, False)]
    layer = samples.layer(1, ablation.Fits())
    monkeypatch.setattr(
        simulation, "spread_bits", lambda cost, bits: torch.tensor([5, 1])[:, None, None].expand(2, 2, 2)
    )
    found = simulation.per_token(*fits, 3, 1, kinds=ablation.KINDS, spends=True)(1, layer.keys, layer.values)
    keys, values = (
        float((stored - exact).square().mean() / exact.var())
        for stored, exact in zip(found, (layer.keys, layer.values), strict=True)
    )
    assert keys < 0.01 < 0.1 < values


# Samples


def test_the_tables_are_those_of_quire_calibrate(
    folder: Path, samples: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.calibrate.settings.cache_folder", lambda: tmp_path / "cache" / "models")
    config = EngineConfig.from_options({"runtime.threads": 1, "runtime.device": "cpu"})
    for variant, slots in ((ablation.Variant(), 1), (ablation.Variant(kinds=("fisher",), spends=False), 1)):
        given = {"kinds": variant.kinds, "spends": variant.spends, "outlier_slots": slots}
        settings = dataclasses.replace(samples.settings, **given)
        made = calibrate(folder, settings, tmp_path / "made", text=TEXT, config=config)
        found = samples.calibration(variant)
        assert set(found.tables) == set(made.tables)
        for codec, tables in made.tables.items():
            for name in tables.__dataclass_fields__:
                assert torch.equal(getattr(found.tables[codec], name), getattr(tables, name)), f"{codec}.{name}"


def test_rotated_samples_are_the_same_vectors_turned(samples: Any) -> None:
    """A rotation keeps each pair's length, of keys and of gradients; values stay."""
    plain, rotated = (samples.layer(0, ablation.Fits(rotated=turned)) for turned in (False, True))
    assert not torch.allclose(plain.keys, rotated.keys) and not torch.allclose(plain.key_cost, rotated.key_cost)
    for one, other in ((plain.keys.square(), rotated.keys.square()), (plain.key_cost, rotated.key_cost)):
        torch.testing.assert_close(*(x.unflatten(-1, (2, -1)).sum(-2) for x in (one, other)), rtol=1e-4, atol=1e-9)
    assert torch.equal(plain.values, rotated.values) and torch.equal(plain.value_cost, rotated.value_cost)
    # The last token of the first window, by hand.
    last = samples.window_tokens - 1
    angle = last * 10000.0 ** (-2 * 3 / 16)
    a, b = (float(plain.keys[last - samples.settings.skipped, 0, channel]) for channel in (3, 11))
    found = float(rotated.keys[last - samples.settings.skipped, 0, 3])
    assert found == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-4)


def test_keys_may_stand_where_values_do_and_errors_cost_the_same(samples: Any) -> None:
    plain, swapped = (samples.layer(1, ablation.Fits(swapped=turned)) for turned in (False, True))
    for keys, values in (("keys", "values"), ("key_cost", "value_cost")):
        assert torch.equal(getattr(swapped, keys), getattr(plain, values))
        assert torch.equal(getattr(swapped, values), getattr(plain, keys))
    even = samples.layer(1, ablation.Fits(fisher=False))
    assert torch.equal(even.keys, plain.keys) and float(plain.key_cost.std()) > 0
    assert (even.key_cost == 1).all() and (even.value_cost == 1).all()


# Rows


def given(folder: Path, out: Path | None, **changes: Any) -> argparse.Namespace:
    text = out.with_suffix(".txt") if out else None
    if text:
        text.write_text(TEXT, encoding="utf-8")
    return argparse.Namespace(
        **{"model": str(folder), "text": text, "threads": 1, "out": out, "markdown": False, **changes}
    )


def test_rows_that_a_file_has_are_not_measured_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "CONTEXT", WINDOW)
    out = tmp_path / "rows.jsonl"
    variants = [None, ablation.Variant(), ablation.Variant(simulated=True)]

    def run(windows: list[list[int]]) -> Any:
        found = ablation.Ablation(given(folder, out), windows, tmp_path)
        if out.exists():
            found.resume(out)
        for variant in variants:
            found.measure(variant, [16] if variant is None else [3, 2])
        return found

    first = run([window(0), window(1)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["variant"], row["bits"]) for row in rows] == list(first.rows)
    assert [row["bits"] for row in rows] == [16, 3, 2, 3, 2]
    assert [row["bits_per_element"] is None for row in rows] == [False] * 3 + [True] * 2
    # Simulated and through the engine: the CPU backend rounds codebooks to bfloat16.
    for engine, simulated in zip(rows[1:3], rows[3:], strict=True):
        assert engine["nll"] == pytest.approx(simulated["nll"], abs=2e-3)
    assert run([window(0), window(1)]).rows.keys() == first.rows.keys()
    assert len(out.read_text().splitlines()) == 5
    run([window(0)])  # other settings
    assert len(out.read_text().splitlines()) == 10


@pytest.mark.parametrize("rotated", [False, True])
def test_keys_per_token_take_books_of_keys(
    rotated: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "CONTEXT", WINDOW)
    asked: list[Any] = []

    def per_token(*given: Any, **more: Any) -> Any:
        asked.extend(given)
        return lambda layer, keys, values: (keys.clone(), values.clone())

    monkeypatch.setattr(ablation, "per_token", per_token)
    fits = ablation.Fits(rotated=rotated)
    found = ablation.Ablation(given(folder, None), [window()], tmp_path)
    found.measure(ablation.Variant(per_token=True, simulated=True, fits=fits), [3])
    samples = found._samples
    assert asked[0] is samples.fits(ablation.Fits(rotated=rotated, swapped=True)) and asked[1] is samples.fits(fits)
    assert asked[2:] == [3, 1]
    found.measure(None, [16])
    (lossless,), (dense,) = (row["nll"] for row in found.rows.values())
    assert lossless == pytest.approx(dense, abs=2e-6)


def test_a_table_has_ratios_and_what_switches_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = {"nothing": {}, "nothing *": {"simulated": True}, "sink *": {"simulated": True, "sinks": 0}}
    monkeypatch.setattr(ablation, "SWITCHES", switches)
    monkeypatch.setattr(ablation, "OWN_SWITCHES", {"widths": {"kinds": ("plain",)}})
    found = object.__new__(ablation.Ablation)
    found._given = argparse.Namespace(markdown=True)
    losses = {"dense": [1.0, 3.0]}
    for base in ablation.BASES:
        names = [str(variant) for variant in ablation.variants(base).values()]
        losses |= dict(zip(names, ([1.1, 3.1], [1.1, 3.2], [1.2, 3.5], [1.1, 3.1]), strict=False))
    found.rows = {
        (name, 16 if name == "dense" else 2): {"nll": nll, "bits_per_element": None if "simu" in name else 2.625}
        for name, nll in losses.items()
    }
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.table(2).splitlines()]
    assert lines[2] == ["nothing", *["8.17", "1.1052", "-", "2.62"] * 2]
    # Against `nothing`: 0 and 0.1 more; exp(0.05) is 5.13 % more, give or take 0.05 of that.
    assert lines[3] == ["nothing *", *["8.58", "1.1618", "+5.13 ± 5.26", "-"] * 2]
    # Against `nothing *`: 0.1 and 0.3.
    assert lines[4] == ["sink *", *["10.49", "1.4191", "+22.14 ± 12.21", "-"] * 2]
    assert lines[5] == ["widths", "8.17", "1.1052", "+0.00 ± 0.00", "2.62", "", "", "", ""]
    for row in found.rows.values():
        row["nll"] = row["nll"][:1]
    assert "±" not in found.table(2) and found.table(2).count("+10.52") == 2, "one window has no error"


def test_every_switch_changes_something() -> None:
    for base in ablation.BASES:
        found = list(ablation.variants(base).values())
        assert len({str(variant) for variant in found}) == len(set(found)) == len(found)
