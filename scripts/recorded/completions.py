"""Requests for /v1/completions."""

from __future__ import annotations

from typing import Any

from recorded.cases import Request, variants, words

PATH = "/v1/completions"

GREEDY: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
DRAWN: dict[str, Any] = GREEDY | {"prompt": "One day a small", "temperature": 0.8, "seed": 7}

SUNG = "La la la la la la la la"

PROMPTS = (
    "The capital of France is", "1, 2, 3, 4,", "def add(a, b):\n    return", "Il était une fois", "Q: What is ice?\nA:",
    "🌍 Hello,",
)  # fmt: skip


def texts() -> list[Request]:
    """Prompts in all their forms."""
    changed: dict[str, dict[str, Any]] = {f"text-{place}": {"prompt": text} for place, text in enumerate(PROMPTS, 1)}
    changed |= {
        "token-ids": {"prompt": [504, 3575, 282]},
        "several-texts": {"prompt": ["One, two,", "Red, green,", "One, two,"]},
        "several-token-ids": {"prompt": [[504, 3575], [1, 2, 3, 4]]},
        "usual-length": {"max_tokens": None},
        "no-tokens": {"max_tokens": 0},
        "named-model": {"model": "smollm2", "user": "somebody"},
        "without-special-tokens": {"add_special_tokens": False},
        "special-tokens-shown": {"skip_special_tokens": False, "prompt": "Bye<|im_end|>", "max_tokens": 4},
        "token-ids-returned": {"return_token_ids": True},
        "salted": {"prompt": words(100, 1), "cache_salt": "s", "max_tokens": 2},
        "salted-again": {"prompt": words(100, 1), "cache_salt": "s", "max_tokens": 2},
        "unsalted": {"prompt": words(100, 1), "max_tokens": 2},
        "cached": {"prompt": words(100, 1) + " Then", "max_tokens": 2},
        "pinned": {"prompt": words(100, 2), "cache_pin": 60, "max_tokens": 1},
        "unpinned": {"prompt": words(100, 2), "cache_pin": False, "max_tokens": 1},
        "priority-and-lifetime": {"prompt": words(100, 3), "cache_priority": 5, "cache_lifetime": 0, "max_tokens": 1},
        "model-s-own-temperature": {"temperature": None, "seed": 3},
    }
    return variants("completions", PATH, GREEDY, changed)


def scores() -> list[Request]:
    """Log-probabilities of answers and prompts."""
    changed: dict[str, dict[str, Any]] = {f"logprobs-{count}": {"logprobs": count} for count in (0, 1, 5, 20)}
    changed |= {
        "echo": {"echo": True},
        "echo-logprobs-0": {"echo": True, "logprobs": 0},
        "echo-logprobs-2": {"echo": True, "logprobs": 2},
        "echo-only": {"echo": True, "logprobs": 1, "max_tokens": 0},
        "echo-several": {"prompt": ["One, two,", "Red, green,"], "echo": True, "logprobs": 1, "n": 2},
        "echo-cached": {"prompt": words(100, 1), "echo": True, "logprobs": 0, "max_tokens": 1},
        "echo-unicode": {"prompt": "日本 é🌍", "echo": True, "logprobs": 2},
        "prompt-logprobs-0": {"prompt_logprobs": 0},
        "prompt-logprobs-3": {"prompt_logprobs": 3, "logprobs": 1},
    }
    return variants("completions", PATH, GREEDY, changed)


