"""The application: its routes, and the middleware that every request passes.

Knows the URLs. The endpoints are in their own modules.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.cluster.tracing import CURRENT, read_traceparent
from quire.server import response_shapes, shapes
from quire.server.access_log import CURRENT as access_of
from quire.server.access_log import AccessRecord, log
from quire.server.auth import AllowedHosts, ApiKeys
from quire.server.chat import create_chat
from quire.server.chat_schema import ChatRequest, TokenizeRequest
from quire.server.cluster import ClusterEndpoints
from quire.server.cluster_schema import PAUSE, DrainRequest, PlaceRequest, RestartRequest, RoleRequest
from quire.server.completions import create_completion
from quire.server.connection import HEALTH
from quire.server.debug import LIMIT, show_cache
from quire.server.embeddings import create_embeddings, create_ranking, create_scores
from quire.server.embeddings_schema import EmbeddingsRequest, RerankRequest, ScoreRequest
from quire.server.errors import ApiError, ClientDisconnected, api_error, json_response
from quire.server.metrics import CONTENT_TYPE
from quire.server.openapi import ApiDocument, Endpoint
from quire.server.prefix_schema import DropRequest, PrefixRequest
from quire.server.prefixes import drop_prefix, list_prefixes, show_prefix, warm_prefix
from quire.server.responses import create_response
from quire.server.responses_schema import ResponsesRequest
from quire.server.schema import CompletionRequest, DetokenizeRequest
from quire.server.service import Service, shutting_down
from quire.server.tokenization import detokenize, tokenize
from quire.version import __version__

if TYPE_CHECKING:
    from quire.config import ServeConfig, SloConfig
    from quire.server.engines import ServedEngine

QUIET = HEALTH | {"/metrics"}
"""URLs that machines poll. The access log omits them."""


class AccessMiddleware:
    """Middleware around every request: checks Host, API key and shutdown; counts requests and statuses; answers errors.

    Stores the tenant of the key in the state of the request, and the client's trace in the context.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service
        config = service.config
        self.allowed_hosts = AllowedHosts(config.host, service.keys, config.allow_public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on or answers it here (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, access = 499, AccessRecord.of(Headers(scope=scope))

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", access.request_id.encode()))
            await send(message)

        self.service.request_started()
        noted = access_of.set(access)
        trace = CURRENT.set(read_traceparent(Headers(scope=scope).get("traceparent")))
        try:
            self._check(scope)
            await self.app(scope, receive, watch)
        except ClientDisconnected:
            status = 499
        except Exception as error:
            answer = api_error(error).response()
            if status == 499:
                await answer(scope, receive, watch)
        finally:
            CURRENT.reset(trace)
            access_of.reset(noted)
            self.service.release_queued(access, access.num_queued)
            self.service.request_ended()
            if self.service.config.access_log and scope["path"] not in QUIET:
                log.info("%s", access.line(scope, status))
            if access.refusal is not None:
                log.debug("%s", access.refusal)
            route = getattr(scope.get("route"), "path", "other")
            self.service.metrics.responses.labels(route, str(status)).inc()

    def _check(self, scope: Scope) -> None:
        self.allowed_hosts.check(Headers(scope=scope).getlist("host"))
        if scope["path"] in HEALTH:
            return
        tenant = self.service.tenant(scope)
        if tenant is None:
            message = "Incorrect or missing API key; send it as 'Authorization: Bearer KEY' or as 'X-Api-Key: KEY'."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if self.service.draining and scope["path"] != "/metrics":
            raise shutting_down()
        scope.setdefault("state", {})["tenant"] = tenant


def create_app(
    llm: ServedEngine, serve_config: ServeConfig, keys: ApiKeys | None = None, slo: SloConfig | None = None
) -> FastAPI:
    """The application that serves `llm`. Its `state.service` counts the current requests and can refuse new ones.

    keys  the accepted API keys; None reads serve.api_key_file
    slo   latency targets of the metrics
    Call this function, and run the application, in the event loop of `llm`. Raises ConfigError if the keys cannot be
    read.
    """
    keys = ApiKeys.from_file(serve_config.api_key_file) if keys is None else keys
    service = Service(llm, serve_config, keys, slo)
    # No documentation pages: they would load scripts from other sites. /openapi.json is enough for tools.
    app = FastAPI(
        title="Quire", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.service = service
    app.add_middleware(AccessMiddleware, service=service)
    if serve_config.cors_origins:
        # Outside the middleware: the preflight requests of browsers have no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=serve_config.cors_origins.split(","),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    # Only unknown URLs and methods; the middleware answers all other errors.
    app.add_exception_handler(HTTPException, _answer_http_error)
    document = ApiDocument(app)
    _add_api(app, service, document)
    _add_prefixes(app, service, document)
    _add_operations(app, service, document)
    _add_cluster(ClusterEndpoints(service), document)
    _add_document(app, service, document)
    return app


async def _answer_http_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = ApiError(404, f"Unknown URL: {request.method} {request.url.path[:200]}", code="unknown_url")
    elif isinstance(error, HTTPException) and error.status_code == 405:
        allowed = _methods(request)
        message = f"{request.url.path[:200]} takes {allowed}, not {request.method}"
        error = ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    return api_error(error).response()


def _methods(request: Request) -> str:
    """The methods of all routes of a URL. Starlette names only those of the first route."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods}))


def _add_api(app: FastAPI, service: Service, document: ApiDocument) -> None:
    """The routes of OpenAI's API and the tokenizer's."""
    operation, plain = document.operation, (400, 401, 403, 404, 413, 500, 503)
    post, working = functools.partial(document.add, "POST"), (*plain, 429)

    def of(answer: Callable[[Service, Request], Awaitable[Response]]) -> Endpoint:
        return functools.partial(answer, service)

    post(
        "/v1/completions", "completions", "Continue prompts.", of(create_completion),
        shapes.Completion, *working, body=CompletionRequest, chunk=shapes.CompletionChunk,
    )  # fmt: skip
    post(
        "/v1/chat/completions", "chat_completions", "Answer a conversation.", of(create_chat),
        shapes.ChatCompletion, *working, body=ChatRequest, chunk=shapes.ChatCompletionChunk,
    )  # fmt: skip
    post(
        "/v1/responses", "responses", "Answer a conversation, in the newer form.", of(create_response),
        response_shapes.Response, *working, body=ResponsesRequest, chunk=response_shapes.ResponseEvent, has_done=False,
    )  # fmt: skip
    post(
        "/v1/embeddings", "embeddings", "Turn texts into vectors.", of(create_embeddings),
        shapes.Embeddings, *working, body=EmbeddingsRequest,
    )  # fmt: skip
    post(
        "/score /v1/score", "score", "Compute the similarity of texts.", of(create_scores),
        shapes.ScoreResponse, *working, body=ScoreRequest,
    )  # fmt: skip
    post(
        "/rerank /v1/rerank /v2/rerank", "rerank", "Order documents by similarity to a query.", of(create_ranking),
        shapes.RerankResponse, *working, body=RerankRequest,
    )  # fmt: skip
    post(
        "/tokenize", "tokenize_text", "Turn text or a conversation into token ids.", of(tokenize),
        shapes.TokenizeResponse, *plain, body=TokenizeRequest,
    )  # fmt: skip
    post(
        "/detokenize", "detokenize_ids", "Turn token ids into text.", of(detokenize),
        shapes.DetokenizeResponse, *plain, body=DetokenizeRequest,
    )  # fmt: skip

    def model_card() -> shapes.ModelInfo:
        return {
            "id": service.engine.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "quire",
            "max_model_len": service.engine.max_context,
            "capabilities": service.capabilities,
            "sampling_defaults": dict(service.sampling.values),
        }

    @app.get("/v1/models", **operation(shapes.ModelList, 401, 403, 503))
    async def models() -> Response:
        """List the served model."""
        return json_response(shapes.ModelList(object="list", data=[model_card()]))

    @app.get("/v1/models/{model:path}", **operation(shapes.ModelInfo, 401, 403, 404, 503))
    async def model_by_name(model: str) -> Response:
        """Describe the served model."""
        service.check_model(model)
        return json_response(model_card())


def _add_prefixes(app: FastAPI, service: Service, document: ApiDocument) -> None:
    """Adds the routes of cached prefixes."""
    add, path, statuses = document.add, "/v1/cache/prefixes", (400, 401, 403, 404, 500, 503)
    add(
        "POST", path, "warm", "Compute or fetch a prefix ahead of the requests that begin with it.",
        functools.partial(warm_prefix, service), shapes.WarmPrefix, *statuses, 413, 429, body=PrefixRequest,
    )  # fmt: skip
    add(
        "GET", path, "listing", "List the caller's prefixes in the arena and on the disk.",
        functools.partial(list_prefixes, service), shapes.ListedPrefixes, *statuses, query={"limit": LIMIT},
    )  # fmt: skip
    add(
        "DELETE", path, "drop", "Drop a prefix and all its descendants.",
        functools.partial(drop_prefix, service), shapes.DroppedPrefix, *statuses, 413, body=DropRequest,
    )  # fmt: skip

    @app.get("/v1/cache/prefixes/{key}", **document.operation(shapes.ListedPrefix, *statuses))
    async def show(request: Request, key: str) -> Response:
        """Describe one of the caller's prefixes."""
        return await show_prefix(service, request, key)


def _add_operations(app: FastAPI, service: Service, document: ApiDocument) -> None:
    """Adds the routes for operators."""
    operation = document.operation

    @app.head("/health/live", include_in_schema=False)
    @app.get("/health/live", **operation(shapes.Status, 403))
    async def live() -> Response:
        """Whether the process answers."""
        return json_response(shapes.Status(status="ok"))

    @app.head("/health", include_in_schema=False)
    @app.head("/health/ready", include_in_schema=False)
    @app.get("/health", **operation(shapes.Status, 403, 503))
    @app.get("/health/ready", **operation(shapes.Status, 403, 503))
    async def ready() -> Response:
        """Whether the server accepts requests."""
        if service.draining:
            raise shutting_down()
        service.check_ready()
        status = shapes.Status(status="ready")
        if (calibration := service.engine.stats().get("calibration")) is not None:
            status["calibration"] = calibration
        return json_response(status)

    @app.get("/version", **operation(shapes.Version, 401, 403, 503))
    async def show_version() -> Response:
        """The version of Quire."""
        return json_response(shapes.Version(version=__version__))

    @app.get("/metrics", **operation(None, 401, 403))
    async def metrics() -> Response:
        """The metrics, in Prometheus's text format."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    document.add(
        "GET", "/debug/cache", "debug_cache", "The caller's prefixes in the cache, and their use.",
        functools.partial(show_cache, service), shapes.CacheInfo, 400, 401, 403, 500, 503, query={"limit": LIMIT},
    )  # fmt: skip


def _add_cluster(endpoints: ClusterEndpoints, document: ApiDocument) -> None:
    """Adds the routes for operators of a cluster."""
    info, changes = shapes.ClusterInfo, (400, 401, 403, 404, 413, 500, 503)
    post = functools.partial(document.add, "POST")
    document.add(
        "GET", "/v1/cluster", "show_cluster",
        "The instances behind the server, and the seconds of requests in each stage.", endpoints.show, info,
        401, 403, 404, 503,
    )  # fmt: skip
    post(
        "/v1/cluster/drain", "drain_instance",
        "Drain an instance and start another one in its place.",
        endpoints.drain, info, *changes, body=DrainRequest,
    )  # fmt: skip
    post(
        "/v1/cluster/restart", "restart_cluster", "Drain and restart one instance after the other.",
        endpoints.restart, info, *changes, body=RestartRequest,
    )  # fmt: skip
    post(
        "/v1/cluster/role", "change_role", "Change an instance's role. Its requests continue.",
        endpoints.role, info, *changes, 409, body=RoleRequest,
    )  # fmt: skip
    post(
        "/v1/cluster/placement", "place_instances",
        "Switch to the instances of a placement, without a failed request.",
        endpoints.place, info, *changes, 409, body=PlaceRequest, query={"pause": PAUSE},
    )  # fmt: skip


def _add_document(app: FastAPI, service: Service, document: ApiDocument) -> None:
    """Makes /openapi.json describe the real requests and answers of the routes."""
    make = functools.cache(functools.partial(document.make, has_keys=bool(service.keys.keys)))
    app.openapi = make  # type: ignore[method-assign]
    # Encoded once, in 3 ms. FastAPI's own route encodes it for each request.
    made = functools.cache(lambda: bytes(json_response(make()).body))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(made(), media_type="application/json")
