"""Retention by brute force, for one sequence: every key and value stays, every row has its whole attention matrix, and
a mask hides the tokens that a head does not keep. Rules are loops over tokens and heads.

Shares no code with `quire.attention` and `quire.cache`. Other kernels may decide differently if two sums, or a
recovery and the threshold, are equal up to rounding. The oracle proves that such a decision is a tie, and follows
it.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.models.decoder import build_model
from quire.models.layers import TorchOps
from quire.models.shape import ModelShape
from quire.models.weights import Checkpoint

CHUNK = 64

PUNCTUATION = frozenset(byte for byte in range(128) if unicodedata.category(chr(byte))[0] == "P")
"""Of `tiny_models.byte_tokenizer`."""

SPECIAL = ((256,), (257,))

RECOVERY_TIE = 2e-5
"""Recoveries so near to the threshold may be on either side of it."""

SUM_TIE = 2e-4
"""Sums that differ by so little of their size may be in any order."""

PEAK_TIE = 2e-5
"""So may tokens whose worth, and pages whose mean worth, differ by so little."""

BEFORE, AFTER = 2, 6
"""Tokens before and behind one that is looked at that are worth as much."""

SUMS_BYTES = 256
"""Beside each page whose tokens are ranked."""


Stored = Callable[[int, int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rules:
    """What decides. Policy p keeps the members up to number p; one more than there are members keeps all. With a budget
    no policy does, and pages of so many bytes are dealt.
    """

    threshold: float
    frequent: float = 0.3
    local: float = 0.3
    members: tuple[str, ...] = ("special", "punctuation", "frequent", "local")
    profile_rows: int = 256
    special: Sequence[Sequence[int]] = SPECIAL
    punctuation: frozenset[int] = PUNCTUATION
    budget: float | None = None
    page_bytes: int = 0

    def num_profiled(self, num_prompt: int) -> int:
        return min(self.profile_rows, math.ceil(num_prompt / 4))

    def marked(self, member: str, tokens: Sequence[int]) -> set[int]:
        """Positions of special tokens, the first among them, or of punctuation."""
        if member == "punctuation":
            return {at for at, token in enumerate(tokens) if token in self.punctuation}
        found = {0}
        for mark in self.special:
            for at in range(len(tokens) - len(mark) + 1):
                if tuple(tokens[at : at + len(mark)]) == tuple(mark):
                    found |= set(range(at, at + len(mark)))
        return found


@dataclass(frozen=True)
class Seen:
    """What somebody else kept of the sealed tokens of a sequence: policies [L][H], and positions of each head."""

    policies: list[list[int]]
    kept: list[list[frozenset[int]]]


@dataclass
class Run:
    """A sequence, computed to its end.

    logits    float32 [generated, V], of the rows that generated tokens were chosen from
    policies  [L][H]
    kept      [L][H] positions, after how many sealed chunks; a prompt's first, without what its open chunk has
    of_prompt [L][H] positions that are kept of the prompt
    recovery  [L][H], of each policy up to the one that passed
    sums      float64 [L, H, tokens] of attention, at the end
    num_ties  decisions that were another's
    """

    logits: Tensor
    policies: list[list[int]]
    kept: dict[int, list[list[frozenset[int]]]]
    of_prompt: list[list[frozenset[int]]]
    recovery: list[list[list[float]]]
    sums: Tensor
    num_ties: int


@dataclass
class Oracle:
    """Runs sequences of a model under the rules.

    stored        keys and values [H, 64, D] of a layer and chunk, before rotation, as rows of later chunks read them;
                  None: as they are
    is_compact    also turn keys by their rank among what is kept, as engines do that forget positions
    is_blind      rows after the prompt do not see themselves, as where a new token gets no slot
    """

    shape: ModelShape
    weights: Checkpoint
    rules: Rules
    stored: Stored | None = None
    is_compact: bool = False
    is_blind: bool = False
    _num_ties: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        # A number at the edge of a code may get another one here than there.
        self._slack = 50.0 if self.stored else 1.0
        self._model = build_model(self.shape, self.weights, TorchOps(), torch.float32)

    def run(self, tokens: Sequence[int], num_prompt: int, seen: Mapping[int, Seen] | None = None) -> Run:
        """Of prompt and generated tokens.

        seen  what another kept, after how many sealed chunks, to be proved equal to what is kept here up to ties
        """
        shape, rules, seen = self.shape, self.rules, seen or {}
        self._num_ties = 0
        heads = range(shape.num_kv_heads)
        attention = _Attention(shape, len(tokens), self.is_compact, self.is_blind, self.stored)
        logits = [self._rows(attention, tokens, 0, num_prompt)[-1:]]
        sums = torch.zeros(shape.num_layers, shape.num_kv_heads, len(tokens), dtype=torch.float64)
        sums[..., :num_prompt] = attention.seen.double().sum(2)
        policies: list[list[int]] = []
        of_prompt: list[list[frozenset[int]]] = []
        recovery: list[list[list[float]]] = []
        sealed = num_prompt // CHUNK
        other = seen.get(sealed)
        peaks = torch.zeros_like(sums)
        if rules.budget is not None:
            peaks[..., :num_prompt] = attention.peaks(rules.num_profiled(num_prompt))
            policies = [[0] * shape.num_kv_heads for _ in range(shape.num_layers)]
            everything = [[set(range(sealed * CHUNK)) for _ in heads] for _ in policies]
            allocated = self._allocate(tokens[:num_prompt], peaks, everything, other)
            of_prompt = [[each | set(range(sealed * CHUNK, num_prompt)) for each in of_layer] for of_layer in allocated]
            last = attention.seen[:, :, -rules.num_profiled(num_prompt) :].double().mean(2)
            recovery = [
                [[float(last[layer, head, sorted(each)].sum())] for head, each in enumerate(of_layer)]
                for layer, of_layer in enumerate(of_prompt)
            ]
        for layer in range(shape.num_layers if rules.budget is None else 0):
            decided = [
                self._decide(
                    list(tokens[:num_prompt]),
                    attention.seen[layer, head].double(),
                    (other.policies[layer][head], other.kept[layer][head]) if other else None,
                )
                for head in heads
            ]
            policies.append([policy for policy, _, _ in decided])
            of_prompt.append([kept for _, kept, _ in decided])
            recovery.append([found for _, _, found in decided])
        kept = {sealed: [[_before(each, sealed * CHUNK) for each in of_layer] for of_layer in of_prompt]}
        at = num_prompt
        while at < len(tokens) - 1:
            end = min(len(tokens) - 1, (at // CHUNK + 1) * CHUNK)
            # What is in the open chunk is visible to every head.
            open_chunk = set(range(sealed * CHUNK, at))
            visible = torch.zeros(shape.num_layers, shape.num_kv_heads, at, dtype=torch.bool)
            for layer in range(shape.num_layers):
                for head in heads:
                    visible[layer, head, sorted(kept[sealed][layer][head] | open_chunk)] = True
            found = self._rows(attention, tokens, at, end, visible)
            logits.append(found)
            sums[..., :end] += attention.seen.double().sum(2)
            peaks[..., :end] = torch.maximum(peaks[..., :end], attention.peaks(end - at))
            at = end
            if at % CHUNK == 0:
                sealed = at // CHUNK
                before, other = kept[sealed - 1], seen.get(sealed)
                if rules.budget is not None:
                    new = set(range(at - CHUNK, at))
                    alive = [[each | new for each in of_layer] for of_layer in before]
                    kept[sealed] = self._allocate(tokens[:at], peaks, alive, other)
                    continue
                kept[sealed] = [
                    [
                        self._keep_on(
                            list(tokens[:at]),
                            policies[layer][head],
                            before[layer][head] | set(range(at - CHUNK, at)),
                            sums[layer, head].tolist(),
                            num_prompt,
                            other.kept[layer][head] if other else None,
                        )
                        for head in heads
                    ]
                    for layer in range(shape.num_layers)
                ]
        return Run(
            torch.cat(logits)[: len(tokens) - num_prompt], policies, kept, of_prompt, recovery, sums, self._num_ties
        )

    def _rows(
        self, attention: _Attention, tokens: Sequence[int], start: int, end: int, visible: Tensor | None = None
    ) -> Tensor:
        """Logits of rows [start, end)."""
        attention.begin(start, end, visible)
        positions = torch.arange(start, end)
        with torch.inference_mode():
            return self._model.head(self._model.hidden(torch.tensor(tokens[start:end]), positions, attention))

    def _decide(
        self, tokens: list[int], matrix: Tensor, other: tuple[int, frozenset[int]] | None
    ) -> tuple[int, frozenset[int], list[float]]:
        """Policy, kept positions and recoveries of a head whose attention is `matrix`, [n, n]."""
        rules, n = self.rules, len(tokens)
        columns = matrix.sum(0).tolist()
        last_rows = range(n - rules.num_profiled(n), n)
        kept: set[int] = set()
        window = 0
        recovery: list[float] = []
        found: list[tuple[frozenset[int], float | None, list[int]]] = []
        cut: float | None = None
        candidates: list[int] = []
        for member in rules.members:
            if member == "local":
                window = math.ceil(rules.local * n)
            elif member == "frequent":
                candidates = [j for j in range(n) if j not in kept and j < n - window]
                candidates.sort(key=lambda j: (-columns[j], j))
                best = candidates[: math.ceil(rules.frequent * n)]
                cut = columns[best[-1]] if best else None
                kept |= set(best)
            else:
                kept |= rules.marked(member, tokens)
            if window:
                # Judged over the last rows alone, each with its own last tokens.
                masses = []
                for i in last_rows:
                    row = matrix[i].tolist()
                    masses.append(sum(row[j] for j in range(i + 1) if j in kept or i - j < window))
                recovery.append(sum(masses) / len(masses))
            else:
                recovery.append(sum(columns[j] for j in kept) / n)
            found.append((frozenset(kept | set(range(n - window, n))), cut, candidates))
            if recovery[-1] >= rules.threshold and (other is None or other[0] < len(found)):
                break
        full = len(rules.members)
        passed = [policy for policy, each in enumerate(recovery) if each >= rules.threshold]
        policy = passed[0] if passed else full
        if other is not None and other[0] != policy:
            wrong = f"policy {other[0]} where recoveries are {recovery}"
            assert all(each < rules.threshold + self._slack * RECOVERY_TIE for each in recovery[: other[0]]), wrong
            assert other[0] == full or recovery[other[0]] >= rules.threshold - self._slack * RECOVERY_TIE, wrong
            policy = other[0]
            self._num_ties += 1
        if policy == full:
            keeps, cut, candidates = frozenset(range(n)), None, []
        else:
            keeps, cut, candidates = found[policy]
        if other is not None:
            keeps = self._same(keeps, other[1], n // CHUNK * CHUNK, columns, cut, candidates)
        return policy, keeps, recovery[: policy + 1]

    def _keep_on(
        self,
        tokens: list[int],
        policy: int,
        alive: set[int],
        sums: list[float],
        num_prompt: int,
        other: frozenset[int] | None,
    ) -> frozenset[int]:
        """What a head keeps of the tokens it has, once all of `tokens` are sealed."""
        rules = self.rules
        cut: float | None = None
        candidates: list[int] = []
        if policy == len(rules.members):
            kept = set(alive)
        else:
            members = rules.members[: policy + 1]
            kept = set()
            for member in ("special", "punctuation"):
                if member in members:
                    kept |= rules.marked(member, tokens)
            if "local" in members:
                kept |= set(range(len(tokens) - math.ceil(rules.local * num_prompt), len(tokens)))
            kept &= alive
            if "frequent" in members:
                candidates = sorted(alive - kept, key=lambda j: (-sums[j], j))
                best = candidates[: math.ceil(rules.frequent * len(tokens))]
                cut = sums[best[-1]] if best else None
                kept |= set(best)
        if other is None:
            return frozenset(kept)
        return self._same(frozenset(kept), other, len(tokens), sums, cut, candidates)

    def _allocate(
        self, tokens: Sequence[int], peaks: Tensor, alive: list[list[set[int]]], other: Seen | None
    ) -> list[list[frozenset[int]]]:
        """What heads keep of the sealed tokens they have, whole pages of it within the budget."""
        rules = self.rules
        assert rules.budget is not None
        end = len(tokens) // CHUNK * CHUNK
        special = {at for at in rules.marked("special", tokens) if at < end}
        num_heads = sum(map(len, alive))
        each = rules.page_bytes + SUMS_BYTES
        # The open chunk counts, also before it has a token.
        room = rules.budget * num_heads * rules.page_bytes * (len(tokens) // CHUNK + 1) - num_heads * each
        pages: list[tuple[float, int, int, list[int]]] = []
        head_scores: list[dict[int, float]] = []
        ordered: list[list[int]] = []
        flat = [held for of_layer in alive for held in of_layer]
        for head, held in enumerate(flat):
            layer, place = divmod(head, len(alive[0]))
            row = peaks[layer, place].tolist()
            score = {
                j: math.inf if j in special else max(row[k] for k in range(j - AFTER, j + BEFORE + 1) if k in held)
                for j in held
            }
            last = [j for j in held if j >= end - CHUNK]
            if last:
                pages.append((math.inf if special & set(last) else float(CHUNK), head, 0, last))
            rest = sorted(held - set(last), key=lambda j, score=score: (-score[j], j))  # type: ignore[misc]
            for at in range(0, len(rest), CHUNK):
                page = rest[at : at + CHUNK]
                pages.append((sum(score[j] for j in page), head, 1 + at, page))
            head_scores.append(score)
            ordered.append(rest)
        pages.sort(key=lambda page: (-page[0], *page[1:3]))
        found: list[set[int]] = [set() for _ in flat]
        num_allocated = 0
        for num_allocated, (gain, head, _, page) in enumerate(pages):
            if (num_allocated + 1) * each > room and gain < math.inf:
                break
            found[head] |= set(page)
        else:
            num_allocated = len(pages)
        if other is not None:
            theirs = [kept for of_layer in other.kept for kept in of_layer]
            if theirs != found:
                self._prove_tie(pages, num_allocated, head_scores, ordered, theirs)
                found = [set(kept) for kept in theirs]
                self._num_ties += 1
        size = len(alive[0])
        return [[frozenset(kept) for kept in found[at : at + size]] for at in range(0, len(found), size)]

    def _prove_tie(
        self,
        pages: list[tuple[float, int, int, list[int]]],
        num_allocated: int,
        head_scores: list[dict[int, float]],
        ordered: list[list[int]],
        theirs: list[frozenset[int]],
    ) -> None:
        """As many pages are dealt, of heads that lose nothing by it, and heads keep their best."""
        allocated = 0
        least = pages[num_allocated - 1][0] if num_allocated else math.inf
        most = pages[num_allocated][0] if num_allocated < len(pages) else 0.0
        for gain, head, place, page in pages:
            has = ordered[head]
            kept = [j for j in has if j in theirs[head]]
            if place == 0:
                is_allocated = set(page) <= theirs[head]
                assert is_allocated or not theirs[head] & set(page), f"part of the last chunk, by head {head}"
            else:
                is_allocated = len(kept) > place - 1
                assert len(kept) == len(has) or len(kept) % CHUNK == 0, f"{len(kept)} tokens of head {head}"
                dropped = [head_scores[head][j] for j in has if j not in theirs[head]]
                lost = max(dropped, default=0.0) - min((head_scores[head][j] for j in kept), default=math.inf)
                assert lost <= self._slack * PEAK_TIE, f"head {head} drops a token worth {lost} more than one it keeps"
            allocated += is_allocated
            tie = CHUNK * self._slack * PEAK_TIE
            if is_allocated:
                assert gain >= most - tie, f"head {head} has a page worth {gain}, others lack {most}"
            else:
                assert gain <= least + tie, f"head {head} lacks a page worth {gain}, others have {least}"
        assert allocated == num_allocated, f"{allocated} pages in place of {num_allocated}"

    def _same(
        self,
        own: frozenset[int],
        other: frozenset[int],
        sealed: int,
        sums: list[float],
        cut: float | None,
        candidates: list[int],
    ) -> frozenset[int]:
        """What is kept, if two who decided did so alike up to ties; of tokens that are not sealed only one knows."""
        differ = _before(own, sealed) ^ other
        if not differ:
            return own
        assert cut is not None, f"kept differently: {sorted(differ)}"
        for j in sorted(differ):
            assert j in candidates and abs(sums[j] - cut) <= self._slack * SUM_TIE * cut + 1e-6, (
                f"token {j}, attention {sums[j]}, cut at {cut}: here {j in own}, there {j in other}"
            )
        self._num_ties += 1
        return other | {j for j in own if j >= sealed}


def _before(positions: frozenset[int], end: int) -> frozenset[int]:
    return frozenset(each for each in positions if each < end)


class _Attention:
    """What a model asks for attention: keys and values of all rows so far, as they were computed."""

    def __init__(
        self, shape: ModelShape, num_tokens: int, is_compact: bool, is_blind: bool, stored: Stored | None
    ) -> None:
        self.shape, self.stored = shape, stored
        self.is_compact, self.is_blind = is_compact, is_blind
        size = shape.num_layers, num_tokens, shape.num_kv_heads, shape.head_dim
        self.keys, self.values = torch.zeros(size), torch.zeros(size)
        # As rows of later chunks see them.
        self.later_keys, self.later_values = torch.zeros(size), torch.zeros(size)
        self.tables = None
        if shape.first.rope is not None:
            self.tables = tuple(torch.from_numpy(part) for part in shape.first.rope.tables(shape.max_context))

    def begin(self, start: int, end: int, visible: Tensor | None) -> None:
        """Rows [start, end) come next; of the tokens before them heads see what `visible` says, bool [L, H, start]."""
        shape = self.shape
        self.start, self.end = start, end
        rows, columns = torch.arange(start, end), torch.arange(end)
        seen = (columns <= rows[:, None]).expand(shape.num_layers, shape.num_kv_heads, -1, -1).clone()
        if visible is not None:
            seen[..., :start] &= visible[:, :, None]
            if self.is_blind:
                seen &= columns != rows[:, None]
        self.visible = seen
        # float32 [L, H, rows, columns], the mean over the query heads of a kv head, and the largest.
        self.seen, self.largest = torch.zeros(seen.shape), torch.zeros(seen.shape)

    def peaks(self, num_rows: int) -> Tensor:
        """The most that any of the last rows looks at each column from a chunk away or farther, [L, H, columns]."""
        rows, columns = torch.arange(self.end - num_rows, self.end), torch.arange(self.end)
        is_far = rows[:, None] - columns >= CHUNK
        return (self.largest[:, :, -num_rows:] * is_far).amax(2).double()

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.keys[layer, self.start : self.end] = k
        self.values[layer, self.start : self.end] = v
        for chunk in range(self.start // CHUNK, self.end // CHUNK) if self.stored else ():
            assert self.stored is not None
            at = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            found = self.stored(
                layer, chunk, self.keys[layer, at].transpose(0, 1), self.values[layer, at].transpose(0, 1)
            )
            self.later_keys[layer, at], self.later_values[layer, at] = (part.transpose(0, 1) for part in found)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        shape = self.shape
        visible = self.visible[layer]
        at = torch.arange(self.end).expand(shape.num_kv_heads, -1)
        if self.is_compact:
            at = (visible.any(1).cumsum(-1) - 1).clamp(min=0)
        q = q.unflatten(1, (shape.num_kv_heads, -1)).permute(1, 2, 0, 3)  # [H, G, R, D]
        q = self._rotate(q, at[:, None, self.start :])
        rows, columns = torch.arange(self.start, self.end)[:, None] // CHUNK, torch.arange(self.end) // CHUNK
        kinds = [(self.keys, self.values, rows == columns if self.stored else rows >= columns)]
        if self.stored:
            kinds.append((self.later_keys, self.later_values, rows > columns))
        scores = torch.zeros(*q.shape[:3], self.end)
        for keys, _, here in kinds:
            k = self._rotate(keys[layer, : self.end].transpose(0, 1), at)  # [H, T, D]
            scores += torch.einsum("hgrd,htd->hgrt", q, k) / math.sqrt(shape.head_dim) * here
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        self.seen[layer], self.largest[layer] = weights.mean(1), weights.amax(1)
        found = [
            torch.einsum("hgrt,htd->rhgd", weights * here, values[layer, : self.end].transpose(0, 1))
            for _, values, here in kinds
        ]
        return torch.stack(found).sum(0).flatten(1)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.tables is None:
            return x
        cos, sin = (table[positions] for table in self.tables)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
