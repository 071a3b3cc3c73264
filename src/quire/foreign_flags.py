"""Flags, commands and parameters of other engines, and Quire's names for them.

Knows flags of vLLM, SGLang and llama.cpp, commands of these and of Ollama, and parameters of their requests; knows no
parser. `quire.cli` looks up flags and commands, `quire.options` looks up keys of a file or of Python, and the server
looks up parameters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from quire.cache.codecs import CODECS, DENSE


@dataclass(frozen=True)
class MigrationHint:
    """The answer to an option of another engine.

    keys  our settings or flags with the same meaning; the answer names the first one that the command takes
    text  a remark; without keys, the whole answer
    """

    keys: tuple[str, ...] = ()
    text: str = ""


def _is(key: str, text: str = "") -> MigrationHint:
    return MigrationHint(tuple(key.split()), text)


def _no(text: str) -> MigrationHint:
    return MigrationHint((), text)


def _codecs() -> str:
    encoded = [row for name, row in CODECS.items() if name != DENSE]
    bits = sorted({row.bits for row in encoded}, reverse=True)
    return f"{_listed([row.name for row in encoded])} store keys and values in {_listed(bits)} bits"


def _listed(values: Sequence[object]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last


def _all(names: str, hint: MigrationHint) -> dict[str, MigrationHint]:
    return dict.fromkeys(names.split(), hint)


FOREIGN_FLAGS: dict[str, MigrationHint] = {
    **_all("model m model-path", _no("the model is the first argument here, not a flag, as in quire serve smollm2")),
    **_all("max-model-len max-seq-len ctx-size c n-ctx context-length", _is("model.max_context")),
    **_all("served-model-name alias a", _is("model.name")),
    **_all("dtype", _is("model.dtype")),
    **_all("tokenizer tokenizer-path", _is("model.tokenizer")),
    **_all("chat-template chat-template-file", _is("model.chat_template")),
    **_all("quantization q", _is("model.weights", "a GGUF file stays packed; g4 packs other weights")),
    **_all("kv-cache-dtype cache-type-k ctk cache-type-v ctv", _is("cache.codec", _codecs())),
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
    **_all(
        "n-gpu-layers ngl gpu-layers",
        _is(
            "runtime.device",
            "cpu or cuda; with offload.mode auto the layers that exceed offload.memory stay outside the GPU's memory",
        ),
    ),
    **_all("generation-config", _is("serve.sampling_defaults", "the file is read by default")),
    **_all("api-key", _is("serve.api_key_file", "a file, because other users of this machine can read flags")),
    **_all("max-new-tokens n-predict n", _is("max_tokens serve.max_output_tokens")),
    **_all("temp", _is("temperature", "a parameter of each request")),
    **_all("repeat-penalty", _is("repetition_penalty", "a parameter of each request")),
    **_all("trust-remote-code", _no("not needed, Quire runs no code from a model's folder")),
    **_all("jinja", _no("not needed, chat templates are always rendered")),
    **_all(
        "disable-log-requests no-enable-log-requests disable-uvicorn-access-log",
        _is("serve.access_log", "false for no line per request; texts are never logged"),
    ),
    **_all(
        "enable-log-requests log-requests",
        _is("serve.access_log", "on unless set to false: a line per request, without its text"),
    ),
    **_all(
        "disable-log-stats metrics enable-metrics", _no("not needed, statistics are at /metrics and not in the log")
    ),
    **_all(
        "log-level uvicorn-log-level verbose v", _no("set the environment variable QUIRE_LOG, as in QUIRE_LOG=debug")
    ),
    **_all("allowed-origins cors-allow-origins", _is("serve.cors_origins", "with commas between, or *")),
    **_all("ssl-keyfile ssl-certfile root-path", _no("not here, put a proxy in front of the server")),
    **_all("data-parallel-size dp dp-size", _is("cluster.mixed", "instances, each with the model and a cache")),
    **_all(
        "tensor-parallel-size tp tp-size pipeline-parallel-size pp pp-size split-mode",
        _no("not yet, one model runs on one device"),
    ),
    **_all(
        "cpu-offload-gb override-tensor ot n-cpu-moe cpu-moe",
        _is("offload.mode", "auto; offload.memory is the memory for weights, and the others are read in every step"),
    ),
    **_all(
        "swap-space kv-offloading-size hicache-size hicache-ratio enable-hierarchical-cache",
        _is("tiers.memory", "a size, beside the cache of a GPU; tiers.disk keeps cached prefixes in a folder"),
    ),
    **_all("hicache-storage-backend slot-save-path lmcache-config", _is("tiers.disk", "a folder and its size")),
    **_all(
        "kv-transfer-config disaggregation-mode kv-connector",
        _is("cluster.prefill", "and cluster.decode: numbers of instances that compute prompts, and that decode"),
    ),
    **_all("mlock", _no("not here, weights are not locked in memory")),
    **_all("mmap no-mmap", _is("model.images", "packed layers are mapped unless set to false")),
    **_all("enforce-eager disable-cuda-graph compilation-config", _no("not here, a GPU always replays graphs")),
    **_all("block-size page-size", _no("not here, a page always holds 64 tokens of one head")),
    **_all("load-format", _no("not needed, the format is known by the file")),
    **_all("guided-decoding-backend structured-outputs-config grammar-backend", _no("not needed, always on")),
    **_all("kv-cache-dtype-skip-layers calculate-kv-scales", _no("not needed, cache.codec says the bits")),
    **_all("host-name hostname", _is("serve.host")),
    **_all("timeout timeout-keep-alive", _no("not here, requests run as long as their client is there")),
    **_all(
        "draft draft-max draft-model speculative-config speculative-model speculative-draft-model-path"
        " speculative-algorithm model-draft md num-speculative-tokens",
        _no("not yet, no other model proposes tokens"),
    ),
    **_all("enable-lora lora-modules lora lora-paths mmproj revision rope-scaling rope-freq-base", _no("not yet")),
    **_all(
        "enable-auto-tool-choice tool-call-parser",
        _no("not needed, tools are always on, and the chat template shows how the model writes calls"),
    ),
    **_all(
        "reasoning-parser enable-reasoning reasoning-format",
        _no("not needed, always on: a chat template that knows <think> shows it; include_reasoning is per request"),
    ),
}
"""Keys are option names without leading dashes, words joined by dashes."""

FOREIGN_COMMANDS: dict[str, str] = {
    "run": "quire chat MODEL talks with a model, quire generate MODEL answers a prompt, quire serve MODEL serves it",
    **dict.fromkeys(
        ("start", "launch", "launch-server", "launch_server", "server", "api-server", "api_server", "up"),
        "quire serve MODEL serves a model",
    ),
    **dict.fromkeys(("complete", "completion", "run-batch", "batch"), "quire generate MODEL continues prompts"),
    **dict.fromkeys(
        ("list", "ls", "ps", "rm", "remove"),
        "quire cache ls and clear are for files on disk; models are your own files",
    ),
    "stop": "Ctrl-C or SIGTERM ends quire serve",
    **dict.fromkeys(("show", "info"), "quire inspect MODEL shows a model, quire doctor shows this machine"),
    **dict.fromkeys(("collect-env", "env", "check"), "quire doctor shows this machine"),
    **dict.fromkeys(("create", "convert", "quantize"), "not needed, --model.weights g4 packs weights while loading"),
    "download": "quire pull smollm2 downloads the embedded model",
    **dict.fromkeys(("ppl", "perplexity"), "quire eval ppl MODEL measures perplexity"),
    "tokenize": "quire serve MODEL has /tokenize",
    "help": "quire --help lists the commands, quire COMMAND --help its flags",
    "version": "quire --version prints it",
}
"""Commands of other programs, and the answer."""

FOREIGN_PARAMETERS: dict[str, MigrationHint] = {
    **_all("guided_json guided_schema", _is("structured_outputs", '{"json": SCHEMA}; or response_format')),
    **_all("guided_regex regex", _is("structured_outputs", '{"regex": EXPRESSION}')),
    **_all("guided_choice", _is("structured_outputs", '{"choice": [TEXT, ...]}')),
    **_all("guided_grammar grammar ebnf", _is("structured_outputs", '{"grammar": GRAMMAR}')),
    **_all("guided_decoding_backend guided_whitespace_pattern", _no("leave it out, there is one way")),
    **_all("json_schema format", _is("response_format", '{"type": "json_schema", "json_schema": ...}')),
    **_all("n_predict num_predict max_new_tokens max_length", _is("max_tokens")),
    **_all("min_new_tokens min_length", _is("min_tokens")),
    **_all("repeat_penalty", _is("repetition_penalty")),
    **_all("stop_sequences", _is("stop")),
    **_all("do_sample", _is("temperature", "0 takes the most probable token")),
    **_all("best_of beam_width use_beam_search num_beams", _is("n", "answers are sampled; there is no beam search")),
    **_all("n_probs", _is("logprobs")),
    **_all(
        "enable_thinking thinking", _is("chat_template_kwargs", '{"enable_thinking": false}, if the template has it')
    ),
    **_all("cache_prompt", _no("leave it out, prefixes are cached unless cache.share is false")),
    **_all("num_ctx", _no("it is the server's setting model.max_context")),
    **_all("keep_alive", _no("leave it out, the model stays loaded")),
    **_all("raw", _no("/v1/completions takes a prompt without a template")),
    **_all(
        "options extra_body sampling_params parameters",
        _no("its entries are parameters of the request itself, such as temperature and max_tokens"),
    ),
    **_all("images", _no("not yet, models read text")),
}
"""Parameters of other servers' requests, and ours."""


