"""OpenVINO GenAI's continuous batching pipeline with its own cache eviction, on the CPU.

Blocks of 32 tokens are evicted layer by layer, from all heads of a layer at once: after the step that reads the first
id after the prompt, and again whenever a block is full. So a request never holds more than its size and one open block,
its answer included. (A press of kvpress thins only the prompt.) START tokens at the beginning and RECENT at the end are
never evicted. The full cache predicts the first two ids of an answer; until then the pool holds the whole prompt.
Arithmetic is float32, the cache float16.

After a prompt, the pipeline reads only ids that it has chosen itself. For a continuation, its model gets another
output: a table has the true next id at each position, and all logits are replaced so that greedy decoding chooses this
id. Its log-probability then encodes the probability that the model gave it, and whether the model's best id differs
from the full cache's. Such a model is written to a temporary folder for each continuation. Whole distributions are not
available, so there is no divergence. Tasks with ids that are read between the eviction and an answer (`Task.later`) are
left out.
"""

import argparse
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
import openvino
from openvino import opset13 as ops
from openvino_genai import (
    AggregationMode,
    CacheEvictionConfig,
    ContinuousBatchingPipeline,
    GenerationConfig,
    SchedulerConfig,
    __version__,
)
from tasks import FULL, Engine, Result, Task, work

METHOD = "eviction"
BLOCK = 32
START, RECENT = 32, 64
# Scores are summed over the last 8 tokens of the prompt, the pipeline's default. With half and a quarter of the cache,
# 10 and 6 of ten pass keys in 1,000 tokens were found; with 64 tokens 8 and 4. Plain instead of normalized sums gave
# the same.
SCORING_TOKENS = 8
# The pipeline reports the used share of these in percent.
POOL_BLOCKS = 100

# The chosen id's log-probability encodes a loss in nats and a flag: whether the best id differs. It is at least -0.65,
# so the id stays more probable than its only rival. In float32 the loss is exact to 1e-5.
LOSS_UNIT = 100.0
MOST_LOSS = 30.0
OTHER = 0.35


