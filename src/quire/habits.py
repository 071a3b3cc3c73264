"""Option names of other engines that people type from habit, and the equivalent options of Quire.

Knows the names of vLLM, SGLang and llama.cpp; knows no parser. `quire.cli` looks up flags, `quire.options` looks up
keys of a file or of Python.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from quire.cache.codecs import CODECS, DENSE


@dataclass(frozen=True)
class Habit:
    """The answer to an option of another engine.

    keys  our settings or flags with the same meaning; the answer names the first one that the command takes
    text  a remark; without keys, the whole answer
    """

    keys: tuple[str, ...] = ()
    text: str = ""


def _is(key: str, text: str = "") -> Habit:
    return Habit(tuple(key.split()), text)


def _no(text: str) -> Habit:
    return Habit((), text)


def _codecs() -> str:
    encoded = [row for name, row in CODECS.items() if name != DENSE]
    bits = sorted({row.bits for row in encoded}, reverse=True)
    return f"{_listed([row.name for row in encoded])} store keys and values in {_listed(bits)} bits"


def _listed(values: Sequence[object]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last


def _all(names: str, habit: Habit) -> dict[str, Habit]:
    return dict.fromkeys(names.split(), habit)


HABITS: dict[str, Habit] = {
    **_all("model m model-path", _no("the model is the first argument here, not a flag, as in quire serve smollm2")),
    **_all("max-model-len max-seq-len ctx-size c n-ctx context-length", _is("model.max_context")),
    **_all("served-model-name alias a", _is("model.name")),
    **_all("dtype", _is("model.dtype")),
    **_all("tokenizer tokenizer-path", _is("model.tokenizer")),
    **_all("chat-template chat-template-file", _is("model.chat_template")),
    **_all("quantization q", _is("model.weights", "a GGUF file stays packed; g4 packs other weights")),
    **_all(
        "kv-cache-dtype cache-type-k ctk cache-type-v ctv",
        _is("cache.codec", _codecs()),
    ),
    **_all(
        "gpu-memory-utilization mem-fraction-static kv-cache-memory-bytes kv-cache-memory",
        _is("cache.memory", "a size such as 8GiB, or auto"),
    ),
    **_all("enable-prefix-caching", _is("cache.share", "on unless set to false")),
    **_all("no-enable-prefix-caching disable-radix-cache", _is("cache.share", "set it to false")),
    **_all("max-num-seqs max-running-requests parallel np", _is("scheduler.max_running")),
    **_all(
        "max-num-batched-tokens chunked-prefill-size max-prefill-tokens batch-size b ubatch-size ub",
        _is("scheduler.token_budget"),
    ),
    **_all("enable-chunked-prefill cont-batching cb", _no("not needed, always on")),
    **_all("max-queued-requests", _is("scheduler.max_queue")),
    **_all("attention-backend flash-attn fa", _is("attention.backend")),
    **_all("threads t threads-batch tb", _is("runtime.threads")),
    **_all("device", _is("runtime.device")),
    **_all("n-gpu-layers ngl gpu-layers", _is("runtime.device", "all layers are on one device")),
    **_all("generation-config", _is("serve.sampling_defaults", "the file is read by default")),
    **_all("api-key", _is("serve.api_key_file", "a file, because other users of this machine can read flags")),
    **_all("max-new-tokens n-predict n", _is("max_tokens serve.max_output_tokens")),
    **_all("temp", _is("temperature", "a parameter of each request")),
    **_all("repeat-penalty", _is("repetition_penalty", "a parameter of each request")),
    **_all("trust-remote-code", _no("not needed, Quire runs no code from a model's folder")),
    **_all("jinja", _no("not needed, chat templates are always rendered")),
    **_all("disable-log-requests disable-log-stats", _no("not needed, requests are logged only under QUIRE_LOG=debug")),
    **_all(
        "log-level uvicorn-log-level verbose v", _no("set the environment variable QUIRE_LOG, as in QUIRE_LOG=debug")
    ),
    **_all("ssl-keyfile ssl-certfile root-path allowed-origins", _no("not here, put a proxy in front of the server")),
    **_all(
        "tensor-parallel-size tp tp-size pipeline-parallel-size pp pp-size data-parallel-size dp dp-size split-mode",
        _no("not yet, one model runs on one device"),
    ),
    **_all(
        "swap-space cpu-offload-gb kv-offloading-size hicache-size kv-transfer-config",
        _no("not yet, nothing is offloaded to CPU memory or disk"),
    ),
    **_all("speculative-config speculative-model speculative-algorithm model-draft md", _no("not yet")),
    **_all("enable-lora lora-modules lora lora-paths mmproj revision rope-scaling rope-freq-base", _no("not yet")),
    **_all("enable-auto-tool-choice tool-call-parser reasoning-parser", _no("not yet")),
}
"""Keys are option names without leading dashes, words joined by dashes."""


def habit_of(option: str) -> Habit | None:
    """The answer to an option as typed: `--max-model-len=4096`, `-ngl`, `-c4096`, `model.max_model_len`."""
    name = option.partition("=")[0].lstrip("-").rpartition(".")[2].replace("_", "-").lower()
    if name not in HABITS and not option.startswith("--"):
        name = re.sub(r"(?<=[a-z])\d+$", "", name)
    return HABITS.get(name)


def flag_answer(option: str, known: Collection[str]) -> str | None:
    """The answer to a flag that a command does not take; None if no other engine has it.

    known  flags that the command takes
    """
    habit = habit_of(option)
    if habit is None:
        return None
    flag = option.partition("=")[0]
    short = [f"--{key.rpartition('.')[2].replace('_', '-')}" for key in habit.keys]
    ours = [each for pair in zip(short, (f"--{key}" for key in habit.keys), strict=True) for each in pair]
    taken = next((each for each in ours if each in known), None)
    if taken is None and habit.keys and not habit.text:
        return f"{flag} is --{habit.keys[0]} in other quire commands"
    return f"{flag}: {habit.text}" if taken is None else f"{flag} is {taken} here{_aside(habit)}"


def key_answer(key: str) -> str | None:
    """The answer to a setting that does not exist; None if no other engine has it."""
    habit = habit_of(key)
    if habit is None:
        return None
    ours = next((each for each in habit.keys if "." in each), None)
    return habit.text or None if ours is None else f"it is {ours} here{_aside(habit)}"


def _aside(habit: Habit) -> str:
    return f" ({habit.text})" if habit.text else ""
