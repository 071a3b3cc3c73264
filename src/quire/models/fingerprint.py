"""A name for a checkpoint's contents that costs milliseconds: sizes, headers and sampled blocks of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from quire.models.gguf_file import files_of
from quire.safe_io import open_file

HEAD_BYTES = 1 << 20
"""Bytes at the start of a file that are hashed in full: the headers of safetensors and GGUF are there."""

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Number of sampled blocks, spread evenly over the rest."""

_SUFFIXES = (".safetensors", ".gguf", ".json")


def fingerprint(path: Path) -> str:
    """Hexadecimal digest (128 bits) of a .gguf file, of all its parts if it is one of several, or of a folder's weights
    and settings. The path does not matter.

    Two checkpoints with another size, header or sampled block have different digests. Changed weights between the
    samples do not show.
    """
    digest = hashlib.blake2b(digest_size=16)
    is_folder = path.is_dir()
    files: Iterable[Path] = () if is_folder else files_of(path)
    if is_folder:
        files = sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES and each.is_file())
    for each in files:
        size = each.stat().st_size
        # In a folder the name identifies the shard.
        digest.update(f"{each.name if is_folder else ''}:{size};".encode())
        with open_file(each, "rb") as file:
            digest.update(file.read(HEAD_BYTES))
            for index in range(SAMPLES if size > HEAD_BYTES else 0):
                file.seek(HEAD_BYTES + (size - HEAD_BYTES) * index // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
