"""The optional parts of an installation, and the command that installs one.

Knows no package index, because users install from a clone or a source distribution. The distribution is called
`quire-llm`, because `quire` is another project's name.
"""

from __future__ import annotations

DISTRIBUTION = "quire-llm"
"""Name of the distribution in pyproject.toml. The package that it installs is `quire`."""

EXTRAS = ("serve", "plot", "cluster", "trace")
"""The optional parts, as pyproject.toml names them."""


def install_command(extra: str, python: str = "") -> str:
    """The command that adds an optional part, for the end of a message.

    python  program that runs pip; empty: the pip of the path
    """
    assert extra in EXTRAS, extra
    return f"in the clone of Quire: {python + ' -m ' if python else ''}pip install -c constraints.txt '.[{extra}]'"
