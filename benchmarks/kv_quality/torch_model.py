"""The model in PyTorch with any of transformers' caches: scores windows, and counts the cache's tensors.

Weights and arithmetic are float32. The cache gets float16, as on a GPU: scales, zero points and exact tokens take two
bytes per number, and no other rounding is attributed to the cache.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Cache, DynamicCache
from windows import Score, Windows, slices


class HalfCache(Cache):
    """Connects a float32 model with a float16 cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Stores float16, returns float32."""
        keys, values = super().update(key_states.half(), value_states.half(), *rest, **named)
        return keys.float(), values.float()


class ExactCache(HalfCache, DynamicCache):
    """All tokens in float16."""


class Model:
    """The checkpoint in float32."""

    def __init__(self, folder: str, threads: int) -> None:
        """Load it."""
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.config = self.model.config

    @torch.inference_mode()
    def score(
        self,
        make_cache: Callable[[], Cache],
        windows: Windows,
        held: Callable[[Cache], object] = lambda cache: cache.layers,
    ) -> Score:
        """Scores every window with a new cache. `held` returns the objects from which all its tensors are reachable."""
        surprise, held_bytes = [], 0
        for window in windows:
            cache, total = make_cache(), 0.0
            for begin, tokens, following in slices(window):
                positions = torch.arange(begin, begin + len(tokens))[None]
                logits = self.model(
                    torch.tensor([tokens]), position_ids=positions, past_key_values=cache, use_cache=True
                ).logits[0, : len(following)]
                total += cross_entropy(logits, torch.tensor(following), reduction="sum").item()
            surprise.append(total)
            held_bytes = sum(storages(held(cache)).values())
        return Score(held_bytes / len(windows[-1]), surprise)


def storages(value: object) -> dict[int, int]:
    """Address -> bytes of the storages of all tensors that are reachable from a value."""
    if isinstance(value, Tensor):
        # A subclass made of several tensors has no bytes of its own.
        if hasattr(value, "__tensor_flatten__"):
            return storages([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()} if storage.nbytes() else {}
    if isinstance(value, dict):
        return storages(value.values())
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return storages(vars(value).values())
    if isinstance(value, Iterable) and not isinstance(value, str):
        found: dict[int, int] = {}
        for each in value:
            found |= storages(each)
        return found
    return {}
