"""A scheduler in this process with made-up workers: real sockets and frames, tokens by a rule."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import zmq.asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from copyengine.wire.errors import CopyFailed, RequestRefused
from copyengine.wire.lifecycle import Progress
from copyengine.wire.loop import run
from copyengine.wire.rpc_server import Call, RpcServer
from scheduler.client import Client
from scheduler.config import SchedulerConfig
from scheduler.lane import running
from scheduler.server import SchedulerServer
from scheduler.startup import build_service, close_all, load_workers, model_name
from scheduler.ticket import Service
from worker import protocol
from worker.protocol import (
    Done,
    ExpertStats,
    Failed,
    Flush,
    LayerStats,
    LayerStatsReply,
    LayerTraffic,
    Load,
    Loaded,
    LoadProgress,
    Logprobs,
    Mode,
    Release,
    Residency,
    ResidencyReply,
    RunStep,
    SequenceStep,
    StepDone,
)

RECORD_NBYTES = 1024
COPY_WAIT_S = 0.25
"""That each step of a made-up worker reports."""

EOS_TEXT = "<|end|>"
CORPUS = ["the quick brown fox", "naïve café 🦊 日本語", "def f(x):\n\treturn x", "0123456789 +-*/", "aaaa bbbb"] * 3


LAYER_STATS = LayerStatsReply(
    LayerTraffic([3, 4], [1, 0]), LayerTraffic([0, 0], [2, 2]), LayerTraffic([0, 0], [0, 0]), [[1, 3], [2, 2]]
)


def next_token(token: int, vocab_size: int) -> int:
    """The rule of the made-up model: 3, 4, 5, ..."""
    return max(3, (token + 1) % vocab_size)


def restricted(token: int, sequence: SequenceStep) -> int:
    """What it draws where a grammar forbids `token`: the largest that is allowed, -1 if none is."""
    changes = sequence.sample.changes if sequence.sample else None
    if changes is None or not changes.allowed:
        return token
    bits = int.from_bytes(changes.allowed, "little")
    return token if bits >> token & 1 else bits.bit_length() - 1


def expected(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """The first `count` tokens of the answer."""
    tokens = [prompt[-1]]
    for _ in range(count):
        tokens.append(next_token(tokens[-1], vocab_size))
    return tokens[1:]


class FakeWorker:
    """Speaks worker.protocol; a load takes `load_s`, a step `step_s` and, if an error is in `failures`, fails with it.

    With `short` a step's reply lacks a token, which the scheduler does not expect.
    """

    def __init__(self, context: zmq.asyncio.Context, vocab_size: int, **facts: Any) -> None:
        self.steps: list[RunStep] = []
        self.released: list[int] = []
        self.loads: list[Load] = []
        self.failures: list[Exception] = []
        self.load_failures: list[Exception] = []
        self.short = False
        self.bad: set[int] = set()  # tokens after which the logits are not finite
        self.fatal: set[tuple[int, int]] = set()  # (start, last token) of sequences whose step fails, once each
        self.step_s = 0.0
        self.load_s = 0.0
        self.load_gate = asyncio.Event()  # before the last half is loaded
        self.load_gate.set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.release_gate = asyncio.Event()
        self.release_gate.set()
        self.residency = ResidencyReply(2, 8, b"\x0f\x07")
        self.residency_asked = 0
        self.residency_gate = asyncio.Event()
        self.residency_gate.set()
        self.release_failure: Exception | None = None
        self.flushes = 0
        self.flush_failure: Exception | None = None
        self.flush_gate = asyncio.Event()
        self.flush_gate.set()
        self.facts = _loaded(vocab_size, **facts)
        self._rpc: RpcServer[protocol.Request, protocol.Reply] = RpcServer(
            context, protocol.Request, self._handle, Failed
        )
        self.endpoint = self._rpc.bind("tcp://127.0.0.1:0")
        self._task = asyncio.create_task(self._rpc.serve())

    async def die(self) -> None:
        """Close the socket without a word."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._rpc.close()

    def modes(self) -> list[Mode]:
        return [step.mode for step in self.steps]

    async def _handle(self, call: Call[protocol.Request, protocol.Reply]) -> protocol.Reply:
        match call.request:
            case Load() as load:
                self.loads.append(load)
                if self.load_failures:
                    raise self.load_failures.pop(0)
                await asyncio.sleep(self.load_s)
                await call.progress(LoadProgress("experts", 1, 2))
                await self.load_gate.wait()
                await call.progress(LoadProgress("dense weights", 2, 2))
                return self.facts
            case RunStep() as step:
                return await self._step(step)
            case Residency():
                self.residency_asked += 1
                await self.residency_gate.wait()
                return self.residency
            case LayerStats():
                return LAYER_STATS
            case Flush():
                self.flushes += 1
                await self.flush_gate.wait()
                if self.flush_failure:
                    raise self.flush_failure
                return Done()
            case Release(sequences=sequences):
                self.released += sequences
                await self.release_gate.wait()
                if self.release_failure:
                    raise self.release_failure
                return Done()
            case other:
                raise RequestRefused("invalid_request", f"{other}")

    async def _step(self, step: RunStep) -> StepDone:
        self.steps.append(step)
        await asyncio.sleep(self.step_s)
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        if fatal := self.fatal.intersection((s.start, s.tokens[-1]) for s in step.sequences):
            self.fatal -= fatal
            raise COPY_FAILED
        vocab_size = self.facts.vocab_size
        tokens = [restricted(next_token(s.tokens[-1], vocab_size), s) if s.sample else -1 for s in step.sequences]
        tokens = [-1 if s.tokens[-1] in self.bad else t for s, t in zip(step.sequences, tokens, strict=True)]
        if self.short:
            tokens.pop()
        misses = len(step.sequences)
        stats = ExpertStats(1, misses + 3, 3, misses, misses * RECORD_NBYTES, COPY_WAIT_S)
        told = [_logprobs(s, token) for s, token in zip(step.sequences, tokens, strict=False)]
        return StepDone(tokens, stats, told if any(told) else None, resident=7)


