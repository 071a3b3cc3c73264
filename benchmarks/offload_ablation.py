"""What each part of offloading is worth: FlexGen's ablation, on this machine.

    python benchmarks/offload_ablation.py --work DIR [--profile FILE] [--rounds 5]

The model is the random Llama shape of benchmarks/offload_fidelity.py, 398 MB in bf16. The disk is throttled to 300
MB/s. Weights, cache and activations have --memory bytes. The batch has --lines prompts of --prompt tokens and --output
tokens for each. The profile is measured first, unless --profile names one. Variants take turns.

    all               the placement of the linear program, with overlap
    no search         half of everything on the disk, micro-batches of 4, four of them
    no overlap        the placement of `all`; moving and computing take turns (offload.overlap false)
    no disk           weights and cache in memory, which may not fit
    batch size alone  all weights on the disk, the cache in memory, one micro-batch as large as the memory allows

FlexGen's row without CPU attention has no counterpart: without a GPU, attention is always computed on the CPU.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import ROOT, append_record, arguments, commit, format_table, hardware, hardware_line, median, spread
from offload import make_model
from offload_fidelity import BANDWIDTH, SHAPE
from tiers import OtherLoad


def prompts_of(given: argparse.Namespace, seed: int) -> list[list[int]]:
    """Random token ids, in the order of the prefix tree."""
    generator = random.Random(seed)
    vocab = int(SHAPE["vocab_size"])
    return sorted([generator.randrange(3, vocab) for _ in range(given.prompt)] for _ in range(given.lines))


def variants(given: argparse.Namespace, config: Any) -> dict[str, tuple[Any, Any, dict[str, Any]] | str]:
    """By name: policy, predicted tokens a second and settings; or why it cannot run."""
    from quire.errors import ConfigError, QuireError
    from quire.offload.planning.batches import plan_batch, seconds_of, workload_of
    from quire.offload.planning.planner import predict
    from quire.offload.planning.profile import read_profile
    from quire.offload.planning.subject import Subject
    from quire.offload.policy import OffloadPolicy
    from quire.offload.units import ALL, NONE, Share, Split

    prompts, outputs = prompts_of(given, 0), [given.output] * given.lines
    work = workload_of(prompts, outputs)
    profile, subject = read_profile(given.profile), Subject.of(str(given.model), config)

    def said(policy: OffloadPolicy) -> Any:
        return predict(profile, subject.sizes, work, policy, budget=subject.token_budget)

    def row(policy: OffloadPolicy, **more: Any) -> tuple[Any, Any, dict[str, Any]]:
        prediction = said(policy)
        rate = given.lines * given.output / seconds_of(policy, prediction, given.lines)
        return policy, rate, {"model.max_context": -(-(given.prompt + given.output) // 64) * 64, **more}

    chosen = plan_batch(str(given.model), config, prompts, outputs).policy
    half, memory, disk = Split((Share(0.5), Share(0.5))), Split((ALL, NONE)), Split((NONE, ALL))
    found: dict[str, tuple[Any, Any, dict[str, Any]] | str] = {
        "all": row(chosen),
        "no search": row(OffloadPolicy(4, 4, half, half, memory)),
        "no overlap": row(chosen, **{"offload.overlap": False}),
    }
    needed = said(OffloadPolicy(1, 1, memory, memory, memory)).memory["cpu"]
    if needed > config.offload.memory:
        found["no disk"] = f"needs {needed / 1e6:.0f} MB, and has {config.offload.memory / 1e6:.0f}"
    else:
        found["no disk"] = row(OffloadPolicy(chosen.block, 1, memory, memory, memory))
    sizes_that_fit = []
    for size in range(1, given.lines + 1):
        policy = OffloadPolicy(size, 1, disk, memory, memory)
        try:
            if said(policy).memory["cpu"] <= config.offload.memory:
                sizes_that_fit.append(policy)
        except (ConfigError, QuireError):
            break
    found["batch size alone"] = row(sizes_that_fit[-1]) if sizes_that_fit else "no batch fits"
    return found


def run(given: argparse.Namespace, policy: Any, settings: dict[str, Any], seed: int) -> dict[str, float]:
    """One batch."""
    from quire import LLM, SamplingParams
    from quire.measure.memory_use import anonymous_bytes
    from quire.offload.policy import policy_text
    from quire.offload.units import TIERS

    before = anonymous_bytes()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.json"
        file.write_text(policy_text(policy, TIERS[1:]))
        options = {
            "offload.mode": str(file), "offload.disk_bandwidth": BANDWIDTH, "runtime.threads": given.threads,
            "scheduler.max_running": policy.block,
            "cache.memory": given.cache * policy.block if policy.cache.beyond(0) <= 0 else "auto",
            **settings,
        }  # fmt: skip
        params = SamplingParams(max_tokens=given.output, temperature=0.0, ignore_eos=True, detokenize=False)
        with LLM(str(given.model), options) as llm:
            llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
            load, begun = OtherLoad(), time.perf_counter()
            llm.generate([{"prompt_token_ids": each} for each in prompts_of(given, seed)], params, use_tqdm=False)
            seconds, moved = time.perf_counter() - begun, llm.stats()["offload"]
            return {
                "rate": given.lines * given.output / seconds, "cores": load.cores(),
                "read": moved["weights_bytes_read"] + moved.get("cache_bytes_read", 0),
                "anonymous": anonymous_bytes() - before,
            }  # fmt: skip


def main() -> int:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / ".peers" / "offload_fidelity", help="folder of the model")
    parser.add_argument("--profile", type=Path, help="of quire plan hardware; measured if not given")
    parser.add_argument("--memory", default="200MiB", help="for weights, cache and activations (default: 200MiB)")
    parser.add_argument("--lines", type=int, default=32, help="prompts (default: 32)")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of a prompt (default: 96)")
    parser.add_argument("--output", type=int, default=16, help="tokens of an answer (default: 16)")
    given = parser.parse_args()
    os.environ["XDG_CACHE_HOME"] = str(given.work.absolute() / "cache")
    from quire.config import EngineConfig
    from quire.measure.offload_profile import measure_machine
    from quire.offload.planning.profile import profile_text
    from quire.offload.planning.subject import Subject

    given.model, load = make_model(given.work / "model", SHAPE), OtherLoad()
    if given.profile is None:
        given.profile = given.work / "machine.json"
        options = {"offload.mode": "auto", "offload.disk_bandwidth": BANDWIDTH, "runtime.threads": given.threads}
        subject = Subject.of(str(given.model), EngineConfig.from_options(options))
        made = measure_machine(subject, tell=lambda what: print(what, file=sys.stderr))
        given.profile.write_text(profile_text(made))
    settings = {
        "offload.mode": "auto", "offload.profile": str(given.profile), "offload.memory": given.memory,
        "offload.disk_bandwidth": BANDWIDTH, "runtime.threads": given.threads,
    }  # fmt: skip
    config = EngineConfig.from_options(settings)
    # Of a sequence: its chunks, one to grow, and one because slabs are whole; 4 heads of 64, keys and values.
    given.cache = (-(-(given.prompt + given.output) // 64) + 2) * 64 * 2 * 4 * 64 * 2 * SHAPE["num_hidden_layers"]
    wanted = variants(given, config)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in wanted}
    for number in range(given.rounds):
        for name, each in wanted.items():
            if not isinstance(each, str):
                found[name].append(run(given, each[0], each[2], number))
                print(f"{name:17} {found[name][-1]['rate']:7.2f} tokens/s", file=sys.stderr, flush=True)
    rows, whole = [], median(each["rate"] for each in found["all"])
    for name, each in wanted.items():
        if isinstance(each, str):
            rows.append([name, each, *["-"] * 7])
            continue
        policy, said, _ = each
        rates = [turn["rate"] for turn in found[name]]
        rows.append(
            [
                name, f"{policy.num_batches} x {policy.micro_batch}",
                " / ".join(f"{split.shares[0]:.0%}" for split in (policy.weights, policy.cache, policy.hidden)),
                f"{median(rates):.2f}", f"{spread(rates):.0%}", f"{median(rates) / whole:.2f}", f"{said:.2f}",
                f"{median(turn['read'] for turn in found[name]) / 1e9:.2f}",
                f"{median(turn['anonymous'] for turn in found[name]) / 1e6:.0f}",
            ]
        )  # fmt: skip
    head = [
        "variant", "block", "weights / cache / activations in memory", "tokens/s", "spread", "of all", "predicted",
        "GB read", "MB anonymous",
    ]  # fmt: skip
    print(format_table(head, rows, False))
    print(
        f"\n{given.lines} prompts of {given.prompt} tokens, {given.output} out, {given.memory}, {given.rounds} rounds"
    )
    print(f"other programs used {load.cores():.2f} cores; {commit()}, {hardware_line(hardware())}")
    if given.json:
        append_record(given.json, {"benchmark": "offload_ablation", "found": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
