"""Quire's retention on the CPU: pages allocated to heads for a share of the prompt's bytes.

One engine runs all shares. After the first share, the prefix tree has the prompt but for its last rows; the decisions
do not depend on this. Weights, arithmetic and cache are bfloat16. A continuation is decoded token by token, like a
request: a sampler that returns the true id, and records its log-probabilities, replaces the engine's. So heads continue
to change what they keep with every chunk that fills, and new tokens are dropped too.

Tasks with ids that are read between the thinning and an answer (`Task.later`) are left out: a prompt is thinned once,
when it is complete.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tasks import FULL, Engine, Result, Task, work

import quire
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.retention.decisions import RANKED, RetentionDecision
from quire.cache.retention.policies import PolicyChain
from quire.cache.retention.protocol import KeepAll
from quire.cache.retention.retainer import Retainer
from quire.config import EngineConfig
from quire.engine.params import SamplingParams
from quire.engine.sampler import SamplerOutput, SampleRow
from quire.load import load_engine

METHOD = "retention"


@dataclass
class Teacher:
    """Replaces the engine's sampler: row i of a request gets the i-th id.

    ids    the ids to return
    found  float32 [V] for every row: its log-probabilities
    """

    ids: list[int]
    found: list[torch.Tensor] = field(default_factory=list)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> SamplerOutput:
        """As `Sampler.sample`."""
        (row,) = rows
        assert row.step == len(self.found), f"row {row.step} after {len(self.found)}"
        self.found.append(torch.log_softmax(logits[0].float(), -1))
        return SamplerOutput(torch.tensor([self.ids[row.step]]), [None], {})


class Runner:
    """The engine. Its retention is set anew for each share."""

    def __init__(self, folder: str, threads: int, settings: dict[str, Any] | None = None) -> None:
        """Loads it. settings: those of `retain` besides the budget."""
        options = {f"retain.{key}": value for key, value in (settings or {}).items()}
        options |= {"model.dtype": "bfloat16", "runtime.device": "cpu", "runtime.threads": threads}
        options |= {"retain.budget": 1.0, "cache.memory": "1GiB"}
        self.engine = load_engine(folder, EngineConfig.from_options(options)).engine
        self.manager = self.engine.scheduler.manager
        assert self.manager.retainer is not None
        self.retainer = self.manager.retainer
        self.retention = self.retainer.retention
        self.decided: RetentionDecision | None = None
        self.resident = 1.0
        self.retainer.on_decision = self._watch

    def run(self, task: Task) -> Iterator[Result]:
        """Runs the task with the full cache, and at every share."""
        if task.later:
            return
        reference = None
        for method, kept in ((FULL, 1.0), *((METHOD, kept) for kept in task.kept)):
            self.set(kept if method == METHOD else None)
            if not task.continuation:
                answer, end = self.generate(task.prompt, task.answer_tokens, task.stop)
                yield Result(method, kept, self.resident, answer=answer, resident_end=end)
                continue
            rows, end = self.read(task.prompt, task.continuation)
            reference = rows if reference is None else reference
            yield Result(
                method, kept, self.resident, resident_end=end, **compare(rows, reference, task.continuation[1:])
            )

    @contextmanager
    def without_retention(self) -> Iterator[None]:
        """Requests run as in an engine without retention."""
        self._swap_retention(KeepAll(self.manager.table, False))
        try:
            yield
        finally:
            self._swap_retention(self.retainer)

    def _swap_retention(self, retention: KeepAll | Retainer) -> None:
        for each in (self.manager, self.manager.reservations, self.manager.paths):
            each.retention = retention

    def set(self, budget: float | None, threshold: float = 2.0) -> None:
        """Sets the budget, a share of the bytes; None: a threshold, which above 1 keeps everything."""
        chain = RANKED if budget is not None else PolicyChain(threshold)
        self.retainer.retention = replace(self.retention, chain=chain, budget=budget)

    def generate(self, prompt: list[int], tokens: int, stop: Sequence[int] = ()) -> tuple[list[int], float]:
        """At most `tokens` greedy ids after a prompt, up to one of `stop`; and the share of the full cache's bytes that
        is held then.
        """
        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, stop_token_ids=list(stop), detokenize=False
        )
        request = self.engine.add("task", list(prompt), params)
        (sequence,) = request.sequences
        written, end, self.resident = [], 1.0, 1.0
        while self.engine.has_work:
            path, table = sequence.path, self.manager.table
            if path.retention.retained is not None:
                full = -(-len(sequence.token_ids) // PAGE_TOKENS) * self.manager.statistics.chunk_bytes
                end = table.bytes_of(np.concatenate((path.chunks, path.retention.sums))) / full
            for output in self.engine.step():
                written += output.outputs[0].token_ids
        return written, end

    def read(self, prompt: list[int], continuation: list[int]) -> tuple[torch.Tensor, float]:
        """The log-probabilities [n - 1, V] after each id of a continuation but the last, and the share of the bytes
        that is held at its end.
        """
        sampler, teacher = self.engine.runner.sampler, Teacher(continuation)
        self.engine.runner.sampler = teacher
        try:
            _, end = self.generate(prompt, len(continuation))
        finally:
            self.engine.runner.sampler = sampler
        # The full cache predicted the first id.
        return torch.stack(teacher.found[1:]), end

    def _watch(self, decided: RetentionDecision, before: int, after: int) -> None:
        self.decided, self.resident = decided, after / before


def compare(rows: torch.Tensor, reference: torch.Tensor, targets: list[int]) -> dict[str, Any]:
    """The fields of a `Result` for a continuation."""
    return {
        "surprise": -rows.gather(1, torch.tensor(targets)[:, None]).double().sum().item(),
        "agreeing": int((rows.argmax(-1) == reference.argmax(-1)).sum()),
        "divergence": (reference.exp() * (reference - rows)).double().sum().item(),
    }


def start(given: argparse.Namespace) -> Engine:
    """The checkpoint."""
    return Engine(quire.__version__, Runner(given.model, given.threads).run)


if __name__ == "__main__":
    work(start)
