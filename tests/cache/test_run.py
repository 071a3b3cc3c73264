"""Runs: an extent has exactly what its rows hold, does not change under a hold, and is checked on arrival."""

from __future__ import annotations

import random
import struct
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.cache.arena import Arena
from quire.cache.codecs import DENSE
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.sums import SumsCodec
from quire.cache.ledger import PageLedger
from quire.cache.namespace import FORMAT_VERSION
from quire.cache.path import SwappedPath
from quire.cache.run import CHECKSUM, MAC, HeldPages, RunIdentity, RunUnpacker, take_rows
from quire.cache.store import Transfer
from quire.cache.table import ALL_SLOTS, ChunkTable
from quire.errors import ExtentError
from tests.cache.test_fetching import SHAPE, VOCABULARY, with_store

from ..codecs import TOY
from ..engines import GREEDY, drain, generate, make_engine
from ..tables import available
from ..toy_store import ToyStore

LAYERS, HEADS, DIM = 3, 2, 16


def make_table(slabs: int = 40, retains: bool = True) -> ChunkTable:
    codec = DenseCodec(DIM, torch.float32)
    ledger = PageLedger(slabs * 2 * codec.page_bytes, 2 * codec.page_bytes)
    table = ChunkTable(
        ledger, LAYERS, HEADS, codec, sums=SumsCodec() if retains else None, arena=Arena(ledger.num_bytes)
    )
    table.arena.data.fill_(0xFF)
    return table


def extents_of(pages: HeldPages) -> list[bytes]:
    return [bytes(extent) for extent in pages.pack(range(LAYERS))]


def write(table: ChunkTable, rows: np.ndarray[Any, Any], rng: np.random.Generator) -> None:
    """Random bytes into all pages of some rows."""
    for row in rows.tolist():
        page_bytes = table.codecs[int(table.kinds[row])].page_bytes
        ids = table.pages[row][table.masks[row] != 0]
        table.arena.store(ids, page_bytes, rng.integers(0, 256, (len(ids), page_bytes), np.uint8))


def bytes_of(table: ChunkTable, row: int) -> list[bytes | None]:
    """The image of each page of a row; None where it holds none."""
    page_bytes, masks = table.codecs[int(table.kinds[row])].page_bytes, table.masks[row]
    return [
        table.arena.load(table.pages[row, layer, head][None], page_bytes).numpy().tobytes()
        if masks[layer, head]
        else None
        for layer, head in np.ndindex(masks.shape)
    ]


def gappy_rows(table: ChunkTable, rng: np.random.Generator, count: int = 4) -> np.ndarray[Any, Any]:
    """Rows some of whose pages are gone, and of others slots: and a neighbour's pages between them."""
    rows, others = [], []
    for _ in range(count):
        rows.append(table.take(1, table.sealed_codec))
        others.append(table.take(1, table.sealed_codec))
    found, beside = np.concatenate(rows), np.concatenate(others)
    write(table, found, rng)
    write(table, beside, rng)
    drawn = rng.random((count, LAYERS, HEADS)) < 0.4
    drawn[0] = True
    drawn[0, 0, 0] = False
    at, layers, heads = np.nonzero(drawn)
    table.drop((found[at], layers, heads))
    assert table.masks is not None
    few = rng.integers(1, 2**63, (count, LAYERS, HEADS), np.uint64)
    table.masks[found] = np.where(table.masks[found] == 0, 0, few)
    return found


