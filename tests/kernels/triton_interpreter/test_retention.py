"""Masks of pages, column sums and recovery in the interpreter, compared with the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.attention.plan import AttentionPlan
from quire.attention.reference import ReferenceAttention
from quire.attention.spec import AttentionSpec
from quire.attention.triton import TritonAttention
from quire.engine.graphs import DecodeGraphs
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams

from ...effort import IS_FULL, whole
from ...retention_cases import BOS, Bench, Head, HeadWeights
from ...retention_oracle import Rules
from ...tiny_models import tiny_shape
from ..harness import Shape, make_spec, relative_rms
from ..masking import check_hidden
from ..placing import ROW_TOLERANCE, check_batch, check_sharers
from ..profiling import HISTORY, Prompts, Steps, check_history
from .test_graphs import FakeGraph, Recorder, install_fakes

SHAPES = [
    Shape(dim=16, group=3, heads=1, layers=1),
    Shape(dim=64, group=4, heads=1, layers=1, dtype=torch.bfloat16),
    Shape(dim=80, group=1, heads=2, layers=1, dtype=torch.float16),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"D{shape.dim}-G{shape.group}-{shape.dtype}")


@each_shape
@pytest.mark.parametrize("num_rows, prefills", [(1, []), (7, []), (20, []), (3, [(130, 1), (65, 40), (0, 70)])])
def test_pages_with_masks_are_attended_to_and_profiled_like_the_reference(
    shape: Shape, num_rows: int, prefills: list[tuple[int, int]], seed: int
) -> None:
    check_hidden(TritonAttention, shape, seed % 10000, num_rows=num_rows, prefills=prefills)


@each_shape
def test_prompts_are_profiled_like_the_reference(shape: Shape, seed: int) -> None:
    steps = HISTORY[:3] if IS_FULL else HISTORY[1:3] if shape is SHAPES[0] else HISTORY[2:3]
    check_history(TritonAttention, shape, None, steps, seed=seed % 100)


def test_every_layer_keeps_its_own_rows(seed: int) -> None:
    check_history(TritonAttention, Shape(dim=16, layers=2), None, [[(0, 70, 20), (1, 5, 2)]], seed=seed % 100)


ENCODED: Steps = [
    [(0, 70, 20), (1, 3, 3)],  # a chunk that is seen as computed and as stored
    [(0, 1, None), (1, 62, 62)],  # one that is filled from its middle on
    [(0, 60, 10), (1, 1, 1)],
]


@pytest.mark.parametrize(
    "shape, codec, sinks",
    whole(
        [
            (Shape(dim=16, group=3, heads=1, layers=1), "mixed", 5),
            (Shape(dim=80, group=1, heads=1, layers=1, dtype=torch.float16), "g4", 1),
            (Shape(dim=32, group=4, heads=1, layers=1, dtype=torch.bfloat16), "nuq3", 0),
        ],
        2,
    ),
    ids=str,
)
def test_prompts_with_encoded_chunks_are_profiled_like_the_reference(shape: Shape, codec: str, sinks: int) -> None:
    """Own chunks as they were computed, those before them as they are stored; first tokens exact."""
    check_history(TritonAttention, shape, codec, ENCODED, sinks=sinks)


def test_every_head_is_profiled_with_its_own_key_bias() -> None:
    check_history(TritonAttention, Shape(dim=16, group=1, layers=1), "g4", [[(0, 64, 0)], [(0, 2, 2)]])


def test_prompts_that_see_themselves_as_computed_are_profiled_so() -> None:
    check_history(TritonAttention, Shape(dim=16, layers=1, heads=1), "g4", ENCODED, strict=False)


@pytest.mark.parametrize(
    "shape, codec, sinks",
    [
        (Shape(dim=16, group=3, layers=1), "mixed", 5),
        (Shape(dim=48, group=1, layers=1, heads=1, dtype=torch.bfloat16), "nuq3", 0),
        (Shape(dim=64, group=4, layers=1, heads=1, dtype=torch.float16), "g4", 1),
        (Shape(dim=16, group=1, layers=1, rotate=False), "mixed", 1),
    ],
    ids=str,
)
def test_encoded_pages_with_positions_of_their_own_attend_and_are_profiled_like_the_reference(
    shape: Shape, codec: str, sinks: int
) -> None:
    """Of some pages heads see a part; a row that fills its chunk, and one that begins one."""
    for hides in (False, True):
        check_batch(TritonAttention, shape, codec, [200, 128, 255], sinks=sinks, hides=hides, tolerance=ROW_TOLERANCE)


def test_sharers_of_pages_with_positions_of_their_own_attend_like_the_reference() -> None:
    shape = Shape(heads=1, group=3, dim=16, layers=1)
    backend = check_sharers(TritonAttention, shape, "mixed", 5, sinks=1)
    assert isinstance(backend, TritonAttention) and backend._last is not None and backend._last.shares


@pytest.mark.parametrize("window", [5, 100])
def test_columns_outside_a_window_get_nothing(window: int) -> None:
    check_history(TritonAttention, Shape(dim=16, layers=1, heads=1, window=window), None, whole(HISTORY, 2))


class Attending:
    """Attention of every layer in place of a model; what a row asks and stores follows from its token."""

    shape = None

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        heads = spec.layers[0].num_kv_heads * (spec.layers[0].group_size + 2)
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(spec.num_layers, 50, heads, spec.layers[0].head_dim, generator=generator).to(spec.dtype)

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        found = []
        for layer, rows in enumerate(self.rows):
            num_kv = self.spec.layers[0].num_kv_heads
            q, k, v = rows[tokens].split([num_kv * self.spec.layers[0].group_size, num_kv, num_kv], 1)
            plan.write(layer, k, v)
            found.append(plan.attend(layer, q)[: len(tokens)])
        return torch.cat(found, 1)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()


def test_a_replayed_step_adds_to_sums_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whether it was captured, replayed or only moved on, and across a chunk's end; padded rows add nothing."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    captured: list[FakeGraph] = []
    found, built = [], 0
    for backend_of in (ReferenceAttention, TritonAttention):
        spec = make_spec(Shape(dim=16, group=2, layers=2), 12, sums=True)
        backend, prompts, model = backend_of(spec), Prompts(spec), Attending(spec)
        decode = model.hidden
        if isinstance(backend, TritonAttention):
            recorder = Recorder(model)
            decode = DecodeGraphs(recorder, backend, (1, 2, 4)).replay
            install_fakes(monkeypatch, recorder, captured)
        generator = torch.Generator().manual_seed(seed)
        outputs = []
        for step in range(6):
            rows = [(name, (20, 61, 3)[name] if step == 0 else 1, 0) for name in range(3 if step < 5 else 2)]
            positions = torch.tensor([prompts.sequences.lengths.get(name, 0) for name, *_ in rows])
            # In the step after these two the second row begins a chunk.
            plan = backend.plan(prompts.step(rows), [] if step in (2, 3) else None)
            tokens = torch.randint(50, (sum(count for _, count, _ in rows),), generator=generator)
            if step == 0:
                model.hidden(tokens, positions, plan)
            else:
                outputs.append(decode(tokens, positions, plan).clone())
        found.append([*outputs, *(torch.from_numpy(prompts.of(name)) for name in range(3))])
        built = getattr(backend, "plans_built", 0)
    assert len(captured) == 2 and built == 4, "one moves on, one has a new chunk, one has fewer rows"
    for number, (expected, actual) in enumerate(zip(*found, strict=True)):
        assert relative_rms(actual, expected) < 1e-5, f"step {number}" if number < 5 else f"sums of {number - 5}"


def random_prompt(random: np.random.Generator, length: int) -> list[int]:
    return [BOS, *random.choice([*range(97, 123), *b" ,.:?"], length - 1).tolist()]


@pytest.mark.parametrize("budget, codec", whole([(0.5, "g4"), (None, "dense"), (0.5, "dense")], 2))
def test_an_engine_keeps_and_answers_like_the_oracle(
    monkeypatch: pytest.MonkeyPatch, seed: int, budget: float | None, codec: str
) -> None:
    """Prompts that are decided on beside answers, some heads with frequent tokens; decode steps are graphs. Answers
    cross one seal, in a full run two.
    """
    shape = tiny_shape()
    heads = [[Head(special=3, noise=1.0), Head(near=3, noise=1.0)], [Head(heavy=3, noise=2.0), Head(noise=3.0)]]
    rules = Rules(threshold=0.8, frequent=0.2, local=0.2, profile_rows=20, budget=budget)
    options = {"scheduler.max_running": 4, "scheduler.token_budget": 200, "cache.codec": codec}
    bench = Bench(shape, HeadWeights(shape, heads, seed=1), rules, "reference", options=options)
    engine = bench.witness.engine
    backend = engine.runner.attention = TritonAttention(engine.runner.attention.spec)  # type: ignore[attr-defined]
    captured: list[FakeGraph] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    recorder = Recorder(engine.runner.model)
    engine.runner.decode = DecodeGraphs(recorder, backend, (1, 2, 4)).replay
    install_fakes(monkeypatch, recorder, captured)
    random = np.random.default_rng(seed)
    common = random_prompt(random, 70)
    outputs: dict[str, RequestOutput] = {}
    params = SamplingParams(max_tokens=70 if IS_FULL else 8, temperature=0.0, ignore_eos=True)
    for name, length in (("first", 118), ("second", 119)):
        # A special token late in the prompt would have its page kept, and with it everything.
        bench.witness.add(name, common + random_prompt(random, length)[budget is not None :], params)
        for _ in range(5):
            bench.witness.step(outputs)
    bench.witness.drain(outputs)
    bench.check()
    kept = [each.kept_fraction for each in outputs.values()]
    assert all(each is not None and each < 1 for each in kept), kept
    assert len(captured) == 2, "one row, and two"
