"""Requests for /v1/embeddings, /score and /rerank."""

from __future__ import annotations

from typing import Any

from recorded.cases import DROPPED, Request, variants, words

PATH = "/v1/embeddings"


def embeddings() -> list[Request]:
    """Texts as vectors."""
    base = {"input": "A quire is 24 sheets.", "dimensions": 12}
    changed: dict[str, dict[str, Any]] = {
        "text": {},
        "whole": {"dimensions": DROPPED},
        "several": {"input": ["One.", "Two two.", "One."]},
        "token-ids": {"input": [5, 6, 7]},
        "several-token-ids": {"input": [[5, 6], [7]]},
        "mean": {"pooling": "mean"},
        "last": {"pooling": "last"},
        "base64": {"encoding_format": "base64"},
        "float": {"encoding_format": "float", "user": "u"},
        "without-special-tokens": {"add_special_tokens": False},
        "long": {"input": words(150, 12)},
        "long-last": {"input": words(150, 12), "pooling": "last"},
        "many-dimensions": {"dimensions": 100_000},
        "no-dimensions": {"dimensions": 0},
        "empty": {"input": ""},
        "no-input": {"input": DROPPED},
        "wrong-pooling": {"pooling": "max"},
        "wrong-format": {"encoding_format": "hex"},
        "another-model": {"model": "other"},
    }
    return variants("embeddings", PATH, base, changed)


def similarity() -> list[Request]:
    """How near texts are."""
    scores: dict[str, dict[str, Any]] = {
        "one": {},
        "pairs": {"text_1": ["One.", "Red."], "text_2": ["Two.", "Blue."]},
        "unequal": {"text_1": ["One.", "Red."], "text_2": ["Two."] * 3},
        "empty-list": {"text_2": []},
        "missing": {"text_2": DROPPED},
    }
    ranks: dict[str, dict[str, Any]] = {
        "all": {},
        "top": {"top_n": 2},
        "without-documents": {"return_documents": False},
        "wrong-top": {"top_n": 0},
        "no-documents": {"documents": []},
    }
    text = {"text_1": "One.", "text_2": ["Two.", "One."]}
    query = {"query": "Red.", "documents": ["Blue.", "Red.", "One red."]}
    found = variants("score", "/score", text, scores) + variants("rerank", "/rerank", query, ranks)
    for name, path, body in (
        ("score", "/v1/score", text),
        ("rerank", "/v1/rerank", query),
        ("rerank", "/v2/rerank", query),
    ):
        found += variants(name, path, body, {path.strip("/").replace("/", "-"): {}})
    return found
