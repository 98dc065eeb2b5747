"""The scheduler's socket side: takes requests, hands them to lanes, sends what comes back."""

import asyncio
import itertools
import secrets
import time

import zmq.asyncio

from copyengine.wire.errors import PeerDied, RequestRefused
from copyengine.wire.lifecycle import Progress
from copyengine.wire.logs import Log
from copyengine.wire.rpc_server import Call, RpcServer
from scheduler import protocol
from scheduler.activity import activity_reply, ask_residency
from scheduler.choices import Choices
from scheduler.counters import stats_reply
from scheduler.encoding import Encoder
from scheduler.grammar import GrammarCompiler, GrammarMatcher
from scheduler.health import health_reply
from scheduler.lane import Lane
from scheduler.policy import route
from scheduler.protocol import Abort, Accepted, Activity, Done, Failed, Finished, Flush, Generate, Health, Stats, Tokens
from scheduler.request import Ending, Request
from scheduler.request_log import log_end, log_refused, log_unaccepted
from scheduler.step_sampling import step_sampling
from scheduler.ticket import Service, Tally, Ticket
from scheduler.validate import SEEDS, check_generate, check_prompt

STOP_NOTICE_S = 0.5
"""Seconds that requests have to receive their last reply when the process stops: they are on loopback, and a second
signal promises the end within two."""

log = Log(__name__)


