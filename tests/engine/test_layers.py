"""The engine answers as `transformers` does, whatever the kinds of a model's layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.params import SamplingParams
from quire.models.weights import open_model
from tests.engines import drain, make_engine
from tests.tiny_models import OF_KINDS, save_tiny

LENGTHS = (5, 64, 100)
NUM_TOKENS = 40
"""With the longest prompt, beyond all windows, original contexts and steps of scales of the tiny models."""


@pytest.mark.parametrize("family", OF_KINDS)
def test_log_probabilities_are_those_of_transformers(family: str, tmp_path: Path, seed: int) -> None:
    """Cold, then with prompts from the cache; on both of the CPU's backends."""
    import transformers

    folder = save_tiny(tmp_path, family, seed)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [[(7 * at + length) % 250 for at in range(length)] for length in LENGTHS]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=1)
    for backend in ("cpu", "reference"):
        with open_model(folder) as weights:
            engine = make_engine(weights.shape, weights=weights, **{"attention.backend": backend, "cache.share": True})
        for visit in range(2):
            for index, prompt in enumerate(prompts):
                engine.add(str(index), prompt, params)
            answers = drain(engine)
            for index, prompt in enumerate(prompts):
                found = answers[str(index)]
                assert found.num_cached_tokens >= 63 * (visit and len(prompt) >= 64)
                answer = found.outputs[0]
                with torch.inference_mode():
                    logits = oracle(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
                expected = logits.double().log_softmax(1)
                ours = torch.tensor([place[token].logprob for place, token in zip(
                    answer.logprobs or [], answer.token_ids, strict=True
                )], dtype=torch.float64)  # fmt: skip
                chosen = expected.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
                torch.testing.assert_close(ours, chosen, atol=1e-4, rtol=0)
                assert (chosen >= expected.amax(1) - 1e-4).all(), "a token is not greedy"
