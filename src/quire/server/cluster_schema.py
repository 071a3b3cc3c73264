"""The requests of /v1/cluster: operations on instances."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.server.schema import StrictModel

Place = Annotated[str, Field(max_length=64, description="The place of an instance, such as `prefill-0`.")]


class DrainRequest(StrictModel):
    """The body of POST /v1/cluster/drain."""

    instance: Place
    restart: bool | None = Field(None, description="Whether another instance takes its place; true by default.")


class RestartRequest(StrictModel):
    """The body of POST /v1/cluster/restart: an empty object."""


class RoleRequest(StrictModel):
    """The body of POST /v1/cluster/role."""

    instance: Place
    role: Literal["prefill", "decode", "mixed"]


class PlaceRequest(StrictModel):
    """The body of POST /v1/cluster/placement: the content of a file of `quire plan placement`."""

    version: int
    instances: list[dict[str, Any]] = Field(
        description="Equal instances: `role`, `count`, and settings of the engine in `options`. `tp` and `pp` are 1."
    )
    predicted: dict[str, Any]
    workload: dict[str, Any] | None = None
    slo: dict[str, Any] | None = None
    made: dict[str, Any] | None = None
    gpus: dict[str, Any] | None = None
    hosts: dict[str, Any] | None = None


PAUSE: dict[str, Any] = {"type": "boolean", "default": False}
"""Schema of the parameter `pause` of POST /v1/cluster/placement: requests may wait while no instance serves."""