class SchedulerServer:
    """Serves protocol.Request. Refuses Generate with "not_ready" until `open` is called."""

    def __init__(self, context: zmq.asyncio.Context, model: str, restarts: bool = False) -> None:
        """`restarts`: somebody starts workers anew that die."""
        self._rpc: RpcServer[protocol.Request, protocol.Reply] = RpcServer(
            context, protocol.Request, self._handle, Failed
        )
        self._model = model
        self._restarts = restarts
        self._service: Service | None = None
        self._progress: Progress | None = None
        self._draining = False
        self._sequences = itertools.count(1)
        self._tickets: dict[tuple[bytes, str], Ticket] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._tally = Tally()
        self._encoder = Encoder()
        self._compiler = GrammarCompiler()

    def bind(self, endpoint: str) -> str:
        """Bind; the endpoint really bound. ConfigError if it is taken."""
        return self._rpc.bind(endpoint)

    async def serve(self) -> None:
        """Take requests until cancelled."""
        await self._rpc.serve()

    def hear(self, progress: Progress) -> None:
        """So much is loaded: what Health says until `open`."""
        self._progress = progress

    def open(self, service: Service) -> None:
        """Requests are accepted from now on."""
        self._service = service

    async def drain(self) -> None:
        """Refuse new requests; returns when every accepted one has its final reply."""
        self._draining = True
        await self._idle.wait()

    async def end(self) -> None:
        """Refuse new requests and end what is being served with a final reply."""
        self._draining = True
        for ticket in self._tickets.values():
            ticket.outbox.put_nowait(Failed("draining", "the engine is stopping"))
        try:
            async with asyncio.timeout(STOP_NOTICE_S):
                await self._idle.wait()
        except TimeoutError:
            log.debug("requests_cut", requests=len(self._tickets))

    async def close(self) -> None:
        """Close the socket; `end` comes first."""
        await self._rpc.close()
        self._encoder.close()
        self._compiler.close()

    async def _handle(self, call: Call[protocol.Request, protocol.Reply]) -> protocol.Reply:
        match call.request:
            case Generate() as generate:
                try:
                    return await self._generate(call, generate)
                except RequestRefused as refused:
                    self._tally.refused += 1
                    log_refused(generate.request_id, refused)
                    raise
            case Abort(request_id=request_id):
                self._abort(self._tickets.get((call.peer, request_id)))
                return Done()
            case Flush():
                await self._flush(self._accepting())
                return Done()
            case Health():
                return health_reply(self._model, self._service, self._progress, self._draining, self._restarts)
            case Stats():
                return self._stats()
            case Activity():
                await ask_residency(self._lanes)
                return activity_reply(self._tickets, self._lanes)

    async def _flush(self, service: Service) -> None:
        """RequestRefused if there are requests."""
        if self._tickets:
            count = f"{len(self._tickets)} requests have" if len(self._tickets) > 1 else "1 request has"
            raise RequestRefused("busy", f"{count} not ended; what is cached can be flushed when all have")
        await asyncio.gather(*(lane.flush() for lane in service.lanes))

    async def _generate(self, call: Call[protocol.Request, protocol.Reply], generate: Generate) -> Finished | Failed:
        service = self._accepting()
        request_id = generate.request_id or secrets.token_hex(8)
        key = (call.peer, request_id)
        if key in self._tickets:
            raise RequestRefused("duplicate_request", f"request_id {request_id!r} of this client is still being served")
        self._check_room(service)
        ticket = self._tickets[key] = Ticket(lambda tokens: self._send(call, tokens))
        self._idle.clear()
        try:
            requests = await self._prepare(service, ticket, generate)
            self._submit(service, ticket, requests)
            call.send(Accepted(request_id=request_id, prompt_tokens=requests[0].prompt_tokens))
            return await ticket.outbox.end()
        except PeerDied:
            if ticket.request is None:
                log_unaccepted(request_id, "left")
            raise
        except Exception as error:
            if ticket.request is None and not isinstance(error, RequestRefused):
                log_unaccepted(request_id, "internal")
            raise
        finally:
            final = ticket.outbox.final  # none if the client left: what is aborted for that reason is no reply to it
            self._abort(ticket)
            self._tally.count(ticket)
            if ticket.request:
                log_end(request_id, ticket.so_far(time.monotonic()), final)
            del self._tickets[key]
            if not self._tickets:
                self._idle.set()

    def _check_room(self, service: Service) -> None:
        """RequestRefused if the requests that have not ended would take all places, running and waiting, by themselves.

        Also those that are not accepted yet count: each may hold a prompt as large as a message may be.
        """
        served = sum(ticket.outbox.final is None for ticket in self._tickets.values())
        waiting = served - sum(lane.core.places for lane in self._alive(service))
        if waiting >= service.max_queued:
            raise _queue_full(service, waiting)

    async def _prepare(self, service: Service, ticket: Ticket, generate: Generate) -> list[Request]:
        """The checked requests, one for each answer.

        Raises as Encoder.run does for a text and GrammarCompiler.run for a grammar, and PeerDied if its client is gone.
        """
        check_generate(generate, service.text.has_text, service.vocab_size)
        prompt = generate.token_ids
        if prompt is None:
            prompt = await self._encoder.run(
                lambda: service.text.encode(generate, service.max_model_len), ticket.outbox.say_it_waits
            )
        sampling = generate.sampling
        max_tokens = check_prompt(prompt, service.vocab_size, sampling, service.max_model_len)
        ending_tokens = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ending_tokens |= service.text.eos_token_ids
        seed = secrets.randbelow(SEEDS) if sampling.seed is None else sampling.seed
        matchers = await self._matchers(service, ticket, sampling)
        return [
            Request(
                sequence=next(self._sequences),
                prompt=prompt,
                sampling=step_sampling(sampling, (seed + i) % SEEDS),
                ending=Ending(max_tokens, ending_tokens, tuple(sampling.stop)),
                detokenizer=service.text.detokenizer(),
                arrived_s=ticket.arrived_s,
                grammar=matchers[i] if matchers else None,
            )
            for i in range(sampling.n)
        ]

    async def _matchers(
        self, service: Service, ticket: Ticket, sampling: protocol.Sampling
    ) -> list[GrammarMatcher] | None:
        """One for each answer; None if no grammar is asked for."""
        if not sampling.grammar:
            return None
        grammars = service.grammars
        if grammars is None:
            raise RequestRefused("no_tokenizer", "grammar needs a tokenizer.json of a kind that llguidance can read")
        return await self._compiler.run(
            lambda: grammars.matchers(sampling.grammar, sampling.n), ticket.outbox.say_it_waits
        )

    def _submit(self, service: Service, ticket: Ticket, requests: list[Request]) -> None:
        """Hand them to the worker that suits them best. RequestRefused if none lives or too many wait already."""
        request = requests[0]
        lane = self._lane_for(service, request, len(requests))
        ticket.request = request
        self._tally.prompt_tokens += request.prompt_tokens
        if ticket.aborted:
            _finish_aborted(ticket, request)
            return
        ticket.lane = lane
        if len(requests) > 1:
            ticket.choices = Choices(lane, requests, ticket.outbox)
            ticket.choices.start()
        else:
            lane.submit(request, ticket.outbox)

    def _lane_for(self, service: Service, request: Request, answers: int) -> Lane:
        """The worker that suits it best; if too many would wait there, the least loaded one where they would not.

        RequestRefused if they would everywhere.
        """
        lanes = self._alive(service)
        places = max(lane.core.places for lane in lanes)
        if answers > places + service.max_queued:
            raise RequestRefused(
                "invalid_request",
                f"n is {answers}, but {places} answers run at a time (--max-running-requests) and {service.max_queued} "
                "may wait (--max-queued-requests)",
            )
        cached = [lane.core.pages.reusable(request.tokens) for lane in lanes]
        lane = lanes[route([lane.core.load for lane in lanes], cached)]
        waiting = sum(lane.core.waiting for lane in service.lanes)

        def takes_it(lane: Lane) -> bool:
            late = lane.core.would_wait(request, answers)
            return not late or waiting + late <= service.max_queued

        if takes_it(lane):
            return lane
        others = [other for other in lanes if takes_it(other)]
        if not others:
            raise _queue_full(service, waiting, min(lane.core.would_wait(request, answers) for lane in lanes), answers)
        return min(others, key=lambda other: other.core.load)

    def _send(self, call: Call[protocol.Request, protocol.Reply], tokens: Tokens) -> None:
        """PeerDied if the client is gone."""
        call.send(tokens)
        self._tally.generated_tokens += len(tokens.token_ids)

    def _abort(self, ticket: Ticket | None) -> None:
        """End a request wherever it is. No-op if it has ended."""
        if ticket is None:
            return
        ticket.aborted = True
        if ticket.choices:
            ticket.choices.abort()
        elif ticket.lane and ticket.request and ticket.lane.abort(ticket.request):
            _finish_aborted(ticket, ticket.request)

    def _accepting(self) -> Service:
        if self._draining:
            raise RequestRefused("draining", "the engine finishes what runs and takes nothing new")
        if self._service is None:
            raise RequestRefused("not_ready", "the model is still loading")
        self._alive(self._service)
        return self._service

    def _alive(self, service: Service) -> list[Lane]:
        lanes = [lane for lane in service.lanes if lane.alive]
        if not lanes and self._restarts:
            names = ", ".join(lane.name for lane in service.lanes)
            raise RequestRefused("not_ready", f"{names} restarting: {service.lanes[0].death}")
        if not lanes:
            raise RequestRefused("worker_failed", f"no worker lives: {service.lanes[0].death}")
        return lanes

    @property
    def _lanes(self) -> list[Lane]:
        return self._service.lanes if self._service else []

    def _stats(self) -> protocol.StatsReply:
        return stats_reply(self._lanes, self._tally, self._rpc.dropped_frames)


def _queue_full(service: Service, waiting: int, late: int = 1, answers: int = 1) -> RequestRefused:
    """`waiting` requests wait, and of the `answers` asked for `late` would have to."""
    wait = "1 request waits already" if waiting == 1 else f"{waiting} requests wait already"
    more = f", {late} of the {answers} answers asked for would too" if answers > 1 else ""
    return RequestRefused("queue_full", f"{wait}{more}, --max-queued-requests is {service.max_queued}")


def _finish_aborted(ticket: Ticket, request: Request) -> None:
    ticket.outbox.put_nowait(request.finished("abort", time.monotonic()))
