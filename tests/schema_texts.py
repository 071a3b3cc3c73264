"""Texts that llguidance allows for a schema, over a vocabulary of bytes."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from quire.structured import schemas

from .tiny_models import byte_tokenizer

LIKELY = b'"}],:0@'
"""Bytes that end something. Without a liking for them, walks do not end."""


@functools.cache
def _vocabulary() -> LLTokenizer:
    return LLTokenizer(byte_tokenizer().to_str(), n_vocab=258, eos_token=[257])


@functools.lru_cache(64)
def _compiled(schema: str) -> LLMatcher:
    source = json.dumps({"grammars": [{"json_schema": schemas.prepare_schema(json.loads(schema))}]})
    return LLMatcher(_vocabulary(), source, log_level=0)


def matcher(schema: Any) -> LLMatcher:
    """At the beginning of a text. Raises UnsupportedSchemaError, and ValueError for what llguidance refuses."""
    found = _compiled(json.dumps(schema)).deep_copy()
    if found.is_error():
        raise ValueError(schemas.schema_error_text(schema, found.get_error()))
    return found


def refusal(schema: Any) -> str | None:
    """Why a schema is refused; None if it is not."""
    try:
        matcher(schema)
    except ValueError as error:
        return str(error)
    return None


def allows(schema: Any, text: str) -> bool:
    """Whether an answer may be this text."""
    found, tokens = matcher(schema), list(text.encode())
    return bool(found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting())


def walked(schema: Any, draw: random.Random, most: int = 300) -> str | None:
    """A random text; None if it has not ended after so many bytes."""
    found, text = matcher(schema), bytearray()
    while len(text) < most:
        words = np.frombuffer(found.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")[:256])
        if found.is_accepting() and (not len(allowed) or draw.random() < 0.4):
            return text.decode(errors="replace")
        if not len(allowed):
            return None
        likely = [byte for byte in LIKELY if byte in allowed]
        byte = draw.choice(likely) if likely and draw.random() < 0.6 else int(draw.choice(allowed))
        assert found.consume_token(byte)
        text.append(byte)
    return None
