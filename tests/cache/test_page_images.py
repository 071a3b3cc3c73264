"""Page images follow docs/reference/page-format.md: a stored page of every codec is written again, and read by the
document's rules.

A change of these bytes is a change of the format version. A new codec is none: no version has pages of it yet. The
stored images are lines of 64 bytes, in hexadecimal. Once CODECS below has a codec, this stores its page:

    from tests.cache.test_page_images import IMAGES, section_of
    IMAGES.write_text(IMAGES.read_text() + section_of("name"))
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from quire.cache.codecs import CODECS as REGISTRY
from quire.cache.codecs import Codec
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.group import GroupCodec
from quire.cache.codecs.nuq import NuqCodec, NuqTables
from quire.cache.namespace import FORMAT_VERSION

IMAGES = Path(__file__).with_name("page_images.txt")
D, HALF, P = 16, 8, 64
ORDER = [7, 2, 5, 0, 3, 6, 1, 4]
WIDTHS = {"nuq4": ((5, 3), 4), "nuq3": ((4, 2), 3), "nuq2": ((1, 0), 5)}
"""Of each of the two blocks of key pairs, and of values: all parts that a code can have."""

SLOTS = {"nuq4": (1, 0), "nuq3": (2, 1), "nuq2": (0, 2)}


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [P, D]: eighths, every channel and token with a range of its own, here and there an outlier."""
    t, d = torch.arange(P)[:, None], torch.arange(D)[None]
    k = ((t * 37 + d * 11 + t * d * 5) % 64 - 32) / 8 + d / 4
    v = ((t * 13 + d * 29 + t * d * 3) % 32 - 16) / 8 * (1 + t % 3) + t / 16
    return k + 40 * ((t + d) % 23 == 7), v - 25 * ((2 * t + d) % 19 == 3)


def key_codebook(channel: int, bits: int) -> list[float]:
    return [8 * (i + 0.5) / (1 << bits) - 4 + channel / 4 + (i % 3) / 16 for i in range(1 << bits)]


def value_codebook(bits: int) -> list[float]:
    return [(2 * i + 1) / (1 << bits) - 1 + (i % 2) / 64 for i in range(1 << bits)]


