"""A family of models: what it reads from files, and what its files call the tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.models.families.config_reader import ConfigReader
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import TensorNames
from quire.models.shape import ModelShape


@dataclass(frozen=True)
class GgufFamily:
    """A family in files of llama.cpp's converter.

    name   `general.architecture`
    shape  the model that the metadata describe
    names  see TensorNames
    """

    name: str
    shape: Callable[[GgufReader], ModelShape]
    names: TensorNames


@dataclass(frozen=True)
class Family:
    """A family in the format of `transformers`, and in GGUF.

    name     `model_type` of config.json
    shape    the model that the settings describe
    names    see TensorNames
    gguf     None: llama.cpp writes no files of it, or they are not read
    text_in  the setting with the text model, for files of models with several parts; "": the file is the text model's
    """

    name: str
    shape: Callable[[ConfigReader], ModelShape]
    names: TensorNames = field(default_factory=TensorNames)
    gguf: GgufFamily | None = None
    text_in: str = ""
