"""The bodies of /v1/cache/prefixes: a prompt, in the form of a completion's or a chat's, and its cache hints."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, model_validator

from quire.server.cache_fields import Lifetime, Pin, Priority, Salt
from quire.server.chat_schema import Messages
from quire.server.errors import bad_request
from quire.server.fields import TemplateVariables, TokenIds, is_token
from quire.server.schema import StrictModel


def _prompt(value: Any) -> str | list[int] | None:
    if value is None or (isinstance(value, str) and value):
        text: str | None = value
        return text
    if isinstance(value, list) and value and all(map(is_token, value)):
        return value
    raise ValueError("Must be a text or a list of token ids, and not empty")


Prompt = Annotated[
    str | list[int] | None,
    PlainValidator(_prompt, Annotated[str, Field(min_length=1)] | TokenIds | None),
]


class PrefixPrompt(StrictModel):
    """The prompt of a prefix."""

    model: str | None = Field(None, description="The served model's name; optional.")
    prompt: Prompt = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="With a text: add the model's begin tokens, as for completions (default)."
    )
    add_generation_prompt: bool | None = Field(
        None, description="With messages: add the marker of the next answer; false by default."
    )
    chat_template_kwargs: TemplateVariables = None
    cache_salt: Salt = None

    @property
    def num_given(self) -> int:
        """Number of prompts given."""
        return (self.prompt is not None) + (self.messages is not None)

    def check_options(self) -> None:
        """Raises ApiError 400 for options that do not apply to this kind of prompt."""
        if self.add_special_tokens is not None and not isinstance(self.prompt, str):
            raise bad_request("'add_special_tokens' is only allowed when 'prompt' is a text", "add_special_tokens")
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if getattr(self, name) is not None and self.messages is None:
                raise bad_request(f"'{name}' is only allowed with 'messages'", name)


class PrefixRequest(PrefixPrompt):
    """The body of POST /v1/cache/prefixes."""

    cache_pin: Pin = None
    cache_priority: Priority = None
    cache_lifetime: Lifetime = None

    @model_validator(mode="after")
    def _one_of(self) -> PrefixRequest:
        if self.num_given != 1:
            raise bad_request("give either 'prompt' or 'messages'", "prompt")
        self.check_options()
        return self


class DropRequest(PrefixPrompt):
    """The body of DELETE /v1/cache/prefixes."""

    key: str | None = Field(None, max_length=64, description="The key of the prefix, instead of a prompt.")

    @model_validator(mode="after")
    def _one_of(self) -> DropRequest:
        if self.num_given + (self.key is not None) != 1:
            raise bad_request("give one of 'key', 'prompt' and 'messages'", "key")
        if self.key is not None and self.cache_salt is not None:
            raise bad_request("'cache_salt' is only allowed with 'prompt' or 'messages'", "cache_salt")
        self.check_options()
        return self
