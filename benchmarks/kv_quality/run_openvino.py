"""OpenVINO's CPU plugin with a paged cache: the model of GenAI's pipeline, called directly for its logits.

The pipeline does not return probabilities of prompt tokens read in slices. Like the pipeline, this script first
transforms the stateful model into one with paged attention. The compiled model names the type and shape of its pages.
Sizes are those of the tensors that we pass. A page has 32 tokens, and keys are quantized per channel within a page, so
slices of whole pages never quantize a key twice.
"""

import argparse
from pathlib import Path

import numpy
import openvino
from openvino._offline_transformations import paged_attention_transformation
from windows import Cache, Engine, Score, Windows, serve, slices

Properties = dict[str, str | int]

GROUPS_OF_32 = {"KEY_CACHE_GROUP_SIZE": 32, "VALUE_CACHE_GROUP_SIZE": 32}
CACHES: dict[str, Cache[Properties]] = {
    "f16": Cache(16, {"KV_CACHE_PRECISION": "f16"}),
    "u8": Cache(8, {"KV_CACHE_PRECISION": "u8"}),
    "key u8, value u4": Cache(4, {"KEY_CACHE_PRECISION": "u8", "VALUE_CACHE_PRECISION": "u4"}),
    "u4": Cache(4, {"KV_CACHE_PRECISION": "u4"}),
    "u4 groups of 32": Cache(4, {"KV_CACHE_PRECISION": "u4", **GROUPS_OF_32}),
}


class Paged:
    """A compiled model, and the pages of one sequence of `tokens` tokens, alone in its cache."""

    def __init__(self, compiled: openvino.CompiledModel, tokens: int) -> None:
        """Makes zeroed pages."""
        self.request = compiled.create_infer_request()
        self.bytes = 0
        for port in compiled.inputs:
            if port.any_name.startswith("value_cache"):
                # Only this input has no scales in the dimension of tokens.
                self.page_tokens = port.partial_shape[2].get_length()
        pages = -(-tokens // self.page_tokens)
        for port in compiled.inputs:
            if port.any_name.startswith(("key_cache", "value_cache")):
                inner = [port.partial_shape[i].get_length() for i in range(1, 4)]
                tensor = openvino.Tensor(port.element_type, openvino.Shape([pages, *inner]))
                tensor.data[:] = 0
                self.bytes += tensor.byte_size
                self.request.set_tensor(port.any_name, tensor)

    def logits(self, begin: int, tokens: list[int]) -> numpy.ndarray:
        """Logits [tokens, vocabulary] of a slice from position `begin` on. Writes the slice to the pages."""
        end = begin + len(tokens)
        pages = -(-end // self.page_tokens)
        given = {
            "input_ids": numpy.array(tokens, numpy.int64),
            "position_ids": numpy.arange(begin, end),
            "max_context_len": numpy.array(end, numpy.int32),
            "past_lens": numpy.array([begin], numpy.int32),
            "subsequence_begins": numpy.array([0, len(tokens)], numpy.int32),
            "block_indices": numpy.arange(pages, dtype=numpy.int32),
            "block_indices_begins": numpy.array([0, pages], numpy.int32),
        }
        return self.request.infer(given)["logits"].reshape(len(tokens), -1)


def surprise(logits: numpy.ndarray, tokens: list[int]) -> float:
    """Sum of -ln p of a token under each row."""
    logits = logits[: len(tokens)].astype(numpy.float64)
    logits -= logits.max(axis=1, keepdims=True)
    found = logits[numpy.arange(len(tokens)), tokens]
    return float((numpy.log(numpy.exp(logits).sum(axis=1)) - found).sum())


def start(given: argparse.Namespace) -> Engine[Properties]:
    """The exported model, compiled for each cache, in float32."""
    core = openvino.Core()
    model = core.read_model(Path(given.model) / "openvino_model.xml")
    paged_attention_transformation(model)
    model.validate_nodes_and_infer_types()

    def measure(properties: Properties, windows: Windows) -> Score:
        fixed = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": given.threads}
        tokens = max(len(window) for window in windows)
        paged = Paged(core.compile_model(model, "CPU", {**fixed, **properties}), tokens)
        totals = [
            sum(surprise(paged.logits(begin, own), following) for begin, own, following in slices(window))
            for window in windows
        ]
        return Score(paged.bytes / tokens, totals)

    return Engine(openvino.__version__.split("-")[0], CACHES, measure)


if __name__ == "__main__":
    serve(start)
