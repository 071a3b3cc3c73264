"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}} and a status code.

Converts our exceptions and pydantic's validation errors to such answers. Never shows a traceback or an internal
message.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire.errors import (
    CacheFullError,
    EngineStoppedError,
    InstancesFailedError,
    QueueFullError,
    QuireError,
    RequestError,
)
from quire.foreign_flags import parameter_hint
from quire.server.access_log import CURRENT
from quire.server.shapes import ErrorResponse

log = logging.getLogger("quire.server")

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)

_TYPES = {429: "rate_limit_error", 501: "invalid_request_error", 503: "service_unavailable_error"}

MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 1000, 200
"""Limits of an error's message and param. They may quote the request, which may be large."""


def error_type(status: int) -> str:
    """The `type` in the body of an error."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


class ClientDisconnected(Exception):
    """The client has disconnected; its work has been stopped."""


class ApiError(Exception):
    """An error answer: any status but 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> ErrorResponse:
        """The JSON body, as a dict."""
        param = None if self.param is None else _cut(self.param, MAX_PARAM_CHARS)
        return {
            "error": {
                "message": _cut(self.message, MAX_MESSAGE_CHARS),
                "type": error_type(self.status),
                "param": param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The HTTP response."""
        return json_response(self.body(), self.status, self.headers)


def json_bytes(value: Any) -> bytes:
    """A value as compact UTF-8 JSON. Raises ValueError rather than sending `NaN`."""
    return _ENCODER.encode(value).encode(errors="backslashreplace")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with `content` as JSON."""
    return Response(json_bytes(content), status, dict(headers or {}), "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names the parameter at fault."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: Exception) -> ApiError:
    """Converts an exception to the client's answer, and notes it for the log. An unexpected one is logged with its
    traceback and answered as 500.
    """
    answer = _converted(error)
    if (access := CURRENT.get()) is not None:
        access.refuse(answer.status, answer.body()["error"])
    return answer


def _converted(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case RequestError():
            return bad_request(str(error), getattr(error, "param", None))
        case QueueFullError():
            seconds = max(1, math.ceil(error.retry_after))
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(seconds)})
        case CacheFullError():
            return ApiError(503, str(error), code="cache_full", headers={"Retry-After": "1"})
        case InstancesFailedError():
            return ApiError(503, str(error), code="instances_failed", headers={"Retry-After": "1"})
        case QuireError() if type(error) in (QuireError, EngineStoppedError):
            return ApiError(503, "the engine is not running", code="not_ready")
        case ValidationError():
            return _invalid(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
    log.error("request failed", exc_info=error)
    return ApiError(500, "the server failed to answer this request; see its log", code="internal_error")


def _invalid(error: ValidationError) -> ApiError:
    """The most useful validation error as an answer: unsupported parameters, then unknown names, then wrong values."""
    complaints = error.errors(include_url=False, include_input=True)
    complaints.sort(key=lambda each: _FIRST.get(each["type"], len(_FIRST)))
    first = complaints[0]
    param = _path(first["loc"])
    kind = first["type"]
    is_outer = sum(not str(word).startswith("=") for word in first["loc"]) == 1
    if is_outer and first["input"] is None and kind not in ("none_required", "extra_forbidden"):
        kind = "missing"  # null means not given, and only required parameters refuse it
    match kind:
        case "none_required":
            message = f"Unsupported parameter: '{param}' is not supported by this server."
            code = "unsupported_parameter"
        case "extra_forbidden":
            answer = parameter_hint(param)
            message, code = f"Unknown parameter: '{param}'{f'; {answer}' if answer else ''}.", "unknown_parameter"
        case "missing":
            message, code = f"Missing required parameter: '{param}'.", "missing_required_parameter"
        case "body_too_complex":
            message, code = f"Invalid value for '{param}': {first['msg']}.", "body_too_complex"
        case "literal_error" | "union_tag_invalid":
            message = f"Unsupported value for '{param}': {shown(first['input'])}. {first['msg']}."
            code = "unsupported_value"
        case "model_type" | "model_attributes_type":
            message, code = f"Invalid type for '{param or 'body'}': expected a JSON object.", "invalid_type"
        case "too_short" | "too_long" as kind:
            least, context = kind == "too_short", first["ctx"]
            bound = f"at least {context['min_length']}" if least else f"at most {context['max_length']}"
            code = "invalid_value"
            message = f"Invalid value for '{param}': its length must be {bound} and is {context['actual_length']}."
        case kind:
            reason = first["msg"].removeprefix("Value error, ")
            reason = reason[:1].lower() + reason[1:]
            found = "" if kind == "faulty_item" else f"; it is {shown(first['input'])}"
            message = f"Invalid value for '{param}': {reason}{found}."
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return bad_request(message, param or None, code)


_FIRST = {"none_required": 0, "literal_error": 1, "extra_forbidden": 2}


def _path(location: tuple[int | str, ...]) -> str:
    """The path as text, such as `messages[0].content`. Leaves out tags of unions (they start with '=') and cuts long
    parts.
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("="):
            path += ("." if path else "") + part[:64]
    return path


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def shown(value: Any) -> str:
    """`value` for a message, as short JSON."""
    if isinstance(value, str):
        value = value[:65]  # one more than is shown, so that the message shows the cut
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and abs(value) > 10**20:
        return "a number of too many digits"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 64 else text[:60] + "..."
