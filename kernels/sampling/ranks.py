# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: the tokens of rows that top_k, top_p or min_p cut, without sorting.

A rank or a mass is found as the largest key (the logit's bits, made to order like integers) above which there is
enough. `draw_by_rank` looks into one of the row's bands only, WAYS keys at a time, and knows what is above it. Where a
band has more logits than there is room for, it searches the whole row, which takes longer.
"""

import triton
import triton.language as tl

from kernels.sampling.bands import DRAW, FLOOR, LOWEST, MASS, TOP, at, first_band, gather, whole_row
from kernels.sampling.search import edge_at, key_of, nth_equal, search, smallest_from, value_of, weight

BY_TOP_K, BY_TOP_P, BY_DRAW, NOTHING = (tl.constexpr(i) for i in range(4))
"""The ranks that draw_by_rank looks for, one after the other."""


@triton.jit
def _among_equals(list_ptr, n, key, equal, mass, one):
    """Of `equal` logits at the key of mass `one` each: how many reach `mass`, at least one of them, and the place in
    the list of the one that goes beyond it."""
    wanted = tl.where(one > 0.0, mass / one, 0.0)
    reaching = tl.minimum(tl.maximum(tl.ceil(wanted), 1.0), equal.to(tl.float64)).to(tl.int32)
    nth = tl.maximum(tl.minimum(tl.floor(wanted), (equal - 1).to(tl.float64)), 0.0).to(tl.int32)
    return reaching, nth_equal(list_ptr, n, key, nth)


@triton.jit(do_not_specialize=["vocab"])
def draw_by_rank(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B] float64
    top_k_ptr,  # [B] int64
    top_p_ptr,  # [B] float64
    facts_ptr,  # [B, FACTS] float64
    marks_ptr,  # [B, BANDS] int64
    counts_ptr,  # [B, C, BANDS] int32
    shares_ptr,  # [B, C, BANDS] float64
    chosen_ptr,  # [B, C] int32, scratch as the next two
    values_ptr,  # [B, ROOM] like logits
    places_ptr,  # [B, ROOM] int32
    tokens_ptr,  # [B] int64
    vocab,
    stride,
    FACTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BANDS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The token of a row that top_k, min_p or top_p cut, of those kept ordered by logit and then the lower id: the
    first whose mass, with that of those before it, is beyond the draw's share of all of theirs.

    Up to three ranks are looked for: that of top_k, that of top_p, that of the draw.
    """
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.cdiv(vocab, CHUNK)
    top = tl.load(facts_ptr + row * FACTS + TOP).to(tl.float32)
    whole = tl.load(facts_ptr + row * FACTS + MASS)
    floor = tl.load(facts_ptr + row * FACTS + FLOOR).to(tl.int64)
    u = tl.load(facts_ptr + row * FACTS + DRAW)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.minimum(tl.load(top_k_ptr + row), vocab)
    top_p = tl.load(top_p_ptr + row)
    drawn_here = whole >= 0.0
    row_ptr = logits_ptr + row * stride
    marks_ptr += row * BANDS
    counts_ptr += row * chunks * BANDS
    shares_ptr += row * chunks * BANDS
    chosen_ptr += row * chunks
    values_ptr += row * ROOM
    places_ptr += row * ROOM
    marks = tl.load(marks_ptr + tl.arange(0, BANDS))
    count, mass = whole_row(counts_ptr, shares_ptr, tl.where(drawn_here, chunks, 0), BANDS)
    all_count, all_mass = tl.max(count, axis=0), tl.max(mass, axis=0)
    # Kept are the logits above the key `edge`, which is in this band, and of those at it the first `limit`.
    edge = at(marks, BANDS - 1, BANDS)
    limit = vocab
    band_kept = tl.sum((mass < all_mass).to(tl.int32), axis=0)
    whole = tl.where((top_k > 0) | (floor > LOWEST), all_mass, whole)
    token = 0
    rank = tl.where((top_k > 0) & (top_k <= all_count), BY_TOP_K, tl.where(top_p < 1.0, BY_TOP_P, BY_DRAW))
    rank = tl.where(drawn_here, rank, NOTHING)
    while rank < NOTHING:
        target = tl.where(rank == BY_TOP_P, top_p, u) * whole
        least = tl.where(rank == BY_TOP_K, top_k, 0)
        over = tl.where(rank == BY_TOP_K, -1.0, tl.where(rank == BY_TOP_P, float("inf"), target))
        reach = tl.where(rank == BY_TOP_P, target, whole)
        last = tl.where(rank == BY_TOP_K, BANDS - 1, band_kept)
        band = first_band(count, mass, least, over, reach, last)
        low = at(marks, band, BANDS)
        high = tl.where(band > 0, at(marks, band - 1, BANDS), key_of(top).to(tl.int64) + 1)
        above = at(count, band - 1, BANDS)
        heavier = at(mass, band - 1, BANDS)
        n = gather(
            row_ptr,
            counts_ptr,
            chosen_ptr,
            values_ptr,
            places_ptr,
            band,
            low,
            high,
            vocab,
            chunks,
            CHUNK,
            BLOCK_C,
            BANDS,
            ROOM,
        )
        fits = n <= ROOM
        list_ptr = values_ptr
        if n > ROOM:
            list_ptr = row_ptr
        n = tl.where(fits, n, vocab)
        above = tl.where(fits, above, 0)
        heavier = tl.where(fits, heavier, 0.0)
        low = tl.maximum(low, edge)
        found = search(list_ptr, n, low, high, top, temperature, least - above, over - heavier, reach - heavier)
        found = smallest_from(list_ptr, n, found)
        equal, before, mass_before = edge_at(list_ptr, n, found, top, temperature)
        equal = tl.where(found == edge, tl.minimum(equal, limit), equal)
        one = weight(value_of(found), top, temperature)
        reaching, place = _among_equals(list_ptr, n, found, equal, target - heavier - mass_before, one)
        token = tl.where(fits, tl.load(places_ptr + place, mask=fits, other=0), place)
        limit = tl.where(rank == BY_TOP_K, top_k.to(tl.int32) - above - before, reaching)
        edge = found
        band_kept = band
        whole = heavier + mass_before + limit * one
        rank = tl.where((rank == BY_TOP_K) & (top_p < 1.0), BY_TOP_P, tl.where(rank < BY_DRAW, BY_DRAW, NOTHING))
    tl.store(tokens_ptr + row, token.to(tl.int64), mask=drawn_here)  # type: ignore[attr-defined]
