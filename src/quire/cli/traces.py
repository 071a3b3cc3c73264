"""Request traces: the requests of a server and their times, with hashes in place of text.

A trace has one JSON object per line: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and
`hash_ids`, one per 512 tokens of the prompt; the last may stand for fewer. Prompts that begin with the same ids begin
with the same text. This is the format of the Mooncake traces.

The module also makes prompts for a trace and counts the tokens that they share. It knows ids and lengths and nothing of
the engine, because the engine is checked against its count.
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
"""Tokens per cached chunk."""
TELLING_TOKENS = 4
"""Number of first tokens of a block that identify it. Block lengths are a multiple of this, so no chunk ends after
fewer tokens of a block. Chunks are therefore equal only if their blocks are."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace.

    line           its number in the file, from 1
    seconds        arrival time
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
    """The first `limit` requests of a trace. Raises ConfigError with file and line for an invalid line."""
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
        raise ConfigError(f"the trace {path} has no requests")
    return requests


def scaled(requests: Sequence[TraceRequest], block_tokens: int, output_tokens: int | None) -> list[TraceRequest]:
    """Scales the requests to blocks of `block_tokens` instead of 512. All lengths shrink in proportion, rounded up.

    The number of blocks of a prompt stays the same; rounding may complete a partial last block.
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
    """Token ids of the prompts. The tokens of a block depend only on its number. A partial block is the beginning of
    the
    whole one.

    ids  token ids to use
    """
    count = 1 + max(max(each.blocks) for each in requests)
    assert block_tokens % TELLING_TOKENS == 0 and count <= len(ids) ** TELLING_TOKENS, f"{count} blocks, {ids} to tell"
    blocks: list[list[int]] = []
    for number in range(count):
        telling = [ids[number // len(ids) ** place % len(ids)] for place in range(TELLING_TOKENS)]
        blocks.append(telling + random.Random(number).choices(ids, k=block_tokens - TELLING_TOKENS))
    return [[token for number in each.blocks for token in blocks[number]][: each.input_tokens] for each in requests]


def count_matches(requests: Sequence[TraceRequest], block_tokens: int, *, is_dense: bool) -> list[int]:
    """Expected number of cached tokens of each prompt, in a cache without eviction that holds all earlier prompts.

    This is the longest common prefix with any earlier prompt, in whole chunks. The last token must be computed: if all
    s tokens are cached, a dense cache finds s - 1, and another one the chunks before the last. The common prefix of two
    prompts is their common first blocks; if the last of these is partial in one prompt, only its tokens count.
    Generated tokens do not count, because no prompt has them.

    block_tokens  tokens of a whole block of these requests
    is_dense      whether the cache is dense and keeps every token
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
        common, most = common // CHUNK_TOKENS * CHUNK_TOKENS, request.input_tokens - 1
        matches.append(min(common, most if is_dense else most // CHUNK_TOKENS * CHUNK_TOKENS))
    return matches


def count_chunks(requests: Sequence[TraceRequest], matches: Sequence[int]) -> int:
    """Number of chunks in a cache without eviction after all these requests. Each request adds the chunks that its
    prompt and answer fill, minus the cached ones. The last token of an answer is never computed.
    """
    filled = (each.input_tokens + each.output_tokens - 1 for each in requests)
    return sum(
        tokens // CHUNK_TOKENS - -(-found // CHUNK_TOKENS) for tokens, found in zip(filled, matches, strict=True)
    )


def _request(line: int, text: str, numbers: dict[int, int]) -> TraceRequest:
    """Parses a line and adds new ids to `numbers`. Raises ValueError for an invalid line."""
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
