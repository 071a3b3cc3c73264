"""vLLM on the CPU, through its offline `LLM`."""

import os

from worker import Answer, Engine, arguments, library, serve


def start() -> Engine:
    """bf16 weights and cache. vLLM reads the environment on import, so the environment is set first."""
    given = arguments()
    cores = sorted(os.sched_getaffinity(0))[: given.threads]
    os.environ |= {
        "OMP_NUM_THREADS": str(given.threads),
        # One OpenMP thread per usable core.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(given.cache_gib),
        # vLLM's engine normally runs in a second process, which on two cores competes with its front end. With both in
        # one process, it was 1.6 times as fast at batch 1 (one quiet pair) and 1.4 to 1.5 times at batch 8 (two).
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(given.model, dtype="bfloat16", max_model_len=4096, max_num_seqs=32, enable_prefix_caching=True)

    def generate(prompts: list[list[int]], output: int) -> list[Answer]:
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [Answer(list(answer.outputs[0].token_ids), answer.num_cached_tokens) for answer in answers]

    return library(generate, vllm.__version__, "bf16, one process, prefix caching")


if __name__ == "__main__":
    serve(start)
