"""The command lines that are recorded, in order: later ones read what earlier ones have written."""

from __future__ import annotations

import json

from recorded.cases import Line, Places, words
from recorded.plans import LATENCY, OPT_30B, TARGETS, made_trace

HELPS = (
    "serve", "chat", "generate", "inspect", "calibrate", "profile", "plan", "simulate", "bench", "eval", "pull",
    "cache", "doctor", "cluster", "plan offload", "plan hardware", "plan placement", "plan auto", "bench throughput",
    "bench latency", "eval ppl", "eval retrieval",
)  # fmt: skip

CPU = ("--model.dtype", "float32", "--runtime.device", "cpu", "--runtime.threads", "1", "--cache.memory", "16MiB")


def lines_of(places: Places) -> list[Line]:
    """All command lines."""
    tiny = str(places.tiny)
    return [
        Line("version", ("--version",), "numbers"),
        *(Line(f"help/{name.replace(' ', '-')}", (*name.split(), "--help"), "options") for name in HELPS),
        *_configured(places, tiny),
        *_inspected(tiny),
        *_generated(places, tiny),
        *_carried(places, tiny),
        *_planned(places, tiny),
        *_measured(places, tiny),
        *_wrong(places, tiny),
    ]


def _configured(places: Places, tiny: str) -> list[Line]:
    """Configurations, printed."""
    file = places.file("quire.toml", '[cache]\nmemory = "1GiB"\ncodec = "g4"\n[serve]\nport = 9000\n')
    wrong = places.file("wrong.toml", '[cache]\nmemry = "1GiB"\n')
    return [
        Line("config/serve", ("serve", "smollm2", "--print-config", "--config", file, "--cache.share", "false")),
        Line(
            "config/generate", ("generate", tiny, "--print-config", "--cache.codec", "nuq3", "--tiers.disk", "kv:1GiB")
        ),
        Line("config/wrong-file", ("serve", "smollm2", "--print-config", "--config", wrong)),
    ]


def _inspected(tiny: str) -> list[Line]:
    """What a model needs."""
    return [
        Line("inspect/table", ("inspect", "smollm2", "--length", "100", "2000", *CPU)),
        Line("inspect/json", ("inspect", tiny, "--json", "--digest", *CPU), "json"),
        Line("inspect/codec", ("inspect", "smollm2", "--json", *CPU, "--cache.codec", "nuq4"), "json"),
        Line("inspect/disk", ("inspect", tiny, "--tiers", "--tiers.disk", "kv:64MiB", *CPU), "numbers"),
        Line("inspect/no-server", ("inspect", "--tree", "http://127.0.0.1:1")),
    ]


