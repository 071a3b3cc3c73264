"""Perplexity through the engine's own cache: compared with the dense oracle and with hand computation; and its
counts.
"""

from __future__ import annotations

import importlib
import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.engine.runner import LOGIT_ROWS
from quire.errors import ConfigError, ModelError, RequestError
from quire.evaluation import Perplexity
from quire.evaluation.perplexity import cut_windows, measure, teacher_forced_logprobs, window_hidden_states
from quire.measure.engines import configs_of, load_engines

from ..engines import GREEDY, chunk_bytes, drain, generate, make_engine, oracle_logits
from ..tiny_models import save_tiny, tiny_shape

# The package's names are the functions.
MODULE = importlib.import_module("quire.evaluation.perplexity")


def random_windows(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for _ in range(count)]


def oracle_losses(shape: Any, window: list[int], seed: int = 0) -> np.ndarray:
    """-log p of every token but the first, float64."""
    logits = oracle_logits(shape, window, seed).double().numpy()[:-1]
    logits -= logits.max(-1, keepdims=True)
    return np.log(np.exp(logits).sum(-1)) - logits[range(len(logits)), window[1:]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("length", [2, 64, 65, 66, 200])
@pytest.mark.parametrize("budget", [72, 1024])
def test_losses_are_the_oracles_whatever_the_windows_and_slices(family: str, length: int, budget: int) -> None:
    shape = tiny_shape(family)
    windows = random_windows(3, length)
    (found,) = measure({"dense": make_engine(shape, **{"scheduler.token_budget": budget})}, windows)
    means = np.array([oracle_losses(shape, window).mean() for window in windows])
    assert found.nll == pytest.approx(means.mean(), abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(means.mean()), rel=1e-5)
    assert found.nll_error == pytest.approx(means.std(ddof=1) / math.sqrt(3), rel=1e-3)
    assert found.perplexity_error == pytest.approx(found.nll_error * found.perplexity)
    assert (found.codec, found.context, found.num_windows, found.num_tokens) == ("dense", length, 3, 3 * (length - 1))
    assert (found.kl_mean, found.kl_p99, found.agreement, found.ratio, found.ratio_error) == (None,) * 5


def test_a_window_may_fill_the_context() -> None:
    shape = tiny_shape(max_context=192)
    engine = make_engine(shape)
    windows = random_windows(1, engine.max_context)
    (found,) = measure({"dense": engine}, windows)
    assert engine.max_context == 192
    assert found.nll == pytest.approx(oracle_losses(shape, windows[0]).mean(), abs=1e-5)
    assert found.nll_error is None and found.perplexity_error is None
    with pytest.raises(RequestError, match="193 tokens and the context holds 192"):
        window_hidden_states(engine, random_windows(1, 194)[0])
    assert engine.runner.observer is None and engine.holds_nothing


def test_divergence_ratio_and_agreement_are_those_of_the_distributions() -> None:
    """Two engines of other weights, against numpy in float64."""
    shape = tiny_shape()
    windows = random_windows(3, 150)
    engines = {"codec": make_engine(shape, seed=1), "dense": make_engine(shape, seed=0)}
    codec, dense = measure(engines, windows, "dense")
    logits = [
        np.concatenate([oracle_logits(shape, window, seed).double().numpy()[:-1] for window in windows])
        for seed in (0, 1)
    ]
    p, q = (np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in logits)
    kl = (p * np.log(p / q)).sum(-1)
    assert codec.kl_mean == pytest.approx(kl.mean(), rel=1e-4)
    assert codec.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-4)
    assert codec.agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    differences = np.array([(oracle_losses(shape, w, 1) - oracle_losses(shape, w, 0)).mean() for w in windows])
    assert codec.ratio == pytest.approx(math.exp(differences.mean()), rel=1e-4)
    assert codec.ratio == pytest.approx(codec.perplexity / dense.perplexity)
    assert codec.ratio_error == pytest.approx(codec.ratio * differences.std(ddof=1) / math.sqrt(3), rel=1e-3)
    assert (dense.kl_mean, dense.kl_p99, dense.agreement, dense.ratio) == (0, 0, 1, 1)


