"""A launched engine and its client, for benchmarks: one answer after the other, or several at once."""

import asyncio
import itertools
import random
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from copyengine.wire.errors import SlotstreamError
from scheduler.client import Client
from scheduler.protocol import Sampling, StatsReply
from tests.bench.ttft_arms import Decoding, Prompt
from tests.e2e.engine import Engine, running

DECODE_PROMPT_TOKENS = 32
WARM_UP_TOKENS = 24
"""Of decoding: enough that every number of sequences up to the batch's had the two steps that make its graph."""

Question = tuple[int, list[int]]
"""A prompt's length and its token ids."""


@contextmanager
def launched(ready_s: float, *flags: str) -> Iterator[Engine]:
    """See tests.e2e.engine.running; all that the engine printed is printed if a request fails."""
    with running(*flags, ready_s=ready_s) as engine:
        try:
            yield engine
        except SlotstreamError:
            print(engine.text(), flush=True)
            raise


TOUCH = """
import sys, threading, numpy
memory = numpy.empty((16, int(sys.argv[1]) << 26), numpy.uint8)
threads = [threading.Thread(target=part.fill, args=(1,)) for part in memory]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def touch(gib: int) -> None:
    """Fill that much memory and free it: some virtual machines show only what they have used so far, and an engine is
    not started where too little is seen."""
    subprocess.run([sys.executable, "-c", TOUCH, str(gib)], check=True)


def prompts(lengths: Sequence[int], repeats: int, vocab_size: int, seed: int = 0) -> list[Question]:
    """The same for every arm, no two alike, lengths taken in turn so that drift hits all."""
    draw = random.Random(seed)
    return [(n, [draw.randrange(vocab_size) for _ in range(n)]) for _ in range(repeats) for n in lengths]


async def ask(client: Client, ids: list[int], new_tokens: int) -> Prompt:
    """One greedy answer."""
    before = await client.stats()
    start_s, first_s = time.perf_counter(), 0.0
    answer = client.generate(token_ids=ids, sampling=Sampling(max_tokens=new_tokens, ignore_eos=True))
    tokens: list[int] = []
    async for piece in answer:
        first_s = first_s or time.perf_counter()
        tokens += piece.token_ids
    assert answer.finished
    after, usage = await client.stats(), answer.finished.usage
    then, now = _prefill(before), _prefill(after)
    return Prompt(
        tokens=len(ids),
        digest=zlib.crc32(repr(ids).encode()),
        answer=tokens,
        ttft_s=first_s - start_s,
        scheduler_ttft_s=answer.finished.timing.ttft_s,
        demand_chunks=usage.demand_chunks,
        streamed_chunks=usage.streamed_chunks,
        hits=now[0] - then[0],
        misses=now[1] - then[1],
        copied_nbytes=now[2] - then[2],
        cached_tokens=usage.cached_tokens,
    )


def _prefill(stats: StatsReply) -> tuple[int, int, int]:
    """Hits, misses and bytes copied of all prefill chunks so far."""
    demand, streamed = stats.demand, stats.streamed
    return (
        demand.hits + streamed.hits,
        demand.misses + streamed.misses,
        demand.copied_nbytes + streamed.copied_nbytes,
    )


async def decode(client: Client, batch: int, new_tokens: int, vocab_size: int) -> Decoding:
    """`batch` sampled answers at once, timed while all of them decode.

    Sampled, because a greedy answer of a model with made-up weights may go round in a circle, over the same experts.
    """
    asked = prompts([DECODE_PROMPT_TOKENS], batch, vocab_size, seed=batch)
    before = (await client.stats()).decode
    answers = await asyncio.gather(*(_sampled(client, ids, new_tokens, i) for i, (_, ids) in enumerate(asked)))
    after = (await client.stats()).decode
    start_s = max(times[0] for times, _ in answers)
    end_s = min(times[-1] for times, _ in answers)
    within = sum(start_s < moment <= end_s for times, _ in answers for moment in times)
    gaps = [b - a for times, _ in answers for a, b in itertools.pairwise(times) if start_s <= a and b <= end_s]
    return Decoding(
        batch=batch,
        tokens_per_s=within / (end_s - start_s) if end_s > start_s else 0.0,
        tpot_s=statistics.median(gaps) if gaps else 0.0,
        hits=after.hits - before.hits,
        misses=after.misses - before.misses,
        distinct_tokens=statistics.mean(len(set(tokens)) / len(tokens) for _, tokens in answers),
    )


async def _sampled(client: Client, ids: list[int], new_tokens: int, seed: int) -> tuple[list[float], list[int]]:
    """When each token came, and which."""
    sampling = Sampling(temperature=1.0, seed=seed, max_tokens=new_tokens, ignore_eos=True)
    times: list[float] = []
    tokens: list[int] = []
    async for piece in client.generate(token_ids=ids, sampling=sampling):
        times += [time.perf_counter()] * len(piece.token_ids)
        tokens += piece.token_ids
    return times, tokens
