"""Checkpoints: named tensors on disk, from a safetensors folder or a GGUF file. Never pickles.

Opening a checkpoint reads only its headers. It reports every error in them (a missing tensor, a wrong shape, a short
file) before anything is loaded. Tensors are memory-mapped and returned one at a time.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Self

import torch

from quire.errors import ModelError
from quire.models.families import gguf_name, hf_name, shape_from_config, shape_from_gguf
from quire.models.files import read_json
from quire.models.gguf_file import GgufFile
from quire.models.quants import BLOCK_KINDS, Blocks, dequantize
from quire.models.resolve import resolve_model
from quire.models.settings import CheckedSettings, one_line
from quire.safe_io import check_regular

log = logging.getLogger("quire")

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor

    from quire.models.shape import ModelShape

# A handle is reopened after this many bytes, so that copied pages leave the resident set.
_REOPEN_BYTES = 256 << 20

_COMPARED_ROWS = 4096
"""Rows of an embedding that are compared at once: 50 MB of a model with 3,072 channels."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Supported dtypes of files, and the dtype in which such a model runs.
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float32"}
# Tensors of some checkpoints that a decoder does not need.
_IGNORED = ("rotary_emb.inv_freq", "rope_freqs.weight", "masked_bias")


class Checkpoint(ABC):
    """The tensors of one model under canonical names (`ModelShape.tensor_shapes`); a context manager."""

    shape: ModelShape
    path: Path | None = None
    """The folder or file; None for a checkpoint that is not on disk."""
    files: tuple[Path, ...] = ()
    """The files with the tensors."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor in `dtype`, or in the file's own (float32 for quantized blocks).

        May be a view of the mapped file: copy before writing.
        """

    def kind(self, name: str) -> str:
        """The stored type of a tensor, by GGUF's name: Q4_K, BF16, ..."""
        return "F32"

    def blocks(self, name: str) -> Blocks | None:
        """The blocks of a quantized matrix, with rows in the order of `tensor`. None for plain numbers, and for types
        not in BLOCK_KINDS.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Releases the file. Tensors already returned stay valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@one_line()
def open_model(path: str | Path) -> Checkpoint:
    """Opens a folder with config.json and safetensors, or a .gguf file. A model in several .gguf files is opened by
    any of them.

    Raises ModelError, one line with the file, setting or tensor, if the model cannot run.
    """
    path = Path(path)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.suffix == ".gguf" and path.is_file():
        return GgufCheckpoint(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    raise ModelError(f"{path}: neither a folder with config.json and safetensors nor a .gguf file")


def stored_shape(name: str) -> tuple[ModelShape, dict[str, str]]:
    """The shape of a model, and the type of each of its tensors in the file (see Checkpoint.kind), from its headers.

    name  as for `LLM`, or a config.json without weights, whose tensors count as BF16
    Raises ModelError.
    """
    if name.endswith(".json"):
        shape = shape_from_config(read_json(Path(name), required=True), {})
        return shape, dict.fromkeys(shape.tensor_shapes, "BF16")
    with open_model(resolve_model(name)) as checkpoint:
        return checkpoint.shape, {tensor: checkpoint.kind(tensor) for tensor in checkpoint.shape.tensor_shapes}


class SafetensorsCheckpoint(Checkpoint):
    """A folder in the format of `transformers`, with one file or shards."""

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / "config.json", required=True)
        generation = read_json(folder / "generation_config.json")
        with one_line(folder):
            self.shape = shape_from_config(config, generation)
        self._files: dict[str, _File] = {}
        stored: dict[str, tuple[int, ...]] = {}
        self.path, self.files = folder, tuple(_weight_files(folder))
        for path in self.files:
            file = _File(path)
            for name, size in file.shapes.items():
                stored[name] = size
                self._files[name] = file
        # Checkpoints of the bare decoder have no "model." prefix.
        bare = not any(name.startswith("model.") for name in stored)

        def stored_name(name: str) -> str:
            return hf_name(name, self.shape.architecture).removeprefix("model." if bare else "")

        head, embed = stored_name("head.weight"), stored_name("embed.weight")
        spare = {head} if self.shape.tied_embeddings else set()
        if self.shape.tied_embeddings and {head, embed} <= stored.keys() and not self._are_equal(head, embed):
            # As in transformers 5. Older versions always used the embedding.
            log.warning(
                "%s: tie_word_embeddings is true, but %s differs from %s: the head is used", folder, head, embed
            )
            self.shape = dataclasses.replace(self.shape, tied_embeddings=False)
        self._names = _match(self.shape, stored_name, stored, spare, folder)
        if not {config.get("dtype"), config.get("torch_dtype")} - {None, "", "auto"}:
            # The settings have no dtype: the dtype of the embedding decides.
            self.shape = dataclasses.replace(self.shape, dtype=_DTYPES[self._files[embed].dtypes[embed]])

    def _are_equal(self, *names: str) -> bool:
        """Whether two stored matrices have the same numbers."""
        shapes = {self._files[name].shapes[name] for name in names}
        if len(shapes) > 1:
            return False
        for first in range(0, shapes.pop()[0], _COMPARED_ROWS):
            one, other = (self._files[name].rows(name, first, first + _COMPARED_ROWS).float() for name in names)
            if not torch.equal(one, other):
                return False
        return True

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See Checkpoint.tensor."""
        stored = self._names[name]
        found = self._files[stored].tensor(stored)
        return found if dtype is None else found.to(dtype)

    def kind(self, name: str) -> str:
        """See Checkpoint.kind."""
        stored = self._names[name]
        return self._files[stored].dtypes[stored]

    def close(self) -> None:
        """See Checkpoint.close."""
        for file in self._files.values():
            file.close()


