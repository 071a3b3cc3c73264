"""Resolves a model's name on the command line to a folder or file."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from quire.errors import ModelError
from quire.models.embedded import EMBEDDED, pull
from quire.models.gguf_file import files_of

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
# By the class name of the hub library's error, the most specific first, because the library may not be installed.
_HUB_REASONS = {
    "GatedRepoError": "you must request access to this model on its page there",
    "RepositoryNotFoundError": "it has no such model, or the model is private",
    "LocalEntryNotFoundError": "it cannot be reached, and the model is not in its cache on this machine",
    "HFValidationError": "the name is not valid there",
}
_SHOWN_CHARS = 200


def resolve_model(name: str, show_progress: bool | None = None) -> Path:
    """The local path of a model: an embedded name, a folder, a .gguf, or a cached or reachable hub id (`owner/name`).

    Raises ModelError that lists the attempts.
    """
    if not isinstance(name, str) or not name:
        raise ModelError(f"a model is a folder, a .gguf file, a hub id or {', '.join(EMBEDDED)}, not {name!r}")
    if name in EMBEDDED:
        return pull(show_progress, model=EMBEDDED[name])
    path = Path(os.path.expanduser(name))  # Path.expanduser raises for an unknown user
    reason = _why_not(path)
    if reason is None:
        return files_of(path)[0]
    tried = [f"a folder or file {_short(str(path))}{reason}", f"an embedded model ({', '.join(EMBEDDED)})"]
    if _HUB_ID.fullmatch(name):
        found, reason = _from_hub(name)
        if found is not None:
            return found
        tried.append(f"the hub ({reason})")
    likely = difflib.get_close_matches(name.lower(), EMBEDDED, n=1, cutoff=0.75)
    hint = f" (did you mean {likely[0]}?)" if likely else ""
    raise ModelError(f"model {_short(name)!r} was not found{hint}; tried {', '.join(tried)}")


def short_name(name: str) -> str:
    """The name of a model for people and for requests. For a path this is its last part, without `.gguf` and the number
    of a part; any other name stays as it is.
    """
    path = Path(os.path.expanduser(name))
    if name in EMBEDDED or not os.path.lexists(path):
        return name
    last = path.absolute().name if path.name not in ("", "..") else path.resolve().name
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", last) or name


def _why_not(path: Path) -> str | None:
    """None if the path exists; otherwise the reason why it cannot be read, empty if it just does not exist."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        return f" ({getattr(error, 'strerror', None) or error})"
    return None


def _from_hub(name: str) -> tuple[Path | None, str]:
    """(local snapshot, "") or (None, reason). Failures become reasons, because an offline hub is not an error here."""
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError:
        return None, "huggingface_hub is not installed"
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES)), ""
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if constants.HF_HUB_OFFLINE and "LocalEntryNotFoundError" in kinds:
            return None, "HF_HUB_OFFLINE is set, and the model is not in its cache on this machine"
        if (reason := next((text for kind, text in _HUB_REASONS.items() if kind in kinds), None)) is not None:
            return None, reason
        reason = _short(str(error).splitlines()[0]) if str(error) else "no reason given"
        return None, f"{type(error).__name__}: {reason}"


def _short(text: str) -> str:
    """The text, shortened for a message."""
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