class Runner:
    """The exported model."""

    def __init__(self, folder: str, threads: int) -> None:
        """Loads nothing yet."""
        self.folder = Path(folder)
        self.properties = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f16",
            "INFERENCE_NUM_THREADS": threads,
        }
        # Prompts of equal length are consecutive and share their pipelines.
        self.kept_pipeline = functools.lru_cache(maxsize=4)(self.pipeline)

    def run(self, task: Task) -> Iterator[Result]:
        """Runs the task with the full cache, and with eviction at every share."""
        if task.later:
            return
        if not task.continuation:
            for method, kept, size in sizes(task):
                pipeline = self.kept_pipeline(self.folder, size)
                answer, _, resident = generate(pipeline, task, task.answer_tokens, task.stop)
                yield Result(method, kept, resident, answer=answer)
            return
        reference = self.best_ids([*task.prompt, *task.continuation[:-1]])
        with tempfile.TemporaryDirectory() as folder:
            self.write_forced(Path(folder), [*task.prompt[1:], *task.continuation], reference)
            for method, kept, size in sizes(task):
                pipeline = self.pipeline(Path(folder), size)
                read, codes, resident = generate(pipeline, task, len(task.continuation), [])
                if read != task.continuation:
                    raise RuntimeError("the pipeline chose other ids than those it was to read")
                # The full cache predicted the first id.
                codes = codes[1:]
                others = codes >= OTHER
                surprise = float(((codes - OTHER * others) * LOSS_UNIT).sum())
                yield Result(method, kept, resident, surprise=surprise, agreeing=int((~others).sum()))

    def pipeline(self, folder: Path, size: int) -> ContinuousBatchingPipeline:
        """A pipeline that evicts down to `size` tokens; 0: without eviction."""
        scheduler = SchedulerConfig()
        scheduler.num_kv_blocks = POOL_BLOCKS
        # A prompt is one step.
        scheduler.max_num_batched_tokens = POOL_BLOCKS * BLOCK
        # Together with eviction it gives wrong answers.
        scheduler.enable_prefix_caching = False
        if size:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = CacheEvictionConfig(
                START, RECENT, size, AggregationMode.NORM_SUM, snapkv_window_size=SCORING_TOKENS
            )
        return ContinuousBatchingPipeline(str(folder), scheduler, "CPU", self.properties)

    @functools.cached_property
    def plain(self) -> openvino.CompiledModel:
        """The model without pages."""
        return openvino.Core().compile_model(self.folder / "openvino_model.xml", "CPU", self.properties)

    def best_ids(self, tokens: Sequence[int]) -> numpy.ndarray:
        """i64 [tokens]: the most probable id after each, without eviction."""
        inputs = {
            "input_ids": numpy.array([tokens], numpy.int64),
            "attention_mask": numpy.ones((1, len(tokens)), numpy.int64),
            "position_ids": numpy.arange(len(tokens))[None],
            "beam_idx": numpy.zeros(1, numpy.int32),
        }
        return self.plain.create_infer_request().infer(inputs)["logits"][0].argmax(axis=-1)

    def write_forced(self, folder: Path, following: Sequence[int], reference: numpy.ndarray) -> None:
        """Writes the model that chooses `following[i]` after position i. Its log-probability is minus a code: the loss
        divided by LOSS_UNIT, plus OTHER if the best id is not `reference[i]`.
        """
        model = openvino.Core().read_model(self.folder / "openvino_model.xml")
        positions = next(port.get_node() for port in model.inputs if port.any_name == "position_ids")
        end = model.get_results()[0].input(0)
        logits = end.get_source_output()
        vocabulary = logits.get_partial_shape()[2].get_length()

        def at_position(table: Sequence[int] | numpy.ndarray) -> openvino.Node:
            # The pipeline also passes positions of padding.
            padded = numpy.zeros(POOL_BLOCKS * BLOCK, numpy.int64)
            padded[: len(table)] = table
            found = ops.gather(ops.constant(padded), positions, ops.constant(numpy.int64(0)))
            return ops.unsqueeze(found, last)

        def number(value: float) -> openvino.Node:
            return ops.constant(numpy.float32(value))

        last = ops.constant(numpy.int64(-1))
        wanted = at_position(following)
        best = ops.topk(logits, ops.constant(numpy.int64(1)), 2, "max", "value", index_element_type="i64")
        shifted = ops.subtract(logits, best.output(0))
        total = ops.log(ops.reduce_sum(ops.exp(shifted), last, keep_dims=True))
        loss = ops.subtract(total, ops.gather_elements(shifted, wanted, 2))
        code = ops.clamp(ops.divide(loss, number(LOSS_UNIT)), 1e-7, MOST_LOSS / LOSS_UNIT)
        other = ops.convert(ops.not_equal(best.output(1), at_position(reference)), "f32")
        code = ops.add(code, ops.multiply(other, number(OTHER)))
        # With this rival, a logit of 0 has probability exp(-code).
        rival = ops.log(ops.subtract(ops.exp(code), number(1)))
        next_id = ops.mod(ops.add(wanted, ops.constant(numpy.int64(1))), ops.constant(numpy.int64(vocabulary)))
        ids = ops.constant(numpy.arange(vocabulary).reshape(1, 1, -1))
        others = ops.select(ops.equal(ids, next_id), rival, number(-1e4))
        end.replace_source_output(ops.select(ops.equal(ids, wanted), number(0), others).output(0))
        for file in self.folder.iterdir():
            if not file.name.startswith("openvino_model."):
                (folder / file.name).symlink_to(file.resolve())
        openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)


def sizes(task: Task) -> Iterator[tuple[str, float, int]]:
    """(method, kept, tokens of the cache in whole blocks; 0 for the full one)."""
    yield FULL, 1.0, 0
    for kept in task.kept:
        yield METHOD, kept, BLOCK * round(kept * len(task.prompt) / BLOCK)


def generate(
    pipeline: ContinuousBatchingPipeline, task: Task, tokens: int, stop: list[int]
) -> tuple[list[int], numpy.ndarray, float]:
    """At most `tokens` ids after the prompt, minus their log-probabilities, and the share of the cache that was
    resident when the second of them was read.
    """
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, logprobs=1)
    config.stop_token_ids, config.ignore_eos = set(stop), not stop
    handle = pipeline.add_request(0, openvino.Tensor(numpy.array([task.prompt], numpy.int64)), config)
    used = []
    while pipeline.has_non_finished_requests():
        pipeline.step()
        used.append(pipeline.get_metrics().cache_usage * POOL_BLOCKS / 100)
    (output,) = handle.read_all()
    # The third step is the first after an eviction, and has read two ids.
    resident = used[2] / -(-(len(task.prompt) + 2) // BLOCK)
    return list(output.generated_ids), -numpy.array(output.generated_log_probs), resident


def start(given: argparse.Namespace) -> Engine:
    """The exported model."""
    return Engine(__version__.split("-")[0], Runner(given.model, given.threads).run)


if __name__ == "__main__":
    work(start)
