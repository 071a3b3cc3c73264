"""The sampling parameters that a model's makers recommend: the defaults of the server and of `quire chat`.

Sources are generation_config.json, GGUF's `general.sampling` keys, and our table of embedded models. Values that a file
omits stay unset: the defaults that `transformers` would fill in are not the makers' advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.engine.params import SamplingParams
from quire.errors import ModelError, RequestError
from quire.models.embedded import EMBEDDED
from quire.models.files import read_json
from quire.models.gguf_file import read_header
from quire.models.settings import CheckedSettings, one_line

GENERATION_CONFIG = "generation_config.json"

_GGUF_NAMES = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True)
class SamplingDefaults:
    """Fields of SamplingParams that the model's makers chose, and their source; empty if they chose none."""

    values: Mapping[str, float | int]
    source: str = ""

    def __str__(self) -> str:
        """`temperature 0.2, top_p 0.9 (generation_config.json)`."""
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items()) + f" ({self.source})"


NO_DEFAULTS = SamplingDefaults({})


@one_line()
def read_sampling_defaults(path: Path, name: str = "") -> SamplingDefaults:
    """The defaults of a model folder or .gguf file. Values in the file win over our table of embedded models.

    name  the name that the model was requested by
    Raises ModelError, naming file and setting, for an invalid value.
    """
    if path.is_dir():
        file, source = path / GENERATION_CONFIG, GENERATION_CONFIG
        values = _from_generation_config(CheckedSettings(read_json(file), str(file)))
    elif path.suffix == ".gguf":
        file, source = path, "the model's file"
        values = _from_gguf(CheckedSettings(read_header(path).metadata, str(path)).under("general.sampling."))
    else:
        return NO_DEFAULTS
    if not values and name in EMBEDDED:
        values, source = dict(EMBEDDED[name].sampling), "its makers' advice"
    if not values:
        return NO_DEFAULTS
    try:
        SamplingParams(**values)  # type: ignore[arg-type]
    except RequestError as error:
        raise ModelError(f"{file}: {error}; correct it, or serve with --sampling-defaults openai") from None
    return SamplingDefaults(values, source)


def _from_generation_config(settings: CheckedSettings) -> dict[str, float | int]:
    """If `do_sample` is absent, the temperature applies, as in vLLM. If it is false, the best token is taken."""
    found: dict[str, float | int] = {
        name: settings.number(name) for name in _GGUF_NAMES if name != "top_k" and settings.values.get(name) is not None
    }
    if settings.values.get("top_k") is not None:
        found["top_k"] = settings.count("top_k", least=-1)
    if not settings.flag("do_sample", default=True):
        # transformers then ignores all filters.
        found = {"temperature": 0.0} | {name: found[name] for name in ("repetition_penalty",) if name in found}
    if settings.values.get("max_new_tokens") is not None:
        found["max_tokens"] = settings.count("max_new_tokens")
    return found


def _from_gguf(settings: CheckedSettings) -> dict[str, float | int]:
    """llama.cpp's keys. Its penalty covers the last `penalty_last_n` tokens, ours the whole sequence."""
    found: dict[str, float | int] = {}
    for ours, theirs in _GGUF_NAMES.items():
        if settings.values.get(theirs) is not None:
            # Stored in float32: 0.2 comes back as 0.20000000298.
            found[ours] = float(f"{settings.number(theirs):.6g}")
    if "top_k" in found:
        found["top_k"] = max(0, int(found["top_k"]))
    if "temperature" in found:
        found["temperature"] = max(0.0, found["temperature"])  # llama.cpp takes the best token at 0 and below
    if settings.values.get("penalty_last_n") == 0:
        found.pop("repetition_penalty", None)
    return found
