"""Answers over HTTP that nobody waits for any more, against the engine's own books: it stops, and nothing is left."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from copyengine.wire.errors import PeerDied
from scheduler.client import Client
from scheduler.http import answering, sse, writing
from scheduler.http.answering import Answering, End, Piece, Prompt, TooSlow, merged
from scheduler.http.connection import Connection as HttpConnection
from scheduler.protocol import Choice, Sampling, Timing, Usage
from tests.scheduler.http.rig import Connection, HttpRig, serving
from tests.scheduler.rig import expected, on_loop

ENDLESS = 4000
"""Tokens of an answer that takes far longer than a test, by a worker that takes its time."""

END = Choice("stop", Usage(1, 1, 0, 0, 0, 0, 0, 0), Timing(0, 0, 0, 0))


class Seen:
    """An Observer of whom all is remembered."""

    def __init__(self, of: list["Seen"]) -> None:
        self.prompt_tokens = 0
        self.tokens = 0
        self.reason = ""
        of.append(self)

    def began(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens

    def token(self, count: int) -> None:
        self.tokens += count

    def ended(self, reason: str, end: Choice | None) -> None:
        assert not self.reason and (end is not None) == (reason in ("stop", "length"))
        self.reason = reason


def observed(rig: HttpRig) -> list[Seen]:
    """All choices of `rig` from now on."""
    seen: list[Seen] = []
    rig.front.observe = lambda: Seen(seen)  # type: ignore[assignment, return-value]
    return seen


def test_pieces_that_have_queued_up_become_one() -> None:
    piece = Piece(0, "a", [1], None)
    assert merged([piece, Piece(1, "x", [9], None), Piece(0, "bc", [2, 3], None), End(0, END)]) == [
        Piece(0, "abc", [1, 2, 3], None),
        Piece(1, "x", [9], None),
        End(0, END),
    ]


def open_files() -> int:
    """Of this process; nothing is known of it on Windows."""
    process = psutil.Process()
    return process.num_fds() if hasattr(process, "num_fds") else 0


async def streamed(connection: Connection) -> None:
    await connection.post(prompt=[5], max_tokens=ENDLESS, stream=True)
    await connection.until(b"data: ")


async def accepted(connection: Connection) -> None:
    await connection.post(prompt=[5], max_tokens=ENDLESS, stream=True)
    await connection.until(b"\r\n\r\n")


async def whole(connection: Connection) -> None:
    await connection.post(prompt=[[5], [6]], n=2, max_tokens=ENDLESS)


async def half_closed(connection: Connection) -> None:
    await streamed(connection)
    connection.socket.shutdown(1)
    await connection.ends()


@pytest.mark.parametrize("hard", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("begin", [streamed, accepted, whole, half_closed])
def test_the_engine_stops_when_the_client_leaves(
    model: Path, event_loop: str, begin: Callable[[Connection], Any], hard: bool
) -> None:
    """While tokens come; `accepted` leaves while the prompt computes."""

    async def main() -> None:
        async with serving(model) as rig:
            seen = observed(rig)
            rig.engine.worker.step_s = 0.01
            descriptors = []
            for _ in range(2):  # what is opened once stays open
                rig.engine.worker.gate.set()
                if begin is accepted:
                    rig.engine.worker.gate.clear()
                connection = Connection(rig.port)
                await begin(connection)
                await rig.engine.settled(4 if begin is whole else 1)
                connection.close(hard)
                await asyncio.sleep(0.05 if begin is accepted else 0)
                rig.engine.worker.gate.set()
                await rig.at_rest()
                await rig.gone()
                await asyncio.sleep(0.01)  # for the descriptor to be closed
                descriptors.append(open_files())
            stats = await rig.front.client.stats()
            assert (stats.aborted, stats.finished, stats.failed) == (4 if begin is whole else 2, 0, 0)
            assert stats.generated_tokens < ENDLESS / 4
            assert {one.reason for one in seen} == {"abort"} and len(seen) == (8 if begin is whole else 2)
            assert descriptors[0] == descriptors[1]

    on_loop(event_loop, main)


def test_a_client_that_leaves_before_its_text_is_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it reaches the engine."""

    async def main() -> None:
        async with serving(model) as rig:
            encoding = asyncio.Event()

            async def encode(work: Callable[[], Any]) -> Any:
                encoding.set()
                await asyncio.sleep(60)

            monkeypatch.setattr(rig.front, "encode", encode)
            connection = Connection(rig.port)
            await connection.post(prompt="the quick")
            await encoding.wait()
            connection.close()
            await rig.at_rest()
            stats = await rig.front.client.stats()
            assert stats.aborted == stats.refused == stats.finished == 0

    on_loop("selector", main)


def test_an_answer_that_ends_by_itself_is_seen_so(model: Path) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            seen = observed(rig)
            await rig.post(prompt=[[5, 6], [7]], n=2, max_tokens=3)
            assert [(one.prompt_tokens, one.tokens, one.reason) for one in seen] == [
                (2, 3, "length"),
                (2, 3, "length"),
                (1, 3, "length"),
                (1, 3, "length"),
            ]

    on_loop("selector", main)


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_that_fails_ends_the_others(model: Path, stream: bool) -> None:
    """Of two prompts one finds the queue full, which the engine alone can tell."""

    async def main() -> None:
        async with serving(model, engine={"max_running_requests": 1, "max_queued_requests": 0}) as rig:
            rig.engine.worker.step_s = 0.01
            reply = await rig.post(prompt=[[5], [6]], max_tokens=3000, stream=stream)
            assert reply.status_code == 429 and reply.json()["error"]["code"] == "queue_full"
            await rig.at_rest()
            assert (await rig.front.client.stats()).aborted == 1

    on_loop("selector", main)


