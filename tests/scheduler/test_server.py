"""The scheduler with made-up workers, over real sockets on both event loops.

Answers are checked against the made-up model's rule and the tokenizer's one-shot decoding; figures against what the
workers were sent.
"""

import asyncio
import logging
import threading
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from tokenizers import Tokenizer

from copyengine.wire.errors import PeerDied, RequestRefused
from scheduler.client import Client
from scheduler.protocol import Finished, Generate, Message, Sampling, Tokens
from scheduler.tokenize import TextCodec
from scheduler.traffic import total
from tests.scheduler.rig import COPY_FAILED, COPY_WAIT_S, RECORD_NBYTES, Rig, engine, expected, on_loop


def sampling(max_tokens: int = 4, **fields: object) -> Sampling:
    return Sampling(max_tokens=max_tokens, ignore_eos=True, **fields)  # type: ignore[arg-type]


async def collect(client: Client, **request: object) -> tuple[str, list[int], Finished]:
    answer = client.generate(**request)  # type: ignore[arg-type]
    text, ids = "", []
    async for piece in answer:
        text += piece.text
        ids += piece.token_ids
    assert answer.finished is not None
    return text, ids, answer.finished


async def refusal(client: Client, **request: object) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        await collect(client, **request)
    return refused.value


async def vanish(client: Client) -> None:
    """Close its connection in the middle of whatever it does, as a killed client's is."""
    assert client._rpc is not None and client._context is not None
    rpc, client._rpc = client._rpc, None
    await rpc.close()
    client._context.term()


def test_text_token_ids_and_chats_are_answered(model: Path, event_loop: str) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            vocab = rig.worker.facts.vocab_size
            ids = tokenizer.encode("the quick fox").ids
            wanted = expected(ids, 9, vocab)
            for request in ({"prompt": "the quick fox"}, {"token_ids": ids}):
                text, tokens, finished = await collect(client, sampling=sampling(9), **request)
                assert tokens == wanted
                assert text == tokenizer.decode(wanted)
                assert finished.reason == "length"
                assert finished.usage.prompt_tokens == len(ids)
                assert finished.usage.new_tokens == 9
            text, tokens, _ = await collect(client, messages=[Message("user", "fox")], sampling=sampling(2))
            chat = tokenizer.encode("<|user|>fox", add_special_tokens=False).ids
            assert tokens == expected(chat, 2, vocab)
            assert rig.pages_free()

    on_loop(event_loop, main)


def test_recurrent_states_are_reused_and_counted(model: Path) -> None:
    """A prompt of 40 tokens and its answer leave snapshots behind 32 and 48 tokens."""

    async def main() -> None:
        facts = {"state_slots": 20, "state_nbytes": 5000}
        async with engine(model, facts=facts, max_running_requests=4) as rig, rig.client() as client:
            prompt = [5] * 40
            _, answer, _ = await collect(client, token_ids=prompt, sampling=sampling(9))
            stats = await client.stats()
            assert (stats.state_slots_free, stats.state_snapshots, stats.state_slots_total) == (18, 2, 20)
            assert stats.state_nbytes == stats.workers[0].state_nbytes == 5000
            assert stats.workers[0].state_snapshots == 2
            _, _, again = await collect(client, token_ids=[*prompt, *answer, 7], sampling=sampling(1))
            assert again.usage.cached_tokens == 48
            sequences = [sequence for step in rig.worker.steps for sequence in step.sequences]
            written = [slot for sequence in sequences[:-1] for _, slot in sequence.snapshots]
            assert sequences[-1].restore in written and sequences[0].state >= 0

    on_loop("selector", main)


