"""transformers' QuantizedCache, with the packages quanto and hqq behind it.

Each time 128 tokens have gathered beside it the cache decodes all it holds and quantizes everything anew. The first
slice is quantized at once.
"""

import argparse
from typing import Any

import transformers
from torch_model import ExactCache, HalfCache, Model
from transformers import QuantizedCache
from windows import Cache, Engine, serve

# Groups of 64 and up to 128 tokens kept exact: its defaults. So is axis 0, which for quanto means groups of one token
# and head; for hqq that is axis 1, what its documentation recommends, and 0 groups numbers from all over the window.
# hqq cannot read back 3 bits along axis 1: it cuts the codes to a length that is right for matrices only.
AXIS_1 = {"axis_key": 1, "axis_value": 1}
CACHES: dict[str, Cache[dict[str, Any]]] = {
    "f16": Cache(16, {}),
    "quanto-4": Cache(4, {"backend": "quanto", "nbits": 4}),
    "quanto-2": Cache(2, {"backend": "quanto", "nbits": 2}),
    "hqq-4": Cache(4, {"backend": "hqq", "nbits": 4}),
    "hqq-4 axis 1": Cache(4, {"backend": "hqq", "nbits": 4, **AXIS_1}),
    "hqq-3": Cache(3, {"backend": "hqq", "nbits": 3}),
    "hqq-2 axis 1": Cache(2, {"backend": "hqq", "nbits": 2, **AXIS_1}),
}


class HalfQuantizedCache(HalfCache, QuantizedCache):
    """A QuantizedCache that is given float16."""


def start(given: argparse.Namespace) -> Engine[dict[str, Any]]:
    """The checkpoint and its caches."""
    model = Model(given.model, given.threads)

    def make(settings: dict[str, Any]) -> HalfCache:
        return HalfQuantizedCache(config=model.config, **settings) if settings else ExactCache(config=model.config)

    return Engine(
        transformers.__version__, CACHES, lambda settings, windows: model.score(lambda: make(settings), windows)
    )


if __name__ == "__main__":
    serve(start)