def test_an_error_in_the_middle_is_an_event_and_no_done_follows(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            rig.engine.worker.step_s = 0.01
            connection = Connection(rig.port)
            await streamed(connection)
            await rig.engine.worker.die()
            got = await connection.until(b"0\r\n\r\n")
            assert b'data: {"error":{' in got and b"worker_failed" in got and b"[DONE]" not in got
            connection.close()
            await rig.at_rest()

    on_loop(event_loop, main)


@pytest.mark.parametrize("reads", [0, 1], ids=["nothing", "a byte at a time"])
def test_a_client_that_does_not_read_is_given_up(
    model: Path, event_loop: str, monkeypatch: pytest.MonkeyPatch, reads: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Log-probabilities make much of little. What others ask meanwhile is answered."""
    monkeypatch.setattr(writing, "WRITE_S", 0.5)

    async def main() -> None:
        async with serving(model, engine={"facts": {"kv_tokens": 200_000, "max_position": 200_000}}) as rig:
            slow = Connection(rig.port, receive_nbytes=4096)
            await slow.post(prompt=[5], max_tokens=150_000, stream=True, logprobs=20)
            await slow.until(b"data: ")
            await rig.engine.settled(1)
            assert (await rig.post(prompt=[7], max_tokens=3)).status_code == 200
            async with asyncio.timeout(30):
                while rig.front._answering:
                    if reads:
                        await slow.receive(reads)
                    await asyncio.sleep(0.02)
            await rig.at_rest()
            await rig.gone(but=1)
            slow.close()
            assert (await rig.front.client.stats()).aborted == 1

    on_loop(event_loop, main)
    assert "event=http_given_up" in caplog.text and "Traceback" not in caplog.text


def test_tokens_do_not_pile_up_for_a_client_that_does_not_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stops long before the client is given up."""
    monkeypatch.setattr(answering, "MAX_WAITING_TOKENS", 100)

    async def main() -> None:
        async with serving(model, engine={"facts": {"kv_tokens": 200_000, "max_position": 200_000}}) as rig:
            slow = Connection(rig.port, receive_nbytes=4096)
            await slow.post(prompt=[5], max_tokens=150_000, stream=True, logprobs=20)
            await slow.until(b"data: ")
            await rig.engine.settled()
            assert (await rig.front.client.stats()).aborted == 1 and rig.front._answering
            slow.close()
            await rig.at_rest()

    on_loop("selector", main)


def test_a_client_that_reads_late_gets_everything(model: Path) -> None:
    """Merged, as it had queued up: against the rule."""

    async def main() -> None:
        async with serving(model) as rig:
            late = Connection(rig.port, receive_nbytes=4096)
            await late.post(prompt=[5], max_tokens=1500, stream=True, logprobs=20, ignore_eos=True)
            got = await late.until(b"data: ")
            await rig.engine.settled()
            (served,) = rig.server.server_state.connections
            assert isinstance(served, HttpConnection) and served.flow.write_paused
            got += await late.until(b"[DONE]")
            late.close()
            told = [json.loads(part.partition(b"\n\n")[0]) for part in got.split(b"data: ")[1:-1]]
            logprobs = [event["choices"][0]["logprobs"] for event in told]
            names = [name for one in logprobs if one for name in one["tokens"]]
            codec = rig.front.text
            assert names == [codec.decode([token]) for token in expected([5], 1500, rig.vocab_size)]
            assert len(told) < 1500, "some were merged"

    on_loop("selector", main)


def test_a_pump_that_breaks_is_an_error_and_no_silence() -> None:
    """A bug of ours must not leave a client waiting."""

    class Broken:
        def generate(self, **_: Any) -> Any:
            raise ValueError("a bug")

    async def main() -> None:
        broken: Any = Broken()
        async with Answering(broken, [Prompt([1], Sampling())], lambda: Seen([])) as run:
            with pytest.raises(ValueError, match="a bug"):
                await run.accepted()

    on_loop("selector", main)


def test_what_is_failed_from_outside_is_raised_where_it_is_waited_for(model: Path) -> None:
    async def main() -> None:
        async with serving(model) as rig, Client(rig.engine.endpoint) as client:
            rig.engine.worker.gate.clear()
            async with Answering(client, [Prompt([5], Sampling(max_tokens=9))], lambda: Seen([])) as run:
                await run.accepted()
                asyncio.get_running_loop().call_later(0.05, run.fail, PeerDied("over"))
                with pytest.raises(PeerDied, match="over"):
                    async for _ in run:
                        pass
            rig.engine.worker.gate.set()
            await rig.at_rest()

    on_loop("selector", main)


async def _events(parts: list[bytes | Exception]) -> AsyncGenerator[bytes, None]:
    for part in parts:
        if isinstance(part, Exception):
            raise part
        yield part


def test_a_stream_that_is_too_slow_is_cut_off_not_told() -> None:
    """What it would be told it would not read."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        stream = sse.EventStream(_events([b"", b"data: 1\n\n", TooSlow("slow")]), "req-1")
        with pytest.raises(TooSlow):
            await stream({"type": "http"}, None, send)  # type: ignore[arg-type]
        assert [message.get("body") for message in sent] == [None, b"", b"data: 1\n\n"]

    on_loop("selector", main)
