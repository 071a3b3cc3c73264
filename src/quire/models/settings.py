"""Reads settings from untrusted files. Checks the type of every value; every error is one line with file and
setting.
"""

from __future__ import annotations

import contextlib
import reprlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.errors import ModelError
from quire.models.rope import MAX_SIZE


class CheckedSettings:
    """The settings of a file. Each look-up checks the type and raises ModelError with the file and the setting.

    A null setting counts as absent. A look-up of an absent setting returns the default; without a default it raises.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "", prefix: str = "") -> None:
        """source: the file, for errors; prefix: prefix of the setting names in errors."""
        self.values = values
        self._source = source
        self._prefix = prefix

    def under(self, prefix: str) -> CheckedSettings:
        """The settings with a prefix in their names, for look-ups without it."""
        found = {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}
        return CheckedSettings(found, self._source, self._prefix + prefix)

    def number(self, key: str, default: float | None = None, least: float | None = None) -> float:
        """A finite number, at least `least`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            many = isinstance(value, list | tuple)
            raise self._wrong(key, value, "the same number for every layer" if many else "one number")
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise self._wrong(key, value, "finite")
        if least is not None and value < least:
            raise self._wrong(key, value, f"at least {least:g}")
        return float(value)

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number from `least` to `most`."""
        value = self.number(key, default)
        if not least <= value <= most or value != int(value):
            raise self._wrong(key, self._value(key, default), f"a whole number from {least} to {most}")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false, also written 1 or 0."""
        value = self._value(key, default)
        if not isinstance(value, int) or value not in (0, 1):
            raise self._wrong(key, value, "true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string that is valid Unicode: JSON can contain half a surrogate pair."""
        value = self._value(key, default)
        if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
            raise self._wrong(key, value, "text")
        return value

    def texts(self, key: str) -> Sequence[str]:
        """A list of strings; empty when absent."""
        return self._list(key, {str}, "a list of texts")

    def numbers(self, key: str) -> Sequence[float]:
        """A list of numbers; empty when absent."""
        return self._list(key, {int, float}, "a list of numbers")

    def ids(self, key: str) -> tuple[int, ...]:
        """One token id or several; empty when absent or -1, as some files write none."""
        value = self.values.get(key)
        found = value if isinstance(value, list | tuple) else () if value is None else (value,)
        for item in found:
            if isinstance(item, bool) or not isinstance(item, int) or item < -1:
                raise self._wrong(key, value, "a token id or a list of them")
        return tuple(item for item in found if item >= 0)

    def table(self, key: str) -> CheckedSettings:
        """The settings inside a setting; none when absent."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return CheckedSettings(value, self._source, f"{self._prefix}{key}.")

    def tables(self, key: str) -> list[CheckedSettings]:
        """A list of settings; empty when absent."""
        values = self._list(key, {dict}, "a list of objects")
        return [
            CheckedSettings(value, self._source, f"{self._prefix}{key}.{index}.") for index, value in enumerate(values)
        ]

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self._setting(key)} is missing")
        return value

    def _list(self, key: str, types: set[type], wanted: str) -> Sequence[Any]:
        value = self._value(key, ())
        # Exact types, not isinstance, because a bool is an instance of int.
        if not isinstance(value, list | tuple) or not set(map(type, value)) <= types:
            raise self._wrong(key, value, wanted)
        return value

    def _wrong(self, key: str, value: Any, wanted: str) -> ModelError:
        return ModelError(f"{self._setting(key)} is {_SHORT.repr(value)}; it must be {wanted}")

    def _setting(self, key: str) -> str:
        return f"{self._source}: setting {self._prefix}{key}" if self._source else f"setting {self._prefix}{key}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_LINE_CHARS = 1000


@contextlib.contextmanager
def one_line(source: object = "") -> Iterator[None]:
    """Makes every ModelError one printable line with the source in front. Also converts OSError to such a
    ModelError.
    """
    try:
        yield
    except (ModelError, OSError) as error:
        text = str(error) if isinstance(error, ModelError) else f"{error.filename}: cannot be read ({error.strerror})"
        text = f"{source}: {text}" if source else text
        if len(text) > _LINE_CHARS:
            text = f"{text[: _LINE_CHARS // 2]}...{text[-_LINE_CHARS // 2 :]}"
        raise ModelError("".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)) from None
