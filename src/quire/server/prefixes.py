"""/v1/cache/prefixes: warms, lists, shows and drops prefixes, given by prompt or by key.

A caller sees and changes only the prefixes of its own tenant; the prefixes of others do not exist for it. Answers have
no text of prompts: a key is a digest.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Literal, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.cache.ledger import PAGE_TOKENS
from quire.engine.pins import PIN_PARAMS
from quire.errors import RequestError
from quire.prefixes.cached import parse_prefix_key
from quire.server import shapes
from quire.server.chat_schema import template_messages
from quire.server.debug import check_allowed, limit_of, with_engine_timeout
from quire.server.errors import ApiError, bad_request, json_response
from quire.server.event_stream import unless_disconnected
from quire.server.json_encoding import encoded, pieces
from quire.server.prefix_schema import DropRequest, PrefixPrompt, PrefixRequest
from quire.server.service import PromptJob, Service
from quire.server.usage import Usage

if TYPE_CHECKING:
    from quire.engine.outputs import RequestOutput
    from quire.prefixes.cached import CachedPrefix
    from quire.prefixes.disk_index import TierCopy

T = TypeVar("T")


async def warm_prefix(service: Service, request: Request) -> Response:
    """Compute or fetch the whole chunks of a prompt, with a request of one token."""
    tenant = str(request.state.tenant)
    async with service.body_reader.read(request, PrefixRequest) as body:
        if not service.engine.config.cache.share:
            raise bad_request("prefixes are not kept: cache.share is off", code="unsupported_value")
        ids, key = await _prompt(service, body, tenant)
        job = PromptJob(ids, PIN_PARAMS, service.hints(body, tenant), tenant)
        await service.admit([job])
    return json_response(await unless_disconnected(request.receive, _warm(service, job, key)))


async def _warm(service: Service, job: PromptJob, key: str) -> shapes.WarmPrefix:
    usage = Usage(prompt_tokens=len(job.prompt_ids))

    async def on_first_output(_: int, item: RequestOutput) -> None:
        usage.record(item)

    async with aclosing(service.run([job], f"prefix-{uuid.uuid4().hex}", on_first_output)) as items:
        async for _ in items:
            pass
    return {
        "key": key,
        "tokens": len(job.prompt_ids) // PAGE_TOKENS * PAGE_TOKENS,
        "cached_tokens": usage.cached_tokens,
        "cached_tokens_by_tier": dict(usage.cached_by_tier),
        "pinned_tokens": usage.pinned_tokens or 0,
    }


async def list_prefixes(service: Service, request: Request) -> Response:
    """The caller's prefixes in the arena and on the disk, those used last first."""
    check_allowed(service)
    limit = limit_of(request)
    service.check_ready()
    visible = service.tenants.visible_salts(str(request.state.tenant))

    async def listed() -> shapes.ListedPrefixes:
        found = await service.engine.known_prefixes(visible)
        shown = found[:limit]
        return {
            "data": shapes.EncodedList(await asyncio.to_thread(encoded, map(_described, shown))),
            "num_prefixes": len(found),
            "truncated": len(shown) < len(found),
            "scope": "tenant" if service.tenants.are_isolated else "all",
        }

    found = await unless_disconnected(request.receive, _alone(service, listed))
    return Response(b"".join(pieces(found)), media_type="application/json")


async def show_prefix(service: Service, request: Request, key: str) -> Response:
    """One of the caller's prefixes."""
    check_allowed(service)
    service.check_ready()
    key = _checked(key)
    visible = service.tenants.visible_salts(str(request.state.tenant))
    found = _alone(service, lambda: service.engine.find_prefix(key, visible))
    prefix = await unless_disconnected(request.receive, found)
    if prefix is None:
        raise _unknown(key)
    return json_response(_described(prefix))


async def drop_prefix(service: Service, request: Request) -> Response:
    """Drop one of the caller's prefixes, given by its key or by a prompt."""
    check_allowed(service)
    tenant = str(request.state.tenant)
    async with service.body_reader.read(request, DropRequest) as body:
        service.check_ready()
        if body.key is None:
            _, key = await _prompt(service, body, tenant)
        else:
            key = _checked(body.key)
    dropped = await _alone(service, lambda: service.engine.drop_prefix(key, service.tenants.visible_salts(tenant)))
    if dropped is None:
        if body.key is not None:
            raise _unknown(key)
        param = "prompt" if body.messages is None else "messages"
        raise ApiError(404, f"The prefix of '{param}' is not cached.", param=param, code="prefix_not_found")
    return json_response(shapes.DroppedPrefix(key=key, dropped=dropped))


async def _alone(service: Service, ask: Callable[[], Awaitable[T]]) -> T:
    """Answers a question that reads the disk, one at a time. Raises ApiError 503 if the answer, with the wait for its
    turn, takes too long.
    """

    async def asked() -> T:
        async with service.disk_index_lock:
            return await ask()

    return await with_engine_timeout(asked())


async def _prompt(service: Service, body: PrefixPrompt, tenant: str) -> tuple[list[int], str]:
    """The token ids of a body's prompt, and the key of its whole chunks. Raises ApiError or RequestError (400)."""
    service.check_model(body.model)
    if body.messages is not None:
        param = "messages"
        marked = body.add_generation_prompt is True
        ids = await service.request_tokenizer.encode_chat(
            lambda: template_messages(body.messages), body.chat_template_kwargs, marked
        )
    else:
        param = "prompt"
        assert body.prompt is not None, "a body without a prompt"
        if isinstance(body.prompt, str):
            ids = await service.request_tokenizer.encode(body.prompt, body.add_special_tokens is not False, param)
        else:
            ids = body.prompt
        service.check_tokens(ids, param)
    salt = service.tenants.salt(tenant, body.cache_salt)
    try:
        return ids, service.engine.prefix_key({"prompt_token_ids": ids, "cache_salt": salt})
    except RequestError as error:
        raise bad_request(str(error), param) from error


def _described(prefix: CachedPrefix) -> shapes.ListedPrefix:
    return {
        "key": prefix.key,
        "parent": prefix.parent,
        "tokens": prefix.num_tokens,
        "last_used": round(prefix.used, 3),
        "tiers": {name: _held(held) for name, held in prefix.tiers.items()},
    }


def _held(held: TierCopy) -> shapes.PrefixTierInfo:
    until: float | Literal["forever"] | None = round(held.pinned_until, 3) or None
    if math.isinf(held.pinned_until):
        until = "forever"
    return {"bytes": held.num_bytes, "last_used": round(held.used, 3), "pinned_until": until}


def _checked(key: str) -> str:
    """A key in the form of listings. Raises ApiError 404 for an invalid key."""
    try:
        return parse_prefix_key(key).hex()
    except RequestError:
        raise _unknown(key) from None


def _unknown(key: str) -> ApiError:
    return ApiError(404, f"There is no prefix '{key[:64]}'.", param="key", code="prefix_not_found")