class _File:
    """One memory-mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes_read = 0
        self._handle: Any = None  # safe_open, whose methods carry no types
        handle = self._open()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for name in handle.keys():  # noqa: SIM118  # a handle is no mapping
            view = handle.get_slice(name)
            self.shapes[name] = tuple(view.get_shape())
            self.dtypes[name] = view.get_dtype()
            if self.dtypes[name] not in _DTYPES:
                raise ModelError(
                    f"{path}: tensor {name} has dtype {self.dtypes[name]}; only {', '.join(_DTYPES)} are read"
                )

    def tensor(self, name: str) -> Tensor:
        if self._bytes_read > _REOPEN_BYTES:
            self.close()
        found: Tensor = self._open().get_tensor(name)
        self._bytes_read += found.nbytes
        return found

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Some rows of a matrix."""
        found: Tensor = self._open().get_slice(name)[first:last]
        return found

    def close(self) -> None:
        self._handle = None
        self._bytes_read = 0

    def _open(self) -> Any:
        if self._handle is None:
            from safetensors import SafetensorError, safe_open

            try:
                check_regular(self._path)
                self._handle = safe_open(self._path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{self._path}: truncated or not a safetensors file ({error})") from None
        return self._handle


class GgufCheckpoint(Checkpoint):
    """A GGUF of llama, qwen2 or qwen3 architecture: one file, or all its parts."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.files = self._file.header.files
        self.path = path = self.files[0]
        tensors = self._file.header.tensors
        if "token_embd.weight" not in tensors:
            raise ModelError(f"{path}: tensor token_embd.weight is missing")
        vocab_size = tensors["token_embd.weight"].shape[0]
        with one_line(path):
            self.shape = shape_from_gguf(self._file.header.metadata, tensors, vocab_size, self._rope_factors())
        sizes = {name: item.shape for name, item in tensors.items()}
        self._names = _match(self.shape, gguf_name, sizes, set(), path)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See Checkpoint.tensor; quantized blocks are decoded."""
        stored = self._file.header.tensors[self._names[name]]
        if dtype is None:
            dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored.kind, torch.float32)
        try:
            found = dequantize(self._file.bytes_of(stored), stored.kind, stored.shape, dtype)
        except ModelError as error:
            raise ModelError(f"tensor {stored.name}: {error}") from None
        found = self._in_order(name, found)
        self._file.unmap(stored)
        return found

    def kind(self, name: str) -> str:
        """See Checkpoint.kind."""
        return self._file.header.tensors[self._names[name]].kind

    def blocks(self, name: str) -> Blocks | None:
        """See Checkpoint.blocks; a copy."""
        stored = self._file.header.tensors[self._names[name]]
        if stored.kind not in BLOCK_KINDS or len(stored.shape) != 2:
            return None
        rows, inputs = stored.shape
        raw = self._in_order(name, self._file.bytes_of(stored).view(rows, -1)).clone()
        self._file.unmap(stored)
        return Blocks(stored.kind, raw, inputs)

    def close(self) -> None:
        """See Checkpoint.close."""
        self._file.close()

    def _rope_factors(self) -> tuple[float, ...]:
        """Divisors of the rotation's frequencies; empty when the file has none."""
        stored = self._file.header.tensors.get("rope_freqs.weight")
        if stored is None:
            return ()
        if len(stored.shape) != 1 or not stored.num_bytes:
            raise ModelError(f"tensor rope_freqs.weight has shape {list(stored.shape)}; it must be one row of numbers")
        return tuple(dequantize(self._file.bytes_of(stored), stored.kind, stored.shape, torch.float32).tolist())

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Undoes the row order of llama files: there q and k pair neighbouring channels (2i, 2i+1) for rotation."""
        part = name.split(".")[-2]
        if self.shape.architecture != "llama" or part not in ("q", "k"):
            return rows
        heads = self.shape.num_q_heads if part == "q" else self.shape.num_kv_heads
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = CheckedSettings(read_json(index), str(index)).table("weight_map")
        files = [_inside(folder, name, index) for name in sorted({shards.text(tensor) for tensor in shards.values})]
        if not files:
            raise ModelError(f"{index}: setting weight_map names no file")
        for file in files:
            if not file.is_file():
                raise ModelError(f"{folder}: {file.name} is missing, but {index.name} lists it")
    else:
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder}: only pickled weights ({pickles[0]}), which are never loaded; save them as safetensors"
        )
    raise ModelError(f"{folder}: no .safetensors file")


def _inside(folder: Path, name: str, source: Path) -> Path:
    """A file named by a model. The name must not lead out of the folder. A link in the folder may, as in the hub's
    cache.
    """
    parts = PurePath(name)
    if not name or parts.is_absolute() or ".." in parts.parts or "\0" in name:
        raise ModelError(f"{source}: names {name[:200]!r}, which is not a file in the model's folder")
    return folder / parts


def _match(
    shape: ModelShape,
    name_of: Callable[[str], str],
    stored: Mapping[str, tuple[int, ...]],
    spare: Collection[str],
    source: Path,
) -> dict[str, str]:
    """Canonical name -> stored name.

    Checks that every tensor of the shape exists with its size, and that the decoder uses every stored tensor.
    """
    # Checked before the names are listed: the list of a damaged number of layers could fill the memory.
    if shape.num_layers > len(stored):
        raise ModelError(f"{source}: {shape.num_layers} layers, but only {len(stored)} tensors")
    names = {name: name_of(name) for name in shape.tensor_shapes}
    for name, expected in shape.tensor_shapes.items():
        found = stored.get(names[name])
        if found is None:
            raise ModelError(f"{source}: tensor {names[name]} is missing")
        if found != expected:
            raise ModelError(f"{source}: tensor {names[name]} has shape {list(found)}, expected {list(expected)}")
    used = set(names.values())
    for name in stored:
        if name not in used and name not in spare and not name.endswith(_IGNORED):
            raise ModelError(
                f"{source}: tensor {name} is not part of a {shape.architecture} model of this configuration"
            )
    return names
