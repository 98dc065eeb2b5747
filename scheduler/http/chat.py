"""/v1/chat/completions."""

import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator

import msgspec
from msgspec import UnsetType
from msgspec.structs import replace
from starlette.responses import Response

from scheduler.http.answering import Answering, End, Piece, Prompt
from scheduler.http.chat_answer import NOTHING, ChatAnswer
from scheduler.http.chat_plan import ChatPlan
from scheduler.http.chat_replies import (
    ChatChoice,
    ChatEvent,
    ChatLogprobs,
    ChatReply,
    Delta,
    DeltaChoice,
    PlaceLogprobs,
    TopLogprob,
)
from scheduler.http.chat_requests import ChatRequest
from scheduler.http.errors import invalid
from scheduler.http.front import Call, Front, Route
from scheduler.http.sampling_fields import sampling_of
from scheduler.http.sse import DONE, EventStream, event
from scheduler.http.usage import StreamUsage, UsageReply, usage_reply
from scheduler.protocol import Logprobs, TokenLogprob
from scheduler.token_bytes import token_bytes
from scheduler.tokenize import TextCodec


async def create_chat_completion(front: Front, call: Call[ChatRequest]) -> Response:
    """Answer at once or as a stream."""
    request = call.body
    front.check_model(request.model)
    sampling = sampling_of(request, front.default_sampling, 1, _max_tokens(request), _logprobs(request))
    template = front.text.template()
    engine = await front.engine.serving()

    def work_out() -> tuple[ChatPlan, list[int]]:
        plan = ChatPlan(request, template, front.text.added_tokens)
        return plan, front.text.encode_rendered(plan.prompt, engine.max_model_len)

    plan, token_ids = await front.encode(work_out)
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=max(1, engine.max_model_len - len(token_ids)))
    prompt = Prompt(token_ids, replace(sampling, grammar=plan.grammar))
    usage = StreamUsage(request, [prompt])
    answering = front.answer([prompt], call.request_id)
    chat = _Chat(front.model, front.text, plan)
    if request.stream:
        return EventStream(_events(answering, chat, sampling.n, usage), call.request_id)
    return Response(msgspec.json.encode(await _whole(answering, chat)), media_type="application/json")


class _Chat:
    """Makes replies of what the engine says."""

    def __init__(self, model: str, text: TextCodec, plan: ChatPlan) -> None:
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._text = text
        self.answers: defaultdict[int, ChatAnswer] = defaultdict(plan.reader)

    def event(self, choices: list[DeltaChoice], usage: UsageReply | UnsetType | None) -> ChatEvent:
        """With what all events of one stream have in common."""
        return ChatEvent(self._id, self._created, self._model, choices, usage)

    def reply(self, choices: list[ChatChoice], usage: UsageReply) -> ChatReply:
        """All at once."""
        return ChatReply(self._id, self._created, self._model, choices, usage)

    def parts(self, one: Piece | End) -> list[DeltaChoice]:
        """What follows of one answer."""
        answer = self.answers[one.choice]
        if isinstance(one, Piece):
            delta, logprobs = answer.push(one.text), self.logprobs(one.logprobs)
            return [] if delta is NOTHING and logprobs is None else [DeltaChoice(one.choice, delta, logprobs)]
        rest = answer.flush()
        end = DeltaChoice(one.choice, NOTHING, finish_reason=answer.finish_reason(one.end.reason))
        return [end] if rest is NOTHING else [DeltaChoice(one.choice, rest), end]

    def logprobs(self, places: list[Logprobs] | None) -> ChatLogprobs | None:
        """Those of some tokens."""
        if places is None:
            return None
        return ChatLogprobs([self._place(place) for place in places])

    def _place(self, place: Logprobs) -> PlaceLogprobs:
        drawn = self._token(place.drawn)
        return PlaceLogprobs(drawn.token, drawn.logprob, drawn.bytes, [self._token(one) for one in place.top])

    def _token(self, one: TokenLogprob) -> TopLogprob:
        own = token_bytes(self._text.token_name(one.token_id), one.text)
        return TopLogprob(one.text, one.logprob, list(own))


async def _events(answering: Answering, chat: _Chat, n: int, usage: StreamUsage) -> AsyncGenerator[bytes, None]:
    begin = Delta(role="assistant", content="")
    async with answering:
        await answering.accepted()
        yield b"".join(event(chat.event([DeltaChoice(i, begin)], usage.begin(i))) for i in range(n))
        async for batch in answering:
            parts = [(part, so_far) for one in batch for so_far in (usage.after(one),) for part in chat.parts(one)]
            if parts:
                yield b"".join(event(chat.event([part], so_far)) for part, so_far in parts)
        if usage.in_last:
            yield event(chat.event([], usage_reply(answering.usage)))
        yield DONE


async def _whole(answering: Answering, chat: _Chat) -> ChatReply:
    places: defaultdict[int, list[Logprobs]] = defaultdict(list)
    asked = False
    ends: list[End] = []
    async with answering:
        async for batch in answering:
            for one in batch:
                if isinstance(one, End):
                    chat.answers[one.choice].flush()
                    ends.append(one)
                    continue
                chat.answers[one.choice].push(one.text)
                places[one.choice] += one.logprobs or []
                asked |= one.logprobs is not None
        usage = usage_reply(answering.usage)
    choices = []
    for end in sorted(ends, key=lambda end: end.choice):
        answer = chat.answers[end.choice]
        logprobs = chat.logprobs(places[end.choice]) if asked else None
        choices.append(ChatChoice(end.choice, answer.message(), logprobs, answer.finish_reason(end.end.reason)))
    return chat.reply(choices, usage)


def _max_tokens(request: ChatRequest) -> int | None:
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is not None and older is not None and newer != older:
        raise invalid("max_tokens is the older name of max_completion_tokens, and says otherwise", "max_tokens")
    return older if newer is None else newer


def _logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


ROUTES = [
    Route(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a chat",
        ChatRequest,
        ChatReply,
        event=ChatEvent,
        asks=True,
    )
]
