"""Models that add large constants to their keys: g4 subtracts the constants and then loses no more than without
them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.cache.codecs.group import GroupCodec
from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.evaluation.perplexity import measure
from quire.models.decoder import build_model
from quire.models.layers import TorchOps

from ..engines import drain, generate, make_engine
from ..tiny_models import BiasedKeys, RandomWeights, biased_shape, tiny_shape

PROMPT = [index * 37 % 256 for index in range(300)]


def biased(codec: str = "g4", seed: int = 0, **options: Any) -> Engine:
    shape = biased_shape()
    return make_engine(
        shape, weights=BiasedKeys(shape, seed), **{"cache.codec": codec, "runtime.threads": 1, **options}
    )


def prompt_logprobs(engine: Engine, prompt: list[int]) -> torch.Tensor:
    engine.add("it", prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    found = drain(engine)["it"].prompt_logprobs
    assert found is not None
    return torch.tensor([next(iter(each.values())).logprob for each in found[1:] if each is not None])


def divergence(weights: type[RandomWeights], backend: str) -> float:
    """Mean KL of g4's predictions from dense ones."""
    shape, options = biased_shape(), {"attention.backend": backend, "runtime.threads": 1}
    engines = {
        codec: make_engine(shape, weights=weights(shape), **{"cache.codec": codec, **options})
        for codec in ("dense", "g4")
    }
    found = {each.codec: each.kl_mean for each in measure(engines, [PROMPT], "dense")}
    assert found["g4"] is not None
    return found["g4"]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_huge_key_biases_cost_group_codes_nothing(backend: str) -> None:
    """Where the constants take the range of their group, it diverges by 1.2 nats a token instead of 0.005."""
    assert divergence(BiasedKeys, backend) < 2 * divergence(RandomWeights, backend)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cpu_backend_is_the_reference(dtype: str) -> None:
    found = [
        prompt_logprobs(biased(**{"attention.backend": backend, "model.dtype": dtype}), PROMPT)
        for backend in ("cpu", "reference")
    ]
    difference = (found[0] - found[1]).abs()
    assert difference.max() < 1e-3 if dtype == "float32" else difference.mean() < 0.05


def test_hits_slices_and_decoding_read_the_same_keys() -> None:
    """Prefilled at once, in slices, from the cache and token by token: the same answer."""
    whole, sliced = biased(), biased(**{"scheduler.token_budget": 128, "scheduler.max_running": 4})
    missed, hit, cut = generate(whole, [PROMPT])[0], generate(whole, [PROMPT])[0], generate(sliced, [PROMPT])[0]
    assert whole.stats()["prefill_tokens_cached"] == 256
    assert missed == hit == cut == generate(biased(**{"attention.backend": "reference"}), [PROMPT])[0]
    engine = biased(**{"cache.share": False})
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True, logprobs=0)
    engine.add("it", PROMPT[:100], params)
    (answer,) = drain(engine)["it"].outputs
    assert answer.logprobs is not None
    said = torch.tensor([next(iter(each.values())).logprob for each in answer.logprobs])
    read = prompt_logprobs(biased(), PROMPT[:100] + answer.token_ids)[99:]
    assert (said - read).abs().max() < 1e-3


@pytest.mark.parametrize(
    "retain", [{"retain.budget": 0.5}, {"retain.threshold": 0.7, "retain.local": 0.1}], ids=["budget", "threshold"]
)
def test_what_retention_keeps_of_such_pages_is_what_the_reference_keeps(retain: dict[str, Any]) -> None:
    """Sums over encoded pages decide, slots move to other pages, and packed pages are read with their bias."""
    params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    answers, kept = [], []
    for backend in ("cpu", "reference"):
        engine = biased(**{"attention.backend": backend, "retain.profile_rows": 16, **retain})
        engine.add("it", PROMPT, params)
        output = drain(engine)["it"]
        answers.append(output.outputs[0].token_ids)
        kept.append(output.kept_fraction)
    assert answers[0] == answers[1]
    assert kept[0] == kept[1] and kept[0] is not None and kept[0] < 0.9


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "opt"])
def test_only_biases_that_reach_the_stored_key_are_taken_off(family: str) -> None:
    """Qwen3 normalises keys after the projection; Llama has no bias."""
    shape = tiny_shape(family, **({"qkv_bias": True} if family == "qwen3" else {}))
    weights = RandomWeights(shape)
    codec = make_engine(shape, **{"cache.codec": "g4"}).scheduler.manager.table.sealed_codec
    model = build_model(shape, weights, TorchOps(), torch.bfloat16)
    assert isinstance(codec, GroupCodec)
    if family in ("llama", "qwen3"):
        assert codec.key_bias is None and model.key_bias is None
        return
    expected = torch.stack([weights.tensor(f"layers.{index}.k.bias") for index in range(2)])
    assert codec.key_bias is not None and model.key_bias is not None
    assert torch.equal(codec.key_bias.flatten(1), expected)
    assert torch.equal(model.key_bias.flatten(1), expected.bfloat16().float()), "what was added is what is taken off"
