"""llama.cpp, through `llama-batched-bench`: its decoding loop without server, scheduler or sampler.

So these numbers are an upper bound for its server. Every run is a fresh process. Loading is not timed. The prompts run
once before the timed run, because the first pass also pays for touching the buffers.

The program shares a common prefix by computing it once and copying it to the other caches (-pps). It has only prompts
that are equal or have nothing in common. Work with a prefix is therefore put together from three runs: the prefix
alone, the requests' own tokens alone, and decoding after a common prompt. The second run attends to no prefix, which
favours llama.cpp.
"""

import json
import subprocess
from pathlib import Path

from llama_server import LlamaServer
from worker import CHECK_PROMPT, CHECK_TOKENS, Engine, Timing, Work, arguments, serve


def start() -> Engine:
    """Weights as the GGUF file has them, f16 cache, one cache stream per request (its default)."""
    given = arguments()
    programs = Path(given.programs)
    common = ["-m", given.model, "-t", str(given.threads)]
    computed: set[int] = set()

    def bench(batch: int, prompt: int, steps: int, in_common: bool = False) -> tuple[float, float]:
        """Seconds of the prompts and of `steps` decoding steps after them. If `in_common`, one prompt is computed for
        all, and only the steps are timed.
        """
        shape = ["-ntg", str(steps), "-npl", str(batch)]
        shape += ["-npp", str(prompt), "-pps"] if in_common else ["-npp", f"{prompt},{prompt}"]
        # One position more: an uncounted step follows the copy of a common prompt.
        context = ["-c", str(batch * (prompt + steps + 1))]
        command = [programs / "llama-batched-bench", *common, *context, *shape, "--output-format", "jsonl"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        measured = json.loads([line for line in printed.splitlines() if line.startswith("{")][-1])
        if (measured["pp"], measured["tg"], measured["pl"]) != (prompt, steps, batch):
            raise RuntimeError(f"llama-batched-bench measured another shape: {measured}")
        return measured["t_pp"], measured["t_tg"]

    def run(work: Work) -> Timing:
        # The pass over the prompts gives the first token, so `output` tokens take one decoding step fewer. The program
        # makes its own random token ids; a fresh process has no cache with an earlier prompt.
        steps = max(1, work.output - 1)
        if not work.common:
            prompts, decoding = bench(work.batch, work.prompt, steps)
        else:
            prompts, decoding = bench(work.batch, work.prompt - work.common, 1)
            if work.common_seed not in computed:
                computed.add(work.common_seed)
                prompts += bench(1, work.common, 1)[0]
            if work.output > 1:
                decoding = bench(work.batch, work.prompt, steps, in_common=True)[1]
        return Timing(prompts + (decoding if work.output > 1 else 0.0), prompts)

    def check() -> list[int]:
        # Through the server, because the benchmark program shows no tokens.
        with LlamaServer([programs / "llama-server", *common, "-c", "512", "-np", "1"]) as server:
            return server.generate([CHECK_PROMPT], CHECK_TOKENS)[0].token_ids

    settings = "4-bit weights" if given.native else "bf16"
    return Engine(check, run, version(programs), f"{settings}, f16 cache, llama-batched-bench")


def version(programs: Path) -> str:
    """llama.cpp's own version and, in brackets, its commit."""
    printed = subprocess.run([programs / "llama-bench", "--version"], capture_output=True, text=True)
    words = [word.strip("()") for word in (printed.stdout + printed.stderr).split("\n")[0].split()]
    return f"{words[1]} ({words[-1]})"


if __name__ == "__main__":
    serve(start)