def test_a_row_with_gaps_arrives_with_what_it_holds_and_shows_nothing_else(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, target = make_table(), make_table(60)
    target.take(5, target.sealed_codec)
    rows = gappy_rows(source, rng)
    pages = HeldPages(source, RunIdentity((b"h" * 16,)), rows)
    extents = extents_of(pages)
    # Of every page that is held the bytes are there once, of no other any.
    held = [image for row in rows.tolist() for image in bytes_of(source, row) if image is not None]
    together = b"".join(extents)
    assert all(together.count(image) == 1 for image in held)
    heads_and_headers = len(together) - sum(map(len, held))
    assert heads_and_headers == sum(80 + len(rows) * (1 + 1 + 4 + HEADS * 9) for _ in range(LAYERS))
    arrived = take_rows(target, pages.run)
    arrival = RunUnpacker(target, pages.run, arrived)
    for extent in rng.permutation(np.array(extents, object)).tolist():
        arrival.unpack(extent)
    assert target.masks is not None and source.masks is not None
    assert np.array_equal(target.masks[arrived], source.masks[rows])
    assert [bytes_of(target, row) for row in arrived.tolist()] == [bytes_of(source, row) for row in rows.tolist()]
    pages.release()
    for table, taken in ((source, rows), (target, arrived)):
        table.check()
        table.free(taken)
        table.check()


def test_a_held_run_keeps_its_bytes_though_its_rows_are_given_back_and_others_move(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = make_table(20)
    rows = np.concatenate([table.take(1, table.sealed_codec) for _ in range(6)])
    write(table, rows, rng)
    expected = [image for row in rows[::2].tolist() for image in bytes_of(table, row)]
    pages = HeldPages(table, RunIdentity((b"h" * 16,)), rows[::2])
    table.free(rows)
    # All of the arena is wanted but for what is held.
    codec = table.sealed_codec
    assert available(table, codec) < 20 * 2 // (LAYERS * HEADS)
    taken = table.take(available(table, codec), codec)
    write(table, taken, rng)
    sums = table.take(3, table.codecs[5])
    table.check()
    together = b"".join(extents_of(pages))
    assert all(image is not None and image in together for image in expected)
    pages.release()
    table.free(np.concatenate((taken, sums)))
    table.check()
    assert table.ledger.allocated_bytes == 0


def test_an_extent_that_is_short_or_of_another_run_is_refused_and_writes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, target = make_table(), make_table()
    rows = gappy_rows(source, rng)
    pages = HeldPages(source, RunIdentity((b"h" * 16,)), rows)
    arrival = RunUnpacker(target, pages.run, take_rows(target, pages.run))
    other = HeldPages(source, RunIdentity((b"o" * 16,)), rows[:3])
    before = target.arena.data.clone()
    extent = extents_of(pages)[0]
    wrong = [b"", extent[:40], extent[:-1], extent + b"\0", extents_of(other)[0]]
    described = 80 + len(rows) * (1 + 1 + 4 + HEADS * 9)
    # A seal covers the pages, and the fields that it fills.
    for at in [*range(CHECKSUM.start), *range(MAC.stop, described)]:
        wrong.append(extent[:at] + bytes([extent[at] ^ (1 << int(rng.integers(8)))]) + extent[at + 1 :])
    for each in wrong:
        with pytest.raises(ExtentError):
            arrival.unpack(each)
    assert torch.equal(before, target.arena.data)
    assert arrival.unpack(extent) == 0


def test_a_layer_that_arrives_twice_counts_once() -> None:
    table = make_table(retains=False)
    parts, extents = [], []
    for name in (b"a" * 16, b"b" * 16):
        rows = table.take(1, table.sealed_codec)
        pages = HeldPages(table, RunIdentity((name,), np.arange(64, dtype=np.int32)), rows)
        extents.append(extents_of(pages))
        parts.append((pages.run, take_rows(table, pages.run)))
        pages.release()
    transfer = Transfer(table, parts, threading.Condition())
    for _ in range(2):
        transfer.arrive(parts[0][0], extents[0][1])
    assert not transfer.done(1), "half of it is there"
    for layer in range(LAYERS):
        transfer.arrive(parts[0][0], extents[0][layer])
        transfer.arrive(parts[1][0], extents[1][layer])
    assert transfer.is_over and transfer.error is None and transfer.close()
    table.check()


def test_the_header_of_an_extent_is_that_of_the_page_format() -> None:
    table = make_table(retains=False)
    rows = table.take(2, table.sealed_codec)
    write(table, rows, np.random.default_rng(0))
    tokens = np.arange(128, dtype=np.int32)
    pages = HeldPages(table, RunIdentity((b"a" * 16, b"b" * 16), tokens), rows)
    extent = extents_of(pages)[2]
    magic, version, flags, layer, num_rows, attached, heads, length = struct.unpack_from("<4sHHIIIIQ", extent)
    assert (magic, version, flags, layer) == (b"QRUN", FORMAT_VERSION, 1, 2)
    assert (num_rows, attached, heads, length) == (2, 0, HEADS, len(extent) - 80)
    assert extent[48:80] == bytes(32), "no MAC in memory"
    at = 80
    parts = {}
    for name, size in (("kinds", 2), ("sidecars", 2), ("placed", 4), ("bases", 8), ("masks", 32)):
        parts[name], at = extent[at : at + size], at + size
    assert parts == {
        "kinds": bytes([1, 1]),
        "sidecars": bytes(2),
        "placed": bytes(4),
        "bases": b"\xff" * 8,
        "masks": b"\xff" * 32,
    }
    images = [bytes_of(table, int(row))[2 * HEADS + head] for row in rows for head in range(HEADS)]
    assert extent[at:] == b"".join(image or b"" for image in images)
    assert ALL_SLOTS == 2**64 - 1


@pytest.mark.usefixtures("toy_codec")
@pytest.mark.parametrize(
    ("codec", "backend"),
    [(codec, backend) for codec in (DENSE, "nuq3") for backend in ("cpu", "reference")] + [(TOY.name, "reference")],
)
def test_a_sequence_with_gaps_goes_on_in_another_engine(codec: str, backend: str, seed: int) -> None:
    """Its pages are pulled from one arena into another, at other places, and its tokens are those it would have had."""
    rng = random.Random(seed)
    options = {
        "cache.codec": codec,
        "retain.budget": 0.5,
        "retain.profile_rows": 32,
        "attention.backend": backend,
    }
    prompt = [rng.randrange(VOCABULARY) for _ in range(260)]
    params = replace(GREEDY, max_tokens=120)
    (expected,) = generate(make_engine(SHAPE, **options), [prompt], params)
    store = ToyStore(seed, delay=0.001)
    first, second = with_store(store, 30, **options), with_store(store, 40, **options)
    generate(second, [prompt[100:250], prompt[::-1]])  # its arena is used otherwise
    (sequence,) = first.add("x", prompt, params).sequences
    while sequence.num_generated < 50:
        first.step()
    first.scheduler.preempt(sequence)
    swapped = sequence.swapped
    assert swapped is not None and ((swapped.run.masks != ALL_SLOTS).any() or swapped.run.placed.any())
    (other,) = second.add("x", prompt, params).sequences
    other.token_ids.extend(sequence.token_ids[len(prompt) :])
    other.swapped, sequence.swapped = SwappedPath(swapped.path, swapped.num_shared, swapped.run), None
    assert drain(second)["x"].outputs[0].token_ids == expected[50:]
    assert second.holds_nothing
    second.check()
