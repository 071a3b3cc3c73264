"""The calibration file: the quantization tables of one model's codecs, in one safetensors file.

Tensors are named CODEC.FIELD (nuq3.key_books). The metadata has the model, the settings, a report of the choices and
their reasons, and the file's own hash. Two sequences share pages only if this hash is equal, because other tables give
other bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from quire.cache.codecs.nuq import BLOCK_PAIRS, CODEBOOK_SIZE, MAX_SLOTS, NuqTables
from quire.cache.codecs.packing import MAX_BITS
from quire.errors import ConfigError
from quire.safe_io import atomic_write, check_regular

FORMAT = "1"
"""Version of the file format: its tensors and their meaning."""


@dataclass(frozen=True)
class Calibration:
    """Tables by codec name, and their origin.

    model     the checkpoint's fingerprint
    settings  the settings of the calibration
    report    for each tensor the choice, its reason and its expected cost
    name      the checkpoint's file or folder, for messages
    """

    model: str
    tables: Mapping[str, NuqTables]
    settings: Mapping[str, Any]
    report: Mapping[str, Any]
    name: str = ""

    @property
    def hash(self) -> str:
        """SHA-256 of everything that pages depend on, as hex."""
        digest = hashlib.sha256(json.dumps([FORMAT, self.model, self.settings], sort_keys=True).encode())
        for name, tensor in sorted(self.tensors().items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Writes the file atomically: readers never see a partial file under its name."""
        from safetensors.torch import save

        with atomic_write(path) as draft:
            # The file gets the permissions of the user's umask. The library's own writer would give it fewer.
            draft.write_bytes(save(self.tensors(), self.metadata()))

    @classmethod
    def load(cls, path: Path, model: str) -> Calibration:
        """Reads a calibration of the model with this fingerprint.

        Raises ConfigError, naming the file, if it is missing, no calibration, damaged, or for another model.
        """
        from safetensors import SafetensorError, safe_open

        try:
            check_regular(path)
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: not a calibration that can be read ({error})") from None
        return cls.of(path, metadata, tensors, model)

    @classmethod
    def of(
        cls, path: Path, metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor], model: str
    ) -> Calibration:
        """A calibration from the contents of a file. Raises the errors of `load`."""
        if metadata.get("format") != FORMAT:
            raise ConfigError(
                f"{path}: not a calibration of this version; make one with quire calibrate MODEL -o {path}"
            )
        if metadata.get("model") != model:
            of = " ".join(filter(None, (metadata.get("name"), f"(fingerprint {str(metadata.get('model'))[:16]})")))
            raise ConfigError(
                f"{path}: made for another model, {of}, and this one has {model[:16]}; make one with quire calibrate"
                " MODEL -o FILE"
            )
        names = [field.name for field in fields(NuqTables)]
        codecs = sorted({name.partition(".")[0] for name in tensors})
        try:
            tables = {codec: NuqTables(**{name: tensors[f"{codec}.{name}"] for name in names}) for codec in codecs}
            found = cls(
                model,
                tables,
                json.loads(metadata["settings"]),
                json.loads(metadata["report"]),
                metadata.get("name", ""),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(f"{path}: the calibration is damaged ({error}); make it again") from None
        if found.hash != metadata.get("hash"):
            raise ConfigError(f"{path}: the calibration is damaged: it does not have the hash it says; make it again")
        return found

    def metadata(self) -> dict[str, str]:
        """The metadata of its file."""
        return {
            "format": FORMAT,
            "model": self.model,
            "name": self.name,
            "settings": json.dumps(self.settings, sort_keys=True),
            "report": json.dumps(self.report, sort_keys=True),
            "hash": self.hash,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of its file."""
        return {
            f"{codec}.{field.name}": getattr(tables, field.name).contiguous()
            for codec, tables in self.tables.items()
            for field in fields(tables)
        }


def check_tables(tables: NuqTables, num_layers: int, num_heads: int, head_dim: int) -> None:
    """Raises ConfigError unless the tables fit a model of this shape and their values are in range."""
    pairs, infinite, most = head_dim // 2, torch.inf, torch.finfo(torch.float32).max
    # For each field: its shape after [L, H], its least value and its largest value.
    wanted: dict[str, tuple[tuple[int, ...], float, float]] = {
        "key_order": ((pairs,), 0, pairs - 1),
        "key_bits": ((pairs // BLOCK_PAIRS,), 0, MAX_BITS),
        "key_edges": ((head_dim, CODEBOOK_SIZE - 1), -infinite, infinite),
        "key_books": ((head_dim, CODEBOOK_SIZE), -most, most),
        "key_weight": ((head_dim,), 0.0, most),
        "key_slots": ((), 0, MAX_SLOTS),
        "value_bits": ((), 1, MAX_BITS),
        "value_edges": ((CODEBOOK_SIZE - 1,), -infinite, infinite),
        "value_books": ((CODEBOOK_SIZE,), -most, most),
        "value_slots": ((), 0, MAX_SLOTS),
    }
    for name, (rest, low, high) in wanted.items():
        found, shape = getattr(tables, name), (num_layers, num_heads, *rest)
        dtype = torch.float32 if isinstance(low, float) else torch.uint8
        if found.shape != shape or found.dtype != dtype:
            raise ConfigError(
                f"the calibration's {name} is {found.dtype} {list(found.shape)}, and a model with {num_layers}"
                f" layers, {num_heads} kv heads and head size {head_dim} needs {dtype} {list(shape)}"
            )
        sound = (found >= low).all() & (found <= high).all()
        if name.endswith("edges"):
            sound &= (found[..., 1:] >= found[..., :-1]).all()
        if name == "key_order":
            sound &= (found.sort(-1).values.diff() == 1).all()
        if not sound:
            raise ConfigError(f"the calibration's {name} has values out of range; run quire calibrate again")