def _logprobs(sequence: SequenceStep, token: int) -> Logprobs | None:
    """By rule: the drawn token at -token / 8, and tokens from 3 on, each a half less likely than the one before."""
    if sequence.sample is None or sequence.sample.logprobs is None or token < 0:
        return None
    ids = list(range(3, 3 + sequence.sample.logprobs))
    return Logprobs(-token / 8, ids, [-0.5 * i for i in ids])


def _loaded(vocab_size: int, **facts: Any) -> Loaded:
    values: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "vocab_size": vocab_size, "max_position": 4096, "moe_layers": 2,
        "experts": 8, "experts_per_token": 2, "record_nbytes": RECORD_NBYTES, "slots": 8, "stream_slots": 16,
        "kv_tokens": 4096, "page_tokens": 16, "kv_nbytes": 1, "bank_nbytes": 1, "pool_nbytes": 1, "dense_nbytes": 1,
        "copy_engine": "process", "load_s": 0.0,
    }  # fmt: skip
    return Loaded(**{**values, **facts})


def train_tokenizer(corpus: list[str], vocab_size: int = 400) -> Tokenizer:
    """A byte-level BPE: every text can be encoded, many characters span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|start|>", EOS_TEXT, "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def write_model(directory: Path, tokenizer: Tokenizer | None = None) -> Path:
    """The text files of a checkpoint; no weights, which made-up workers do not need."""
    tokenizer = tokenizer or train_tokenizer(CORPUS)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    settings = {"eos_token": EOS_TEXT, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    (directory / "config.json").write_text("{}", "utf-8")
    return directory


class Rig:
    """A scheduler and its workers; `client()` opens a connection."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        server: SchedulerServer,
        endpoint: str,
        workers: list[FakeWorker],
        service: Service,
    ) -> None:
        self.context = context
        self.server = server
        self.endpoint = endpoint
        self.workers = workers
        self.service = service
        self.lanes = service.lanes

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    def client(self) -> Client:
        return Client(self.endpoint)

    async def settled(self, running: int = 0) -> None:
        """Wait until `running` requests run and none waits."""
        async with asyncio.timeout(30):
            while sum(lane.core.running + lane.core.waiting for lane in self.lanes) != running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def lost(self, number: int) -> None:
        """Wait until the scheduler knows that this worker is gone."""
        async with asyncio.timeout(30):
            while self.lanes[number].alive:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def pages_free(self) -> bool:
        return all(lane.core.pages.own == 0 for lane in self.lanes)


@contextlib.asynccontextmanager
async def engine(
    directory: Path,
    workers: int = 1,
    facts: dict[str, Any] | None = None,
    at: str = "tcp://127.0.0.1:0",
    restarts: bool = False,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A running scheduler for the model in `directory`."""
    context = zmq.asyncio.Context()
    path = directory / "tokenizer.json"
    vocab_size = Tokenizer.from_file(str(path)).get_vocab_size() if path.exists() else 400
    fakes = [FakeWorker(context, vocab_size, **(facts or {})) for _ in range(workers)]
    config = SchedulerConfig(model=str(directory), workers=",".join(f.endpoint for f in fakes), port=0, **settings)
    server = SchedulerServer(context, model_name(config), restarts)
    endpoint = server.bind(at)
    serving = asyncio.create_task(server.serve())
    seen: list[Progress] = []
    try:
        clients, loaded = await load_workers(context, config, seen.append)
        assert [p.phase for p in seen[::workers]][:1] == ["experts"]
        service = build_service(config, clients, loaded)
        try:
            async with running(service.lanes):
                server.open(service)
                yield Rig(context, server, endpoint, fakes, service)
                await server.end()
        finally:
            await close_all([lane.worker for lane in service.lanes])
    finally:
        await server.close()
        serving.cancel()
        for fake in fakes:
            await fake.die()
        context.term()


def on_loop(name: Any, main: Callable[[], Coroutine[Any, Any, None]], limit_s: float = 60.0) -> None:
    """Run `main` on the loop called `name`, no longer than `limit_s`."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await main()

    run(limited(), name)


COPY_FAILED = CopyFailed("expert 3 of layer 1 did not land")
