"""Quire, through its `LLM`."""

from worker import Engine, arguments, library, serve


def start() -> Engine:
    """bf16 weights and cache, or with --native the packed 4-bit weights of the model."""
    given = arguments()
    import quire
    from quire import LLM, SamplingParams

    options = {
        "model.dtype": "bfloat16",
        "model.weights": "native" if given.native else "dequantized",
        "runtime.threads": given.threads,
        "cache.memory": f"{given.cache_gib}GiB",
    }
    llm = LLM(given.model, options=options)

    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return library(generate, quire.__version__, "4-bit weights, bf16 cache" if given.native else "bf16")


if __name__ == "__main__":
    serve(start)
