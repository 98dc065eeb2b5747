"""How prompts are cut into prefill chunks, and whether a chunk's experts are fetched on demand or streamed. Pure."""

from collections.abc import Sequence
from typing import Literal

PrefillMode = Literal["demand", "streamed"]


def prefill_mode(tokens: int, demand_tokens: int) -> PrefillMode:
    """The mode of a step of `tokens` tokens, all sequences together: demand up to and including `demand_tokens`."""
    return "demand" if tokens <= demand_tokens else "streamed"


SHORT_PART = 8
"""What fits into such a part of a chunk is short whatever the demand threshold, also without any: it costs a long
prompt little time, and would wait for the whole of that. By default a demand chunk is as long."""


def is_short(pending: int, demand_tokens: int, chunk_tokens: int) -> bool:
    """Whether all that a request has left fits into one demand chunk, or is a small part of any chunk."""
    return pending <= min(max(demand_tokens, chunk_tokens // SHORT_PART), chunk_tokens)


def cut_chunks(pending: Sequence[int], chunk_tokens: int, cut_tokens: int = 1) -> list[int]:
    """Tokens that the next prefill step takes of each of the first requests.

    `pending` are the tokens left of each request, first come first, all at least 1. The first request takes all it has
    left if a chunk may have as much, else as many multiples of `cut_tokens` as fit into one; one must. Requests behind
    it join, in order, as long as all they have left fits into the chunk too. The first that does not ends the step;
    nobody overtakes.

    So together they may stream what each would have loaded on demand. Left to steps of their own, with a long prompt's
    chunk between any two, the last of 64 short prompts waited for 4 to 10 of these chunks instead of 2.
    """
    if not pending:
        return []
    first = pending[0]
    if first > chunk_tokens:
        first = chunk_tokens // cut_tokens * cut_tokens
    chunks, total = [first], first
    for left in pending[1:]:
        if total + left > chunk_tokens:
            break
        chunks.append(left)
        total += left
    return chunks
