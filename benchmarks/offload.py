"""Generation with a model that is larger than memory: Quire, accelerate's disk offloading, and llama.cpp's mmap.

    python benchmarks/offload.py --llama-server .peers/llamacpp/bin/llama-server
    python benchmarks/offload.py --sides quire --batches 1,32 --rounds 1

The model is a Llama shape with random weights: 1.40 billion parameters, 2.81 GB in bf16. Every side runs in a memory
cgroup of its own with 1.7 GB, so that weights cannot all be in memory. The cgroup's page cache counts too. Prompts have
64 random tokens, answers 16 tokens. Sides take turns; in each turn a side starts, warms up, and answers every batch
size. llama.cpp has batch 1 only.

`resident` is Quire outside of the cgroup with all weights in memory, and the same cache, so that its passes have the
same rows. From their seconds and from the seconds of reading the layers without computing, measured before and after
each batch size in the same process, follows the floor: every pass takes at least as long as its computing and as
reading what is not in memory. `of floor` is the floor's seconds divided by the measured ones.

`4 bits` are sides that need no disk: the same weights in 4 bits, Quire's and llama.cpp's (with --llama-4bit), in the
same cgroup.

A cgroup is made below --cgroup, where the script may write. Without one the script says so, and bounds the anonymous
memory of each side by RLIMIT_DATA instead. `peak` is the cgroup's largest usage; it includes page cache, which the
system drops at the limit. `anon` is the largest anonymous memory of the process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, append_record, arguments, commit, format_table, hardware, hardware_line, median
from tiers import Mark, OtherLoad, drop_page_cache, marks_table, ratios

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
PROMPT, OUTPUT = 64, 16
LAYERS_IN_RAM = 5
"""Of accelerate: more do not fit beside its own buffers."""
LOADS = 2
"""Passes of reading alone, before and after each batch size; the faster two count."""


def make_model(folder: Path, shape: Mapping[str, Any] = SHAPE) -> Path:
    """A random Llama checkpoint of a shape, a file for each layer; written once."""
    if (folder / "done").exists():
        return folder
    import torch
    import transformers
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = transformers.LlamaConfig(**shape, dtype="bfloat16", bos_token_id=1, eos_token_id=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    groups: dict[str, dict[str, Any]] = {}
    for name, tensor in model.named_parameters():
        if name != "lm_head.weight":
            groups.setdefault(name.split(".")[2] if ".layers." in name else "rest", {})[name] = tensor
    weight_map, total = {}, 0
    for number, (_, tensors) in enumerate(groups.items()):
        made = {
            name: (
                torch.ones(tensor.shape)
                if tensor.ndim == 1
                else torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5
            ).to(torch.bfloat16)
            for name, tensor in tensors.items()
        }
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(made, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(made, file)
        total += sum(tensor.nbytes for tensor in made.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _save_tokenizer(folder)
    (folder / "done").touch()
    return folder


def _save_tokenizer(folder: Path) -> None:
    """A tokenizer of one token per byte: prompts are ids."""
    sys.path.insert(0, str(ROOT))
    from tests.tiny_models import save_tokenizer

    save_tokenizer(folder)


def make_gguf(folder: Path, file: Path) -> Path:
    """The same weights as a bf16 GGUF, for llama.cpp."""
    if file.exists():
        return file
    sys.path.insert(0, str(ROOT))
    from quire.models.weights import open_model
    from tests.tiny_models import write_gguf

    tokens = [f"<{number}>" for number in range(SHAPE["vocab_size"])]
    extra = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "general.file_type": 32,
    }
    part = file.with_suffix(".part")
    with open_model(folder) as checkpoint:
        write_gguf(part, checkpoint.shape, checkpoint, kind="BF16", extra=extra)
    part.rename(file)
    return file


def prompts_of(batch: int, seed: int) -> list[list[int]]:
    """Random token ids; no two prompts begin alike."""
    generator = random.Random(repr((seed, batch)))
    return [[generator.randrange(3, SHAPE["vocab_size"]) for _ in range(PROMPT)] for _ in range(batch)]


# What runs in a process of its own.


def child_quire(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Quire's library. Yields the seconds of each batch size."""
    from quire import LLM, SamplingParams

    with LLM(given["model"], given["options"]) as llm:
        model = llm._loaded.engine.runner.model  # type: ignore[union-attr]
        stream = getattr(model, "stream", None)

        hidden, begun = model.hidden, list[tuple[int, float]]()

        def noted(tokens: Any, *others: Any) -> Any:
            begun.append((len(tokens), time.perf_counter()))
            return hidden(tokens, *others)

        model.hidden = noted  # type: ignore[method-assign]

        def run(prompts: list[list[int]], tokens: int) -> tuple[float, list[tuple[int, float]]]:
            """Seconds of a generation; rows and seconds of each pass, with the work up to the next one."""
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
            begun.clear()
            start = time.perf_counter()
            found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            end = time.perf_counter()
            assert all(len(each.outputs[0].token_ids) == tokens for each in found)
            ends = [*(at for _, at in begun[1:]), end]
            return end - start, [(rows, until - at) for (rows, at), until in zip(begun, ends, strict=True)]

        def load_seconds() -> float:
            """Of reading all layers that are not in memory, as the stream reads them, without computing."""
            if stream is None:
                return 0.0
            begun = time.perf_counter()
            for _ in range(LOADS):
                stream.begin()
                for layer in range(SHAPE["num_hidden_layers"]):
                    stream.take(layer)
                    stream.give(layer)
            return (time.perf_counter() - begun) / LOADS

        run(prompts_of(1, -1), 2)
        for batch in given["batches"]:
            loads = [load_seconds()]
            before = (stream.bytes_read, stream.wait_seconds) if stream else (0, 0.0)
            seconds, passes = run(prompts_of(batch, given["seed"]), OUTPUT)
            after = (stream.bytes_read, stream.wait_seconds) if stream else (0, 0.0)
            loads.append(load_seconds())
            streamed = model.weights.streamed_bytes if stream else 0
            yield {
                "batch": batch, "seconds": seconds, "passes": passes, "streamed": streamed,
                "read": after[0] - before[0], "waited": after[1] - before[1], "load": min(loads), "loads": loads,
            }  # fmt: skip


