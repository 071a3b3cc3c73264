"""Models whose heads attend to chosen tokens; and engines that record every decision and logit, to compare with the
oracle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.engine.request import Sequence
from quire.engine.sampler import SamplerOutput
from quire.llm import merge_delta
from quire.models.shape import ModelShape

from . import engines
from .retention_oracle import CHUNK, PUNCTUATION, Oracle, Rules, Run, Seen
from .tiny_models import RandomWeights

BOS = 256
HEAVY = frozenset(range(ord("a"), ord("e")))
"""Ordinary tokens that heads may be told to look at."""

LOST = ord("Q")
"""A token whose rows look everywhere alike, whatever the head is told."""

MOST = 1e-4
"""By how much a logit of the engine may differ from the oracle's."""

ROUNDING = 5e-7
"""By how much keys and values of the engine may differ from the oracle's, of the largest one."""

_CONSTANT, _SPECIAL, _PUNCTUATION, _HEAVY = range(4)
_NUM_FEATURES = 4


@dataclass(frozen=True)
class Head:
    """How strongly a head looks at tokens of a kind, at those just before the row, and at random."""

    special: float = 0.0
    punctuation: float = 0.0
    heavy: float = 0.0
    near: float = 0.0
    noise: float = 0.0


class HeadWeights(RandomWeights):
    """Random weights but for the queries and keys of heads, [L][H] (all query heads of a kv head look alike, unless
    there are as many `queries`, by layer and query head, with a share of it each).

    The first channels of the residual stream say what a token is and are never written to.
    """

    def __init__(
        self, shape: ModelShape, heads: list[list[Head]], seed: int = 0, shares: list[float] | None = None
    ) -> None:
        super().__init__(shape, seed)
        self.heads = heads
        self.shares = shares or [1.0] * shape.num_q_heads

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        found = super().tensor(name, dtype)
        shape = self.shape
        part = name.split(".")[-2]
        if name == "embed.weight":
            found[:, :_NUM_FEATURES] = 0.0
            found[:, _CONSTANT] = 1.0
            found[[BOS, BOS + 1], _SPECIAL] = 1.0
            found[sorted(PUNCTUATION), _PUNCTUATION] = 1.0
            found[sorted(HEAVY), _HEAVY] = 1.0
            found[LOST, _CONSTANT] = 0.0
        elif part in ("o", "down"):
            found *= 0.3
            found[:_NUM_FEATURES] = 0.0
        elif part in ("q", "k"):
            heads = self.heads[int(name.split(".")[1])]
            found = found.view(-1, shape.head_dim, shape.hidden_size).clone()
            group = len(found) // len(heads)
            half = shape.head_dim // 2
            for number, head in enumerate(heads):
                for row in range(number * group, (number + 1) * group):
                    share = self.shares[row] if part == "q" else 1.0
                    found[row] *= head.noise**0.5
                    found[row, :, :_NUM_FEATURES] = 0.0
                    # The pair of channels that turns least, for what tokens are; those that turn most for where.
                    if part == "q":
                        found[row, half - 1, _CONSTANT] = share
                        found[row, :3, _CONSTANT] = share * head.near
                    else:
                        found[row, half - 1, :_NUM_FEATURES] = torch.tensor(
                            [0.0, head.special, head.punctuation, head.heavy]
                        )
                        found[row, :3, _CONSTANT] = 1.0
            found = found.view(-1, shape.hidden_size)
        return found