def _generated(places: Places, tiny: str) -> list[Line]:
    """Prompts, files of prompts, chats."""
    asked = [
        {"id": "a", "prompt": "The capital of France is", "max_tokens": 5},
        {"id": "b", "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4, "logprobs": 1},
        {"id": "c", "prompt_token_ids": [1, 2, 3], "temperature": 1.0, "seed": 3, "n": 2},
        {"id": "d", "prompt": "Year: ", "structured_outputs": {"regex": "[0-9]{4}"}, "cache_salt": "s"},
    ]
    failing = [*asked[:1], {"id": "long", "prompt": "a" * 5000}, {"id": "outside", "prompt_token_ids": [10**6]}]
    wrong = [{"prompt": "a", "temprature": 1}, {"id": "x"}, {"prompt": "a", "max_tokens": -1}]
    given, few, bad = (
        places.file(f"{name}.jsonl", "".join(json.dumps(each) + "\n" for each in found))
        for name, found in (("asked", asked), ("failing", failing), ("wrong", wrong))
    )
    greedy = ("--max-tokens", "8", *CPU)
    return [
        Line("generate/prompt", ("generate", tiny, "Once upon", *greedy)),
        Line("generate/chat", ("generate", "smollm2", "Name a colour.", "--chat", *greedy)),
        Line("generate/drawn", ("generate", tiny, "-", "--temperature", "1", "--seed", "5", *greedy), stdin="Once"),
        Line(
            "generate/file", ("generate", "smollm2", "--input", given, "--output", "out.jsonl", *greedy),
            files={"out.jsonl": "lines"},
        ),
        Line("generate/file-again", ("generate", tiny, "--input", given, "--output", "out.jsonl", *greedy)),
        Line("generate/failing-lines", ("generate", tiny, "--input", few, *greedy), "lines"),
        Line("generate/wrong-lines", ("generate", tiny, "--input", bad, *greedy)),
        Line(
            "generate/offloaded", ("generate", tiny, "Once upon", *greedy, "--offload.mode", "auto"),
        ),
        Line(
            "chat/lines", ("chat", tiny, "--temperature", "0", "--max-tokens", "6", *CPU),
            stdin="Hello\n/system Be brief.\nHello again\n/exit\n",
        ),
    ]  # fmt: skip


def _carried(places: Places, tiny: str) -> list[Line]:
    """Prefixes on a disk, carried to another folder."""
    prompt = places.file("prompt.jsonl", json.dumps({"id": 1, "prompt": words(60, 40), "max_tokens": 2}) + "\n")
    disk = ("--tiers.disk", "kept:64MiB")
    return [
        Line("cache/layers", ("cache", "ls")),
        Line("cache/filled", ("generate", tiny, "--input", prompt, *CPU, *disk), "lines"),
        Line("cache/ls", ("cache", "ls", "--disk", "kept")),
        Line("cache/ls-json", ("cache", "ls", "--disk", "kept", "--json"), "json"),
        Line("cache/export", ("cache", "export", "--disk", "kept", "prefixes.quire")),
        Line("cache/import", ("cache", "import", "--disk", "new:64MiB", "prefixes.quire", "--model", tiny, *CPU)),
        Line("cache/ls-new", ("cache", "ls", "--disk", "new", "--json"), "json"),
        Line("cache/found", ("generate", tiny, "--input", prompt, *CPU, "--tiers.disk", "new:64MiB"), "generated"),
        Line("cache/clear", ("cache", "clear", "--disk", "kept", "--model", tiny)),
        Line("cache/clear-layers", ("cache", "clear")),
        Line("cache/wrong-export", ("cache", "export", "--disk", "kept")),
    ]


def _planned(places: Places, tiny: str) -> list[Line]:
    """Plans and simulations from given files."""
    config = places.file("opt/config.json", json.dumps(OPT_30B))
    latency = places.file("latency.json", json.dumps(LATENCY))
    cores = places.file("cores.toml", '[nodes]\ncores = 2\nmemory = "4GiB"\n')
    gpus = places.file("gpus.toml", '[nodes]\ngpus = 2\ngpu_memory = "80GB"\ndevice = "a100-80g"\n')
    trace = places.file("trace.jsonl", made_trace())
    room = ("--hardware", "t4", "--plan.gpu", "16GiB", "--plan.cpu", "200GiB", "--plan.disk", "1500GiB")
    block = ("--micro-batch", "48", "--num-batches", "3")
    small = ("--scheduler.max_running", "16", "--scheduler.token_budget", "128", "--cache.memory", "4MiB")
    simulated = ("simulate", tiny, "--trace", trace, "--latency", latency, *CPU[:6], *small, "--requests", "30")
    apart = ("--cluster.prefill", "1", "--cluster.decode", "1")
    of_cores = ("plan", "placement", tiny, "--cluster.file", cores, "--trace", trace, *TARGETS)
    placement = ("plan", "placement", "opt-13b", "--cluster.file", gpus, "--trace", trace, *TARGETS, "--requests", "16")
    return [
        Line("plan/offload", ("plan", "offload", config, *room, *block)),
        Line(
            "plan/offload-json",
            ("plan", "offload", config, *room, *block, "--json", "--output", "policy.json"), "json",
            {"policy.json": "json"},
        ),
        Line("plan/offload-no-room", ("plan", "offload", config, "--hardware", "t4", "--plan.cpu", "1GiB", *block)),
        Line("plan/offload-no-hardware", ("plan", "offload", config)),
        Line("plan/hardware-no-output", ("plan", "hardware", tiny)),
        Line(
            "plan/placement",
            (*placement, "--algorithm", "mixed", "--rate", "2", "--json", "--output", "placement.json"), "json",
            {"placement.json": "json"},
        ),
        Line("plan/placement-no-latency", of_cores),
        Line("plan/auto-no-targets", ("plan", "auto", tiny, "--trace", trace)),
        Line("simulate/engine", (*simulated, *TARGETS, "--rates", "2,20", "--json"), "json"),
        Line("simulate/table", (*simulated, *TARGETS, "--rate", "4", *apart)),
        Line(
            "simulate/gpus",
            ("simulate", "opt-13b", "--hardware", "a100-80g", "--trace", trace, "--requests", "20", "--json"), "json",
        ),
        Line("simulate/no-trace", ("simulate", tiny, "--trace", "nowhere.jsonl")),
    ]  # fmt: skip


def _measured(places: Places, tiny: str) -> list[Line]:
    """Evaluations, profiles and benchmarks on small inputs."""
    text = places.file("text.txt", " ".join(words(30, seed) for seed in range(8)))
    ppl = ("eval", "ppl", tiny, "--text", text, "--context", "200", "--windows", "3")
    return [
        Line("eval/ppl", (*ppl, "--codecs", "dense,g4", "--json", *CPU), "json"),
        Line("eval/ppl-retention", (*ppl, "--continuation", "50", "--retain.budget", "0.5", *CPU)),
        Line("eval/ppl-no-text", ("eval", "ppl", tiny)),
        Line(
            "eval/retrieval",
            ("eval", "retrieval", tiny, "--lengths", "300", "--depths", "0,1", "--trials", "1", "--json", *CPU), "json",
        ),
        Line("profile/json", ("profile", tiny, "--input", text, "--json", "-", *CPU), "json"),
        Line("profile/table", ("profile", "smollm2", "--input", text, "--retain.budget", "0.3", *CPU)),
        Line(
            "bench/throughput",
            (
                "bench", "throughput", tiny, "--prefill", "64", "--batch", "2", "--input-tokens", "32",
                "--output-tokens", "32", "--repeats", "1", "--json", "bench.json", *CPU,
            ),
            "numbers", {"bench.json": "shape"},
        ),
        Line(
            "calibrate/tiny",
            (
                "calibrate", tiny, "--windows", "3", "--window", "64", "--text", text, "-o", "made.calibration",
                "--json", *CPU[:6],
            ),
            "json",
        ),
        Line(
            "calibrate/used",
            (
                "generate", tiny, "Once upon", "--max-tokens", "6", *CPU, "--cache.codec", "nuq2",
                "--cache.calibration", "made.calibration", "--cache.check", "false",
            ),
        ),
        Line("calibrate/no-text", ("calibrate", tiny, "--text", "nowhere.txt")),
        Line("calibrate/wrong-bits", ("calibrate", tiny, "--bits", "7", "--text", text)),
        Line("doctor/findings", ("doctor", "--json"), "findings"),
        Line("doctor/text", ("doctor",), "nothing"),
        Line("pull/smollm2", ("pull", "smollm2")),
    ]  # fmt: skip


def _wrong(places: Places, tiny: str) -> list[Line]:
    """Words that no command takes."""
    return [
        Line("wrong/nothing", ()),
        Line("wrong/command", ("srve", "smollm2")),
        Line("wrong/foreign-command", ("run", "smollm2")),
        Line("wrong/no-model", ("serve",)),
        Line("wrong/unknown-model", ("inspect", "no-such-folder")),
        Line("wrong/flag", ("serve", "smollm2", "--cache.memry", "1GiB")),
        Line("wrong/value", ("serve", "smollm2", "--cache.memory", "lots")),
        Line("wrong/choice", ("serve", "smollm2", "--cache.codec", "nuq9")),
        Line("wrong/truth", ("serve", "smollm2", "--cache.share", "maybe")),
        Line("wrong/foreign-flag", ("serve", "smollm2", "--swap-space", "4")),
        Line("wrong/foreign-flags", ("serve", "--model", "smollm2", "--max-model-len", "4096")),
        Line("wrong/together", ("serve", "smollm2", "--retain.budget", "0.5", "--retain.threshold", "0.5")),
        Line("wrong/public", ("serve", "smollm2", "--host", "0.0.0.0")),
        Line("wrong/keys", ("serve", "smollm2", "--api-key-file", "nowhere")),
        Line("wrong/cluster", ("serve", tiny, "--cluster.prefill", "1")),
        Line("wrong/log-level", ("inspect", tiny), variables={"QUIRE_LOG": "loud"}),
        Line("wrong/no-server", ("cluster", "status", "--url", "http://127.0.0.1:1")),
        Line("wrong/action", ("plan", "everything", tiny)),
        Line("wrong/flag-of-another-action", ("plan", "hardware", tiny, "--output", "x.json", "--slack", "0.5")),
        Line("wrong/debug", ("inspect", "no-such-folder", "--debug")),
    ]
