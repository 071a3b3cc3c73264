"""The bodies of /v1/cluster: what an operator asks of instances."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quire.server.schema import Model

Place = Annotated[str, Field(max_length=64, description="The place of an instance, such as `prefill-0`.")]


class DrainRequest(Model):
    """The body of POST /v1/cluster/drain."""

    instance: Place
    restart: bool | None = Field(None, description="Whether another instance takes its place; true by default.")


class RestartRequest(Model):
    """The body of POST /v1/cluster/restart: an empty object."""


class RoleRequest(Model):
    """The body of POST /v1/cluster/role."""

    instance: Place
    role: Literal["prefill", "decode", "mixed"]
