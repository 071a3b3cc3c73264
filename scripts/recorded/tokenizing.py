"""Requests for /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from recorded.cases import DROPPED, Request, user, variants
from recorded.tools import TOOLS


def requests() -> list[Request]:
    """Texts and conversations to tokens, and back."""
    chat = {"prompt": DROPPED, "messages": [user("Hi <|im_end|> there."), {"role": "assistant", "content": "Yes"}]}
    texts: dict[str, dict[str, Any]] = {
        "text": {},
        "empty": {"prompt": ""},
        "unicode": {"prompt": "é日本🌍"},
        "control-tokens": {"prompt": "<|im_start|>user\nHi<|im_end|>"},
        "without-special-tokens": {"add_special_tokens": False},
        "messages": chat,
        "messages-not-opened": chat | {"add_generation_prompt": False},
        "messages-continued": chat | {"continue_final_message": True},
        "messages-tools": chat | {"tools": TOOLS[:1]},
        "messages-variables": chat | {"chat_template_kwargs": {"enable_thinking": False}},
        "both": chat | {"prompt": "a"},
        "neither": {"prompt": DROPPED},
        "another-model": {"model": "other"},
        "tools-of-a-text": {"tools": TOOLS[:1]},
        "special-tokens-of-messages": chat | {"add_special_tokens": True},
    }
    ids: dict[str, dict[str, Any]] = {
        "ids": {},
        "none": {"tokens": []},
        "special": {"tokens": [1, 2, 70]},
        "special-skipped": {"tokens": [1, 2, 70], "skip_special_tokens": True},
        "outside": {"tokens": [10**6]},
        "negative": {"tokens": [-1]},
        "text": {"tokens": "abc"},
    }
    found = variants("tokenize", "/tokenize", {"prompt": "Hello, world!"}, texts)
    return found + variants("detokenize", "/detokenize", {"tokens": [72, 101, 108, 108]}, ids)
