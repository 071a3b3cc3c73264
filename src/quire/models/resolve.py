"""A model's name on the command line -> the folder or file it stands for."""

from __future__ import annotations

import re
from pathlib import Path

from quire.errors import ModelError
from quire.models.embedded import EMBEDDED, pull

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]


def resolve_model(name: str, show_progress: bool | None = None) -> Path:
    """The local path of a model: an embedded name, a folder, a .gguf, or a hub id (`owner/name`) cached or reachable.

    Raises ModelError that says what was tried.
    """
    if name in EMBEDDED:
        return pull(show_progress, model=EMBEDDED[name])
    path = Path(name).expanduser()
    if path.exists():
        return path
    tried = [f"a folder or file {path}", f"an embedded model ({', '.join(EMBEDDED)})"]
    if _HUB_ID.fullmatch(name):
        found, reason = _from_hub(name)
        if found is not None:
            return found
        tried.append(f"the hub ({reason})")
    raise ModelError(f"model {name!r} was not found; tried {', '.join(tried)}")


def _from_hub(name: str) -> tuple[Path | None, str]:
    """(local snapshot, "") or (None, why not); an offline hub is no error of ours, so failures become reasons."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None, "huggingface_hub is not installed"
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES)), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