def test_figures_are_those_of_the_steps(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with engine(model, demand_tokens=8, chunked_prefill_size=16) as rig, rig.client() as client:
            _, _, finished = await collect(client, token_ids=[5] * 40, sampling=sampling(3))
            assert rig.worker.modes() == ["streamed", "streamed", "demand", "decode", "decode"]
            usage = finished.usage
            assert (usage.streamed_chunks, usage.demand_chunks, usage.cached_tokens) == (2, 1, 0)
            assert (usage.expert_hits, usage.expert_misses) == (15, 5)
            assert usage.copied_nbytes == 5 * RECORD_NBYTES
            timing = finished.timing
            assert 0 < timing.queued_s <= timing.ttft_s <= timing.total_s
            assert timing.tpot_s > 0
            stats = await client.stats()
            assert (stats.finished, stats.prompt_tokens, stats.generated_tokens) == (1, 40, 3)
            assert (stats.decode.steps, stats.demand.steps, stats.streamed.steps) == (2, 1, 2)
            waits = (stats.decode.copy_wait_s, stats.demand.copy_wait_s, stats.streamed.copy_wait_s)
            assert waits == (2 * COPY_WAIT_S, COPY_WAIT_S, 2 * COPY_WAIT_S)
            assert (stats.kv_pages_free, stats.kv_pages_cached, stats.kv_pages_total) == (254, 2, 256)
            assert stats.kv_pages_available == 256, "nobody uses the cached ones any more"
            assert rig.worker.released == [1]

    on_loop(event_loop, main)


@pytest.mark.parametrize(("demand_tokens", "modes"), [(0, ["streamed"] * 3), (7, ["demand", "demand", "streamed"])])
def test_the_threshold_decides_the_mode(model: Path, demand_tokens: int, modes: list[str]) -> None:
    async def main() -> None:
        async with engine(model, demand_tokens=demand_tokens) as rig, rig.client() as client:
            for tokens in (1, 7, 8):
                await collect(client, token_ids=[5] * tokens, sampling=sampling(1))
            assert rig.worker.modes() == modes
            assert rig.worker.loads[0].demand_prefill == (demand_tokens > 0)

    on_loop("selector", main)


def test_a_dense_model_streams_everything(model: Path) -> None:
    async def main() -> None:
        async with engine(model, facts={"moe_layers": 0}) as rig, rig.client() as client:
            await collect(client, token_ids=[5], sampling=sampling(1))
            assert rig.worker.modes() == ["streamed"]

    on_loop("selector", main)


@pytest.mark.parametrize("disabled", [False, True])
def test_a_prefix_is_computed_once_unless_the_cache_is_off(model: Path, disabled: bool) -> None:
    async def main() -> None:
        async with engine(model, disable_prefix_cache=disabled) as rig, rig.client() as client:
            vocab, prompt = rig.worker.facts.vocab_size, [5] * 40
            _, answer, first = await collect(client, token_ids=prompt, sampling=sampling(9))
            turn = [*prompt, *answer, 7, 8]
            _, ids, second = await collect(client, token_ids=turn, sampling=sampling(2))
            assert ids == expected(turn, 2, vocab)
            reused = 0 if disabled else 48
            assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, reused)
            chunk = [step for step in rig.worker.steps if step.mode == "demand"][-1].sequences[0]
            assert (chunk.start, len(chunk.tokens)) == (reused, len(turn) - reused)
            stats = await client.stats()
            assert (stats.cached_tokens, stats.kv_pages_cached > 0) == (reused, not disabled)
            assert stats.queried_tokens == (0 if disabled else 40 + len(turn))

    on_loop("selector", main)


def test_a_request_goes_to_the_worker_that_has_its_prefix(model: Path) -> None:
    async def main() -> None:
        async with engine(model, workers=2) as rig, rig.client() as client:
            prompts = [[5 + i] * 64 for i in range(2)]
            await asyncio.gather(*(collect(client, token_ids=p, sampling=sampling(4)) for p in prompts))
            homes = [next(w for w in rig.workers if w.steps[0].sequences[0].tokens == p) for p in prompts]
            assert homes[0] is not homes[1], "without a prefix the load decides"
            for worker in rig.workers:
                worker.steps.clear()
            for home, prompt in zip(homes, prompts, strict=True):
                for last in (3, 4, 9):
                    _, _, finished = await collect(client, token_ids=[*prompt, last], sampling=sampling(4))
                    assert finished.usage.cached_tokens == 64
                    assert home.steps.pop(0).sequences[0].start == 64
                    home.steps.clear()
                assert not any(worker.steps for worker in rig.workers)

    on_loop("selector", main)


