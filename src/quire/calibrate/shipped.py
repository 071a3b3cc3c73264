"""The calibrations that come with Quire, one file each, found by the model's fingerprint.

A file has the contents of a calibration file, packed without loss: `scripts/ship_calibration.py` writes it. Edges lie
between centroids, so their difference from the middle is stored, which is 0 almost everywhere. The bytes of numbers
are sorted by their place in the number, because the upper ones repeat. LZMA compresses the rest.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.calibrate.settings import CalibrationSettings
from quire.engine.calibration import Calibration
from quire.errors import ConfigError

FOLDER = Path(__file__).parent / "shipped"
SUFFIX = ".xz"

_EDGES = {"key_edges": "key_books", "value_edges": "value_books"}
"""Edges, and the decoded values between which they lie."""


def shipped(model: str, settings: CalibrationSettings) -> Calibration | None:
    """The calibration that comes with Quire for the model with this fingerprint and these settings; None if none does.
    Raises ConfigError for a damaged file.
    """
    path = FOLDER / (settings.file(model).name + SUFFIX)
    return unpack(path, model) if path.exists() else None


def pack(calibration: Calibration) -> bytes:
    """The contents of a file."""
    tensors = calibration.tensors()
    head = {
        "metadata": calibration.metadata(),
        "tensors": [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()],
    }
    parts = [json.dumps(head, sort_keys=True).encode() + b"\n"]
    for name, tensor in tensors.items():
        found = tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor
        if (middles := _middles(name, tensors)) is not None:
            found = found - middles
        parts.append(_planes(found).numpy().tobytes())
    return lzma.compress(b"".join(parts), preset=9 | lzma.PRESET_EXTREME)


def unpack(path: Path, model: str) -> Calibration:
    """The calibration in a packed file. Raises the errors of `Calibration.load`."""
    try:
        line, _, body = lzma.decompress(path.read_bytes()).partition(b"\n")
        head = json.loads(line)
        tensors: dict[str, Tensor] = {}
        at = 0
        for name, dtype, shape in head["tensors"]:
            kind = getattr(torch, dtype)
            size = math.prod(shape) * kind.itemsize
            planes = torch.frombuffer(bytearray(body[at : at + size]), dtype=torch.uint8).view(kind.itemsize, -1)
            tensors[name] = planes.T.contiguous().view(kind).view(shape)
            at += size
        for name, tensor in tensors.items():
            if (middles := _middles(name, tensors)) is not None:
                tensors[name] = (tensor.view(torch.int32) + middles).view(torch.float32)
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{path}: not a calibration that can be read ({error}); install Quire again") from None
    return Calibration.of(path, head["metadata"], tensors, model)


def _middles(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The middles between centroids as int32, for edges; None for other tensors."""
    codec, _, field = name.partition(".")
    if field not in _EDGES:
        return None
    codebooks = tensors[f"{codec}.{_EDGES[field]}"]
    return ((codebooks[..., 1:] + codebooks[..., :-1]) * 0.5).view(torch.int32)


def _planes(numbers: Tensor) -> Tensor:
    """The bytes of numbers, uint8 [bytes of a number, count]: all first bytes, all second ones, and so on."""
    return numbers.reshape(-1, 1).view(torch.uint8).T.contiguous()
