"""Fields that clients send back in messages, because another server gave them or a library adds them for one.

They change nothing here. Only these names are passed over; any other one is refused, so that a mistyped name is found.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from pydantic import model_validator

from quire.server.fields import Ignored
from quire.server.schema import Model

log = logging.getLogger("quire.server")

_said: set[str] = set()
"""Names that the log has; at most those below."""


class Replayed(Model):
    """An object of a conversation.

    passed_over  names of fields of which the log says once that they are not used
    """

    passed_over: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "extra_content", "provider_specific_fields"}  # no more than has a field
    )

    cache_control: Ignored = None
    extra_content: Ignored = None
    provider_specific_fields: Ignored = None

    @model_validator(mode="after")
    def _say(self) -> Replayed:
        for name in self.passed_over.intersection(self.__pydantic_fields_set__).difference(_said):
            if getattr(self, name) is not None:
                _said.add(name)
                log.info("a conversation has %r, which is passed over here; this is said once", name)
        return self


class ReplayedMessage(Replayed):
    """A message of a chat."""

    passed_over: ClassVar[frozenset[str]] = Replayed.passed_over | {
        "annotations", "id", "reasoning", "reasoning_details", "thinking_blocks",
    }  # fmt: skip

    annotations: Ignored = None
    id: Ignored = None
    reasoning: Ignored = None
    reasoning_details: Ignored = None
    thinking_blocks: Ignored = None


class ReplayedPart(Replayed):
    """A piece of a message of a chat."""

    passed_over: ClassVar[frozenset[str]] = Replayed.passed_over | {"annotations", "extras", "id", "index"}

    annotations: Ignored = None
    extras: Ignored = None
    id: Ignored = None
    index: Ignored = None
