"""transformers' QuantizedCache, with the packages quanto and hqq.

Whenever 128 exact tokens have accumulated, the cache decodes all its contents and quantizes everything again. The first
slice is quantized at once.
"""

import argparse
from typing import Any

import transformers
from torch_model import ExactCache, HalfCache, Model
from transformers import QuantizedCache
from windows import Cache, Engine, serve

# Groups of 64, up to 128 exact tokens and axis 0 are defaults. For quanto, axis 0 means groups within one token and
# head. For hqq that is axis 1, which its documentation recommends; axis 0 groups numbers from the whole window. hqq
# cannot read back 3 bits along axis 1, because it cuts the codes to a length that is right only for matrices.
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
    """A QuantizedCache that gets float16."""


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
