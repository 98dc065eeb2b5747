"""/v1/completions: texts or token ids go on."""

import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from scheduler.http.answering import Answering, End, Piece, Prompt
from scheduler.http.errors import invalid, unsupported
from scheduler.http.front import Call, Front, Route
from scheduler.http.limits import Choices, MaxTokens, TopLogprobs
from scheduler.http.sampling_fields import SamplingFields, sampling_of
from scheduler.http.sse import DONE, EventStream, event
from scheduler.http.usage import StreamUsage, UsageReply, usage_reply
from scheduler.protocol import Logprobs
from scheduler.validate import MAX_CHOICES

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPTS = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_CHOICES},
    _TOKENS,
    {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MAX_CHOICES},
]
"""What `prompt` may be, as JSON Schema has it: a type cannot tell lists by what is in them."""


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`prompt` is a text, a list of texts, the token ids of one prompt, or a list of such lists."""

    prompt: Annotated[str | list[str | int | list[int]], Meta(extra_json_schema={"oneOf": PROMPTS})]
    max_tokens: Annotated[MaxTokens | None, Meta(description="16 if not given")] = None
    logprobs: Annotated[TopLogprobs | None, Meta(description="how many likeliest tokens of each place to list")] = None
    echo: Annotated[bool | None, Meta(description="only false", extra_json_schema={"enum": [False, None]})] = None
    best_of: Annotated[Choices | None, Meta(description="only what n is")] = None
    suffix: Annotated[str | None, Meta(description="only null", extra_json_schema={"maxLength": 0})] = None


class CompletionLogprobs(Struct, frozen=True):
    """Lists of equal length, an entry for each token. `text_offset` counts characters of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    """One answer, or a part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class CompletionReply(Struct, frozen=True):
    """The answer, or one event of it. `usage` is null in events but the last, and absent if none is asked for."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["text_completion"] = "text_completion"


async def create_completion(front: Front, call: Call[CompletionRequest]) -> Response:
    """Answer at once or as a stream."""
    request = call.body
    front.check_model(request.model)
    _check(request)
    engine = await front.engine.serving()
    parts = _parts(request.prompt)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    sampling = sampling_of(request, front.default_sampling, len(parts), max_tokens, request.logprobs)
    prompts = [Prompt(await _token_ids(front, part, engine.max_model_len), sampling) for part in parts]
    usage = StreamUsage(request, prompts)
    answering = front.answer(prompts, call.request_id)
    completion = _Completion(front.model)
    if request.stream:
        return EventStream(_events(answering, completion, usage), call.request_id)
    return Response(msgspec.json.encode(await _whole(answering, completion)), media_type="application/json")


class _Completion:
    """Makes replies of what the engine says."""

    def __init__(self, model: str) -> None:
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def reply(self, choices: list[CompletionChoice], usage: UsageReply | msgspec.UnsetType | None) -> CompletionReply:
        """With what all replies to one request have in common."""
        return CompletionReply(self._id, self._created, self._model, choices, usage)

    def choice(self, piece: Piece) -> CompletionChoice:
        """A part of an answer."""
        return CompletionChoice(piece.choice, piece.text, self.logprobs(piece), None)

    def logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        """Those of its tokens, which go on where the choice's piece before ended."""
        if piece.logprobs is None:
            return None
        offsets = []
        for place in piece.logprobs:
            offsets.append(self._offsets[piece.choice])
            self._offsets[piece.choice] += len(place.drawn.text)
        return CompletionLogprobs(
            [_name(place.drawn.token_id, place.drawn.text) for place in piece.logprobs],
            [place.drawn.logprob for place in piece.logprobs],
            [_top(place) for place in piece.logprobs],
            offsets,
        )


async def _events(answering: Answering, completion: _Completion, usage: StreamUsage) -> AsyncGenerator[bytes, None]:
    async with answering:
        await answering.accepted()
        yield b""
        async for batch in answering:
            yield b"".join(event(completion.reply([_part(completion, one)], usage.after(one))) for one in batch)
        if usage.in_last:
            yield event(completion.reply([], usage_reply(answering.usage)))
        yield DONE


def _part(completion: _Completion, one: Piece | End) -> CompletionChoice:
    if isinstance(one, Piece):
        return completion.choice(one)
    return CompletionChoice(one.choice, "", None, one.end.reason)


async def _whole(answering: Answering, completion: _Completion) -> CompletionReply:
    pieces: defaultdict[int, list[Piece]] = defaultdict(list)
    reasons: dict[int, str] = {}
    async with answering:
        async for batch in answering:
            for one in batch:
                if isinstance(one, Piece):
                    pieces[one.choice].append(one)
                else:
                    reasons[one.choice] = one.end.reason
        usage = usage_reply(answering.usage)
    choices = []
    for number, reason in sorted(reasons.items()):
        places = [place for piece in pieces[number] for place in piece.logprobs or []]
        asked = any(piece.logprobs is not None for piece in pieces[number])
        text = "".join(piece.text for piece in pieces[number])
        logprobs = completion.logprobs(Piece(number, text, [], places if asked else None))
        choices.append(CompletionChoice(number, text, logprobs, reason))
    return completion.reply(choices, usage)


def _name(token_id: int, text: str) -> str:
    """What a token is called among log-probabilities; without a tokenizer by its id."""
    return text or f"token_id:{token_id}"


def _top(place: Logprobs) -> dict[str, float]:
    """The likeliest tokens and the drawn one. Of tokens with the same text, as parts of characters, the likeliest."""
    top: dict[str, float] = {}
    for one in [*place.top, place.drawn]:
        top.setdefault(_name(one.token_id, one.text), one.logprob)
    return top


def _check(request: CompletionRequest) -> None:
    """ApiError for what is known and not supported."""
    if request.echo:
        raise unsupported("echo", "the prompt is not sent back; leave it out")
    if request.suffix:
        raise unsupported("suffix", "text is not inserted; leave it out")
    if request.best_of is not None and request.best_of != (1 if request.n is None else request.n):
        raise unsupported("best_of", "every answer that is drawn is sent; set n alone")


def _parts(prompt: Any) -> list[str | list[int]]:
    """The prompts, each a text or token ids. ApiError if they are mixed or there are none."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if not kinds:
        raise invalid("prompt is empty", "prompt")
    if len(kinds) > 1:
        raise invalid("prompt mixes texts, token ids or lists of these; send one kind", "prompt")
    if kinds == {int}:
        return [prompt]
    if len(prompt) > MAX_CHOICES:
        raise invalid(f"prompt has {len(prompt)} prompts, at most {MAX_CHOICES} are allowed", "prompt")
    return list(prompt)


async def _token_ids(front: Front, part: str | list[int], max_tokens: int) -> list[int]:
    if isinstance(part, list):
        return part
    return await front.encode(lambda: front.text.encode_prompt(part, max_tokens))


ROUTES = [
    Route(
        "POST",
        "/v1/completions",
        create_completion,
        "Complete texts or token ids",
        CompletionRequest,
        CompletionReply,
        event=CompletionReply,
        asks=True,
    )
]
