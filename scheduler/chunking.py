"""How prompts are cut into prefill chunks, and whether a chunk's experts are fetched on demand or streamed. Pure."""

from collections.abc import Sequence
from typing import Literal

PrefillMode = Literal["demand", "streamed"]


def prefill_mode(tokens: int, demand_tokens: int) -> PrefillMode:
    """The mode of a step of `tokens` tokens, all sequences together: demand up to and including `demand_tokens`."""
    return "demand" if tokens <= demand_tokens else "streamed"


def is_short(pending: int, demand_tokens: int, chunk_tokens: int) -> bool:
    """Whether all that a request has left fits into one demand chunk. With `demand_tokens` 0 no request is short."""
    return pending <= min(demand_tokens, chunk_tokens)


def cut_chunks(pending: Sequence[int], demand_tokens: int, chunk_tokens: int, cut_tokens: int = 1) -> list[int]:
    """Tokens that the next prefill step takes of each of the first requests.

    `pending` are the tokens left of each request, first come first, all at least 1. The first request takes all it has
    left if a chunk may have as much, else as many multiples of `cut_tokens` as fit into one; one must. Requests behind
    it join, in order, as long as all they have left fits: into the demand threshold when the first one's chunk is a
    demand chunk (so that its mode does not change by company), else into the chunk. The first that does not fit ends
    the step; nobody overtakes.
    """
    if not pending:
        return []
    first = pending[0]
    if first > chunk_tokens:
        first = chunk_tokens // cut_tokens * cut_tokens
    limit = chunk_tokens
    if prefill_mode(first, demand_tokens) == "demand":
        limit = min(demand_tokens, chunk_tokens)
    chunks, total = [first], first
    for left in pending[1:]:
        if total + left > limit:
            break
        chunks.append(left)
        total += left
    return chunks
