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
from quire.models.families import FAMILIES, GGUF_FAMILIES, shape_from_config, shape_from_gguf
from quire.models.families.names import PartRows, TensorNames, rows_of, text_names
from quire.models.files import read_json
from quire.models.gguf_file import GgufFile
from quire.models.quants import BLOCK_KINDS, Blocks, dequantize
from quire.models.resolve import resolve_model
from quire.models.settings import CheckedSettings, one_line
from quire.safe_io import check_regular

log = logging.getLogger("quire")

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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
_FACTORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")
_IGNORED = ("rotary_emb.inv_freq", "masked_bias", *(f"{name}.weight" for name in _FACTORS))


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
        self._family = FAMILIES[config["model_type"]]
        self._files: dict[str, _File] = {}
        self.path, self.files = folder, tuple(_weight_files(folder))
        for path in self.files:
            file = _File(path)
            self._files.update(dict.fromkeys(file.shapes, file))
        # The names of the text model as its own files have them -> the names in these files.
        self._stored, skipped = text_names(self._files, has_other_parts=bool(self._family.text_in))
        if skipped:
            parts = ", ".join(sorted({name.removeprefix("model.").split(".")[0] for name in skipped}))
            log.warning("%s: only the text model is run; %d tensors of %s are skipped", folder, len(skipped), parts)
        stored = {name: self._files[place].shapes[place] for name, place in self._stored.items()}
        names = self._family.names
        head, embed = names.stored("head.weight").name, names.stored("embed.weight").name
        spare = {head} if self.shape.tied_embeddings else set()
        if (
            self.shape.tied_embeddings
            and {head, embed} <= stored.keys()
            and not self._are_equal(self._stored[head], self._stored[embed])
        ):
            # As in transformers 5. Older versions always used the embedding.
            log.warning(
                "%s: tie_word_embeddings is true, but %s differs from %s: the head is used", folder, head, embed
            )
            self.shape = dataclasses.replace(self.shape, tied_embeddings=False)
        self._rows = _match(self.shape, names, stored, spare, folder)
        if not {config.get("dtype"), config.get("torch_dtype")} - {None, "", "auto"}:
            # The settings have no dtype: the dtype of the embedding decides.
            self.shape = dataclasses.replace(self.shape, dtype=_DTYPES[self.kind("embed.weight")])

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
        place, names = self._rows[name], self._family.names
        file, stored = self._file_of(place)
        found = file.tensor(stored) if place.is_whole else file.rows(stored, place.first, place.end)
        if names.norm_offset and name.endswith("norm.weight"):
            found = found.float() + names.norm_offset
        order = channel_order(self.shape, names, name)
        if order is not None:
            found = found[order]
        return found if dtype is None else found.to(dtype)

    def kind(self, name: str) -> str:
        """See Checkpoint.kind."""
        file, stored = self._file_of(self._rows[name])
        return file.dtypes[stored]

    def _file_of(self, place: PartRows) -> tuple[_File, str]:
        stored = self._stored[place.name]
        return self._files[stored], stored

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
    """A GGUF: one file, or all its parts."""

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
        self._names = GGUF_FAMILIES[self.shape.architecture].names
        self._rows = _match(self.shape, self._names, sizes, set(), path)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See Checkpoint.tensor; quantized blocks are decoded."""
        place = self._rows[name]
        stored = self._file.header.tensors[place.name]
        if dtype is None:
            dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored.kind, torch.float32)
        raw, size = self._file.bytes_of(stored), stored.shape
        if not place.is_whole:
            raw = raw.view(size[0], -1)[place.first : place.end].flatten()
            size = place.end - place.first, *size[1:]
        try:
            found = dequantize(raw, stored.kind, size, dtype)
        except ModelError as error:
            raise ModelError(f"tensor {stored.name}: {error}") from None
        found = self._in_order(name, found)
        self._file.unmap(stored)
        return found

    def kind(self, name: str) -> str:
        """See Checkpoint.kind."""
        return self._file.header.tensors[self._rows[name].name].kind

    def blocks(self, name: str) -> Blocks | None:
        """See Checkpoint.blocks; a copy."""
        place = self._rows[name]
        stored = self._file.header.tensors[place.name]
        if stored.kind not in BLOCK_KINDS or len(stored.shape) != 2:
            return None
        rows, inputs = stored.shape
        raw = self._in_order(name, self._file.bytes_of(stored).view(rows, -1)[place.first : place.end]).clone()
        self._file.unmap(stored)
        return Blocks(stored.kind, raw, inputs)

    def close(self) -> None:
        """See Checkpoint.close."""
        self._file.close()

    def _rope_factors(self) -> dict[str, tuple[float, ...]]:
        """Divisors of the rotation's frequencies, by the names of their tensors."""
        found = {}
        for name in _FACTORS:
            stored = self._file.header.tensors.get(f"{name}.weight")
            if stored is None:
                continue
            if len(stored.shape) != 1 or not stored.num_bytes:
                raise ModelError(f"tensor {name}.weight has shape {list(stored.shape)}; it must be one row of numbers")
            numbers = dequantize(self._file.bytes_of(stored), stored.kind, stored.shape, torch.float32)
            found[name] = tuple(numbers.tolist())
        return found

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        order = channel_order(self.shape, self._names, name)
        return rows if order is None else rows[order]


def channel_order(shape: ModelShape, names: TensorNames, name: str) -> Tensor | None:
    """The stored row at each place of a tensor of q or k, where files order the channels of heads differently. None:
    the rows are in order.
    """
    _, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    part = part.split(".")[0]
    if part not in ("q", "k", "q_norm", "k_norm"):
        return None
    mixer = shape.layers[int(index)].mixer
    channels = None if mixer.rope is None else mixer.rope.channels(interleaved=names.interleaved)
    if channels is None:
        return None
    if part.endswith("norm") and mixer.qk_norm == "heads":
        return torch.from_numpy(channels)
    heads = mixer.num_q_heads if part.startswith("q") else mixer.num_kv_heads
    return (torch.arange(heads)[:, None] * mixer.head_dim + torch.from_numpy(channels)).flatten()


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
    tensor_names: TensorNames,
    stored: Mapping[str, tuple[int, ...]],
    spare: Collection[str],
    source: Path,
) -> dict[str, PartRows]:
    """Canonical name -> rows of a stored tensor.

    Checks that every tensor of the shape exists with its size, and that the decoder uses every stored tensor.
    """
    # Checked before the names are listed: the list of a damaged number of layers could fill the memory.
    if shape.num_layers > len(stored):
        raise ModelError(f"{source}: {shape.num_layers} layers, but only {len(stored)} tensors")
    places = {name: rows_of(tensor_names.stored(name), name, shape.tensor_shapes) for name in shape.tensor_shapes}
    for place in places.values():
        found = stored.get(place.name)
        if found is None:
            raise ModelError(f"{source}: tensor {place.name} is missing")
        if found != place.shape:
            raise ModelError(f"{source}: tensor {place.name} has shape {list(found)}, expected {list(place.shape)}")
    used = {place.name for place in places.values()}
    for name in stored:
        if name not in used and name not in spare and not name.endswith(_IGNORED):
            raise ModelError(
                f"{source}: tensor {name} is not part of a {shape.architecture} model of this configuration"
            )
    return places
