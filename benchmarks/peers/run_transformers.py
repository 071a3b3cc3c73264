"""transformers' `generate`: one static batch, which all prompts enter and leave together."""

import torch
import transformers
from transformers import AutoModelForCausalLM
from worker import Answer, Engine, arguments, library, serve


def start() -> Engine:
    """The checkpoint cast to bf16; attention (sdpa) and cache (growing) are its defaults."""
    given = arguments()
    torch.set_num_threads(given.threads)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).eval()
    # Otherwise requests without an end token would get the model's own.
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], output: int) -> list[Answer]:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            answer = model.generate(ids, attention_mask=mask, max_new_tokens=output, do_sample=False, pad_token_id=0)
        return [Answer(new) for new in answer[:, ids.shape[1] :].tolist()]

    return library(generate, transformers.__version__, "bf16, static batch")


if __name__ == "__main__":
    serve(start)
