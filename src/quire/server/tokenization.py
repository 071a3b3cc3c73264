"""POST /tokenize and /detokenize: text to token ids and back, as the model sees them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.server.chat_schema import TokenizeRequest, template_messages
from quire.server.errors import json_response
from quire.server.schema import DetokenizeRequest
from quire.server.service import Service
from quire.server.shapes import DetokenizeResponse, TokenizeResponse


async def tokenize(service: Service, request: Request) -> Response:
    """The token ids of a text or of a conversation."""
    async with service.body_reader.read(request, TokenizeRequest) as body:
        service.check_model(body.model)
        if body.messages is not None:
            ids = await service.request_tokenizer.encode_chat(
                lambda: template_messages(body.messages),
                body.chat_template_kwargs,
                body.add_generation_prompt is not False,
                [param.tool() for param in body.tools or ()],
                continues=bool(body.continue_final_message),
            )
        else:
            ids = await service.request_tokenizer.encode(
                body.prompt or "", body.add_special_tokens is not False, "prompt"
            )
    return json_response(TokenizeResponse(tokens=ids, count=len(ids), max_model_len=service.engine.max_context))


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids."""
    async with service.body_reader.read(request, DetokenizeRequest) as body:
        service.check_model(body.model)
        service.check_tokens(body.tokens, "tokens")
        text = await service.request_tokenizer.decode(body.tokens, body.skip_special_tokens is True, "tokens")
    return json_response(DetokenizeResponse(prompt=text))
