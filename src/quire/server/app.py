"""The application: its routes, and the middleware that every request passes.

Knows the URLs. The endpoints are in their own modules.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
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
from quire.server.openapi import components, operation
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
    from quire.server.protocol import EngineProtocol

QUIET = HEALTH | {"/metrics"}
"""What machines ask for again and again: it is not in the access log."""


class AccessMiddleware:
    """Middleware around every request: checks Host, API key and shutdown; counts requests and statuses; answers errors.

    Stores the tenant of the key in the state of the request, and the client's trace in the context.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service
        config = service.config
        self.allowed_hosts = AllowedHosts.of(config.host, service.keys, config.allow_public)

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
            self.service.release_queued(access.queued)
            self.service.request_ended()
            if self.service.config.access_log and scope["path"] not in QUIET:
                log.info("%s", access.line(scope, status))
            if log.isEnabledFor(logging.DEBUG) and (reason := access.reason()) is not None:
                log.debug("%s", reason)
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
    llm: EngineProtocol, serve_config: ServeConfig, keys: ApiKeys | None = None, slo: SloConfig | None = None
) -> FastAPI:
    """The application that serves `llm`. Its `state.service` counts the current requests and can refuse new ones.

    keys  the accepted API keys; None reads serve.api_key_file
    slo   latency targets, which the metrics are about
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
        # Around the middleware: browsers ask without a key whether they may ask.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=serve_config.cors_origins.split(","),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    # Only unknown URLs and methods; the middleware answers all other errors.
    app.add_exception_handler(HTTPException, _answer_http_error)
    _add_api(app, service)
    _add_prefixes(app, service)
    _add_operations(app, service)
    _add_cluster(app, ClusterEndpoints(service))
    _document(app, service)
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
    """The methods that a URL takes, by any of its routes: Starlette names those of the first one."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods}))


