"""What /v1/chat/completions answers."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from scheduler.http.usage import UsageReply

FinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(Struct, frozen=True):
    """A token and the natural logarithm of its probability. `bytes` are its own, also where it is part of a character
    and `token` U+FFFD."""

    token: str
    logprob: float
    bytes: list[int]


class PlaceLogprobs(Struct, frozen=True):
    """The same of a token of the answer, and of the likeliest ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Of each token of the answer, thinking and calls included."""

    content: list[PlaceLogprobs]
    refusal: None = None


class ReplyFunction(Struct, frozen=True):
    """`arguments` is JSON text, or in a stream a piece of it."""

    arguments: str
    name: str | UnsetType = UNSET


class ReplyCall(Struct, frozen=True):
    """A call. In a stream only its first piece has `id`, `type` and name; `index` is there only in a stream."""

    function: ReplyFunction
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ReplyMessage(Struct, frozen=True):
    """The answer. `content` is null if there are only calls or thinking."""

    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ReplyCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Delta(Struct, frozen=True):
    """What follows of an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ReplyCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One answer."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatReply(Struct, frozen=True):
    """All answers to one chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    object: Literal["chat.completion"] = "chat.completion"


class DeltaChoice(Struct, frozen=True):
    """A piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatEvent(Struct, frozen=True):
    """One event of a stream. `usage` is null in events but the last, or that of the choice so far; absent if none is
    asked for."""

    id: str
    created: int
    model: str
    choices: list[DeltaChoice]
    usage: UsageReply | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