@dataclass
class EngineRecorder:
    """Writes down what an engine does.

    logits       of every token that was sampled, by sequence
    kept         what sequences kept, after how many sealed chunks
    is_changed   sequences that kept something else when they were computed again
    sequences    of requests, by name
    """

    engine: Engine
    logits: dict[Sequence, list[Tensor]] = field(default_factory=dict)
    kept: dict[Sequence, dict[int, Seen]] = field(default_factory=dict)
    is_changed: set[Sequence] = field(default_factory=set)
    sequences: dict[str, list[Sequence]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        engine, sample = self.engine, self.engine.runner.sampler.sample
        by_row: dict[int, Sequence] = {}

        def sampled(logits: Tensor, rows: Any) -> SamplerOutput:
            live = {each.sequence_id: each for each in engine.scheduler.running}
            by_row.update((id(row), live[name]) for name, row in engine.runner._rows.items() if name in live)
            for each, row in zip(logits, rows, strict=True):
                self.logits.setdefault(by_row[id(row)], []).append(each[: engine.runner.sampler.vocab_size].clone())
            return sample(logits, rows)

        engine.runner.sampler.sample = sampled  # type: ignore[method-assign]

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        """Queues a request."""
        self.sequences[name] = list(self.engine.add(name, prompt, params).sequences)

    def step(self, collected: dict[str, RequestOutput]) -> None:
        """One step of the engine, which then has to be whole."""
        for delta in self.engine.step():
            merge_delta(collected, delta)
        has_news = not self.engine.scheduler.running
        for sequence in self.engine.scheduler.running:
            path = sequence.path
            has_news |= path.num_tokens % CHUNK < 2 or path.num_tokens <= sequence.num_prompt + 1
            if path.retention.retained is not None:
                self._note(sequence)
        if has_news:
            self.engine.check()

    def drain(self, collected: dict[str, RequestOutput] | None = None) -> dict[str, RequestOutput]:
        """Steps until nothing is left."""
        collected = {} if collected is None else collected
        steps = 0
        while self.engine.has_work:
            steps += 1
            assert steps < 20_000, "the engine works and nothing ends"
            self.step(collected)
        return collected

    def _note(self, sequence: Sequence) -> None:
        path, known = sequence.path, self.kept.setdefault(sequence, {})
        retained = path.retention.retained
        assert retained is not None
        if path.num_tokens % CHUNK and path.num_tokens != sequence.num_prompt:
            return
        policies: list[list[int]] = retained.policies.tolist()
        kept = [[frozenset(each[each >= 0].tolist()) for each in of_layer] for of_layer in retained.positions]
        seen = Seen(policies, kept)
        if known.setdefault(path.num_sealed, seen) != seen:
            self.is_changed.add(sequence)


@dataclass
class Bench:
    """An engine with retention, watched, and the oracle of its model and settings."""

    shape: ModelShape
    weights: RandomWeights
    rules: Rules
    backend: str = "cpu"
    chunks: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.witness = EngineRecorder(self.engine())
        table = self.witness.engine.scheduler.manager.table
        page_bytes = table.page_sizes(table.sealed_codec).ravel().tolist() if self.rules.budget is not None else [0]
        assert len(set(page_bytes)) == 1, "the oracle deals pages of one size"
        rules = replace(self.rules, page_bytes=page_bytes[0])
        self.oracle = Oracle(self.shape, self.weights, rules, self._stored if table.encodes else None)
        self.runs: dict[Sequence, Run] = {}
        self.nudges: torch.Generator | None = None

    def engine(self, **options: Any) -> Engine:
        """An engine of the model; options come on top of those that retain."""
        rules = self.rules
        retain: dict[str, Any] = {"retain.profile_rows": rules.profile_rows}
        if rules.budget is not None:
            retain["retain.budget"] = rules.budget
        else:
            retain |= {
                "retain.threshold": rules.threshold,
                "retain.frequent": rules.frequent,
                "retain.local": rules.local,
                "retain.chain": ",".join(rules.members),
            }
        options = {"attention.backend": self.backend, "runtime.threads": 1, **retain, **self.options, **options}
        if options.get("retain.threshold") == "off":
            options = {key: value for key, value in options.items() if not key.startswith("retain.")}
        engine = engines.make_engine(self.shape, chunks=self.chunks, weights=self.weights, **options)
        retainer = engine.scheduler.manager.retainer
        if retainer is not None:
            retainer.retention = replace(retainer.retention, special=rules.special, punctuation=rules.punctuation)
        return engine

    def _stored(self, layer: int, chunk: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A chunk, encoded and decoded, but for the first tokens of a sequence."""
        table = self.witness.engine.scheduler.manager.table
        exact = table.sinks.num_tokens if table.sinks is not None and chunk == 0 else 0
        parts = keys.clone(), values.clone()
        for part in parts:
            if self.nudges is not None:
                signs = torch.randint(0, 2, part.shape, generator=self.nudges) * 2 - 1
                part += signs * part.abs().amax() * ROUNDING
            part[:, :exact] = 0.0
        decoded = [
            table.sealed_codec.decode(layer, head, table.sealed_codec.encode(layer, head, k[None], v[None]))
            for head, (k, v) in enumerate(zip(*parts, strict=True))
        ]
        found = tuple(torch.cat([pair[part] for pair in decoded]).float() for part in (0, 1))
        for part, given in zip(found, (keys, values), strict=True):
            part[:, :exact] = given[:, :exact]
        return found[0], found[1]

    def check(self) -> None:
        """Holds all that the engine did so far to the oracle."""
        for sequences in self.witness.sequences.values():
            for sequence in sequences:
                if sequence not in self.runs and (logits := self.witness.logits.get(sequence)):
                    self.runs[sequence] = self._check(sequence, logits)

    def _check(self, sequence: Sequence, logits: list[Tensor]) -> Run:
        tokens, n = sequence.token_ids, sequence.num_prompt
        assert len(logits) == len(tokens) - n
        seen = self.witness.kept.get(sequence, {})
        run = self.oracle.run(tokens, n, seen)
        for sealed, other in seen.items():
            assert other.policies == run.policies, f"policies after {sealed} chunks"
        if sequence.kept_fraction is not None and not run.num_ties:
            open_chunk = frozenset(range(n // CHUNK * CHUNK, n))
            kept = [len(each | open_chunk) for of_layer in run.of_prompt for each in of_layer]
            assert abs(sequence.kept_fraction - sum(kept) / (len(kept) * n)) < 1e-9
        if sequence in self.witness.is_changed:
            assert run.num_ties, "computed again, it keeps something else"
            return run
        answered = torch.stack(logits)
        differ = (answered - run.logits).abs().amax(-1)
        if self.oracle.stored is not None and float(differ.max()) >= MOST:
            run, differ = self._with_other_edges(sequence, answered, seen)
        assert float(differ.max()) < MOST, f"logits differ by {differ.tolist()}"
        if sequence.request.params.greedy:
            chosen = run.logits.gather(1, torch.tensor(tokens[n:])[:, None])[:, 0]
            assert (chosen >= run.logits.amax(-1) - 2 * float(differ.max()) - 1e-4).all()
        return run

    def _with_other_edges(self, sequence: Sequence, answered: Tensor, seen: dict[int, Seen]) -> tuple[Run, Tensor]:
        """The oracle's run that is nearest to the engine's, of several whose keys and values are rounded otherwise.

        About one number in a million stands so near the edge between two codes that rounding decides, here one way and
        there the other. Then the engine's answers are those of one of these runs, and still within `MOST`.
        """
        found: list[tuple[Run, Tensor]] = []
        for seed in range(64):
            self.nudges = torch.Generator().manual_seed(seed)
            run = self.oracle.run(sequence.token_ids, sequence.num_prompt, seen)
            found.append((run, (answered - run.logits).abs().amax(-1)))
            if float(found[-1][1].max()) < MOST:
                break
        self.nudges = None
        return min(found, key=lambda each: float(each[1].max()))
