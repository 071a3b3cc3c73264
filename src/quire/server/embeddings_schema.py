"""The requests of /v1/embeddings, /score and /rerank, field by field; see `schema`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from quire.server.fields import UNUSED, Prompts, User, extension
from quire.server.schema import ModelRequest

MAX_TEXTS = 2048
"""Maximum number of texts of a request, as in OpenAI's API."""

Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


OneOrMore = Annotated[Texts, BeforeValidator(_several, json_schema_input_type=str | Texts)]


class EmbeddingsRequest(ModelRequest):
    """The body of POST /v1/embeddings."""

    input: Annotated[Prompts, Field(max_length=MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Keep only the first dimensions, with length 1 again."
    )
    user: User | None = UNUSED

    pooling: Literal["mean", "last"] | None = extension(
        "pooling of a text's hidden states. Default: the model's own, else mean."
    )
    add_special_tokens: bool | None = extension("with the model's begin tokens (default).")


class ScoreRequest(ModelRequest):
    """The body of POST /score: one text and several, or two lists of equal length."""

    text_1: OneOrMore
    text_2: OneOrMore


class RerankRequest(ModelRequest):
    """The body of POST /rerank."""

    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
