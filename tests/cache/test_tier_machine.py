"""Random operations over the tree, the manager, a store and its transfers, without a model.

Every page has a pattern that follows from the tokens up to its chunk's end, its layer and its head. So a page that
arrives at another place, too late, twice, or from another sequence is found wherever it is read.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from quire.cache.arena import Arena
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.nuq import NuqCodec
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS, UNIT, PageLedger
from quire.cache.manager import CacheManager
from quire.cache.path import Path, SwappedPath
from quire.cache.run import Run, layer_of
from quire.cache.sinks import Sinks
from quire.cache.store import Transfer
from quire.cache.table import ChunkTable
from quire.cache.tree import PrefixTree
from quire.errors import QuireError

from ..effort import tries
from ..nuq_tables import random_tables
from ..poison import poison_free

L, H, DIM = 3, 2, 16
CODEC = DenseCodec(DIM, torch.float32)
OPERATIONS = 500
"""Of one machine; then another one begins, in an arena of another size."""

MOST_WAITING, MOST_CHUNKS = 5, 7


@dataclass(eq=False)
class CachedSequence:
    """A sequence, as the manager sees one."""

    token_ids: list[int]
    namespace: str
    num_prompt: int
    reads_cache: bool
    number: int
    num_preemptions: int = 0
    priority: int = 0
    lifetime: float | None = None
    swapped: SwappedPath | None = None
    fetched: dict[str, int] = field(default_factory=dict)
    path: Path = field(default_factory=Path)
    keys: ChunkKeys = field(init=False)

    def __post_init__(self) -> None:
        self.keys = ChunkKeys(self.namespace, self.token_ids)

    def content(self, index: int, num_tokens: int) -> bytes:
        """What stands in a chunk of which tokens up to `num_tokens` are stored."""
        if (index + 1) * PAGE_TOKENS <= num_tokens:
            return self.keys.first(index + 1)[index]
        tokens = np.array(self.token_ids[:num_tokens], np.int32).tobytes()
        return hashlib.blake2b(self.namespace.encode() + tokens, digest_size=16).digest()


@functools.lru_cache(20_000)
def pattern(content: bytes, layer: int, head: int) -> np.ndarray:
    """512 bytes, which a page repeats."""
    digest = hashlib.blake2b(content + bytes((layer, head))).digest()
    return np.frombuffer(digest * 8, np.uint8)


def image(content: bytes, layer: int, head: int, num_bytes: int) -> np.ndarray:
    return np.resize(pattern(content, layer, head), num_bytes)


class SteppedStore:
    """Keeps the last runs. Brings an extent when the machine says so, in any order of runs."""

    keeps = True

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.runs: dict[bytes, Run] = {}
        self.extents: dict[Run, list[bytes]] = {}
        self.pending: list[tuple[Transfer, Run, bytes]] = []
        self.is_full = False
        self.put_names: Counter[bytes] = Counter()

    def wants(self, names: Sequence[bytes]) -> list[bool]:
        return [not self.is_full and name not in self.runs for name in names]

    def put(self, run: Run, extents: Iterable[memoryview]) -> None:
        assert not self.is_full and any(self.wants(run.names)), "it has all of this"
        assert not run.is_shared or all(self.wants(run.names)), "chunks that it has are copied again"
        self.extents[run] = [bytes(extent) for extent in extents]
        for name in run.names:
            self.runs[name] = run
        while len(self.extents) > self.cap:
            self.drop(next(iter(self.extents)).names)

    def find(self, name: bytes) -> Run | None:
        return self.runs.get(name)

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        for run in runs:
            transfer.sources[run] = "stepped"
            if run not in self.extents:
                transfer.fail(QuireError("it was lost"))
                return
            self.pending += [(transfer, run, extent) for extent in self.extents[run]]

    def drop(self, names: Iterable[bytes]) -> None:
        for name in list(names):
            run = self.runs.get(name)
            if run is not None:
                self.extents.pop(run, None)
                for each in run.names:
                    if self.runs.get(each) is run:
                        del self.runs[each]


class Machine:
    """One manager, and what it is told."""

    def __init__(self, rng: random.Random, encodes: bool) -> None:
        self.rng = rng
        self.store = SteppedStore(rng.choice([6, 1000, 1000]))
        chunks, sinks, sealed = rng.randrange(7, 20), None, ()
        size, slab = CODEC.page_bytes * L * H, CODEC.page_bytes * L * H
        if encodes:
            slab = CODEC.page_bytes * rng.choice([1, 2, 5])
            if num_sinks := rng.choice([0, 1, 64]):
                sinks = Sinks(num_sinks, L, H, DIM, torch.float32)
                slab = max(slab, sinks.sidecar_bytes)
            sealed = (NuqCodec("nuq3", random_tables(L, H, DIM, 0)),)
            chunks //= 2
        lifetime = rng.choice([None, 20.0])
        self.most, self.max_running = 0, rng.choice([1, 2, 5])
        while self.most < 3:
            chunks += 1
            ledger = PageLedger(chunks * size, slab)
            self.table = ChunkTable(ledger, L, H, CODEC, *sealed, sinks=sinks, arena=Arena(ledger.num_bytes))
            self.manager = CacheManager(self.table, PrefixTree((L, H)), lifetime, store=self.store)
            self.most = min(self.manager.capacity, MOST_CHUNKS)
        self.table.arena.data.fill_(0xFF)
        self.manager.fetching.costs.speed = 1e12
        self.fetching, self.tree = self.manager.fetching, self.manager.tree
        self.running: list[CachedSequence] = []
        self.waiting: deque[CachedSequence] = deque()
        self.now, self.num_asked = 0.0, 0
        self.counts: Counter[str] = Counter()

    # ---- what a scheduler does ---------------------------------------------------------------------------------------

    def ask(self) -> None:
        if len(self.waiting) < MOST_WAITING:
            letters = [self.rng.choice((0, 0, 1)) for _ in range(self.rng.randrange(self.most))]
            tokens = [letter for letter in letters for _ in range(PAGE_TOKENS)]
            tokens += [self.rng.randrange(3)] * self.rng.randrange(1, PAGE_TOKENS + 1)
            reads = self.rng.random() < 0.9
            namespace = self.rng.choice("aaaab")
            for _ in range(self.rng.choice((1, 1, 2))):
                self.num_asked += 1
                self.waiting.append(CachedSequence(list(tokens), namespace, len(tokens), reads, self.num_asked))

    def admit(self) -> None:
        if not self.waiting or len(self.running) >= self.max_running:
            return
        sequence = self.waiting[0]
        near, was_swapped, taken = self.num_near(sequence), sequence.swapped is not None, self.table.num_taken
        prefetches = len(self.fetching.prefetches)
        if self.manager.swapping.must_wait(sequence):
            assert not self.manager.admit(sequence) and sequence.swapped is not None
            self.counts["waited for another's"] += 1
            return
        if not self.manager.admit(sequence):
            assert len(self.fetching.prefetches) == 0, "a fetch for others was left in the way"
            assert self.table.num_taken == taken or prefetches
            assert self.running or sequence.swapped is not None or prefetches, "it would wait for ever"
            return
        self.waiting.popleft()
        self.running.append(sequence)
        path = sequence.path
        if sequence.reads_cache and not was_swapped:
            assert path.num_shared >= min(near, (len(sequence.token_ids) - 1) // PAGE_TOKENS), "a hit was missed"
        assert not was_swapped or sequence.swapped is None
        self.counts["swapped back"] += was_swapped and path.transfer is not None

    def prefetch(self) -> None:
        for sequence in list(self.waiting)[:3]:
            if sequence.swapped is None:
                self.manager.prefetch(sequence)

    def is_fetching(self, sequence: CachedSequence) -> bool:
        transfer = sequence.path.transfer
        if transfer is None:
            return False
        if not transfer.is_over:
            return True
        whole = bool((transfer.ready == 1).all())
        assert self.manager.end_fetch(sequence) == whole
        if not whole:
            self.restart(sequence)
            return True
        self.verify_path(sequence)
        return False

    def restart(self, sequence: CachedSequence) -> None:
        self.running.remove(sequence)
        self.manager.release(sequence)
        self.waiting.appendleft(sequence)

    def preempt(self, sequence: CachedSequence) -> None:
        self.manager.swapping.swap_out(sequence)
        self.counts["swapped with shared ones"] += sequence.swapped is not None and sequence.path.num_shared > 0
        self.restart(sequence)
        sequence.num_preemptions += 1

    def make_room(self, sequence: CachedSequence, num_tokens: int) -> bool:
        while not self.manager.paths.extend(sequence, num_tokens):
            if self.fetching.cancel_latest_prefetch():
                continue
            youngest = max(self.running, key=lambda each: each.number)
            self.preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def compute(self) -> None:
        """The next slice of a prompt, or the next tokens of a sequence, of which a last one may stay uncomputed."""
        if not self.running:
            return
        sequence = self.rng.choice(self.running)
        if self.is_fetching(sequence):
            return
        path = sequence.path
        if path.num_tokens + 1 < len(sequence.token_ids):
            self.manager.paths.match(sequence)
            if (name := self.manager.next_chunk(sequence)) is not None and name in self.fetching.arriving:
                self.counts["waited for another's"] += 1
                return
            end = (path.num_tokens // PAGE_TOKENS + self.rng.randrange(1, 4)) * PAGE_TOKENS
            end = min(end, len(sequence.token_ids))
        elif len(sequence.token_ids) < min(self.most, self.manager.capacity) * PAGE_TOKENS:
            sequence.token_ids.append(self.rng.randrange(3))
            end = len(sequence.token_ids) - self.rng.randrange(2)
        else:
            self.leave(sequence)
            return
        if end <= path.num_tokens or not self.make_room(sequence, end):
            return
        if self.rng.random() < 0.1:  # somebody else's growth takes its place before its rows are computed
            self.preempt(sequence)
            return
        self.verify_path(sequence)  # rows read it
        self.write(sequence, end)
        self.manager.paths.commit(sequence, end)
        self.verify_path(sequence)

    def generate(self) -> None:
        """Many tokens of one sequence, each in a step of its own."""
        ready = [
            each for each in self.running if each.path.transfer is None and each.num_prompt <= each.path.num_tokens
        ]
        if not ready:
            return
        sequence = self.rng.choice(ready)
        for _ in range(self.rng.randrange(1, 70)):
            path = sequence.path
            if path.num_tokens == len(sequence.token_ids):
                if len(sequence.token_ids) >= self.most * PAGE_TOKENS:
                    return
                sequence.token_ids.append(self.rng.randrange(3))
            end = path.num_tokens + 1
            if not self.make_room(sequence, end):
                return
            self.write(sequence, end)
            self.manager.paths.commit(sequence, end)

    def follow(self) -> None:
        """Rows behind arriving layers: the rest arrives, or does not, while they are computed."""
        for sequence in list(self.running):
            path = sequence.path
            if path.transfer is None or path.transfer.is_over:
                continue
            mine = [each for each in self.store.pending if each[0] is path.transfer]
            self.deliver([each for each in mine if layer_of(each[2]) == 0])
            if path.transfer.is_over or not self.fetching.can_overlap(path):
                continue
            self.fetching.assume_arrived(sequence)
            self.manager.check()
            end = min(len(sequence.token_ids), path.num_tokens + self.rng.randrange(1, 130))
            if end <= path.num_tokens or not self.make_room(sequence, end):
                return
            transfer = path.transfer
            self.write(sequence, end)
            if self.rng.random() < 0.7:
                self.deliver([each for each in self.store.pending if each[0] is transfer])
            else:
                transfer.fail(QuireError("it stopped"))
            if not self.is_fetching(sequence):
                self.counts["followed"] += 1
                self.manager.paths.commit(sequence, end)
                self.verify_path(sequence)
            return

    def leave(self, sequence: CachedSequence | None = None) -> None:
        """A sequence ends, or is aborted wherever it is."""
        everyone = [*self.running, *self.waiting]
        if not everyone:
            return
        sequence = sequence or self.rng.choice(everyone)
        if sequence in self.running:
            self.running.remove(sequence)
            self.manager.release(sequence)
        else:
            self.waiting.remove(sequence)
            self.manager.swapping.forget(sequence)
        assert sequence not in self.fetching.prefetches and sequence.swapped is None

    # ---- what a store does -------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Some extents, mostly the oldest ones."""
        pending = self.store.pending
        if self.rng.random() < 0.3:
            self.rng.shuffle(pending)
        self.deliver(pending[: self.rng.randrange(1, 12)])

    def deliver(self, deliveries: Sequence[tuple[Transfer, Run, bytes]]) -> None:
        for transfer, run, extent in list(deliveries):
            self.store.pending.remove((transfer, run, extent))
            if self.rng.random() < 0.02:
                extent = self.rng.choice([extent[:-1], extent.replace(b"QRUN", b"QRUM", 1), extent + b"x"])
            transfer.arrive(run, extent)  # a late one, of a transfer that was closed, must write nothing
            if self.rng.random() < 0.02:
                transfer.arrive(run, extent)

    def fail(self) -> None:
        if self.store.pending:
            self.rng.choice(self.store.pending)[0].fail(QuireError("an I/O error"))

    def lose(self) -> None:
        if self.store.extents:
            self.store.drop(self.rng.choice(list(self.store.extents)).names[:1])

    def fill(self) -> None:
        self.store.is_full = self.rng.random() < 0.2

    # ---- time and room -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.now += self.rng.choice([0.0, 1e-5, 1e-3, 5.0])
        self.manager.tick(self.now)

    def idle(self) -> None:
        self.manager.demotion.run(self.rng.choice([1, 1 << 16, 1 << 30]))

    def evict(self) -> None:
        before = {name for segment in self.tree.segments() for name in segment.keys}
        self.manager.eviction.evict(self.rng.choice((1, 2, 4, 99)))
        gone = before - {name for segment in self.tree.segments() for name in segment.keys}
        if not self.store.is_full and self.store.cap == 1000:
            assert all(self.store.find(name) for name in gone), "an evicted chunk is not in the store"
        self.counts["evicted"] += len(gone)

    def pin(self) -> None:
        if self.running:
            sequence = self.rng.choice(self.running)
            if sequence.path.retention.retained is None:
                num_tokens = min(self.rng.randrange(1, 200), sequence.path.num_shared * PAGE_TOKENS)
                self.manager.pins.add(sequence, num_tokens, self.rng.choice([1.0, 15.0]))
        elif self.waiting:
            self.manager.pins.end(self.waiting[0].keys)

    def poison(self) -> None:
        poison_free(self.table)

    # ---- the model ---------------------------------------------------------------------------------------------------

    def num_near(self, sequence: CachedSequence) -> int:
        """Leading chunks of a sequence that some segment of the tree has, found without the tree's own search."""
        near = {name for segment in self.tree.segments() for name in segment.keys}
        names = sequence.keys.first(99)
        return next((index for index, name in enumerate(names) if name not in near), len(names))

    def write(self, sequence: CachedSequence, end: int) -> None:
        """The rows up to `end`: all chunks that have one of them."""
        path, table = sequence.path, self.table
        for index in range(path.num_tokens // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
            assert index >= path.num_sealed and index >= path.num_shared, "a sealed chunk is written"
            row, content = int(path.chunks[index]), sequence.content(index, end)
            sizes = table.sizes[table.kinds[row]]
            for layer, head in np.ndindex(L, H):
                found = image(content, layer, head, sizes[layer, head])
                table.arena.store(table.pages[row, layer, head][None], int(sizes[layer, head]), found[None])
            if table.sidecars[row] >= 0:
                assert table.sinks is not None
                for layer in range(L):
                    at = int(table.sidecars[row]) * UNIT + layer * table.sinks.layer_bytes
                    table.arena.write(at, image(content, layer, 99, table.sinks.layer_bytes))

    def verify_row(self, row: int, content: bytes, what: str) -> None:
        table = self.table
        sizes = table.sizes[table.kinds[row]]
        for layer, head in np.ndindex(L, H):
            found = table.arena.images(table.pages[row, layer, head][None], int(sizes[layer, head]))[0]
            assert np.array_equal(found, image(content, layer, head, sizes[layer, head])), (
                f"{what}: layer {layer}, head {head} has other bytes"
            )
        if table.sidecars[row] >= 0:
            assert table.sinks is not None
            for layer in range(L):
                at = int(table.sidecars[row]) * UNIT + layer * table.sinks.layer_bytes
                found = table.arena.read(at, table.sinks.layer_bytes)
                assert np.array_equal(found, image(content, layer, 99, len(found))), f"{what}: its sidecar has others"

    def holds(self, row: int, keys: ChunkKeys, index: int) -> bool:
        """Whether a row has the bytes of a whole chunk."""
        size = int(self.table.sizes[self.table.kinds[row]][0, 0])
        found = self.table.arena.images(self.table.pages[row, 0, 0][None], size)[0]
        return np.array_equal(found, image(keys.first(index + 1)[index], 0, 0, size))

    def verify_path(self, sequence: CachedSequence) -> None:
        path = sequence.path
        end = path.num_tokens if path.transfer is None else path.num_shared * PAGE_TOKENS
        for index in range(-(-end // PAGE_TOKENS)):
            whole = (index + 1) * PAGE_TOKENS <= end
            # An open chunk that this step fills is to be encoded into the one that is in its place already.
            row = path.reservation.filled if not whole and path.reservation.filled >= 0 else int(path.chunks[index])
            wanted = self.table.sealed_codec if whole else self.table.open_codec
            assert self.table.codecs[int(self.table.kinds[row])] is wanted
            has_sidecar = whole and index == 0 and self.table.sinks is not None
            assert (self.table.sidecars[row] >= 0) == has_sidecar, "a sidecar too many, or one is missing"
            content = sequence.content(index, end)
            is_known = end + 1 == (index + 1) * PAGE_TOKENS <= len(sequence.token_ids)
            if is_known and self.holds(row, sequence.keys, index):
                content = sequence.content(index, end + 1)  # a copy of a cached chunk
                self.counts["whole"] += 1
            self.verify_row(row, content, f"chunk {index} of {sequence.number}")

    def verify(self) -> None:
        """Everything that anybody may read."""
        self.manager.check()
        for segment in self.tree.segments():
            for row, name in zip(segment.chunks.tolist(), segment.keys, strict=True):
                self.verify_row(row, name, "the tree")
        for sequence in self.running:
            self.verify_path(sequence)
            names = sequence.path.segments
            fresh = tuple((segment.number, len(segment.chunks)) for segment in names)
            assert self.tree.shared(sequence.path) == fresh, "what a path remembers of its segments is out of date"
        owners = [each.path for each in self.running] + [*self.fetching.prefetches.values()]
        live = {path.transfer for path in owners if path.transfer is not None}
        assert live == set(self.fetching._underway), "a transfer of nobody, or one that nobody counts"
        arriving = [name for path in owners if path.transfer is not None for name in path.transfer.names]
        assert len({*arriving}) == len(arriving) and self.fetching.arriving == {*arriving}, "fetched twice at once"
        ledger = self.table.ledger
        for transfer in live:
            for rows in transfer._parts.values():
                pages = self.table._pages_of(rows[rows >= 0])
                assert ledger.holds(pages).all(), "a page may move while a store writes it"
        if not live:
            assert not ledger.holds(ledger.allocated_ids()).any(), "a hold outlives its transfer"
        handles = {each.swapped.run.names[0] for each in self.waiting if each.swapped is not None}
        handles |= {run.names[0] for path in owners if path.transfer for run in path.transfer.runs if not run.is_shared}
        kept = {run.names[0] for run in self.store.extents if not run.is_shared}
        assert kept <= handles, "a private run outlives its sequence"

    def run(self, num_operations: int) -> None:
        weights = {
            self.ask: 10, self.admit: 10, self.prefetch: 6, self.compute: 24, self.generate: 3, self.follow: 14,
            self.leave: 3, self.arrive: 10, self.fail: 1, self.lose: 1, self.fill: 2, self.tick: 8, self.idle: 3,
            self.evict: 7, self.pin: 1, self.poison: 3, self.random_preemption: 4,
        }  # fmt: skip
        for number in range(num_operations):
            (operation,) = self.rng.choices(list(weights), list(weights.values()))
            operation()
            if number % 8 == 0:
                self.verify()
        self.end()

    def random_preemption(self) -> None:
        if self.running:
            self.preempt(self.rng.choice(self.running))

    def end(self) -> None:
        """All leave; then only cached chunks are left, and then none."""
        while self.running or self.waiting:
            self.leave()
        self.verify()
        self.deliver(self.store.pending)
        self.manager.tick(self.now)
        self.verify()
        assert not self.fetching.arriving and not self.fetching.prefetches and self.fetching.transfer is None
        assert not any(not run.is_shared for run in self.store.runs.values())
        assert self.manager.stats()["bytes_used"] == 0
        while self.manager.pins.end_oldest():
            pass
        self.manager.eviction.evict(1 << 20)
        assert self.table.num_taken == 0 and self.table.ledger.allocated_bytes == 0
        self.counts.update(vars(self.fetching.counts))


EVENTS = ("fetched", "prefetched", "wasted", "swapped_out", "swapped_in", "failed_transfers", "followed", "evicted",
          "swapped with shared ones", "swapped back", "waited for another's")  # fmt: skip
"""What must happen. Few machines may miss one; then others run."""


def test_whatever_happens_every_page_that_is_read_has_the_bytes_of_its_tokens(seed: int) -> None:
    """Half of the machines encode. A night run has 300,000 operations."""
    counts, most = Counter[str](), tries(6000) // OPERATIONS
    for number in range(5 * most):
        if number >= most and all(counts[name] for name in EVENTS):
            break
        machine = Machine(random.Random(f"{seed} {number}"), encodes=number % 2 == 1)
        try:
            machine.run(OPERATIONS)
        except BaseException as error:
            error.add_note(f"machine {number} of seed {seed}")
            raise
        counts += machine.counts
    print(dict(counts))
    never = [name for name in EVENTS if not counts[name]]
    assert not never, f"never happened: {never}"