def test_answers_that_outgrow_the_kv_are_preempted_and_complete(model: Path, event_loop: str) -> None:
    async def main() -> None:
        facts = {"kv_tokens": 160, "max_position": 160}
        async with engine(model, facts=facts) as rig, rig.client() as client:
            vocab, prompts = rig.worker.facts.vocab_size, [[5 + i] * 20 for i in range(4)]
            answers = await asyncio.gather(*(collect(client, token_ids=p, sampling=sampling(120)) for p in prompts))
            assert [ids for _, ids, _ in answers] == [expected(prompt, 120, vocab) for prompt in prompts]
            stats = await client.stats()
            assert stats.preempted > 0 and stats.generated_tokens == 480 and stats.cached_tokens == 0
            assert stats.kv_pages_free + stats.kv_pages_cached == stats.kv_pages_total == 10

    on_loop(event_loop, main)


def test_answers_end_at_eos_stop_tokens_and_stop_strings(model: Path, event_loop: str) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            vocab = rig.worker.facts.vocab_size
            start = tokenizer.encode("a").ids
            wanted = expected(start, 12, vocab)
            text, ids, finished = await collect(
                client, token_ids=start, sampling=Sampling(max_tokens=12, stop_token_ids=[wanted[3]])
            )
            assert (ids, finished.reason) == (wanted[:4], "stop")
            assert text == tokenizer.decode(wanted[:3])
            whole = tokenizer.decode(wanted)
            stop = whole[4:7]
            text, _, finished = await collect(client, token_ids=start, sampling=sampling(12, stop=[stop]))
            assert finished.reason == "stop"
            assert text == whole[: whole.index(stop)]

    on_loop(event_loop, main)


