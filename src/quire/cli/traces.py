"""Request traces: what a server was asked and when, with hashes in place of text.

A trace has one JSON object a line: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and
`hash_ids`, one for every 512 tokens of the prompt; the last may stand for fewer. Prompts that begin with the same ids
begin with the same text. (The format of the Mooncake traces.)

Also makes prompts of a trace, and counts what they have in common. Knows ids and lengths, and nothing of the engine:
its count is what the engine is held to.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.errors import ConfigError

HASHED_TOKENS = 512
"""Tokens of a trace that one hash id stands for."""
CHUNK_TOKENS = 64
"""Tokens that are found in the cache together or not at all."""
TELLING_TOKENS = 4
"""First tokens of a block, which tell it from every other block; blocks are a multiple of this. A chunk then never ends
after fewer tokens of a block, so chunks are equal only if their blocks are, by construction and not by good luck."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace.

    line           its number in the file, from 1
    seconds        when it came
    input_tokens   length of its prompt
    output_tokens  length of its answer, at least 1
    blocks         the prompt's hash ids, numbered from 0 as they first appear in the trace
    """

    line: int
    seconds: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path, limit: int) -> list[TraceRequest]:
    """The first `limit` requests of a trace. Raises ConfigError, naming file and line, for what is no request."""
    numbers: dict[int, int] = {}
    requests: list[TraceRequest] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line, text in enumerate(file, 1):
                if len(requests) == limit:
                    break
                if not text.strip():
                    continue
                try:
                    request = _request(line, text, numbers)
                    if requests and request.seconds < requests[-1].seconds:
                        raise ValueError("its timestamp is before that of the line above")
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{path} line {line}: {error}") from error
                requests.append(request)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if not requests:
        raise ConfigError(f"the trace {path} holds no requests")
    return requests


def scaled(requests: Sequence[TraceRequest], block_tokens: int, output_tokens: int | None) -> list[TraceRequest]:
    """The requests with blocks of `block_tokens` in place of 512, all lengths in proportion, rounded up.

    A last block that is cut short stays so, or becomes whole by rounding: a prompt has as many blocks as before.
    output_tokens  length of every answer; None: in proportion too
    """

    def shorter(count: int) -> int:
        return -(-count * block_tokens // HASHED_TOKENS)

    return [
        replace(
            each, input_tokens=shorter(each.input_tokens), output_tokens=output_tokens or shorter(each.output_tokens)
        )
        for each in requests
    ]


def make_prompts(requests: Sequence[TraceRequest], block_tokens: int, ids: range) -> list[list[int]]:
    """Token ids of the prompts. A block's tokens depend on its number alone; one that is cut short is the beginning of
    the whole one.

    ids  where token ids are taken from
    """
    count = 1 + max(max(each.blocks) for each in requests)
    assert block_tokens % TELLING_TOKENS == 0 and count <= len(ids) ** TELLING_TOKENS, f"{count} blocks, {ids} to tell"
    blocks: list[list[int]] = []
    for number in range(count):
        telling = [ids[number // len(ids) ** place % len(ids)] for place in range(TELLING_TOKENS)]
        blocks.append(telling + random.Random(number).choices(ids, k=block_tokens - TELLING_TOKENS))
    return [[token for number in each.blocks for token in blocks[number]][: each.input_tokens] for each in requests]


def count_matches(requests: Sequence[TraceRequest], block_tokens: int) -> list[int]:
    """Tokens of each prompt that a cache which forgets nothing holds from the prompts before it.

    That is the longest common prefix with any of them, in whole chunks; at least one token is left, since without it
    there would be nothing to compute the answer from: at most floor((s - 1) / 64) chunks of s tokens. Two prompts
    have in common the blocks they both begin with; of the last of these, if it is cut short in one, only what both
    have. Generated tokens are not counted: they are in no prompt.

    block_tokens  tokens of a whole block of these requests
    """
    nodes: dict[tuple[int, int], int] = {}  # a trie: (node, block) -> node; 0 is the root
    held = [0]  # by node: most tokens of its block that any prompt so far has
    matches = []
    for request in requests:
        node = depth = common = 0
        for depth, block in enumerate(request.blocks):
            own = min(block_tokens, request.input_tokens - depth * block_tokens)
            child = nodes.setdefault((node, block), len(held))
            if child == len(held):
                held.append(0)
            if held[child]:
                common = depth * block_tokens + min(held[child], own)
            held[child] = max(held[child], own)
            node = child
        matches.append(min(common, request.input_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS)
    return matches


def count_chunks(requests: Sequence[TraceRequest], matches: Sequence[int]) -> int:
    """Chunks that a cache holds which forgets none of these requests: what each fills with its prompt and its answer,
    but for what it finds. The last token of an answer is never computed.
    """
    filled = (each.input_tokens + each.output_tokens - 1 for each in requests)
    return sum((tokens // CHUNK_TOKENS) - found // CHUNK_TOKENS for tokens, found in zip(filled, matches, strict=True))


def _request(line: int, text: str, numbers: dict[int, int]) -> TraceRequest:
    """One line; ValueError says what is wrong with it. New ids are added to the numbers."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a request is an object, not {text.strip()!r:.60}")
    time, hash_ids = fields.get("timestamp"), fields.get("hash_ids")
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < math.inf:
        raise ValueError(f"timestamp is {time!r:.60}; it must be milliseconds, at least 0")
    for name, least in (("input_length", 1), ("output_length", 0)):
        if type(fields.get(name)) is not int or fields[name] < least:
            raise ValueError(f"{name} is {fields.get(name)!r:.60}; it must be a whole number of at least {least}")
    if not isinstance(hash_ids, list) or any(type(each) is not int for each in hash_ids):
        raise ValueError(f"hash_ids is {hash_ids!r:.60}; it must be a list of whole numbers")
    needed = -(-fields["input_length"] // HASHED_TOKENS)
    if len(hash_ids) != needed:
        raise ValueError(
            f"hash_ids has {len(hash_ids)} ids; {fields['input_length']} tokens in blocks of {HASHED_TOKENS} have"
            f" {needed}"
        )
    blocks = tuple(numbers.setdefault(each, len(numbers)) for each in hash_ids)
    return TraceRequest(line, time / 1000, fields["input_length"], max(1, fields["output_length"]), blocks)