def find_hint(option: str) -> MigrationHint | None:
    """The answer to an option as typed: `--max-model-len=4096`, `-ngl`, `-c4096`, `model.max_model_len`."""
    name = option.partition("=")[0].lstrip("-").rpartition(".")[2].replace("_", "-").lower()
    if len(name) == 1 and not re.match("-[^-]", option):
        return None  # a short flag of llama.cpp: -n is not --n, which counts answers elsewhere
    if name not in FOREIGN_FLAGS and not option.startswith("--"):
        name = re.sub(r"(?<=[a-z])\d+$", "", name)
    return FOREIGN_FLAGS.get(name)


def flag_hint(option: str, known: Collection[str]) -> str | None:
    """The answer to a flag that a command does not take; None if no other engine has it.

    known  flags that the command takes
    """
    hint = find_hint(option)
    if hint is None:
        return None
    flag = option.partition("=")[0]
    short = [f"--{key.rpartition('.')[2].replace('_', '-')}" for key in hint.keys]
    ours = [each for pair in zip(short, (f"--{key}" for key in hint.keys), strict=True) for each in pair]
    own_flag = next((each for each in ours if each in known), None)
    if own_flag is not None:
        return f"{flag} is {own_flag} here{_aside(hint)}"
    if hint.keys and ("." in hint.keys[0] or not hint.text):
        return f"{flag} is --{hint.keys[0]} in other quire commands{_aside(hint)}"
    return f"{flag}: {hint.text}"


def command_hint(word: str) -> str | None:
    """The answer to a command that does not exist; None if no other program has it."""
    return FOREIGN_COMMANDS.get(word.lower())


def parameter_hint(name: str) -> str | None:
    """The answer to a parameter of a request that does not exist; None if no other server has it."""
    hint = FOREIGN_PARAMETERS.get(name)
    if hint is None:
        return None
    return f"it is '{hint.keys[0]}' here{_aside(hint)}" if hint.keys else hint.text


def setting_hint(key: str) -> str | None:
    """The answer to a setting that does not exist; None if no other engine has it."""
    hint = find_hint(key)
    if hint is None:
        return None
    ours = next((each for each in hint.keys if "." in each), None)
    return hint.text or None if ours is None else f"it is {ours} here{_aside(hint)}"


def _aside(hint: MigrationHint) -> str:
    return f" ({hint.text})" if hint.text else ""