def test_bad_requests_are_refused_and_the_next_one_is_not(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with engine(model, max_model_len=64) as rig, rig.client() as client:
            assert (await refusal(client)).code == "invalid_request"
            assert (await refusal(client, prompt="")).code == "invalid_request"
            assert (await refusal(client, token_ids=[10**6])).code == "invalid_request"
            assert (await refusal(client, token_ids=[5], sampling=Sampling(top_p=2))).code == "invalid_request"
            too_long = await refusal(client, token_ids=[5] * 60, sampling=Sampling(max_tokens=5))
            assert too_long.code == "context_length_exceeded"
            assert "60" in too_long.detail and "64" in too_long.detail
            assert rig.worker.steps == []
            _, ids, _ = await collect(client, token_ids=[5], sampling=sampling(2))
            assert len(ids) == 2
            stats = await client.stats()
            assert (stats.finished, stats.failed, stats.refused) == (1, 0, 5)

    on_loop(event_loop, main)


def test_malformed_frames_are_counted_and_harm_nobody(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            context = zmq.asyncio.Context()
            with context.socket(zmq.DEALER) as socket:
                socket.connect(rig.endpoint)
                unknown_field = b"\x83\xa4type\xa8Generate\xa6prompt\xa1a\xa5bogus\x01"
                for frames in ([b""], [b"1"], [b"12345678", b"\xc1"], [b"12345678", unknown_field], [b"x"] * 9):
                    await socket.send_multipart(frames)
                replies = [await socket.recv_multipart(), await socket.recv_multipart()]
                assert b"wire" in replies[0][1] and b"bogus" in replies[1][1]
            context.term()
            _, ids, _ = await collect(client, token_ids=[5], sampling=sampling(2))
            assert len(ids) == 2
            assert (await client.stats()).dropped_frames == 5

    on_loop(event_loop, main)


def test_many_requests_at_once_share_steps_and_do_not_mix(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with engine(model, workers=2, max_running_requests=4, kv_tokens="auto") as rig, rig.client() as client:
            vocab = rig.worker.facts.vocab_size
            prompts = [[7 * i + 3, i + 3] * (i % 5 + 1) for i in range(24)]
            answers = await asyncio.gather(
                *(collect(client, token_ids=p, sampling=sampling(3 + i % 4)) for i, p in enumerate(prompts))
            )
            for i, (prompt, (_, ids, _)) in enumerate(zip(prompts, answers, strict=True)):
                assert ids == expected(prompt, 3 + i % 4, vocab)
            assert all(worker.steps for worker in rig.workers)
            assert any(len(step.sequences) > 1 for step in rig.worker.steps)
            misses = sum(finished.usage.expert_misses for _, _, finished in answers)
            stats = await client.stats()
            assert misses == stats.decode.misses + stats.demand.misses + stats.streamed.misses
            assert rig.pages_free()
            one, two = stats.workers
            assert (one.alive, one.resident_slots) == (two.alive, two.resident_slots) == (True, 7)
            for mode in ("decode", "demand", "streamed"):
                assert total([getattr(one, mode), getattr(two, mode)]) == getattr(stats, mode)
            assert one.kv_pages_total + two.kv_pages_total == stats.kv_pages_total

    on_loop(event_loop, main)


def test_one_more_than_may_wait_is_refused(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with engine(model, max_running_requests=1, max_queued_requests=2) as rig, rig.client() as client:
            rig.worker.gate.clear()
            asked = [asyncio.create_task(collect(client, token_ids=[5], sampling=sampling(1))) for _ in range(3)]
            await rig.settled(running=3)
            refused = await refusal(client, token_ids=[5], sampling=sampling(1))
            assert refused.code == "queue_full"
            assert refused.detail == "2 requests wait already, --max-queued-requests is 2"
            rig.worker.gate.set()
            assert [ids for _, ids, _ in await asyncio.gather(*asked)] == [[6]] * 3

    on_loop(event_loop, main)


def test_no_more_prompts_are_taken_in_than_there_are_places(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One runs and one waits at most: the third is refused before its text is looked at, and not once one has ended."""
    begun, goes_on, encode = list[str](), threading.Event(), TextCodec.encode

    def slow(codec: TextCodec, generate: Generate, most: int) -> list[int]:
        begun.append(str(generate.prompt))
        assert goes_on.wait(10)
        return encode(codec, generate, most)

    monkeypatch.setattr(TextCodec, "encode", slow)

    async def main() -> None:
        async with engine(model, max_running_requests=1, max_queued_requests=1) as rig, rig.client() as client:
            asked = [asyncio.create_task(collect(client, prompt="ab"[i], sampling=sampling(2))) for i in range(2)]
            async with asyncio.timeout(20):
                while len(begun) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            refused = await asyncio.wait_for(refusal(client, prompt="c", sampling=sampling(2)), 20)
            assert refused.code == "queue_full"
            assert refused.detail == "1 request waits already, --max-queued-requests is 1"
            goes_on.set()
            await asyncio.gather(*asked)
            await collect(client, prompt="d", sampling=sampling(2))
            assert sorted(begun) == ["a", "b", "d"]

    try:
        on_loop("selector", main)
    finally:
        goes_on.set()


@pytest.mark.parametrize("max_queued", [0, 1])
def test_a_request_that_runs_at_once_needs_no_place_in_the_queue(model: Path, max_queued: int) -> None:
    async def main() -> None:
        async with engine(model, max_queued_requests=max_queued) as rig, rig.client() as client:
            await collect(client, token_ids=[5], sampling=sampling(1))

    on_loop("selector", main)


def test_a_full_worker_refuses_nothing_that_runs_at_once_on_another(model: Path) -> None:
    """The prompt's prefix is cached by the first worker, whose only place is taken."""

    async def main() -> None:
        serving = engine(model, workers=2, max_running_requests=1, max_queued_requests=0)
        async with serving as rig, rig.client() as client:
            prompt = [5] * 1024
            await collect(client, token_ids=prompt, sampling=sampling(1))
            for worker in rig.workers:
                worker.gate.clear()
            asked = []
            for running in (1, 2):
                request = collect(client, token_ids=prompt, sampling=sampling(2))
                asked.append(asyncio.create_task(request))
                await rig.settled(running=running)
            assert [lane.core.running for lane in rig.lanes] == [1, 1]
            assert (await refusal(client, token_ids=prompt, sampling=sampling(2))).code == "queue_full"
            for worker in rig.workers:
                worker.gate.set()
            ends = [finished for _, _, finished in await asyncio.gather(*asked)]
            assert [end.usage.cached_tokens for end in ends] == [1008, 0]

    on_loop("selector", main)


def test_a_request_aborts_wherever_it_is(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with engine(model, max_running_requests=1) as rig, rig.client() as client:
            rig.worker.gate.clear()
            names = ["running", "waiting"]
            asked = [
                asyncio.create_task(collect(client, token_ids=[5] * 9, sampling=sampling(50), request_id=name))
                for name in names
            ]
            await rig.settled(running=2)
            await client.abort("waiting")
            await client.abort("running")
            await client.abort("no such request")
            ends = [finished for _, _, finished in await asyncio.gather(*asked)]
            assert [end.reason for end in ends] == ["abort", "abort"]
            assert not rig.pages_free(), "the step that is out still writes into them"
            rig.worker.gate.set()
            _, ids, _ = await collect(client, token_ids=[5], sampling=sampling(2))
            assert ids == [6, 7]
            assert rig.pages_free()
            stats = await client.stats()
            assert (stats.aborted, stats.finished, stats.waiting, stats.running) == (2, 1, 0, 0)

    on_loop(event_loop, main)


def test_a_request_of_another_client_cannot_be_aborted_or_clash(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as rig, rig.client() as one, rig.client() as two:
            rig.worker.step_s = 0.01
            asked = asyncio.create_task(collect(one, token_ids=[5], sampling=sampling(9), request_id="same"))
            await rig.settled(running=1)
            await two.abort("same")
            assert (await refusal(one, token_ids=[5], request_id="same")).code == "duplicate_request"
            _, ids, _ = await collect(two, token_ids=[5], sampling=sampling(2), request_id="same")
            assert ids == [6, 7]
            _, ids, finished = await asked
            assert (len(ids), finished.reason) == (9, "length")

    on_loop("selector", main)


@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "collect"])
def test_leaving_an_answer_aborts_it(model: Path, event_loop: str, way: str) -> None:
    async def leave(client: Client) -> None:
        answer = client.generate(token_ids=[5], sampling=sampling(2000))
        if way == "aclose":
            iterator = aiter(answer)
            await anext(iterator)
            await iterator.aclose()
            return
        if way == "collect":
            iterator = aiter(answer)
            await anext(iterator)
            del iterator
            return
        async for _ in answer:
            if way == "break":
                break

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.step_s = 0.002
            task = asyncio.create_task(leave(client))
            if way == "cancel":
                await rig.settled(running=1)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await rig.settled()
            assert len(rig.worker.steps) < 1000
            assert (await client.stats()).aborted == 1
            _, ids, _ = await collect(client, token_ids=[5], sampling=sampling(2))
            assert ids == [6, 7]

    on_loop(event_loop, main)


def test_a_client_that_is_gone_has_its_requests_aborted_and_is_said_to_have_left(
    model: Path, event_loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that aborts its request has not."""
    caplog.set_level(logging.INFO, "scheduler.request_log")

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.step_s = 0.002
            gone = rig.client()
            await gone.__aenter__()
            answer = aiter(gone.generate(token_ids=[5], sampling=sampling(2000), request_id="gone"))
            await anext(answer)
            await vanish(gone)
            with pytest.raises(PeerDied):
                while True:
                    await anext(answer)
            await rig.settled()
            assert (await client.stats()).aborted == 1
            aborted = asyncio.create_task(collect(client, token_ids=[5], sampling=sampling(2000), request_id="aborted"))
            await rig.settled(running=1)
            await client.abort("aborted")
            assert (await aborted)[2].reason == "abort"
            ends = [" ".join(record.getMessage().split()[:3]) for record in caplog.records]
            assert ends == ["event=request id=gone end=left", "event=request id=aborted end=abort"]
            async with asyncio.timeout(20):
                while not rig.pages_free():  # noqa: ASYNC110 - the step that was out still writes into them
                    await asyncio.sleep(0.005)

    on_loop(event_loop, main)


def test_an_answer_that_ended_while_its_client_left_is_counted_as_finished(model: Path, event_loop: str) -> None:
    """Its last tokens cannot be sent any more, but the lane is through with it."""

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.gate.clear()
            async with rig.client() as leaver:
                answer = aiter(leaver.generate(token_ids=[5], sampling=sampling(1)))
                asked = asyncio.ensure_future(anext(answer))
                await rig.settled(running=1)
                with rig.server._rpc._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as left:
                    await vanish(leaver)
                    await asyncio.wait_for(left.recv_multipart(), 20)
                assert isinstance((await asyncio.gather(asked, return_exceptions=True))[0], PeerDied)
            await asyncio.sleep(0.1)  # the socket itself hears of it just after its monitor
            rig.worker.gate.set()
            await rig.settled()
            async with asyncio.timeout(20):
                while (stats := await client.stats()).finished == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (stats.finished, stats.failed, stats.aborted, stats.generated_tokens) == (1, 0, 0, 0)

    on_loop(event_loop, main)


def test_every_accepted_request_ends_in_one_count(model: Path, event_loop: str) -> None:
    """Answers that end by length, that are left, aborted, whose client is gone, or whose step fails, all at once.

    The sixth decode step of request 20 fails, and with it whatever else is decoded there.
    """

    async def ask(rig: Rig, number: int) -> str:
        request_id = str(number)
        async with rig.client() as client:
            try:
                answer = client.generate(token_ids=[number + 3], sampling=sampling(5 + number), request_id=request_id)
                async for _ in answer:
                    if number % 4 == 1:
                        return "left"
                    if number % 4 == 2:
                        await client.abort(request_id)
                    if number % 4 == 3 and client._rpc:  # a piece that had come before may still be read
                        await vanish(client)
            except RequestRefused as refused:
                return refused.code
            except PeerDied:
                return "gone"
            assert answer.finished
            return answer.finished.reason

    async def main() -> None:
        async with engine(model, max_running_requests=3) as rig, rig.client() as client:
            rig.worker.step_s = 0.005
            rig.worker.fatal.add((6, 20 + 3 + 6))
            ends = await asyncio.gather(*(ask(rig, number) for number in range(24)))
            await rig.settled()
            assert ends[20] == "worker_failed" and not rig.worker.fatal
            stats = await client.stats()
            assert stats.finished + stats.failed + stats.aborted == len(ends) == 24
            assert 3 >= stats.failed >= ends.count("worker_failed")
            assert stats.finished >= ends.count("length") > 0
            assert stats.aborted >= ends.count("abort") > 0
            assert stats.prompt_tokens == 24

    on_loop(event_loop, main)


def test_a_failed_step_ends_its_requests_and_the_next_ones_work(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.failures.append(COPY_FAILED)
            failed = await refusal(client, token_ids=[5], sampling=sampling(2))
            assert (failed.code, failed.detail) == ("worker_failed", str(COPY_FAILED))
            _, ids, _ = await collect(client, token_ids=[5], sampling=sampling(2))
            assert ids == [6, 7]
            assert (await client.health()).phase == "ready"
            assert rig.pages_free()

    on_loop(event_loop, main)


@pytest.mark.parametrize("idle", [False, True])
def test_a_dead_worker_ends_all_its_requests(model: Path, event_loop: str, idle: bool) -> None:
    async def main() -> None:
        async with engine(model, max_running_requests=1) as rig, rig.client() as client:
            await collect(client, token_ids=[5], sampling=sampling(2))
            if idle:
                await rig.worker.die()
                await rig.lost(0)
            else:
                rig.worker.step_s = 0.01
                asked = [asyncio.create_task(refusal(client, token_ids=[5], sampling=sampling(500))) for _ in range(3)]
                await rig.settled(running=3)
                await rig.worker.die()
                assert {refused.code for refused in await asyncio.gather(*asked)} == {"worker_failed"}
            assert (await client.health()).phase == "dead"
            assert (await refusal(client, token_ids=[5])).code == "worker_failed"

    on_loop(event_loop, main)


def test_the_other_worker_goes_on_when_one_dies(model: Path) -> None:
    """What they have allocated is told, of the dead one too: slots of both, and the banks that they share."""

    async def main() -> None:
        facts = {"slots": 9, "stream_slots": 6, "bank_nbytes": 5000, "pinned_nbytes": 4000}
        async with engine(model, workers=2, facts=facts) as rig, rig.client() as client:
            await rig.workers[0].die()
            await rig.lost(0)
            stats = await client.stats()
            assert (stats.slots, stats.stream_slots, stats.restarts) == (18, 12, 1)
            assert (stats.bank_nbytes, stats.pinned_nbytes) == (5000, 4000)
            assert [(one.slots, one.stream_slots, one.restarts) for one in stats.workers] == [(9, 6, 1), (9, 6, 0)]
            for _ in range(3):
                await collect(client, token_ids=[5], sampling=sampling(2))
            assert (await client.health()).ready

    on_loop("selector", main)


def test_draining_finishes_what_was_accepted_and_refuses_the_rest(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with engine(model, max_running_requests=1) as rig, rig.client() as client:
            rig.worker.gate.clear()
            asked = [asyncio.create_task(collect(client, token_ids=[5], sampling=sampling(3))) for _ in range(2)]
            await rig.settled(running=2)
            drained = asyncio.create_task(rig.server.drain())
            await asyncio.sleep(0.05)
            assert (await client.health()).phase == "draining"
            assert (await refusal(client, token_ids=[5])).code == "draining"
            assert not drained.done()
            rig.worker.gate.set()
            await drained
            assert [ids for _, ids, _ in await asyncio.gather(*asked)] == [[6, 7, 8]] * 2

    on_loop(event_loop, main)


def test_a_stop_gives_running_requests_their_last_reply(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.step_s = 0.01
            asked = asyncio.create_task(refusal(client, token_ids=[5], sampling=sampling(500)))
            await rig.settled(running=1)
            await rig.server.end()
            assert (await asked).code == "draining"

    on_loop(event_loop, main)


def test_a_text_that_takes_long_keeps_its_client_waiting_and_is_refused_at_last(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not too late is answered; token ids need no tokenizer."""
    goes_on, encode = threading.Event(), TextCodec.encode

    def slow(codec: TextCodec, generate: Generate, most: int) -> list[int]:
        assert goes_on.wait(10)
        return encode(codec, generate, most)

    monkeypatch.setattr(TextCodec, "encode", slow)
    monkeypatch.setattr("scheduler.timed_threads.KEEPALIVE_S", 0.02)

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            monkeypatch.setattr("scheduler.encoding.ENCODE_S", 0.1)
            refused = await refusal(client, prompt="a", sampling=sampling(1))
            assert refused.code == "encode_timeout" and "after 0.1 s" in refused.detail
            assert (await collect(client, token_ids=[5], sampling=sampling(1)))[1] == [6]
            monkeypatch.setattr("scheduler.encoding.ENCODE_S", 10.0)
            seen = []
            async for reply in client._stream(client.generate(prompt="a", sampling=sampling(1))._request):
                seen.append(reply)
                if seen == [Tokens("", [])] * 2:
                    goes_on.set()
            assert seen[:2] == [Tokens("", [])] * 2 and isinstance(seen[-1], Finished)
            stats = await client.stats()
            assert (stats.finished, stats.refused) == (2, 1)

    try:
        on_loop("selector", main)
    finally:
        goes_on.set()


def test_a_client_that_leaves_while_its_text_becomes_tokens_is_waited_for_no_more(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, begun = threading.Event(), threading.Event()

    def stuck(*_: object) -> list[int]:
        begun.set()
        assert goes_on.wait(10)
        return [5]

    monkeypatch.setattr(TextCodec, "encode", stuck)
    monkeypatch.setattr("scheduler.timed_threads.KEEPALIVE_S", 0.02)

    async def main() -> None:
        async with engine(model) as rig, rig.client() as gone:
            asked = asyncio.create_task(collect(gone, prompt="a", sampling=sampling(1)))
            assert await asyncio.to_thread(begun.wait, 5)
            await vanish(gone)
            assert isinstance((await asyncio.gather(asked, return_exceptions=True))[0], PeerDied)
            async with asyncio.timeout(20):
                await rig.server.drain()

    try:
        on_loop("selector", main)
    finally:
        goes_on.set()


def test_a_request_that_waits_hears_that_the_engine_lives(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.ticket.KEEPALIVE_S", 0.02)

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.gate.clear()
            seen = []
            request = client.generate(token_ids=[5], sampling=sampling(1))._request
            async for reply in client._stream(request):
                seen.append(reply)
                if seen.count(Tokens("", [])) == 2:
                    rig.worker.gate.set()
            assert isinstance(seen[-1], Finished)

    on_loop("selector", main)
