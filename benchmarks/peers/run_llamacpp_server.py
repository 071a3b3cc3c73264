"""llama.cpp, through `llama-server` and its prompt cache."""

from pathlib import Path

from llama_server import LlamaServer
from run_llamacpp import version
from worker import Engine, arguments, library, serve

# Requests at once. A request that shares a prefix with a slot's last request goes to that slot and finds the prefix.
# Requests that start together find nothing, so every slot computes the prefix once. 16 and 32 requests with a common
# prefix took 12.3 and 20.9 s on 4 slots, 15.0 and 28.9 on 8, 21.0 and 41.3 on 32 (one run each while another process
# ran; fewer slots not tried). One cache for all slots, --kv-unified, was no better.
SLOTS = 4
SLOT_TOKENS = 2048


def start() -> Engine:
    """bf16 weights, f16 cache."""
    given = arguments()
    programs = Path(given.programs)
    command = [programs / "llama-server", "-m", given.model, "-t", given.threads]
    command += ["-np", SLOTS, "-c", SLOTS * SLOT_TOKENS, "--cache-ram", given.cache_gib * 1024]
    settings = f"bf16, f16 cache, llama-server, {SLOTS} slots, prompt cache"
    return library(LlamaServer(command).generate, version(programs), settings)


if __name__ == "__main__":
    serve(start)
