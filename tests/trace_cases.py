"""Traces of requests with shared prefixes, and what they match."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

TraceRequest = tuple[int, int, list[int]]
"""input_length, output_length, hash_ids"""


def blocks(*ids: int, cut: int = 0, answer: int = 512) -> TraceRequest:
    """A request for whole blocks, the last one cut by so many tokens."""
    return 512 * len(ids) - cut, answer, list(ids)


FORKS: list[TraceRequest] = [
    blocks(0, 1, 2, 3, 4),  # 160 tokens at 32 a block
    blocks(0, 1, 2, 3, 4),  # the same again: two chunks of 2.5
    blocks(0, 1, 2, 3),  # exactly two chunks: only one may match
    blocks(0, 1, 2, 3),
    blocks(0, 1, 2, 3, 5, 6),  # a fork on a chunk boundary
    blocks(0, 1, 2, 7, 8, 9),  # a fork inside a chunk
    blocks(0, 1, 2, 7, 8, 9, 10, 11, cut=100),  # goes on after it
    blocks(0, 1, 2, 7, 8, 9, 10, 11, 12, answer=2048),  # fills up a block that was cut short, with a long answer
    blocks(0, 1, 2, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16),  # and on, where the cache has that answer
    blocks(2, 1, 0),  # the same ids elsewhere
    blocks(17, cut=511),  # one token
    blocks(17, cut=511),
    blocks(17, 18, 19, cut=510, answer=1),
    blocks(17, 18, 19, 20),
]


def write(path: Path, requests: list[TraceRequest], every: float = 100.0) -> Path:
    keys = ("input_length", "output_length", "hash_ids")
    lines = [{"timestamp": every * index} | dict(zip(keys, each, strict=True)) for index, each in enumerate(requests)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def random_trace(draw: random.Random, count: int) -> list[TraceRequest]:
    """Requests that begin like earlier ones, cut anywhere, and go on with known or new ids."""
    requests: list[TraceRequest] = []
    for _ in range(count):
        ids = list(draw.choice(requests)[2]) if requests and draw.random() < 0.8 else []
        ids = ids[: draw.randint(0, len(ids))]
        ids += [draw.randrange(40) for _ in range(draw.randint(0 if ids else 1, 4))]
        cut = draw.choice([0, 0, 1, 17, 32, 500, 511])
        requests.append(blocks(*ids, cut=cut, answer=draw.choice([0, 3, 512, 900])))
    return requests


def counted_on_tokens(prompts: list[list[int]], is_dense: bool) -> list[int]:
    """The same count without ids: every prompt against every earlier one, token by token."""
    found = []
    for index, prompt in enumerate(prompts):
        best = 0
        for earlier in prompts[:index]:
            equal = 0
            for left, right in zip(prompt, earlier, strict=False):
                if left != right:
                    break
                equal += 1
            best = max(best, equal)
        last = (len(prompt) - 1) // 64 * 64
        found.append(min(best // 64 * 64, len(prompt) - 1 if is_dense else last))
    return found


def conversation(data_dir: Path) -> Path:
    path = data_dir / "traces" / "mooncake_conversation.jsonl"
    if not path.is_file():
        pytest.skip(f"no trace at {path}")
    return path
