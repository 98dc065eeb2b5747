"""Chunk cutting against the rules of the demand threshold, stated again as properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.chunking import SHORT_PART, cut_chunks, is_short, prefill_mode

SIZES = st.integers(1, 60)


@pytest.mark.parametrize(
    ("tokens", "demand_tokens", "mode"),
    [
        (1, 0, "streamed"),
        (511, 512, "demand"),
        (512, 512, "demand"),
        (513, 512, "streamed"),
        (1, 1, "demand"),
        (2, 1, "streamed"),
    ],
)
def test_the_threshold_itself_is_demand(tokens: int, demand_tokens: int, mode: str) -> None:
    assert prefill_mode(tokens, demand_tokens) == mode


@given(st.lists(SIZES, max_size=8), SIZES)
def test_chunks_keep_the_rules(pending: list[int], chunk_tokens: int) -> None:
    counts = cut_chunks(pending, chunk_tokens)
    assert bool(counts) == bool(pending)
    if not counts:
        return
    total = sum(counts)
    assert counts[0] == min(pending[0], chunk_tokens)
    assert counts[1:] == pending[1 : len(counts)], "who joins brings all it has left"
    assert total <= chunk_tokens
    if len(counts) < len(pending):  # the next one would not fit
        assert total + pending[len(counts)] > chunk_tokens


@given(SIZES, SIZES)
def test_a_prompt_ends_after_as_few_chunks_as_its_length_allows(tokens: int, chunk: int) -> None:
    steps, left = 0, tokens
    while left:
        (count,) = cut_chunks([left], chunk)
        left -= count
        steps += 1
    assert steps == -(-tokens // chunk)


@given(st.lists(SIZES, min_size=1, max_size=8), SIZES, SIZES)
def test_a_prompt_is_cut_at_multiples_alone(pending: list[int], chunk: int, cut_tokens: int) -> None:
    """With as few chunks as the multiples that fit into one allow; who joins is not cut at all."""
    chunk = max(chunk, cut_tokens)
    counts = cut_chunks(pending, chunk, cut_tokens)
    assert counts[1:] == pending[1 : len(counts)] and sum(counts) <= chunk
    done, steps = 0, 0
    while done < pending[0]:
        (count,) = cut_chunks([pending[0] - done], chunk, cut_tokens)
        done += count
        steps += 1
        assert done % cut_tokens == 0 or done == pending[0]
    most = chunk // cut_tokens * cut_tokens
    assert steps == 1 + max(0, -(-(pending[0] - chunk) // most))


@given(SIZES, st.integers(0, 40), SIZES)
def test_a_request_is_short_if_one_demand_chunk_takes_all_it_has_left(tokens: int, demand: int, chunk: int) -> None:
    """Or if so many like it fit into any chunk as SHORT_PART says."""
    (count,) = cut_chunks([tokens], chunk)
    on_demand = count == tokens and prefill_mode(count, demand) == "demand"
    assert is_short(tokens, demand, chunk) == (on_demand or tokens * SHORT_PART <= chunk)