def test_a_worked_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two words. The reference says 1/2 each; the codec 1/4 and 3/4 after the first token, 1/2 each after the next."""
    rows = {"dense": [[0.5, 0.5], [0.5, 0.5]], "codec": [[0.25, 0.75], [0.5, 0.5]]}
    shape = SimpleNamespace(vocab_size=2, kv_bytes_per_token=lambda itemsize: 4 * itemsize)
    # Columns past the vocabulary, as a padded head has them, do not count.
    padding = torch.full((2, 1), 50.0)
    engines: dict[str, Any] = {
        name: SimpleNamespace(
            runner=SimpleNamespace(model=SimpleNamespace(shape=shape, head=lambda hidden: hidden)), rows=table
        )
        for name, table in rows.items()
    }

    def read(engine: Any, tokens: list[int]) -> tuple[torch.Tensor, int]:
        return torch.cat((torch.tensor(engine.rows).log(), padding), 1), 10

    monkeypatch.setattr(MODULE, "window_hidden_states", read)
    dense, codec = measure(engines, [[0, 1, 0]], "dense")
    assert dense.perplexity == pytest.approx(2)
    assert codec.nll == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert first == pytest.approx(0.143841, abs=1e-6)
    assert codec.kl_mean == pytest.approx(first / 2)
    assert codec.kl_p99 == pytest.approx(0.99 * first)
    # Of equal probabilities the first counts: word 0 for the reference, word 1 and word 0 for the codec.
    assert codec.agreement == 0.5
    assert codec.ratio == pytest.approx(math.sqrt(2 / 3))
    assert codec.bytes_per_token == 5 and codec.bits_per_element is None


@pytest.mark.parametrize("share", [True, False])
def test_bytes_are_what_the_ledger_gave(share: bool) -> None:
    shape = tiny_shape()
    engine = make_engine(shape, **{"cache.share": share})
    for _ in range(2):  # what stays cached of the first round is not counted in the second
        (found,) = measure({"dense": engine}, random_windows(2, 131))
        assert found.bytes_per_token == 3 * chunk_bytes(shape) / 130
        assert found.bits_per_element == 32
        engine.check()
        assert engine.holds_nothing
    (found,) = measure({"dense": engine}, random_windows(1, 65))
    assert found.bytes_per_token == chunk_bytes(shape) / 64 and found.bits_per_element is None


def test_bits_are_counted_in_the_ledger_and_leave_the_last_chunk_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger whose full chunks weigh 100 bytes and whose last one 1,000."""
    engine = make_engine()
    per_token = engine.runner.model.shape.kv_bytes_per_token(1)

    def read(_: Engine, tokens: list[int]) -> tuple[torch.Tensor, int]:
        return torch.empty(0), -(-(len(tokens) - 1) // 64) * 100 + 900

    monkeypatch.setattr(MODULE, "window_hidden_states", read)
    for length in (130, 193, 194):
        _, num_bytes = read(engine, [0] * length)
        bits = MODULE._bits_per_element(engine, [0] * length, num_bytes)
        assert bits == pytest.approx(8 * 100 / (64 * per_token))
    assert MODULE._bits_per_element(engine, [0] * 65, 1000) is None


def test_nothing_of_a_window_is_taken_from_the_cache() -> None:
    shape = tiny_shape()
    engine = make_engine(shape)
    windows = random_windows(1, 150)
    generate(engine, [windows[0]])
    before = engine.stats()
    (found,) = measure({"dense": engine}, windows)
    after = engine.stats()
    assert after["prefill_tokens_cached"] == before["prefill_tokens_cached"]
    assert after["prefill_tokens_computed"] == before["prefill_tokens_computed"] + 149 + 21
    assert found.nll == pytest.approx(oracle_losses(shape, windows[0]).mean(), abs=1e-5)


def test_an_observer_sees_its_prompts_rows_among_those_of_others() -> None:
    shape = tiny_shape()
    engine = make_engine(shape, **{"scheduler.token_budget": 280})
    prompts = random_windows(3, 100)
    seen: dict[str, list[tuple[int, torch.Tensor]]] = {}

    def observe(sequence_id: int, start: int, hidden: torch.Tensor) -> None:
        seen.setdefault("abc"[sequence_id], []).append((start, hidden.clone()))

    engine.runner.observer = observe
    wanted = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    for name, prompt, params in zip("abc", prompts, (wanted, GREEDY, wanted), strict=True):
        engine.add(name, prompt, params)
    with torch.inference_mode():
        outputs = drain(engine)
        assert {name: [start for start, _ in parts] for name, parts in seen.items()} == {"a": [0], "c": [0, 64]}
        for name, prompt in (("a", prompts[0]), ("c", prompts[2])):
            logits = engine.runner.model.head(torch.cat([hidden for _, hidden in seen[name]]))
            torch.testing.assert_close(logits, oracle_logits(shape, prompt), atol=1e-4, rtol=1e-4)
            assert outputs[name].prompt_logprobs == [None]


def test_logits_are_made_a_block_of_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    head, rows = engine.runner.model.head, []

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(engine.runner.model, "head", counted)
    measure({"dense": engine}, random_windows(1, 512))
    # One more row: the sampled token's.
    assert max(rows) == LOGIT_ROWS and sum(rows) >= 511


def test_a_model_whose_numbers_are_not_finite_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    head = engine.runner.model.head
    monkeypatch.setattr(engine.runner.model, "head", lambda hidden: head(hidden) * math.nan)
    with pytest.raises(ModelError, match="codec dense: the logits of window 0 hold NaN"):
        measure({"dense": engine}, random_windows(1, 70))
    assert engine.holds_nothing and engine.runner.observer is None


@pytest.mark.parametrize(("length", "continuation"), [(70, 20), (200, 64), (300, 70)])
def test_a_continuation_is_scored_as_decoded(length: int, continuation: int) -> None:
    """Its losses are the oracle's where nothing is dropped; the prompt's own tokens are not scored."""
    shape = tiny_shape()
    windows = random_windows(3, length)
    engine = make_engine(shape, **{"retain.threshold": 2, "retain.profile_rows": 64})
    (found,) = measure({"dense": engine}, windows, continuation=continuation)
    means = np.array([oracle_losses(shape, window)[-continuation:].mean() for window in windows])
    assert found.nll == pytest.approx(means.mean(), abs=1e-5)
    assert (found.context, found.continuation, found.num_tokens) == (length, continuation, 3 * continuation)
    assert engine.holds_nothing and engine.runner.observer is None
    assert generate(engine, [windows[0][:40]], GREEDY) == generate(make_engine(shape), [windows[0][:40]], GREEDY)


@pytest.mark.parametrize(("continuation", "sizes"), [(1, [1]), (64, [32, 32]), (70, [32, 32, 6])])
def test_a_continuation_is_read_in_blocks(continuation: int, sizes: list[int]) -> None:
    engine = make_engine()
    blocks = teacher_forced_logprobs(engine, random_windows(1, 200)[0], 199 - continuation)
    assert [len(block) for block in blocks] == sizes
    assert engine.holds_nothing and engine.runner.observer is None


@pytest.mark.parametrize("setting", [{"retain.budget": 0.4}, {"retain.threshold": 0.5}])
def test_retention_changes_the_predictions_of_a_continuation_and_the_bytes(setting: dict[str, float]) -> None:
    shape = tiny_shape()
    windows = random_windows(2, 400)
    engines = {"dense": make_engine(shape), "kept": make_engine(shape, **setting, **{"retain.profile_rows": 64})}
    dense, kept = measure(engines, windows, "dense", continuation=40)
    assert (dense.kl_mean, dense.ratio, dense.bytes_per_token) == (0, 1, 7 * chunk_bytes(shape) / 399)
    assert kept.kl_mean is not None and kept.kl_mean > 1e-7 and kept.ratio != 1
    assert kept.bytes_per_token < 0.8 * dense.bytes_per_token
    assert engines["kept"].holds_nothing


def test_windows_are_whole_and_follow_each_other() -> None:
    assert cut_windows(range(10), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut_windows(range(4), 4) == [[0, 1, 2, 3]]
    with pytest.raises(ConfigError, match="the text has 3 tokens, fewer than a window of 4"):
        cut_windows(range(3), 4)


def test_each_codec_gets_the_settings_that_it_has() -> None:
    options = {"cache.codec": "nuq3", "cache.calibration": "file", "cache.strict": False, "cache.pin": "pins"}
    config = EngineConfig.from_options(options | {"tiers.disk": "kv:64MiB", "retain.budget": 0.5})
    found = configs_of(config, ["nuq3", "g4", "dense"], compares=True)
    assert [*found] == ["dense", *(f"{codec}, retain.budget 0.5" for codec in ("nuq3", "g4", "dense"))]
    assert [(each.cache.codec, each.cache.calibration, each.cache.strict) for each in found.values()] == [
        ("dense", None, True), ("nuq3", "file", False), ("g4", None, False), ("dense", None, True)
    ]  # fmt: skip
    for each in found.values():
        assert (each.cache.pin, each.cache.check, each.tiers.is_on) == (None, False, False), "nothing stays"
    assert [each.retain.is_on for each in found.values()] == [False, True, True, True]


def test_an_evaluation_opens_no_tier(tmp_path: Any) -> None:
    folder = str(save_tiny(tmp_path / "tiny"))
    options = {"model.dtype": "float32", "runtime.threads": 1, "tiers.disk": f"{tmp_path / 'kv'}:64MiB"}
    engines, _ = load_engines(folder, EngineConfig.from_options(options | {"tiers.disk_bandwidth": "50MB"}), 64)
    assert all(engine.tiering.tiers is None for engine in engines.values()) and not (tmp_path / "kv").exists()


def test_engines_share_weights_and_have_arenas_of_their_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engines_module = importlib.import_module("quire.measure.engines")
    made = engines_module.configs_of

    def twice(*given: Any, compares: bool) -> Any:
        (config,) = made(*given).values()
        return {"dense": config, "other": config}

    monkeypatch.setattr(engines_module, "configs_of", twice)
    folder = str(save_tiny(tmp_path))
    config = EngineConfig.from_options({"model.dtype": "float32", "runtime.threads": 1})
    engines, tokenizer = load_engines(folder, config, 512)
    first, second = engines["dense"], engines["other"]
    assert first.runner.model is second.runner.model and first.tokenizer is second.tokenizer is tokenizer
    arenas = [engine.scheduler.manager.table.arena for engine in (first, second)]
    assert arenas[0].data.data_ptr() != arenas[1].data.data_ptr()
    # Automatic: as much as the window needs, not half of the machine.
    assert (
        512 // 64 * chunk_bytes(first.runner.model.shape)
        <= arenas[0].num_bytes
        <= 24 * chunk_bytes(first.runner.model.shape)
    )
    found = measure(engines, random_windows(1, 512), "dense")
    assert [each.kl_mean for each in found] == [0, 0]
    assert isinstance(found[0], Perplexity)
    for wrong, said in (
        (
            {"cache.memory": 4 * chunk_bytes(first.runner.model.shape)},
            "with codec dense it holds .* tokens, fewer than 512",
        ),
        ({"model.max_context": 300}, "512 tokens exceed the model's context of 300"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_engines(folder, config.with_options(wrong), 512)
    # Twice 20 chunks are wanted.
    free = 2 * first.runner.model.shape.weight_bytes("float32") + 20 * chunk_bytes(first.runner.model.shape)
    monkeypatch.setattr("quire.engine.build.available_memory", lambda device: free)
    with pytest.raises(ConfigError, match="caches for 512 tokens with 2 codecs need .* are free; give fewer codecs"):
        load_engines(folder, config, 512)
