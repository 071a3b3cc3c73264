"""Embeddings are the pooled hidden states of transformers, whatever is cached, sliced, preempted and batched."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams

from .engines import drain, make_engine
from .tiny_models import FAMILIES, save_tiny

OPTIONS: dict[str, Any] = {
    "model.dtype": "float32", "runtime.device": "cpu", "runtime.threads": 1, "cache.memory": "8MiB",
    "scheduler.token_budget": 128, "scheduler.max_running": 4,
}  # fmt: skip


def prompts_of(draw: random.Random) -> list[list[int]]:
    """The second one begins with the first, the last one is of one token."""
    first = draw.choices(range(256), k=200)
    return [first, first + draw.choices(range(256), k=70), draw.choices(range(256), k=64), [draw.randrange(256)]]


# Transformers projects the states of opt-350m to another width, which is a part of the head here.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt-350m"])
def test_embeddings_are_the_last_hidden_states_pooled(family: str, tmp_path: Path, seed: int) -> None:
    import transformers

    folder, prompts = save_tiny(tmp_path / family, family), prompts_of(random.Random(seed))
    reference = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = [reference(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    with LLM(str(folder), OPTIONS) as llm:
        for _ in range(2):  # the second time with what is cached
            mean = llm.embed(prompts, "mean", normalize=False)
            last = llm.embed(prompts, "last", normalize=False)
            for state, one, other in zip(states, mean, last, strict=True):
                np.testing.assert_allclose(one, state.mean(0).numpy(), atol=2e-4)
                np.testing.assert_allclose(other, state[-1].numpy(), atol=5e-4)
        assert llm.engine.holds_nothing and llm.stats()["prefill_tokens_cached"] > 0


@pytest.mark.parametrize("options", [{}, {"cache.share": False}, {"cache.codec": "g4"}], ids=str)
def test_a_prompt_that_is_preempted_midway_has_the_same_embedding(options: dict[str, Any], seed: int) -> None:
    prompt = random.Random(seed).choices(range(256), k=400)
    params = SamplingParams(max_tokens=1, pooling="mean")

    def embedded(preempts: bool) -> Any:
        engine = make_engine(**options)
        request = engine.add("0", prompt, params)
        assert engine.step() == [], "the prompt does not take several slices"
        if preempts:
            engine.scheduler.preempt(request.sequences[0])
        return drain(engine)["0"].embedding

    np.testing.assert_allclose(embedded(True), embedded(False), atol=1e-4)