def choices() -> list[Request]:
    """Drawn answers, several of them, penalties, biases and stops."""
    changed: dict[str, dict[str, Any]] = {f"seed-{seed}": {"seed": seed} for seed in (0, 1, -5)}
    changed |= {
        "top-p": {"top_p": 0.5},
        "top-k": {"top_k": 3},
        "min-p": {"min_p": 0.2},
        "hot": {"temperature": 2.0, "top_k": 50},
        "n-2": {"n": 2},
        "n-3-logprobs": {"n": 3, "logprobs": 1},
        "best-of": {"n": 2, "best_of": 2},
        "n-several-prompts": {"n": 2, "prompt": ["One day", "At night"], "max_tokens": 3},
        "presence-penalty": {"n": 4, "presence_penalty": 2.0, "prompt": SUNG, "temperature": 1.0},
        "frequency-penalty": {"n": 4, "frequency_penalty": 0.5, "prompt": SUNG, "temperature": 1.0},
    }
    drawn = variants("completions/drawn", PATH, DRAWN, changed)
    counted = GREEDY | {"prompt": "1, 2, 3, 4, 5, 6, 7,", "max_tokens": 12}
    sung = {"prompt": SUNG}
    changed = {
        "no-penalty": sung,
        "presence-penalty": sung | {"presence_penalty": 2.0},
        "frequency-penalty": sung | {"frequency_penalty": 1.5},
        "repetition-penalty": sung | {"repetition_penalty": 1.4},
        "all-penalties": sung | {"presence_penalty": -1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        "bias-forces": {"logit_bias": {"28": 100}, "max_tokens": 3},
        "bias-forbids": {"logit_bias": {"216": -100, "28": -100}, "max_tokens": 3},
        "stop": {"stop": " 10"},
        "stop-list": {"stop": ["11", ", 9"]},
        "stop-included": {"stop": [" 10"], "include_stop_str_in_output": True},
        "stop-not-met": {"stop": ["zebra"], "max_tokens": 4},
        "stop-token-ids": {"stop_token_ids": [28]},
        "end-of-text": {"logit_bias": {"2": 100}},
        "end-of-text-ignored": {"logit_bias": {"2": 100}, "ignore_eos": True, "max_tokens": 3},
        "min-tokens": {"logit_bias": {"2": 100}, "min_tokens": 3},
        "min-tokens-stop": {"stop": [","], "min_tokens": 4},
        "min-tokens-overlap": sung | {"stop": [" la la la"], "min_tokens": 4},
    }
    return [*drawn, *variants("completions", PATH, counted, changed)]


def streams() -> list[Request]:
    """Streamed answers."""
    streamed = GREEDY | {"stream": True}
    usage = {"stream_options": {"include_usage": True}}
    changed: dict[str, dict[str, Any]] = {
        "plain": {},
        "usage": usage,
        "usage-in-every-chunk": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "usage-in-every-chunk-only": {"stream_options": {"continuous_usage_stats": True}},
        "several-texts": {"prompt": ["One, two,", "Red, green,"]} | usage,
        "n-2": {"n": 2, "temperature": 0.8, "seed": 4} | usage,
        "logprobs": {"logprobs": 2},
        "echo": {"echo": True} | usage,
        "echo-logprobs": {"echo": True, "logprobs": 1, "n": 2},
        "stop": {"prompt": "1, 2, 3,", "stop": [" 6"], "max_tokens": 16} | usage,
        "stop-included": {"prompt": "1, 2, 3,", "stop": [" 6"], "include_stop_str_in_output": True, "max_tokens": 16},
        "seed": {"temperature": 1.0, "seed": 11},
        "token-ids-returned": {"return_token_ids": True},
        "unicode": {"prompt": "Emoji: 🌍🌎🌏", "max_tokens": 10},
        "end-of-text": {"logit_bias": {"2": 100}} | usage,
        "no-tokens": {"max_tokens": 0, "echo": True, "logprobs": 0},
    }
    return variants("completions/stream", PATH, streamed, changed)


def conversation_prompt() -> list[Request]:
    """A prompt written by hand in the model's template."""
    prompt = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
    return variants("completions", PATH, GREEDY, {"by-hand": {"prompt": prompt, "echo": True}})


def pressed() -> list[Request]:
    """Answers of the tiny model that do not all fit into a small cache at once: some are preempted, others evict."""
    base: dict[str, Any] = {"prompt": "a" * 100, "max_tokens": 150, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    drawn = {"n": 6, "temperature": 1.0, "seed": 3}
    changed: dict[str, dict[str, Any]] = {
        "n-6": drawn,
        "n-6-stream": drawn | {"stream": True, "stream_options": {"include_usage": True}},
        "prompts": {"prompt": [letter * 200 for letter in "bcdef"], "prompt_logprobs": 0},
        "prompts-echo": {"prompt": [letter * 200 for letter in "ghijk"], "echo": True},
        "stops": drawn | {"stop": ["e", "s"], "min_tokens": 20},
        "penalties": drawn | {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        "form": drawn | {"ignore_eos": False, "structured_outputs": {"regex": "[a-z ]{100}"}},
        "evicted": {"max_tokens": 2},
        "kept": {"max_tokens": 2},
        "pinned": {"prompt": "p" * 400, "cache_pin": True, "max_tokens": 2},
        "pinned-too-long": {"prompt": "q" * 1000, "cache_pin": True, "max_tokens": 2},
        "beside-a-pin": drawn,
        "too-long": {"prompt": "r" * 3000, "max_tokens": 2},
    }
    return variants("completions/pressed", PATH, base, changed)


def short(name: str) -> list[Request]:
    """A few requests for any server, whole and streamed. Later prompts begin like earlier ones."""
    long = words(150, 5)
    changed: dict[str, dict[str, Any]] = {
        "text": {"logprobs": 1},
        "stream": {"stream": True, "stream_options": {"include_usage": True}},
        "seed": {"temperature": 0.9, "seed": 5, "n": 2},
        "long": {"prompt": long, "logprobs": 1, "max_tokens": 4},
        "long-again": {"prompt": long, "logprobs": 1, "max_tokens": 4},
        "longer": {"prompt": long + " " + words(60, 6), "logprobs": 1, "max_tokens": 4},
        "echo": {"prompt": long, "echo": True, "logprobs": 0, "max_tokens": 1},
        "regex": {"structured_outputs": {"regex": "[0-9]{3}"}},
    }
    return variants(f"completions/{name}", PATH, GREEDY, changed)
