"""The embedded model generates the same text in the engine and in `transformers`, in float32."""

from __future__ import annotations

import pytest
import torch

from quire import LLM, SamplingParams
from tests.effort import full_only
from tests.real_model import embedded_gguf

PROMPTS = ("The capital of France is", "def fibonacci(n):\n    ", "In 1984 there were 12 ways to", "word " * 70)
OPTIONS = {"model.dtype": "float32", "runtime.device": "cpu", "runtime.threads": 1, "cache.memory": "64MiB"}


@full_only("tiny models of every family are held to transformers, and the embedded one in test_logits.py")
@pytest.mark.slow
def test_greedy_text_of_the_embedded_model_agrees_with_transformers() -> None:
    """All prompts in one batch, prefilled in slices, through pages and our own attention."""
    from transformers import AutoModelForCausalLM

    path = embedded_gguf()
    with LLM(str(path), options={**OPTIONS, "scheduler.max_running": 4, "scheduler.token_budget": 70}) as llm:
        outputs = llm.generate(list(PROMPTS), SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, logprobs=1))
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads of a small product wait for each other on a busy machine
    try:
        for output in outputs:
            prompt, answer = output.prompt_token_ids, output.outputs[0]
            with torch.inference_mode():
                logits = theirs(torch.tensor([[*prompt, *answer.token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
            # Each token is the best of their model after the same text: by induction the greedy texts are equal.
            assert answer.token_ids == logits.argmax(-1).tolist(), answer.text
            assert answer.logprobs is not None
            found = torch.tensor(
                [place[token].logprob for place, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            )
            torch.testing.assert_close(found, logits.log_softmax(-1).amax(-1), atol=1e-3, rtol=0)
    finally:
        torch.set_num_threads(threads)
