"""What the clients of a soak do: drawn from a seed, so that a run can be had again. Pure.

Each act is one request, by ZMQ or HTTP: short, long or over a shared prefix, drawn in every way that there is,
streamed or not, waited for, left or aborted half-way, or one that has to be refused.
"""

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from copyengine.checkpoint.builtin_text import TEXT
from scheduler.protocol import Generate, Message, Sampling

Leaves = Literal["", "aborts", "breaks off", "vanishes"]
"""How a client ends its request before its end: by a word (ZMQ), by leaving the loop, by closing its connection."""

LARK = 'start: ("yes" | "no" | "perhaps") " " /[a-z]{1,12}/'
SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
"""Of an answer that ends, although the built-in model's random text seldom ends anything."""

ZMQ_REFUSED: tuple[Generate, ...] = (
    Generate(token_ids=[]),
    Generate(token_ids=[1 << 40]),
    Generate(token_ids=[5] * 50_000),
    Generate(prompt="a", token_ids=[1]),
    Generate(prompt="a", sampling=Sampling(temperature=-1)),
    Generate(prompt="a", sampling=Sampling(n=100_000)),
    Generate(prompt="a", sampling=Sampling(grammar="start: [")),
)
HTTP_REFUSED: tuple[tuple[str, Any], ...] = (
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": [1 << 40]}),
    ("/v1/completions", {"prompt": [5] * 50_000}),
    ("/v1/completions", {"prompt": "a", "temperature": -1}),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}),
    ("/v1/completions", {"prompt": "a", "model": "another"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}),
    ("/v1/chat/completions", {"messages": [], "response_format": {"type": "json_schema", "json_schema": 3}}),
    ("/v1/chat/completions", b"{"),
    ("/v1/nothing", {}),
)
"""Requests that no engine may answer, each for another reason."""


@dataclass(frozen=True)
class Sizes:
    """Tokens of prompts and answers."""

    vocab_size: int
    short_tokens: int = 24
    long_tokens: int = 600
    prefix_tokens: int = 256
    new_tokens: int = 24
    left_tokens: int = 2000  # of an answer that is left long before it ends


@dataclass(frozen=True)
class ZmqAct:
    """`request` has no id yet. `after` pieces its client leaves it as `leaves` says."""

    request: Generate
    leaves: Leaves = ""
    after: int = 0
    refused: bool = False


@dataclass(frozen=True)
class HttpAct:
    """A POST of `body`; of one that is left the connection is closed `after` events, or fiftieths of a second, on."""

    path: str
    body: Any
    leaves: Leaves = ""
    after: int = 0
    refused: bool = False

    @property
    def stream(self) -> bool:
        """Whether its answer comes in events."""
        return isinstance(self.body, dict) and bool(self.body.get("stream"))


@dataclass
class Drawer:
    """Draws acts."""

    sizes: Sizes
    seed: int
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        prefixes = random.Random(0)  # the same for all who draw
        self._prefixes = [self._ids(self.sizes.prefix_tokens, prefixes) for _ in range(4)]

    def act(self) -> ZmqAct | HttpAct:
        """The next one."""
        zmq, refused = self.draw.random() < 0.5, self.draw.random() < 0.08
        if refused:
            if zmq:
                return ZmqAct(self.draw.choice(ZMQ_REFUSED), refused=True)
            return HttpAct(*self.draw.choice(HTTP_REFUSED), refused=True)
        return self._zmq() if zmq else self._http()

    def burst(self) -> ZmqAct:
        """One of many at once."""
        return ZmqAct(Generate(token_ids=self._ids(8), sampling=Sampling(max_tokens=4)))

    def _zmq(self) -> ZmqAct:
        leaves: Leaves = self.draw.choice(("", "", "", "aborts", "breaks off", "vanishes"))
        sampling = Sampling(**self._sampling(bool(leaves)))
        kind = self.draw.randrange(4)
        if kind == 0 and not leaves:
            sampling = Sampling(max_tokens=40, temperature=1.0, seed=sampling.seed, grammar=LARK)
        if kind == 1:
            return ZmqAct(Generate(prompt=self._text(), sampling=sampling), leaves, self.draw.randrange(6))
        if kind == 2:
            chat = [Message("user", self._text())]
            return ZmqAct(Generate(messages=chat, sampling=sampling), leaves, self.draw.randrange(6))
        return ZmqAct(Generate(token_ids=self._prompt(), sampling=sampling), leaves, self.draw.randrange(6))

    def _http(self) -> HttpAct:
        leaves: Leaves = self.draw.choice(("", "", "", "breaks off"))
        body = self._sampling(bool(leaves))
        if self.draw.random() < 0.6:
            body["stream"], body["stream_options"] = True, {"include_usage": True}
        after = self.draw.randrange(6)
        if self.draw.random() < 0.5:
            body["prompt"] = self._prompt() if self.draw.random() < 0.5 else self._text()
            return HttpAct("/v1/completions", body, leaves, after)
        body["messages"] = [{"role": "user", "content": self._text()}]
        top = body.pop("logprobs", None)
        if top is not None:
            body |= {"logprobs": True, "top_logprobs": top}
        if self.draw.random() < 0.3 and not leaves:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
            body |= {"max_tokens": 40, "n": 1, "ignore_eos": False}
        return HttpAct("/v1/chat/completions", body, leaves, after)

    def _sampling(self, left: bool) -> dict[str, Any]:
        """Fields that Sampling and HTTP have in common."""
        fields: dict[str, Any] = {"max_tokens": 1 + self.draw.randrange(self.sizes.new_tokens)}
        if left:
            fields = {"max_tokens": self.sizes.left_tokens, "ignore_eos": True}
        fields["temperature"] = self.draw.choice((0.0, 0.7, 1.3))
        fields["seed"] = self.draw.randrange(1 << 30)
        for name, values in (
            ("top_p", (0.5, 0.95)),
            ("top_k", (1, 40)),
            ("min_p", (0.05,)),
            ("repetition_penalty", (1.2,)),
            ("presence_penalty", (0.5,)),
            ("frequency_penalty", (-0.3, 0.4)),
            ("logprobs", (0, 5)),
            ("n", (2, 3)),
            ("stop", (["the"], ["zz", "\n"])),
        ):
            if self.draw.random() < 0.2:
                fields[name] = self.draw.choice(values)
        return fields

    def _prompt(self) -> list[int]:
        kind = self.draw.random()
        if kind < 0.5:
            return self._ids(1 + self.draw.randrange(self.sizes.short_tokens))
        if kind < 0.8:
            return self.draw.choice(self._prefixes) + self._ids(1 + self.draw.randrange(self.sizes.short_tokens))
        return self._ids(self.sizes.long_tokens)

    def _text(self) -> str:
        begin = self.draw.randrange(len(TEXT) - 200)
        return TEXT[begin : begin + 1 + self.draw.randrange(200)] + self.draw.choice(("", "é ü", "日本", "🙂"))

    def _ids(self, count: int, draw: random.Random | None = None) -> list[int]:
        return [(draw or self.draw).randrange(3, self.sizes.vocab_size) for _ in range(count)]
