"""What every endpoint works with, and what an endpoint is."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from msgspec import Struct
from starlette.responses import Response

from copyengine.wire.errors import RequestRefused
from scheduler.client import Client
from scheduler.encoding import Encoder
from scheduler.http.answering import Answering, Prompt
from scheduler.http.config import HttpConfig
from scheduler.http.default_sampling import DefaultSampling
from scheduler.http.engine_state import EngineState
from scheduler.http.errors import queue_full, unknown_model
from scheduler.http.live import Live
from scheduler.http.metrics import Metrics
from scheduler.tokenize import TextCodec
from scheduler.validate import check_prompt, check_sampling

B = TypeVar("B")
T = TypeVar("T")


class Front:
    """What every endpoint works with.

    - `client`: the connection to the scheduler, for `Answering` and for what endpoints ask themselves.
    - `text`: the checkpoint's tokenizer and chat template. Use it through `encode`, which keeps it off the event loop.
    - `model`: the name under which the model is served; `check_model` compares a request's with it.
    - `default_sampling`: how answers are drawn where a request does not say.
    - `observe`: makes the Observer of one choice, for `Answering`; `metrics` has what they saw.
    - `engine`: whether it takes requests, and how long one may be.
    - `live`: looks at the engine for those who look at the page.
    - `created_s`: when the front started, in seconds since the epoch, as /v1/models states it.
    - `draining`: true from SIGTERM on. The app refuses requests then, so endpoints need not look, but for health.
    """

    def __init__(
        self,
        config: HttpConfig,
        client: Client,
        text: TextCodec,
        model: str,
        default_sampling: DefaultSampling | None = None,
    ) -> None:
        self.default_sampling = default_sampling or DefaultSampling()
        self.config = config
        self.client = client
        self.text = text
        self.model = model
        self.metrics = Metrics(model)
        self.observe = self.metrics.observe
        self.engine = EngineState(client.health)
        self.live = Live(client, self.metrics, model)
        self.created_s = int(time.time())
        self.draining = False
        self._encoder = Encoder()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._answering: set[Answering] = set()
        self._coming: set[str] = set()  # requests that will ask the engine, and have not yet

    def check_model(self, name: str | None) -> None:
        """ApiError 404 if a request's `model` is another one; without any the one that is served is meant."""
        if name is not None and name != self.model:
            raise unknown_model(name, self.model)

    async def encode(self, encode: Callable[[], T]) -> T:
        """What `encode` returns or raises, from a thread. RequestRefused("encode_timeout") if it takes too long."""
        return await self._encoder.run(encode, lambda: None)

    def answer(self, prompts: Sequence[Prompt], request_id: str) -> Answering:
        """What runs `prompts`, which all have the same n; see Answering of its use.

        RequestRefused for what the engine would refuse as it is written: that need not be sent, and some could not.
        ApiError 429 if those that were sent before leave too few places for all choices. Of more choices than there
        are places at all the engine says what is wrong.
        """
        for prompt in prompts:
            self._check(prompt)
        self._coming.discard(request_id)
        choices = sum(prompt.sampling.n for prompt in prompts)
        if choices <= self.engine.known_places < self._asked + choices:
            self._refuse()
        return Answering(self.client, prompts, self.observe, request_id, self._answering)

    def _check(self, prompt: Prompt) -> None:
        vocab_size, sampling = self.engine.known_vocab_size, prompt.sampling
        if not prompt.token_ids:
            raise RequestRefused("invalid_request", "prompt is empty")
        if vocab_size:
            check_sampling(sampling, vocab_size)
            check_prompt(prompt.token_ids, vocab_size, sampling, self.engine.known_max_model_len)

    def check_room(self) -> None:
        """ApiError 429 if `full`: for a request of which nothing is known yet."""
        if self.full:
            self._refuse()

    def _refuse(self) -> NoReturn:
        self.metrics.refused.inc()
        raise queue_full(self.engine.known_places)

    @property
    def _asked(self) -> int:
        """Places of the engine that are taken by what was sent from here, at least."""
        return sum(answering.places for answering in self._answering)

    @property
    def full(self) -> bool:
        """Whether the engine would refuse one more choice, for those that have come here before it alone.

        A request that has come, but is not put into tokens yet, counts as one choice: it has at least that. Never while
        it is not known how many places there are.

        The engine says so itself, but later: of 200 requests at once each is decoded, checked and put into tokens by
        then, and the last is refused after 0.2 s instead of 0.06 (2 busy cores of an AMD EPYC, 2026-11).
        """
        places = self.engine.known_places
        return 0 < places <= len(self._coming) + self._asked

    def begin(self, request_id: str, asks: bool) -> None:
        """A request that a drain waits for begins; it `asks` the engine for an answer."""
        if asks:
            self._coming.add(request_id)
        self._running += 1
        self._idle.clear()

    def done(self, request_id: str) -> None:
        """Such a request has its whole answer, or its client has left."""
        self._coming.discard(request_id)
        self._running -= 1
        if not self._running:
            self._idle.set()

    async def drain(self) -> None:
        """Have requests refused from now on; returns when those that run have ended."""
        self.draining = True
        await self._idle.wait()

    def end(self) -> None:
        """Have requests refused from now on, and end those that run with an error."""
        self.draining = True
        for answering in list(self._answering):
            answering.fail(RequestRefused("draining", "the engine is stopping"))

    def close(self) -> None:
        """Texts that wait to be encoded are given up."""
        self._encoder.close()


class Call(Generic[B]):
    """One HTTP request as an endpoint sees it.

    `request_id` is what the answer's x-request-id says, `body` the decoded Struct that its Route names (None without
    one), `params` what the path's `{name}` stand for.
    """

    def __init__(self, request_id: str, body: B, params: dict[str, str]) -> None:
        self.request_id = request_id
        self.body = body
        self.params = params


class Route(Struct, frozen=True):
    """One operation, and what its description in OpenAPI is made from.

    `endpoint(front, call)` returns the response or raises ApiError or SlotstreamError. It is cancelled when the client
    leaves. `body` is the Struct (or union) that the JSON body is decoded to, which refuses unknown fields by itself;
    `reply` that of the 200 answer. Of a route that is not `guarded` no key is asked; one that does not `serve` answers
    while the engine drains, and no drain waits for it. `event` is the Struct of each event of a stream, if the body may
    ask for one. Of a route that `asks` the engine for an answer requests are refused where it has no place left.
    `media` are the types that the 200 answer may have, without a schema if there is no `reply`; `others`
    are Structs of answers with another status that are no ErrorReply. `refusals` are statuses of errors of its own.
    """

    method: str
    path: str
    endpoint: Callable[[Front, Call[Any]], Awaitable[Response]]
    about: str
    body: Any = None
    reply: Any = None
    guarded: bool = True
    serves: bool = True
    asks: bool = False
    event: Any = None
    media: tuple[str, ...] = ("application/json",)
    others: dict[int, Any] = {}
    refusals: tuple[int, ...] = ()
