"""The access log: one line per request, with its times and token counts."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

if TYPE_CHECKING:
    from quire.engine.outputs import RequestOutput

log = logging.getLogger("quire.access")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass
class AccessRecord:
    """What the server knows of a request when it ends. Times are of time.monotonic.

    request_id  the client's X-Request-Id, or a generated one
    answer_id   id of the completion, which the engine's log shows too
    num_kept    tokens of the prompts that retention keeps; None without retention
    refusal     a log line about the error with which the server answered
    tenant      tenant whose prompts wait
    num_queued  tokens of the request's prompts that wait for their first token
    """

    request_id: str
    begun: float = field(default_factory=time.monotonic)
    first_at: float | None = None
    answer_id: str = ""
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_kept: float | None = None
    refusal: str | None = None
    tenant: str = ""
    num_queued: int = 0

    @classmethod
    def of(cls, headers: Headers) -> AccessRecord:
        """The record of a request that has just arrived. Replaces an id that is not short and printable."""
        given = headers.get("x-request-id", "")
        return cls(given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)

    def record(self, item: RequestOutput) -> None:
        """Notes the first output of a prompt."""
        self.first_at = self.first_at or time.monotonic()
        self.num_prompt += len(item.prompt_token_ids)
        self.num_cached += item.num_cached_tokens or 0
        if item.kept_fraction is not None:
            self.num_kept = (self.num_kept or 0.0) + item.kept_fraction * len(item.prompt_token_ids)

    def refuse(self, status: int, error: Mapping[str, Any]) -> None:
        """Notes the error with which the server answers."""
        # As JSON, because the message may quote the request, whose line breaks must not begin another line.
        self.refusal = f"refused id={self.request_id} status={status} error={json.dumps(error)}"

    def line(self, scope: Scope, status: int) -> str:
        """The log line of a request that has ended: name=value pairs. Pairs without a value are left out."""
        now, client = time.monotonic(), scope.get("client")
        path = re.sub(r"[^\x21-\x7e]", "?", scope["path"])[:200]  # nothing in it begins another line or value
        parts = [
            f"{client[0] if client else '-'} {scope['method']} {path} {status}",
            f"seconds={now - self.begun:.3f}",
        ]
        if self.first_at is not None:
            parts.append(f"first={self.first_at - self.begun:.3f}")
        if self.num_prompt:
            parts += [f"prompt={self.num_prompt}", f"cached={self.num_cached}", f"generated={self.num_generated}"]
        if self.num_kept is not None:
            parts.append(f"kept={round(self.num_kept)}")
        parts.append(f"id={self.request_id}")
        if self.answer_id:
            parts.append(f"answer={self.answer_id}")
        return " ".join(parts)


CURRENT: ContextVar[AccessRecord | None] = ContextVar("quire_access", default=None)
"""The record of the request that is being answered."""
