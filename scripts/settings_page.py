"""Prints the reference page of all settings, docs/reference/settings.md, from their docstrings; see `make docs`."""

from __future__ import annotations

import inspect

from quire.config import ALL_GROUPS
from quire.options import settings_of

HEAD = """\
# Configuration

Generated from `src/quire/config.py` by `make docs`; edit the docstrings there.

A setting can be given in three places. The first in this list wins:

1. a flag: `quire serve smollm2 --cache.memory 1GiB`; from Python `LLM("smollm2", options={"cache.memory": "1GiB"})`
2. a TOML file: `--config quire.toml` with `[cache]` and, below it, `memory = "1GiB"`
3. the default

Quire rejects an unknown key and names a valid one that is near. `--print-config` prints every value and its origin, as
a file for `--config`. Sizes are written `512MiB`, `1.5GiB` (binary) or `20GB` (decimal). Four environment variables are
used as well: `QUIRE_LOG` sets the log level: debug, info, warning, error or critical. `QUIRE_API_KEY` is the key that
`quire inspect --tree` and `quire cluster` send. `XDG_CACHE_HOME` (`~/.cache` by default) is the folder that holds
`quire/` with models, calibrations, layer images and compiled kernels. `OTEL_EXPORTER_OTLP_ENDPOINT` is where a cluster
exports spans to (docs/guide/machines.md).
"""


def page() -> str:
    """The page in Markdown, with a table for each group."""
    lines: list[str] = []
    for group in ALL_GROUPS:
        lines += [
            "",
            f"## {group.key}",
            "",
            inspect.cleandoc(group.__doc__ or ""),
            "",
            "| key | value | default | meaning |",
            "|---|---|---|---|",
        ]
        for setting in settings_of(group):
            value = ", ".join(f"`{term}`" for term in setting.terms(in_words=False))
            lines.append(f"| `{setting.key}` | {value} | `{setting.show(setting.default)}` | {setting.doc} |")
    return HEAD + "\n" + "\n".join(lines[1:]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
