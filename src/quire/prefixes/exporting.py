"""Chooses the runs of a disk tier's folder to export or remove: by model, by key or by prompts.

A model named by its digest is found without torch, which takes seconds to import.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ConfigError, RequestError
from quire.models.digest import SHOWN_DIGEST, Report, digest_of

if TYPE_CHECKING:
    from quire.cache.namespace import Namespace
    from quire.stores.folder_reader import FolderReader, LocatedRun


def of_model(reader: FolderReader, model: str, report: Report) -> Callable[[Namespace], bool]:
    """A test of whether a namespace belongs to a model.

    model   beginning of its digest, or its name or path
    report  called with the bytes hashed so far, and the total
    """
    digests = {usage.namespace.model for usage in reader.usages()}
    if re.fullmatch(r"[0-9a-f]{8,}", model):
        found = {digest for digest in digests if digest.startswith(model)}
        if len(found) > 1:
            raise ConfigError(f"several models begin with {model}; give more of the digest")
    else:
        from quire.models.resolve import resolve_model
        from quire.models.weights import open_model

        with open_model(resolve_model(model)) as checkpoint:
            found = {digest_of(checkpoint, report).digest} & digests
    if not found:
        known = ", ".join(sorted(digest[:SHOWN_DIGEST] for digest in digests)) or "none"
        raise ConfigError(f"{reader.path} has nothing of {model!r}; models there: {known}")
    (digest,) = found
    return lambda namespace: namespace.model == digest


def with_key(key: str) -> Callable[[LocatedRun], bool]:
    """A test of whether a run has the chunk with a key. Raises ConfigError."""
    from quire.prefixes.cached import parse_prefix_key

    try:
        name = parse_prefix_key(key)
    except RequestError as error:
        raise ConfigError(f"--key: {error}") from error
    return lambda located: name in located.header.run.names


def with_prompts(reader: FolderReader, model: str, file: Path) -> Callable[[LocatedRun], bool]:
    """A test of whether a run has a chunk of the prompts in a file. The file has the format of cache.pin."""
    from quire.cache.keys import ChunkKeys
    from quire.engine.pins import read_pins
    from quire.models.resolve import resolve_model
    from quire.models.tokenizer import load_tokenizer

    prompts = [pin.ids for pin in read_pins(file, load_tokenizer(resolve_model(model)), "--prompt-file")]
    namespaces = {dataclasses.replace(usage.namespace, salt=salt) for usage in reader.usages() for salt in usage.salts}
    names = {
        name for namespace in namespaces for ids in prompts for name in ChunkKeys(namespace, ids).first(len(ids) // 64)
    }
    return lambda located: not names.isdisjoint(located.header.run.names)