def child_accelerate(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Transformers with accelerate's disk offloading."""
    import torch
    import transformers

    torch.set_num_threads(given["threads"])
    device_map: dict[str, str] = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu"}
    device_map["model.rotary_emb"] = "cpu"
    for number in range(SHAPE["num_hidden_layers"]):
        device_map[f"model.layers.{number}"] = "cpu" if number < LAYERS_IN_RAM else "disk"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        given["model"], dtype=torch.bfloat16, device_map=device_map, offload_folder=given["folder"]
    ).eval()

    def run(prompts: list[list[int]], tokens: int) -> float:
        ids = torch.tensor(prompts)
        begun = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=tokens, max_new_tokens=tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        assert out.shape[1] == PROMPT + tokens
        return time.perf_counter() - begun

    run(prompts_of(1, -1), 1)
    for batch in given["batches"]:
        yield {"batch": batch, "seconds": run(prompts_of(batch, given["seed"]), OUTPUT)}


CHILDREN: dict[str, Callable[[dict[str, Any]], Iterator[dict[str, Any]]]] = {
    "quire": child_quire,
    "accelerate": child_accelerate,
}


def child(words: str) -> int:
    """Runs a side in this process and prints one JSON line for each batch size."""
    given = json.loads(words)
    for row in CHILDREN[given["side"]](given):
        print("RESULT " + json.dumps(row), flush=True)
    return 0


# The parent: cgroups, turns, tables.


class Cage:
    """A memory cgroup (version 1) for one process, or a limit on its anonymous memory."""

    def __init__(self, parent: Path | None, limit: int) -> None:
        self._limit = limit
        self._folder = None if parent is None else parent / f"quire-{os.getpid()}-{time.monotonic_ns()}"
        if self._folder is not None:
            self._folder.mkdir()
            (self._folder / "memory.limit_in_bytes").write_text(str(limit))

    def enter(self) -> None:
        """In the child, before it becomes another program."""
        if self._folder is not None:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (self._limit, self._limit))

    @property
    def peak(self) -> int:
        """The largest usage so far, page cache included; 0 without a cgroup."""
        return self._number("memory.max_usage_in_bytes")

    @property
    def kills(self) -> int:
        """Processes that the kernel ended for memory."""
        if self._folder is None:
            return 0
        lines = (self._folder / "memory.oom_control").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def _number(self, name: str) -> int:
        return 0 if self._folder is None else int((self._folder / name).read_text())

    def close(self) -> None:
        """Removes it, once its processes have ended."""
        if self._folder is not None:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    self._folder.rmdir()
                    return
                time.sleep(0.1)


def cgroup_folder(given: argparse.Namespace) -> Path | None:
    """Where cgroups may be made; None if nowhere."""
    try:
        Cage(given.cgroup, given.memory).close()
    except OSError:
        return None
    return Path(given.cgroup)


def watch_anonymous(process: subprocess.Popen[str], found: list[int]) -> None:
    """Notes the largest anonymous memory of a process until it ends."""
    while process.poll() is None:
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            found.append(int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10)
        time.sleep(0.05)


