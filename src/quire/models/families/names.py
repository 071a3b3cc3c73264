"""Names of tensors in files, and how files store what the decoder calls by its canonical names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attn_out_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_out_norm": "post_ffw_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_GGUF_TOP = {"embed": "token_embd", "norm": "output_norm", "head": "output"}


class StoredPart(NamedTuple):
    """A tensor in a file, or some rows of it.

    name   of the stored tensor
    parts  canonical names of all tensors that it holds, one below the other
    """

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class TensorNames:
    """How the files of a family store its tensors.

    layer        canonical part of a layer -> its name in files; what is left out has the usual name
    top          the same for tensors outside the layers
    prefix       of the names in layers
    fused        stored name -> the canonical parts that are stored as one tensor, one below the other
    interleaved  whether q and k pair neighbouring channels for rotation
    norm_offset  what is added to the weights of RMS norms
    """

    layer: Mapping[str, str] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model.layers"
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: float = 0.0
    is_gguf: bool = False

    def stored(self, name: str) -> StoredPart:
        """How a tensor is stored, by its canonical name."""
        tops, layers = (_GGUF_TOP, _GGUF_LAYER) if self.is_gguf else (_TOP, _LAYER)
        if not name.startswith("layers."):
            part, kind = name.rsplit(".", 1)
            return StoredPart(f"{self.top.get(part) or tops[part]}.{kind}", (name,))
        _, index, part, kind = name.split(".")
        for stored, parts in self.fused.items():
            if part in parts:
                names = tuple(f"layers.{index}.{each}.{kind}" for each in parts)
                return StoredPart(f"{self.prefix}.{index}.{stored}.{kind}", names)
        return StoredPart(f"{self.prefix}.{index}.{self.layer.get(part) or layers[part]}.{kind}", (name,))


def gguf_names(
    layer: Mapping[str, str] | None = None,
    fused: Mapping[str, tuple[str, ...]] | None = None,
    *,
    interleaved: bool = False,
) -> TensorNames:
    """The names in files of llama.cpp's converter, which adds the offset of norms itself."""
    return TensorNames(layer or {}, {}, "blk", fused or {}, interleaved, is_gguf=True)


class PartRows(NamedTuple):
    """Rows of a stored tensor.

    name        of the stored tensor
    shape       of the whole stored tensor
    first, end  the rows
    """

    name: str
    shape: tuple[int, ...]
    first: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows."""
        return self.first == 0 and self.end == self.shape[0]


def rows_of(stored: StoredPart, name: str, shapes: Mapping[str, tuple[int, ...]]) -> PartRows:
    """The rows of a stored tensor that hold a tensor. shapes: of all tensors, by canonical names."""
    counts = [shapes[part][0] for part in stored.parts]
    at = stored.parts.index(name)
    first = sum(counts[:at])
    return PartRows(stored.name, (sum(counts), *shapes[name][1:]), first, first + counts[at])


_OTHER_PARTS = ("vision_tower", "vision_model", "multi_modal_projector", "audio_tower")


def text_names(stored: Iterable[str], *, has_other_parts: bool) -> tuple[dict[str, str], list[str]]:
    """The names of a text model's tensors as in files of it alone -> the names in these files; and the names of other
    parts' tensors.

    has_other_parts  whether the files are those of a model with several parts
    """
    names: dict[str, str] = {}
    skipped: list[str] = []
    for name in stored:
        plain = name
        if has_other_parts:
            if name.removeprefix("model.").startswith(_OTHER_PARTS):
                skipped.append(name)
                continue
            plain = name.replace("model.language_model.", "model.").replace("language_model.", "")
        names[plain] = name
    # Checkpoints of the bare decoder have no "model." prefix.
    if not any(name.startswith("model.") for name in names):
        names = {name if name.startswith("lm_head.") else f"model.{name}": place for name, place in names.items()}
    return names, skipped
