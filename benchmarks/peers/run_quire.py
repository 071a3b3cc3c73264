"""Quire, through its `LLM`."""

from worker import Answer, Engine, arguments, library, serve


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
        **dict(option.split("=", 1) for option in given.option),
    }
    llm = LLM(given.model, options=options)

    def generate(prompts: list[list[int]], output: int) -> list[Answer]:
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [Answer(list(answer.outputs[0].token_ids), answer.num_cached_tokens) for answer in answers]

    settings = ["bf16", *given.option]
    return library(generate, quire.__version__, ", ".join(settings))


if __name__ == "__main__":
    serve(start)