def turn_of(given: argparse.Namespace, side: str, number: int, cage: Cage | None) -> list[dict[str, Any]]:
    """One turn of a Python side."""
    options = {
        "runtime.threads": given.threads, "cache.memory": given.cache_memory, "scheduler.max_running": 32,
        "scheduler.token_budget": 2048, "model.max_context": 512,
    }  # fmt: skip
    if side == "quire":
        options |= {"offload.mode": "auto", "offload.memory": given.offload_memory}
    if side == "quire 4 bits":
        options |= {"model.weights": "g4"}
    about = {
        "side": "accelerate" if side == "accelerate" else "quire", "model": str(given.model), "options": options,
        "batches": given.batches, "seed": number, "threads": given.threads, "folder": str(given.work / "accelerate"),
    }  # fmt: skip
    command = [sys.executable, __file__, "--child", json.dumps(about)]
    environ = {**os.environ, "XDG_CACHE_HOME": str(given.work / "cache"), "OMP_NUM_THREADS": str(given.threads)}
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, text=True, preexec_fn=None if cage is None else cage.enter
    )
    anonymous = [0]
    watcher = threading.Thread(target=watch_anonymous, args=(process, anonymous), daemon=True)
    watcher.start()
    assert process.stdout is not None
    rows = [json.loads(line[7:]) for line in process.stdout if line.startswith("RESULT ")]
    process.wait()
    watcher.join()
    for row in rows:
        row["anon"], row["peak"] = max(anonymous), 0 if cage is None else cage.peak
    kills = 0 if cage is None else cage.kills
    if process.returncode or kills:
        print(f"{side} ended with {process.returncode}, killed for memory: {kills}", file=sys.stderr)
    return rows


def turn_of_llama(given: argparse.Namespace, file: Path, number: int, cage: Cage) -> list[dict[str, Any]]:
    """One turn of llama.cpp: batch 1."""
    port = 18700 + number % 100
    command = [
        str(given.llama_server), "-m", str(file), "--port", str(port), "-c", "512", "-np", "1",
        "-t", str(given.threads), "--no-webui",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=cage.enter, text=True
    )
    try:
        for _ in range(3000):
            if process.poll() is not None:
                print(f"llama.cpp ended with {process.returncode}", file=sys.stderr)
                return []
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                if answer.status == 200:
                    break
            time.sleep(0.1)
        ask_llama(port, prompts_of(1, -1)[0], 2)
        begun = time.perf_counter()
        ask_llama(port, prompts_of(1, number)[0], OUTPUT)
        return [{"batch": 1, "seconds": time.perf_counter() - begun, "peak": cage.peak, "anon": 0}]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def ask_llama(port: int, prompt: Sequence[int], tokens: int) -> None:
    """One completion."""
    body = {"prompt": list(prompt), "n_predict": tokens, "ignore_eos": True, "cache_prompt": False, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=580) as answer:
        assert json.load(answer)["tokens_predicted"] == tokens


def floor_seconds(row: dict[str, Any], resident: dict[str, Any]) -> float:
    """The least seconds of a batch: each pass computes, and reads what is not in memory. Passes with equally many rows
    count with their mean, because single ones are disturbed.
    """
    by_rows: dict[int, list[float]] = {}
    for rows, seconds in resident["passes"]:
        by_rows.setdefault(rows, []).append(seconds)
    assert [rows for rows, _ in row["passes"]] == [rows for rows, _ in resident["passes"]], "passes with other rows"
    return sum(max(sum(each), len(each) * row["load"]) for each in by_rows.values())