def _add_api(app: FastAPI, service: Service) -> None:
    """The routes of OpenAI's API and the tokenizer's."""
    working = (400, 401, 403, 404, 413, 429, 500, 503)

    @app.post(
        "/v1/completions",
        **operation(shapes.Completion, *working, body=CompletionRequest, chunk=shapes.CompletionChunk),
    )
    async def completions(request: Request) -> Response:
        """Continue prompts."""
        return await create_completion(service, request)

    @app.post(
        "/v1/chat/completions",
        **operation(shapes.ChatCompletion, *working, body=ChatRequest, chunk=shapes.ChatCompletionChunk),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await create_chat(service, request)

    @app.post(
        "/v1/responses",
        **operation(
            response_shapes.Response,
            *working,
            body=ResponsesRequest,
            chunk=response_shapes.ResponseEvent,
            has_done=False,
        ),
    )
    async def responses(request: Request) -> Response:
        """Answer a conversation, in the newer form."""
        return await create_response(service, request)

    @app.post("/v1/embeddings", **operation(shapes.Embeddings, *working, body=EmbeddingsRequest))
    async def embeddings(request: Request) -> Response:
        """Turn texts into vectors."""
        return await create_embeddings(service, request)

    @app.post("/score", **operation(shapes.ScoreResponse, *working, body=ScoreRequest))
    @app.post("/v1/score", include_in_schema=False)
    async def score(request: Request) -> Response:
        """Tell how near texts are to each other."""
        return await create_scores(service, request)

    @app.post("/rerank", **operation(shapes.RerankResponse, *working, body=RerankRequest))
    @app.post("/v1/rerank", include_in_schema=False)
    @app.post("/v2/rerank", include_in_schema=False)
    async def rerank(request: Request) -> Response:
        """Order documents by their nearness to a query."""
        return await create_ranking(service, request)

    @app.post(
        "/tokenize", **operation(shapes.TokenizeResponse, 400, 401, 403, 404, 413, 500, 503, body=TokenizeRequest)
    )
    async def tokenize_text(request: Request) -> Response:
        """Turn text or a conversation into token ids."""
        return await tokenize(service, request)

    @app.post(
        "/detokenize", **operation(shapes.DetokenizeResponse, 400, 401, 403, 404, 413, 500, 503, body=DetokenizeRequest)
    )
    async def detokenize_ids(request: Request) -> Response:
        """Turn token ids into text."""
        return await detokenize(service, request)

    def model_card() -> shapes.ModelInfo:
        return {
            "id": service.engine.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "quire",
            "max_model_len": service.max_context,
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


def _add_prefixes(app: FastAPI, service: Service) -> None:
    """The routes of cached prefixes."""
    asked = (400, 401, 403, 404, 500, 503)

    @app.post(
        "/v1/cache/prefixes",
        **operation(shapes.WarmPrefix, 400, 401, 403, 404, 413, 429, 500, 503, body=PrefixRequest),
    )
    async def warm(request: Request) -> Response:
        """Compute or fetch a prefix ahead of the requests that begin with it."""
        return await warm_prefix(service, request)

    @app.get("/v1/cache/prefixes", **operation(shapes.ListedPrefixes, *asked, query={"limit": LIMIT}))
    async def listing(request: Request) -> Response:
        """List the caller's prefixes in the arena and on the disk."""
        return await list_prefixes(service, request)

    @app.delete("/v1/cache/prefixes", **operation(shapes.DroppedPrefix, *asked, 413, body=DropRequest))
    async def drop(request: Request) -> Response:
        """Drop a prefix and all that goes on from it."""
        return await drop_prefix(service, request)

    @app.get("/v1/cache/prefixes/{key}", **operation(shapes.ListedPrefix, *asked))
    async def show(request: Request, key: str) -> Response:
        """Describe one of the caller's prefixes."""
        return await show_prefix(service, request, key)


def _add_operations(app: FastAPI, service: Service) -> None:
    """The routes for operators."""

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

    @app.get("/debug/cache", **operation(shapes.CacheInfo, 400, 401, 403, 500, 503, query={"limit": LIMIT}))
    async def debug_cache(request: Request) -> Response:
        """The caller's prefixes in the cache, and their use."""
        return await show_cache(service, request)


def _add_cluster(app: FastAPI, endpoints: ClusterEndpoints) -> None:
    """The routes of a cluster's operators."""
    changes = (400, 401, 403, 404, 413, 500, 503)

    @app.get("/v1/cluster", **operation(shapes.ClusterInfo, 401, 403, 404, 503))
    async def show_cluster() -> Response:
        """The instances behind the server, and how long requests are in each stage."""
        return await endpoints.show()

    @app.post("/v1/cluster/drain", **operation(shapes.ClusterInfo, *changes, body=DrainRequest))
    async def drain_instance(request: Request) -> Response:
        """Let an instance finish what it has and end, and start another one in its place."""
        return await endpoints.drain(request)

    @app.post("/v1/cluster/restart", **operation(shapes.ClusterInfo, *changes, body=RestartRequest))
    async def restart_cluster(request: Request) -> Response:
        """Drain and restart one instance after the other."""
        return await endpoints.restart(request)

    @app.post("/v1/cluster/role", **operation(shapes.ClusterInfo, *changes, 409, body=RoleRequest))
    async def change_role(request: Request) -> Response:
        """Change what an instance does. Requests that it has go on."""
        return await endpoints.role(request)

    @app.post(
        "/v1/cluster/placement",
        **operation(shapes.ClusterInfo, *changes, 409, body=PlaceRequest, query={"pause": PAUSE}),
    )
    async def place_instances(request: Request) -> Response:
        """Switch to the instances of a placement, without a failed request."""
        return await endpoints.place(request)


def _document(app: FastAPI, service: Service) -> None:
    """Makes /openapi.json describe the real requests and answers of the routes."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            found["components"] = {"schemas": components()}
            if service.keys.keys:
                found["components"]["securitySchemes"] = {
                    "key": {"type": "http", "scheme": "bearer"},
                    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
                }
                found["security"] = [{"key": []}, {"header": []}]
            for methods in found["paths"].values():
                for described in methods.values():
                    described["responses"].pop("422", None)  # FastAPI's own; ours are 400
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
    # Encoded once: that takes 3 ms, and FastAPI's own route does it for each request.
    made = functools.cache(lambda: bytes(json_response(document()).body))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(made(), media_type="application/json")
