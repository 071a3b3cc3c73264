"""Fields that clients send back in messages, because another server gave them or a library adds them for one.

They change nothing here. Only these names are passed over; any other one is refused, so that a mistyped name is found.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from pydantic import model_validator

from quire.server.fields import Ignored
from quire.server.schema import StrictModel

log = logging.getLogger("quire.server")

_said: set[str] = set()
"""Names that the log has; at most those below."""


class ConversationObject(StrictModel):
    """An object of a conversation.

    ignored_names  names of fields of which the log says once that they are not used
    """

    ignored_names: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "extra_content", "provider_specific_fields"}  # no more than has a field
    )

    cache_control: Ignored = None
    extra_content: Ignored = None
    provider_specific_fields: Ignored = None

    @model_validator(mode="after")
    def _say(self) -> ConversationObject:
        for name in self.ignored_names.intersection(self.__pydantic_fields_set__).difference(_said):
            if getattr(self, name) is not None:
                _said.add(name)
                log.info("a conversation has %r, which is passed over here; this is said once", name)
        return self


class ConversationMessage(ConversationObject):
    """A message of a chat."""

    ignored_names: ClassVar[frozenset[str]] = ConversationObject.ignored_names | {
        "annotations", "id", "reasoning", "reasoning_details", "thinking_blocks",
    }  # fmt: skip

    annotations: Ignored = None
    id: Ignored = None
    reasoning: Ignored = None
    reasoning_details: Ignored = None
    thinking_blocks: Ignored = None


class ConversationPart(ConversationObject):
    """A piece of a message of a chat."""

    ignored_names: ClassVar[frozenset[str]] = ConversationObject.ignored_names | {
        "annotations",
        "extras",
        "id",
        "index",
    }

    annotations: Ignored = None
    extras: Ignored = None
    id: Ignored = None
    index: Ignored = None