def bits_of_channel(name: str, channel: int) -> int:
    return WIDTHS[name][0][ORDER.index(channel % HALF) // 4]


def tables(name: str) -> NuqTables:
    def filled(codebooks: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
        centroids, edges = torch.zeros(len(codebooks), 32), torch.full((len(codebooks), 31), torch.inf)
        for row, codebook in enumerate(codebooks):
            centroids[row, : len(codebook)] = torch.tensor(codebook)
            edges[row, : len(codebook) - 1] = torch.tensor(
                [(a + b) / 2 for a, b in zip(codebook[1:], codebook, strict=False)]
            )
        return centroids[None, None], edges[None, None]

    key_books, key_edges = filled([key_codebook(channel, bits_of_channel(name, channel)) for channel in range(D)])
    (key_bits, value_bits), slots = WIDTHS[name], SLOTS[name]
    value_books, value_edges = filled([value_codebook(value_bits)])
    return NuqTables(
        key_order=torch.tensor([[ORDER]], dtype=torch.uint8),
        key_bits=torch.tensor([[key_bits]], dtype=torch.uint8),
        key_edges=key_edges,
        key_books=key_books,
        key_weight=1 + torch.arange(D).float().view(1, 1, D) % 4,
        key_slots=torch.tensor([[slots[0]]], dtype=torch.uint8),
        value_bits=torch.tensor([[value_bits]], dtype=torch.uint8),
        value_edges=value_edges[:, :, 0],
        value_books=value_books[:, :, 0],
        value_slots=torch.tensor([[slots[1]]], dtype=torch.uint8),
    )


BIAS = [150.0 if channel == 3 else -channel / 4 for channel in range(D)]

CODECS: dict[str, Codec] = {
    "dense": DenseCodec(D, torch.bfloat16),
    **{name: NuqCodec(name, tables(name)) for name in WIDTHS},
    "g4": GroupCodec(D),
    "g4 less a bias": GroupCodec(D, torch.tensor(BIAS)[None, None]),
}


def numbers_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = numbers()
    return k + torch.tensor(BIAS) * (name == "g4 less a bias"), v


def image_of(name: str) -> bytes:
    k, v = numbers_of(name)
    return bytes(CODECS[name].encode(0, 0, k[None], v[None])[0].tolist())


def section_of(name: str) -> str:
    """A codec's image as page_images.txt has it."""
    image = image_of(name)
    return "".join([f"# {name}\n", *(f"{image[at : at + 64].hex()}\n" for at in range(0, len(image), 64))])


def stored() -> dict[str, bytes]:
    """The stored images by codec; the file's first line is the format version."""
    version, _, rest = IMAGES.read_text().partition("\n")
    assert version == f"format version {FORMAT_VERSION}"
    found = {}
    for section in rest.split("# ")[1:]:
        name, _, lines = section.partition("\n")
        found[name] = bytes.fromhex(lines)
    return found


def halves(page: bytes, start: int, count: int) -> list[float]:
    return list(struct.unpack_from(f"<{count}e", page, start))


def codes(page: bytes, start: int, fields: int, bits: int) -> list[list[int]]:
    """Codes [fields][32] of lines from a byte on, one bit after the other."""
    found = [[0] * 32 for _ in range(fields)]
    above = bits
    for width in (4, 2, 1):
        if not bits & width:
            continue
        above -= width
        for field in range(fields):
            line, place = divmod(field, 16 // width)
            for lane in range(32):
                (word,) = struct.unpack_from("<H", page, start + 64 * line + 2 * lane)
                found[field][lane] |= (word >> width * place & ((1 << width) - 1)) << above
        start += 64 * fields * width // 16
    return found


def add_slots(page: bytes, start: int, count: int, vectors: list[list[float]]) -> None:
    for slot in range(start, start + 192 * count, 192):
        for t, missing in enumerate(halves(page, slot + 64, P)):
            vectors[t][page[slot + t]] += missing


def read_nuq(page: bytes, name: str) -> tuple[list[list[float]], list[list[float]]]:
    """Keys and values as docs/reference/page-format.md has them."""
    (widths, value_bits), (key_slots, value_slots) = WIDTHS[name], SLOTS[name]
    k = [[0.0] * D for _ in range(P)]
    start = 0
    for block, bits in enumerate(widths):
        for field, lanes in enumerate(codes(page, start, 16, bits)):
            pair = ORDER[4 * block + field // 4]
            for lane, code in enumerate(lanes):
                channel = pair + HALF * (lane % 2)
                k[16 * (field % 4) + lane // 2][channel] = key_codebook(channel, bits)[code]
        start += 64 * bits
    add_slots(page, start, key_slots, k)
    start += 192 * key_slots
    found = codes(page, start, 32, value_bits)
    start += 128 * value_bits
    s, z = halves(page, start, P), halves(page, start + 128, P)
    codebook = value_codebook(value_bits)
    v = [[codebook[found[t // 2][2 * d + t % 2]] * s[t] + z[t] for d in range(D)] for t in range(P)]
    add_slots(page, start + 256, value_slots, v)
    end = start + 256 + 192 * value_slots
    assert len(page) == -(-end // 128) * 128 and not any(page[end:])
    return k, v


def read_g4(page: bytes) -> tuple[list[list[float]], list[list[float]]]:
    assert len(page) == 2 * P * HALF + 2 * 256
    found = []
    for which in (0, 1):
        low, step = (halves(page, 2 * P * HALF + 256 * which + 128 * i, P) for i in (0, 1))
        rows = [page[(which * P + t) * HALF :][:HALF] for t in range(P)]
        both = [[byte & 15 for byte in row] + [byte >> 4 for byte in row] for row in rows]
        found.append([[low[t] + code * step[t] for code in both[t]] for t in range(P)])
    return found[0], found[1]


def read_dense(page: bytes) -> tuple[list[list[float]], list[list[float]]]:
    assert len(page) == 2 * P * D * 2
    words = struct.unpack(f"<{2 * P * D}H", page)
    numbers = [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words]
    rows = [numbers[D * row : D * (row + 1)] for row in range(2 * P)]
    return rows[:P], rows[P:]


@pytest.mark.parametrize("name", CODECS)
def test_a_page_is_written_as_it_was(name: str) -> None:
    kept, image = stored()[name], image_of(name)
    differ = [at for at, (a, b) in enumerate(zip(kept, image, strict=True)) if a != b]
    assert not differ, f"{name}: bytes {differ[:8]} of {len(image)} differ: that is another format version"


@pytest.mark.parametrize("name", CODECS)
def test_a_stored_page_is_read_as_the_documentation_says(name: str) -> None:
    page = stored()[name]
    plain = read_dense(page) if name == "dense" else read_nuq(page, name) if name in WIDTHS else read_g4(page)
    if name == "g4 less a bias":
        plain = [[number + bias for number, bias in zip(row, BIAS, strict=True)] for row in plain[0]], plain[1]
    decoded = CODECS[name].decode(0, 0, torch.tensor(list(page), dtype=torch.uint8)[None])
    for found, expected, written in zip(decoded, plain, numbers_of(name), strict=True):
        torch.testing.assert_close(found[0], torch.tensor(expected), atol=2e-5, rtol=2e-6)
        assert (found[0] - written).abs().median() < (1.6 if name == "nuq2" else 0.7), (
            "what was stored is not what is read"
        )


def test_the_file_has_one_section_after_the_other() -> None:
    assert IMAGES.read_text() == f"format version {FORMAT_VERSION}\n" + "".join(map(section_of, CODECS))


def test_every_codec_has_an_image() -> None:
    assert set(stored()) == set(CODECS)
    assert {name.partition(" ")[0] for name in CODECS} == set(REGISTRY)
    assert len({*map(len, stored().values())}) > 1
