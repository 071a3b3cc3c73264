"""/v1/cluster: operators see the instances behind a server, drain and restart them, and change their roles and numbers.

A drain, restart or switch continues if its client leaves. One operation runs at a time; others wait, but a second
switch is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import ConfigError, EngineStoppedError, ModelError
from quire.placement.placement_file import Placement, placement_of
from quire.server import shapes
from quire.server.cluster_schema import PAUSE, DrainRequest, PlaceRequest, RestartRequest, RoleRequest
from quire.server.debug import check_query
from quire.server.errors import ApiError, bad_request, json_response
from quire.server.event_stream import unless_disconnected
from quire.server.service import Service

if TYPE_CHECKING:
    from quire.cluster.operations import ClusterOperations

log = logging.getLogger("quire.server")


class ClusterEndpoints:
    """The endpoints of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: set[asyncio.Future[None]] = set()
        self._switches = False

    async def show(self, _: Request) -> Response:
        """The instances and the stages."""
        return self._answer(self._operations())

    async def drain(self, request: Request) -> Response:
        """Drains an instance and starts another one in its place."""
        async with self._service.body_reader.read(request, DrainRequest) as body:
            operations = self._named(body.instance)
            restart = body.restart is not False
        await self._finish(request, lambda: operations.drain(body.instance, restart=restart))
        return self._answer(operations)

    async def restart(self, request: Request) -> Response:
        """Drains and restarts the instances one after the other."""
        async with self._service.body_reader.read(request, RestartRequest):
            operations = self._changeable()
        await self._finish(request, operations.restart)
        return self._answer(operations)

    async def role(self, request: Request) -> Response:
        """Changes the role of an instance."""
        async with self._service.body_reader.read(request, RoleRequest) as body:
            operations = self._named(body.instance)
        self._check_no_switch(operations)
        operations.set_role(body.instance, body.role)
        return self._answer(operations)

    async def place(self, request: Request) -> Response:
        """Switches to the instances of a placement."""
        may_pause = _pauses(request)
        async with self._service.body_reader.read(request, PlaceRequest) as body:
            operations = self._changeable()
            placement = await asyncio.to_thread(_placement, body)
        self._check_no_switch(operations)

        async def switch() -> None:
            try:
                await operations.switch(placement, may_pause=may_pause)
            except ConfigError as error:
                raise bad_request(str(error)) from error
            finally:
                self._switches = False

        self._switches = True
        await self._finish(request, switch)
        return self._answer(operations)

    def _check_no_switch(self, operations: ClusterOperations) -> None:
        """Raises ApiError 409 while a switch runs or waits for its turn. The cluster itself may have started it."""
        switch = operations.state()["switch"]
        if self._switches or (switch is not None and not switch["error"]):
            message = "a switch to another placement is under way; try again when it has ended"
            raise ApiError(409, message, code="switch_under_way")

    def _operations(self) -> ClusterOperations:
        found = self._service.engine.operations
        if found is None:
            message = "this server has one engine and no cluster; see cluster.prefill, cluster.decode, cluster.mixed"
            raise ApiError(404, message, code="no_cluster")
        return found

    def _changeable(self) -> ClusterOperations:
        """Raises ApiError 404 without a cluster, and 403 on a public server without keys: anybody could stop it."""
        found = self._operations()
        if self._service.is_open:
            message = "this server is public (serve.allow_public) and has no API keys; set serve.api_key_file"
            raise ApiError(403, message, code="operators_only")
        return found

    def _named(self, place: str) -> ClusterOperations:
        """As `_changeable`. Also raises ApiError 404 for an unknown instance."""
        found = self._changeable()
        places = [each["place"] for each in found.state()["instances"]]
        if place not in places:
            message = f"there is no instance '{place}'; there are {', '.join(places)}"
            raise ApiError(404, message, param="instance", code="instance_not_found")
        return found

    async def _finish(self, request: Request, work: Callable[[], Awaitable[None]]) -> None:
        """Waits for an operation, which continues if the client leaves. Raises ApiError 503 if it fails."""

        async def patiently(task: asyncio.Future[None]) -> None:
            await asyncio.shield(task)

        task = asyncio.ensure_future(work())
        self._running.add(task)
        task.add_done_callback(self._has_ended)
        try:
            await unless_disconnected(request.receive, patiently(task))
        except ModelError as error:
            raise ApiError(503, str(error), code="instance_failed") from error

    def _has_ended(self, task: asyncio.Future[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, EngineStoppedError | ApiError):
            log.error("an operation on instances failed: %s", error)

    def _answer(self, operations: ClusterOperations) -> Response:
        state = operations.state()
        found: shapes.ClusterInfo = {
            "instances": [_instance(each) for each in state["instances"]],
            "counts": state["counts"],
            "stages": state["stages"],
            "placement": state["placement"],
            "switch": _switch(state["switch"]),
            "replanning": state["replanning"],
        }
        return json_response(found)


def _pauses(request: Request) -> bool:
    """Whether a switch may pause. Raises ApiError 400."""
    check_query(request, "pause")
    words = {"true": True, "false": False}
    *given, text = ["true" if PAUSE["default"] else "false", *request.query_params.getlist("pause")]
    if len(given) > 1 or text not in words:
        raise bad_request("'pause' must be true or false, and given once", "pause")
    return words[text]


def _placement(body: PlaceRequest) -> Placement:
    try:
        return placement_of(body.model_dump(exclude_none=True))
    except ConfigError as error:
        raise bad_request(str(error)) from error


def _switch(found: dict[str, Any] | None) -> shapes.SwitchInfo | None:
    if found is None:
        return None
    return {
        "to": found["to"],
        "actions": found["num_all"],
        "done": found["num_done"],
        "now": found["now"],
        "error": found["error"],
    }


def _instance(found: dict[str, Any]) -> shapes.InstanceInfo:
    load = found["load"]
    return {
        "place": found["place"],
        "name": found["name"],
        "role": found["role"],
        "health": found["health"],
        "pid": found["pid"],
        "cores": found["cores"],
        "attempts": found["attempts"],
        "saturating_rows": found["prompt_rows"],
        "seconds_per_row": found["seconds_per_row"],
        "batch": found["batch"],
        "seconds_per_step": found["seconds_per_step"],
        "cache_bytes": found["cache_bytes"],
        "load": None
        if load is None
        else {
            "running": load["num_running"],
            "waiting": load["num_waiting"],
            "held": load["num_held"],
            "queued_rows": load["prompt_rows"],
            "free_bytes": load["free_bytes"],
            "total_bytes": load["total_bytes"],
        },
    }
