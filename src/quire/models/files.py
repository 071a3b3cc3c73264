"""Small files beside the weights. Imports no torch, so that a tokenizer loads fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.safe_io import parse_json, read_text


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; empty if an optional file does not exist. Raises ModelError naming the file."""
    try:
        found = parse_json(read_text(path))
    except FileNotFoundError:
        if required:
            found = sorted(each.name for each in path.parent.glob("*.gguf"))
            hint = f"; the folder has {found[0]}: give that file's path" if found else ""
            raise ModelError(f"{path.parent}: {path.name} is missing{hint}") from None
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: not a JSON object")
    return found
