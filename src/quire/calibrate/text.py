"""The windows of text for a calibration: from a given text, or written by the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.engine.params import SamplingParams
from quire.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.models.tokenizer import Tokenizer


def windows_from_text(tokenizer: Tokenizer, text: str, num_windows: int, window_tokens: int) -> Tensor:
    """Windows int64 [num_windows, window_tokens], spread evenly over a text, each with the model's begin tokens.

    Raises ConfigError if the text is too short for windows without overlap.
    """
    begin = tokenizer.encode("")[:1]
    begin = begin if begin == [tokenizer.bos_id] else []
    ids = torch.tensor(tokenizer.encode(text, add_special=False), dtype=torch.int64)
    body = window_tokens - len(begin)
    if len(ids) < num_windows * body:
        raise ConfigError(
            f"the text has {len(ids):,} tokens, but {num_windows} windows of {window_tokens:,} need"
            f" {num_windows * body:,}; give a longer text, fewer windows or shorter ones"
        )
    starts = [index * (len(ids) - body) // max(1, num_windows - 1) for index in range(num_windows)]
    head = torch.tensor(begin, dtype=torch.int64)
    return torch.stack([torch.cat((head, ids[start : start + body])) for start in starts])


def generate_windows(
    engine: Engine,
    tokenizer: Tokenizer,
    num_windows: int,
    window_tokens: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> Tensor:
    """Windows int64 [num_windows, window_tokens] of text that the model writes without a prompt, at temperature 1.

    Each begins with bos (a random token if the model has no bos) and continues past ends of text.
    """
    draw = random.Random(seed)
    ordinary = sorted(set(range(min(tokenizer.vocab_size, engine.vocab_size))) - tokenizer.special_ids)
    windows: dict[str, list[int]] = {}
    for index in range(num_windows):
        first = draw.choice(ordinary) if tokenizer.bos_id is None else tokenizer.bos_id
        windows[str(index)] = [first]
        params = SamplingParams(
            temperature=1.0, max_tokens=window_tokens - 1, ignore_eos=True, seed=seed + index, detokenize=False
        )
        engine.add(str(index), [first], params)
    total = num_windows * window_tokens
    while engine.has_work:
        for delta in engine.step():
            for output in delta.outputs:
                if output.finish_reason == "error":
                    raise ModelError(f"the model cannot write a text: {output.stop_reason}")
                windows[delta.request_id] += output.token_ids
        progress(sum(map(len, windows.values())), total)
    return torch.tensor(list(windows.values()))
