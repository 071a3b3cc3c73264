"""The embedded model says the same words here as in `transformers`, in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.models.decoder import build_model
from quire.models.layers import TorchOps
from quire.models.plan import Model
from quire.models.tokenizer import load_tokenizer
from quire.models.weights import open_model
from tests.dense_plan import DensePlan
from tests.real_model import embedded_gguf

PROMPTS = ("The capital of France is", "def fibonacci(n):\n    ", "In 1984 there were 12 ways to")
NUM_TOKENS = 64


def greedy(model: Model, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """All prompts in one batch: (generated ids [n, NUM_TOKENS], logits [n, NUM_TOKENS, V])."""
    plan, rows = DensePlan(model.shape), []
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    counts = [len(prompt) for prompt in prompts]
    for _ in range(NUM_TOKENS):
        hidden = model.hidden(tokens, plan.step(list(enumerate(counts))), plan)
        rows.append(model.head(hidden[torch.tensor(counts).cumsum(0) - 1]))
        tokens, counts = rows[-1].argmax(-1), [1] * len(prompts)
    logits = torch.stack(rows, dim=1)
    return logits.argmax(-1), logits


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # On a busy machine the two threads of a small product wait for each other longer than one needs for both halves
    # (10x seen).
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@torch.inference_mode()
def test_greedy_text_of_the_embedded_model_agrees_with_transformers() -> None:
    from transformers import AutoModelForCausalLM

    path = embedded_gguf()
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(path)
    with open_model(path) as checkpoint:
        ours = build_model(checkpoint.shape, checkpoint, TorchOps(), torch.float32)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    for prompt, found, logits in zip(prompts, *greedy(ours, prompts), strict=True):
        expected = theirs(torch.tensor([[*prompt, *found[:-1]]])).logits[0, len(prompt) - 1 :]
        # Every token is the best one of their model after the same text, so the greedy texts are equal by induction.
        assert torch.equal(found, expected.argmax(-1)), tokenizer.decode(found.tolist())
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
