"""How a running engine draws: against what its own log-probabilities say it must have drawn."""

import asyncio

from scheduler.client import Client
from scheduler.protocol import Logprobs, Sampling
from tests.e2e.engine import Engine, running

PROMPT = list(range(300, 340))


async def told(client: Client, sampling: Sampling) -> list[Logprobs]:
    pieces = [piece async for piece in client.generate(token_ids=PROMPT, sampling=sampling)]
    return [one for piece in pieces for one in piece.logprobs or []]


def test_greedy_tokens_are_the_likeliest(engine: Engine) -> None:
    """And their alternatives come in order, all less likely than certain."""

    async def session(client: Client) -> None:
        answer = await told(client, Sampling(max_tokens=8, ignore_eos=True, logprobs=5))
        assert len(answer) == 8
        for one in answer:
            assert one.drawn == one.top[0] and one.drawn.text
            values = [entry.logprob for entry in one.top]
            assert values == sorted(values, reverse=True) and values[0] < 0 and len({e.token_id for e in one.top}) == 5

    engine.over(session)


def test_penalties_and_bias_draw_what_they_make_likeliest(engine: Engine) -> None:
    """The 20 likeliest have one that is not penalised, as no more than 13 are: the best of them after penalties, by
    hand, is the best of all."""

    async def session(client: Client) -> None:
        first = (await told(client, Sampling(max_tokens=1, logprobs=0)))[0].drawn.token_id
        penalised = Sampling(
            max_tokens=12,
            ignore_eos=True,
            presence_penalty=0.5,
            frequency_penalty=1.5,
            logit_bias={first: -100.0},
            logprobs=20,
        )
        counts: dict[int, int] = {}
        for one in await told(client, penalised):

            def changed(token: int, logprob: float) -> float:
                count = counts.get(token, 0)
                return logprob - 1.5 * count - 0.5 * (count > 0) - 100 * (token == first)

            best = max(changed(entry.token_id, entry.logprob) for entry in one.top)
            assert changed(one.drawn.token_id, one.drawn.logprob) >= best - 1e-5
            counts[one.drawn.token_id] = counts.get(one.drawn.token_id, 0) + 1
        assert sum(counts.values()) == 12 and first not in counts

    engine.over(session)


def test_min_p_leaves_only_the_likely(engine: Engine) -> None:
    """Against the shares of the likeliest, at a temperature that draws nearly anything else."""

    async def session(client: Client) -> None:
        hot = Sampling(temperature=4.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=1)
        kept = Sampling(temperature=4.0, min_p=0.7, seed=3, max_tokens=12, ignore_eos=True, logprobs=1)

        def depths(answer: list[Logprobs]) -> list[float]:
            return [(one.top[0].logprob - one.drawn.logprob) / 4.0 for one in answer]

        least = 0.3566749439387324  # log(1 / 0.7)
        assert max(depths(await told(client, kept))) <= least + 1e-9
        assert max(depths(await told(client, hot))) > least

    engine.over(session)


def test_several_answers_to_one_prompt(engine: Engine) -> None:
    """Each drawn by a seed of its own, over a prompt that is computed once."""

    async def session(client: Client) -> None:
        answer = client.generate(token_ids=PROMPT, sampling=Sampling(temperature=1.0, seed=5, n=3, max_tokens=10))
        texts = await answer.texts()
        assert len(set(texts)) == 3
        assert answer.finished and len(answer.finished.choices) == 3
        assert answer.finished.usage.prompt_tokens == len(PROMPT)
        assert [choice.usage.cached_tokens for choice in answer.finished.choices][1:] == [32, 32]

    engine.over(session)


def test_the_same_request_gets_the_same_answer_whatever_else_is_served() -> None:
    """Alone, and while 12 others come and go, of whom many share its prompt. In float32, where a batch of another size
    flips no close pair of logits; with so few pages that requests are preempted."""
    greedy = Sampling(max_tokens=24, ignore_eos=True)
    seeded = Sampling(temperature=0.9, seed=11, max_tokens=24, ignore_eos=True)
    penalised = Sampling(temperature=0.9, seed=12, max_tokens=24, ignore_eos=True, frequency_penalty=0.7, logprobs=2)
    chosen = Sampling(temperature=1.1, seed=13, top_k=40, top_p=0.9, n=2, max_tokens=24, ignore_eos=True)

    async def answer(client: Client, ids: list[int], sampling: Sampling) -> list[int]:
        pieces = [piece async for piece in client.generate(token_ids=ids, sampling=sampling)]
        return [token for choice in range(sampling.n) for p in pieces if p.index == choice for token in p.token_ids]

    async def session(client: Client) -> None:
        asked = [(PROMPT, greedy), (PROMPT, seeded), (PROMPT[:20], penalised), (PROMPT[3:], chosen)]
        alone = [await answer(client, *one) for one in asked]
        assert len({tuple(tokens) for tokens in alone}) == len(asked)
        others = [
            answer(client, [*PROMPT[: 5 * i], 7 * i], Sampling(temperature=1.0, max_tokens=10 + 9 * i))
            for i in range(1, 9)
        ]
        together = await asyncio.gather(*(answer(client, *one) for one in asked), *others)
        assert list(together[: len(asked)]) == alone
        assert (await client.stats()).preempted > 0

    with running("--dtype", "float32", "--slots", "128", "--demand-tokens", "64", "--kv-tokens", "400") as engine:
        engine.over(session)