def main() -> int:
    """Measures and prints."""
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2])
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--work", type=Path, default=ROOT / ".peers" / "offload", help="folder of models and images")
    parser.add_argument("--sides", default="quire,accelerate,llama.cpp,quire 4 bits,llama.cpp 4 bits")
    parser.add_argument("--batches", default="1,8,32", help="sequences at once (default: 1,8,32)")
    parser.add_argument("--memory", type=int, default=1_700_000_000, help="bytes of the cgroup (default: 1.7e9)")
    parser.add_argument("--offload-memory", default="1000MiB", help="of Quire's weights (default: 1000MiB)")
    parser.add_argument("--cache-memory", default="176MiB", help="of Quire's cache; 32 sequences fit (default: 176MiB)")
    parser.add_argument("--cgroup", type=Path, default=Path("/sys/fs/cgroup/memory"))
    parser.add_argument("--llama-server", type=Path, help="a llama-server; without it llama.cpp is left out")
    parser.add_argument("--llama-quantize", type=Path, help="a llama-quantize, for llama.cpp's 4 bits")
    given = parser.parse_args()
    given.batches = [int(word) for word in given.batches.split(",")]
    load = OtherLoad()
    given.model = make_model(given.work / "model")
    cgroup = cgroup_folder(given)
    if cgroup is None:
        print(f"no cgroup can be made in {given.cgroup}: RLIMIT_DATA bounds the memory instead", file=sys.stderr)
    sides = [side.strip() for side in given.sides.split(",")]
    if given.llama_server is None:
        sides = [side for side in sides if not side.startswith("llama.cpp")]
    elif given.llama_quantize is None:
        sides = [side for side in sides if side != "llama.cpp 4 bits"]
    files = {}
    if "llama.cpp" in sides or "llama.cpp 4 bits" in sides:
        files["llama.cpp"] = make_gguf(given.model, given.work / "bf16.gguf")
    if "llama.cpp 4 bits" in sides:
        files["llama.cpp 4 bits"] = file = given.work / "q4_0.gguf"
        if not file.exists():
            subprocess.run([given.llama_quantize, files["llama.cpp"], file, "Q4_0"], check=True, capture_output=True)
    results: Turns = {}

    def keep(side: str, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            results.setdefault((side, row["batch"]), []).append(row)
            rate = row["batch"] * OUTPUT / row["seconds"]
            print(f"{side:17} batch {row['batch']:3}  {rate:8.3f} tokens/s", file=sys.stderr, flush=True)

    for number in range(given.rounds):
        order = [*sides[number % len(sides) :], *sides[: number % len(sides)]]
        if "quire" in sides:
            keep("resident", turn_of(given, "resident", number, None))
        for side in order:
            drop_page_cache(given.work)
            cage = Cage(cgroup, given.memory)
            try:
                if side in files:
                    rows = turn_of_llama(given, files[side], number, cage)
                else:
                    rows = turn_of(given, side, number, cage)
            finally:
                cage.close()
            keep(side, rows)
    shutil.rmtree(given.work / "accelerate", ignore_errors=True)
    report(given, results, load)
    return int(any(mark.reached is False for mark in marks_of(results)))


Turns = dict[tuple[str, int], list[dict[str, Any]]]
"""The results of every turn, by side and batch size."""


def rates_of(results: Turns, side: str, batch: int) -> list[float]:
    """Tokens per second of every turn."""
    return [batch * OUTPUT / row["seconds"] for row in results.get((side, batch), [])]


def shares_of_floor(results: Turns, batch: int) -> list[float]:
    """The floor's seconds divided by Quire's, of every turn."""
    pairs = zip(results.get(("quire", batch), []), results.get(("resident", batch), []), strict=False)
    return [floor_seconds(row, whole) / row["seconds"] for row, whole in pairs]


def marks_of(results: Turns) -> list[Mark]:
    """The claims."""
    marks = []
    for batch, least in ((1, 3), (8, 5), (32, 5)):
        ours = rates_of(results, "quire", batch)
        theirs = ratios(ours, rates_of(results, "accelerate", batch))
        marks += [
            Mark(f"batch {batch}: Quire / accelerate", theirs, least),
            Mark(f"batch {batch}: of the floor", shares_of_floor(results, batch), 0.8),
        ]
    mapped = ratios(rates_of(results, "quire", 1), rates_of(results, "llama.cpp", 1))
    return [*marks, Mark("batch 1: Quire / llama.cpp mmap", mapped, 1.5)]


def report(given: argparse.Namespace, results: Turns, load: OtherLoad) -> None:
    """Prints the tables."""
    rows = []
    for (side, batch), turns in results.items():
        of_floor = median(shares_of_floor(results, batch)) if side == "quire" else None
        speed = median(row["streamed"] / row["load"] for row in turns) if turns[0].get("load") else 0.0
        rows.append(
            [
                side,
                batch,
                f"{median(rates_of(results, side, batch)):.3f}",
                "-" if of_floor is None else f"{of_floor:.2f}",
                f"{turns[0].get('streamed', 0) / 1e9:.2f}",
                f"{speed / 1e9:.2f}" if speed else "-",
                f"{median(row['anon'] for row in turns) / 1e6:.0f}",
                f"{median(row['peak'] for row in turns) / 1e6:.0f}",
            ]
        )
    head = ["side", "batch", "tokens/s", "of floor", "GB a pass", "disk, GB/s", "anon, MB", "peak, MB"]
    print(format_table(head, rows, False))
    print(f"\n{marks_table(marks_of(results), False)}\n")
    print(f"{PROMPT} tokens in, {OUTPUT} out, a cgroup of {given.memory / 1e9:.2f} GB")
    print(f"other programs used {load.cores():.2f} cores; {commit()}, {hardware_line(hardware())}")
    if given.json:
        for (side, batch), turns in results.items():
            append_record(given.json, {"benchmark": "offload", "side": side, "batch": batch, "turns": turns})


if __name__ == "__main__":
    sys.exit(main())
