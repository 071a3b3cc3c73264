"""Silent mistakes that an engine with retention could make: one test each, mostly with heads that attend to chosen
tokens.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from quire.cache.retention import decisions as retention_module
from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.engine.request import Sequence
from tests.retention_cases import BOS, HEAVY, LOST, Bench, Head, HeadWeights
from tests.retention_oracle import PUNCTUATION, Oracle, Rules, Run
from tests.tiny_models import tiny_shape

LENGTH = 200
PLAIN = [token for token in range(ord("e"), ord("z") + 1) if token not in HEAVY]
FULL = 4

# A head that each policy is made for, and one that looks everywhere alike.
ROLES = [Head(special=6), Head(special=6, punctuation=6), Head(heavy=6), Head(near=6), Head()]
SHAPE = tiny_shape(num_q_heads=len(ROLES), num_kv_heads=len(ROLES))
WEIGHTS = HeadWeights(SHAPE, [ROLES, ROLES[::-1]], seed=1)
RULES = Rules(0.9, profile_rows=64)

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


def text(length: int, seed: int = 0, marks: str = ",.:?ab") -> list[int]:
    """A prompt of ordinary tokens with some that heads look for."""
    rng = random.Random(seed)
    tokens = [rng.choice(PLAIN) if rng.random() < 0.88 else ord(rng.choice(marks)) for _ in range(length - 1)]
    return [BOS, *tokens]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def answered(
    prompts: list[list[int]], count: int, backend: str = "cpu", rules: Rules = RULES, **options: Any
) -> tuple[Bench, list[Sequence]]:
    """A bench that has answered prompts, all at once, as the oracle does."""
    weights = options.pop("weights", WEIGHTS)
    bench = Bench(weights.shape, weights, rules, backend, options=options)
    for index, prompt in enumerate(prompts):
        bench.witness.add(str(index), prompt, greedy(count))
    bench.witness.drain()
    bench.check()
    return bench, [bench.witness.sequences[str(index)][0] for index in range(len(prompts))]


def policies(bench: Bench, sequence: Sequence) -> list[list[int]]:
    """What the engine decided; full heads everywhere where it decided to keep all."""
    seen = bench.witness.kept.get(sequence)
    shape = bench.shape
    if seen is None:
        assert sequence.kept_fraction == 1.0
        return [[len(bench.rules.members)] * shape.num_kv_heads] * shape.num_layers
    assert len({str(each.policies) for each in seen.values()}) == 1, "policies are chosen once"
    return next(iter(seen.values())).policies


def stepped(engine: Engine, prompt: list[int], params: SamplingParams) -> Sequence:
    """The sequence of a request whose prompt is computed, and what it keeps decided."""
    (sequence,) = engine.add("x", prompt, params).sequences
    while sequence.num_generated == 0:
        engine.step()
    return sequence


@BACKENDS
def test_every_head_of_every_layer_has_its_own_policy(backend: str) -> None:
    bench, (sequence,) = answered([text(LENGTH)], 2, backend)
    assert policies(bench, sequence) == [[0, 1, 2, 3, FULL], [FULL, 3, 2, 1, 0]]


@BACKENDS
@pytest.mark.parametrize("length", [448, 456])
def test_memory_is_that_of_the_tokens_that_are_kept(backend: str, length: int) -> None:
    bench, (sequence,) = answered([text(length)], 2, backend)
    run = bench.runs[sequence]
    engine = bench.engine(**{"cache.share": False})
    stepped(engine, text(length), greedy(9))
    table = engine.scheduler.manager.table
    page_bytes, num_open = table.open_codec.page_bytes, int(length % 64 > 0)
    expected = 0
    for of_layer, of_policy in zip(run.kept[length // 64], run.policies, strict=True):
        for kept, policy in zip(of_layer, of_policy, strict=True):
            pages = math.ceil(len(kept) / 64) + num_open
            # Sums of attention only where a member needs them.
            expected += pages * (page_bytes + 256 * (policy in (2, 3)))
    stats = engine.stats()["cache"]
    assert stats["bytes_used"] == table.ledger.allocated_bytes == expected
    assert stats["bytes_free"] == stats["bytes_total"] - expected
    assert expected < 0.6 * (7 + num_open) * table.shape[0] * table.shape[1] * page_bytes, "nothing was saved"


@BACKENDS
@pytest.mark.parametrize("share", [False, True])
def test_a_threshold_above_one_changes_no_bit(backend: str, share: bool) -> None:
    rules = Rules(1.01, profile_rows=64)
    prompts = [text(length, length) for length in (1, 63, 64, 65, 130, 200)]
    found = []
    for threshold in (1.01, "off"):
        bench = Bench(SHAPE, WEIGHTS, rules, backend, options={"cache.share": share, "retain.threshold": threshold})
        bench.witness.engine.scheduler.policy.token_budget = 2048
        logits = []
        for index, prompt in enumerate(prompts):
            bench.witness.add(str(index), prompt, greedy(70 if backend == "cpu" else 10))
            if index % 2:  # alone or two at once
                bench.witness.drain()
        for sequences in bench.witness.sequences.values():
            assert sequences[0].kept_fraction in (1.0, None)
            logits.append(torch.stack(bench.witness.logits[sequences[0]]))
        found.append((logits, [each[0].token_ids for each in bench.witness.sequences.values()]))
    assert found[0][1] == found[1][1]
    assert all(torch.equal(*pair) for pair in zip(found[0][0], found[1][0], strict=True))


def test_a_threshold_of_nothing_leaves_the_first_member_alone() -> None:
    bench, sequences = answered([text(LENGTH), text(66, 1)], 70, rules=Rules(0.0, profile_rows=64))
    for sequence in sequences:
        assert policies(bench, sequence) == [[0] * 5] * 2
        for seen in bench.witness.kept[sequence].values():
            assert all(kept <= {0} for of_layer in seen.kept for kept in of_layer)


def test_more_recovery_never_keeps_less() -> None:
    before, used = 0.0, 0
    for threshold in (0.0, 0.3, 0.6, 0.7, 0.8, 0.9, 0.97, 0.99, 1.01):
        bench = Bench(SHAPE, WEIGHTS, Rules(threshold, profile_rows=64), options={"cache.share": False})
        engine = bench.engine()
        sequence = stepped(engine, text(LENGTH), greedy(3))
        kept, bytes_used = sequence.kept_fraction, engine.stats()["cache"]["bytes_used"]
        assert kept is not None and kept >= before and bytes_used >= used, f"threshold {threshold}"
        before, used = kept, bytes_used
    assert before == 1.0


@BACKENDS
def test_recovery_is_that_of_all_rows(backend: str) -> None:
    """A head looks at the first token in all rows but the last, and the other way round."""
    most, least = text(LENGTH), [BOS, *[LOST] * (LENGTH - 2), PLAIN[0]]
    most[-1] = LOST
    bench, sequences = answered([most, least], 2, backend)
    oracle = Oracle(SHAPE, WEIGHTS, RULES)
    for sequence, policy in zip(sequences, (0, FULL), strict=True):
        assert policies(bench, sequence)[0][0] == policy
        attention = last_row(oracle, sequence.token_ids[:LENGTH])[0, 0]
        assert (attention[0] > 0.9) == (policy != 0), "by its last row alone it would be decided otherwise"


def last_row(oracle: Oracle, prompt: list[int]) -> torch.Tensor:
    """The attention of the last row of a prompt, [L, H, n]: what it adds to the sums."""
    longer, shorter = (oracle.run([*prompt[:n], 0], n).sums for n in (len(prompt), len(prompt) - 1))
    return longer[..., : len(prompt)] - shorter


def test_query_heads_of_a_group_decide_by_their_mean() -> None:
    """One of two looks at the first token, the other everywhere: half of the attention of their kv head is there."""
    shape = tiny_shape(num_q_heads=4, num_kv_heads=2)
    weights = HeadWeights(shape, [[Head(special=6)] * 2] * 2, shares=[1.0, 0.0, 1.0, 1.0])
    for threshold, policy in ((0.45, 0), (0.55, 2)):
        rules = Rules(threshold, profile_rows=64)
        bench, (sequence,) = answered([text(LENGTH)], 2, rules=rules, weights=weights)
        assert policies(bench, sequence)[0] == [policy, 0]
        assert 0.5 < bench.runs[sequence].recovery[0][0][0] < 0.53


@BACKENDS
def test_frequent_tokens_are_beside_marked_ones(backend: str) -> None:
    """The most frequent tokens are marked ones: these do not use up what may be kept beside them."""
    weights = HeadWeights(SHAPE, [[Head(special=4, punctuation=4, heavy=4.8)] * 5] * 2)
    rules = Rules(0.9, frequent=0.1, profile_rows=64)
    prompt = text(192, 3)
    bench, (sequence,) = answered([prompt], 66, backend, rules, weights=weights)
    marked = {0} | {at for at, token in enumerate(prompt) if token in PUNCTUATION}
    assert policies(bench, sequence)[0] == [2] * 5
    kept = bench.witness.kept[sequence][3].kept[0][0]
    assert kept >= marked and len(kept) == len(marked) + math.ceil(0.1 * 192)
    sums = bench.runs[sequence].sums[0, 0]
    first = sums[:192].argsort(descending=True)[: math.ceil(0.1 * 192)].tolist()
    assert len(set(first) & marked) > 5, "marked tokens are among the most frequent"
    marked |= {at for at, token in enumerate(sequence.token_ids[:256]) if token in PUNCTUATION or token >= BOS}
    assert len(bench.witness.kept[sequence][4].kept[0][0]) == len(marked) + math.ceil(0.1 * 256)


def test_while_decoding_the_frequent_budget_grows_and_the_window_does_not() -> None:
    """Both members, each alone behind the special tokens, in a sequence that has more than doubled."""
    prompt = text(128)
    for member, role in (("frequent", Head(heavy=6)), ("local", Head(near=6))):
        rules = Rules(0.8, frequent=0.3, local=0.3, members=("special", member), profile_rows=64)
        weights = HeadWeights(SHAPE, [[role] * 5] * 2)
        bench, (sequence,) = answered([prompt], 200, rules=rules, weights=weights)
        assert policies(bench, sequence)[0] == [1] * 5
        seen = bench.witness.kept[sequence]
        assert sorted(seen) == [2, 3, 4, 5]
        for sealed, each in seen.items():
            n = sealed * 64
            special = {0} | {at for at, token in enumerate(sequence.token_ids[:n]) if token >= BOS}
            for kept in each.kept[0]:
                if member == "frequent":
                    assert len(kept - special) == math.ceil(0.3 * n)
                else:
                    assert kept - special == set(range(n - math.ceil(0.3 * 128), n)) - special


@BACKENDS
def test_a_row_sees_itself_whatever_its_head_keeps(backend: str) -> None:
    weights = HeadWeights(SHAPE, [[Head(noise=1.0)] * 5] * 2)
    rules = Rules(0.0, profile_rows=64)
    for length in (128, 150):  # the first token of a chunk, and another
        bench, (sequence,) = answered([text(length)], 70, backend, rules, weights=weights)
        assert policies(bench, sequence) == [[0] * 5] * 2
        blind = Oracle(SHAPE, weights, rules, is_blind=True).run(sequence.token_ids, length)
        differ = (blind.logits - bench.runs[sequence].logits).abs().amax(-1)
        assert differ[0] < 1e-4 and differ[1:].min() > 1e-3, "nobody would see the difference"


@BACKENDS
def test_positions_are_those_of_the_sequence(backend: str) -> None:
    weights = HeadWeights(SHAPE, [[Head(special=1, heavy=2, near=0.3, noise=2.0)] * 5] * 2)
    bench, (sequence,) = answered([text(LENGTH)], 130, backend, Rules(0.5, 0.1, profile_rows=64), weights=weights)
    run: Run = bench.runs[sequence]
    assert sum(len(kept) for of_layer in run.of_prompt for kept in of_layer) < 0.6 * LENGTH * 10
    seen = bench.witness.kept[sequence]
    compact = Oracle(SHAPE, weights, bench.rules, is_compact=True).run(sequence.token_ids[:230], LENGTH, {3: seen[3]})
    differ = (compact.logits - run.logits[:30]).abs().amax(-1)
    assert differ[0] < 1e-4 and differ[1:].median() > 1e-2, "nobody would see the difference"


def test_policies_are_searched_once_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    decide = retention_module.decide

    def counted(chain: Any, marks: Any, sums: np.ndarray, *rest: Any) -> Any:
        searched.append(sums[..., 0].size)
        return decide(chain, marks, sums, *rest)

    monkeypatch.setattr(retention_module, "decide", counted)
    bench, sequences = answered([text(LENGTH), text(70, 1), text(130, 2)], 140)
    assert searched == [len(ROLES) * SHAPE.num_layers] * 3
    assert [len(bench.witness.kept[sequence]) for sequence in sequences] == [3, 3, 3]


@BACKENDS
def test_requests_of_a_batch_decide_for_themselves(backend: str) -> None:
    """Equal prompts alike, others otherwise: where nothing is frequent a head keeps all. Short ones as long ones."""
    prompts = [text(LENGTH), text(LENGTH, 5, ",.:?"), text(LENGTH), text(9, 1), text(5, 2)]
    bench, sequences = answered(prompts, 5, backend, **{"scheduler.token_budget": 2048})
    found = [policies(bench, sequence) for sequence in sequences]
    assert found[0] == found[2] != found[1]
    assert (found[0][0][2], found[1][0][2]) == (2, FULL)
    for prompt, sequence, expected in zip(prompts, sequences, found, strict=True):
        alone, (single,) = answered([prompt], 5, backend)
        assert policies(alone, single) == expected
        assert single.token_ids == sequence.token_ids and single.kept_fraction == sequence.kept_fraction
