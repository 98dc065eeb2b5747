"""/tokenize and /detokenize: the served model's tokenizer, in vLLM's shapes."""

from typing import Annotated

from msgspec import Meta, Struct
from starlette.responses import Response

from copyengine.wire.errors import RequestRefused
from scheduler.http.errors import invalid, not_loaded
from scheduler.http.front import Call, Front, Route
from scheduler.http.limits import TokenId
from scheduler.http.models import json_response
from scheduler.protocol import Message

MEASURED = 4
"""A text may have so many times the tokens of a request, for who wants to know by how much it is too long. Unbounded,
the tokenizer would take some 150 bytes of memory for each character."""


class TokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of a text and a chat, which is rendered by the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="what the tokenizer adds to a text; true if not given, false for a chat")
    ] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="of a chat; true if not given")] = None


class TokenizeReply(Struct, frozen=True):
    """`count` token ids; a request of the model may have `max_model_len`, its answer included."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    tokens: list[TokenId]
    model: str | None = None


class DetokenizeReply(Struct, frozen=True):
    """Their text, special tokens included."""

    prompt: str


async def tokenize(front: Front, call: Call[TokenizeRequest]) -> Response:
    """Token ids of a text or chat, which may be longer than a request may be, but not without end."""
    request = call.body
    front.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("exactly one of prompt and messages is needed", "prompt")
    if request.prompt is not None and request.add_generation_prompt is not None:
        raise invalid("add_generation_prompt is only for messages", "add_generation_prompt")
    max_model_len = await front.engine.max_model_len()
    if not max_model_len:
        raise not_loaded()
    tokens = await front.encode(lambda: _encode(front, request, MEASURED * max_model_len))
    return json_response(TokenizeReply(len(tokens), max_model_len, tokens))


async def detokenize(front: Front, call: Call[DetokenizeRequest]) -> Response:
    """The text of token ids, of as many as a request may have."""
    front.check_model(call.body.model)
    max_model_len, count = await front.engine.max_model_len(), len(call.body.tokens)
    if not max_model_len:
        raise not_loaded()
    if count > max_model_len:
        raise invalid(f"tokens has {count} ids, at most {max_model_len} are allowed", "tokens")
    return json_response(DetokenizeReply(await front.encode(lambda: front.text.decode(call.body.tokens))))


def _encode(front: Front, request: TokenizeRequest, most: int) -> list[int]:
    """ApiError for what is certain to have more than `most` tokens: that is not encoded."""
    try:
        return _encoded(front, request, most)
    except RequestRefused as error:
        if error.code != "context_length_exceeded":
            raise
        field = "messages" if request.prompt is None else "prompt"
        text = f"{field} has more than {most} tokens, {MEASURED} times what a request may have"
        raise invalid(text, field, error.code) from None


def _encoded(front: Front, request: TokenizeRequest, most: int) -> list[int]:
    special, text = request.add_special_tokens, request.prompt
    if text is None:
        chat = [{"role": message.role, "content": message.content} for message in request.messages or []]
        generation = request.add_generation_prompt is not False
        text = front.text.template().render(chat, add_generation_prompt=generation)
        special = bool(special)
    return front.text.encode_rendered(text, most) if special is False else front.text.encode_prompt(text, most)


ROUTES = [
    Route("POST", "/tokenize", tokenize, "Token ids of a text or chat", TokenizeRequest, TokenizeReply, serves=False),
    Route("POST", "/detokenize", detokenize, "The text of token ids", DetokenizeRequest, DetokenizeReply, serves=False),
]
