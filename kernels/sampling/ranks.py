# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: the tokens of rows that top_k, top_p or min_p cut, without sorting.

A rank or a mass is found as the largest key (the logit's bits, made to order like integers) above which there is
enough. BANDS keys, the marks, cut a row's logits into bands; `count_bands` says for each chunk of the row how many
logits and how much mass are at or above each mark. `draw_by_rank` then looks into one band only, WAYS keys at a time,
and knows what is above it. Where a band has more logits than there is room for, it searches the whole row, which takes
longer.
"""

import triton
import triton.language as tl

FACTS = 4
TOP, MASS, FLOOR, DRAW = (tl.constexpr(i) for i in range(FACTS))
"""What is known of a row before its bands, float64 each: the largest logit, the mass of all, the key of min_p's floor,
and the draw, in [0, 1). A mass below 0 says that the row is not drawn here."""
BY_TOP_K, BY_TOP_P, BY_DRAW, NOTHING = (tl.constexpr(i) for i in range(4))
"""The ranks that draw_by_rank looks for, one after the other."""
GATHER = tl.constexpr(4)
"""Chunks looked at together for a band's logits. 8, with as many more warps, were slower (H200, 2026-11)."""
TILE = tl.constexpr(512)
"""Logits of a list looked at together."""
WAYS = tl.constexpr(8)
LOWEST = tl.constexpr(-(2**31))
UNDERFLOW = tl.constexpr(746.0)
"""A logit so many temperatures below the top has no mass in float64."""
NEAR = tl.constexpr(64.0)
"""The marks but the last are at most so many temperatures below the top, so that a few logits far away, as a mask
leaves, do not make all bands wide."""


@triton.jit
def weight(x, top, temperature):
    """The mass of x [...], in float64; that of the largest logit is 1."""
    return tl.exp((x.to(tl.float64) - top.to(tl.float64)) / temperature)


@triton.jit
def _key(x):
    """int32 that orders like x; the two zeros are one."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _wide_key(x):
    """The key of x, a finite float64 or nearly so, rounded to float32."""
    return _key(tl.maximum(x, -3.4e38).to(tl.float32)).to(tl.int64)


@triton.jit
def _value(key):
    """The float32 of a key [...] int64."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


# The bands of a row ---------------------------------------------------------------------------------------------------


@triton.jit
def min_p_floor(top, temperature, min_p):
    """The lowest key, [] int64, whose logit min_p keeps: one that is -temperature * log(min_p) below the top or less.
    LOWEST if min_p is off.

    The sum's rounding may be a key or two off the comparison's, so the keys around it are compared.
    """
    on = min_p > 0.0
    depth = temperature * tl.log(tl.where(on, min_p, 1.0))
    near = _wide_key(top.to(tl.float64) + depth)
    keys = near + tl.arange(0, WAYS) - WAYS // 2
    kept = _value(keys).to(tl.float64) - top.to(tl.float64) >= depth
    lowest = tl.min(tl.where(kept, keys, near + WAYS), axis=0)  # not under a condition: Triton 3.6 may lose that
    return tl.where(on, lowest, LOWEST)


@triton.jit
def lowest_kept(maxima_ptr, chunks, vocab, whole, top, temperature, top_k, top_p, floor):
    """A key, [] int64, at or below that of every token with a mass that top_k, min_p and top_p keep; of every one that
    top_k and min_p keep, if one of them is on, since top_p is a share of their mass."""
    lowest = tl.maximum(_wide_key(top.to(tl.float64) - temperature * UNDERFLOW), floor)
    # Below it V tokens have less than what top_p leaves out of the whole; 1e-9 is for the roundings of the masses.
    share = (1.0 - top_p) * (1.0 - 1e-9) * whole / vocab.to(tl.float64)
    by_mass = (top_k == 0) & (floor == LOWEST) & (share > 0.0)
    beyond = _wide_key(top.to(tl.float64) + temperature * tl.log(tl.where(by_mass, share, 1.0))) - 2
    lowest = tl.where(by_mass, tl.maximum(lowest, beyond), lowest)
    # Of top_k tokens none is below the last of as many chunks' largest.
    least = tl.where((top_k > 0) & (top_k <= chunks), top_k, 0)
    n = tl.where(least > 0, chunks, 0)
    high = tl.where(least > 0, _key(top).to(tl.int64) + 1, lowest)
    return _search(maxima_ptr, n, lowest, high, top, temperature, least, -1.0, 0.0)


@triton.jit
def marks_down_to(lowest, top, temperature, BANDS: tl.constexpr):
    """Keys [BANDS] int64 from the top down, evenly apart in logits; the last is `lowest`."""
    depth = tl.minimum(top.to(tl.float64) - _value(lowest).to(tl.float64), temperature * NEAR)
    j = tl.arange(0, BANDS)
    near = _wide_key(top.to(tl.float64) - depth * (j + 1).to(tl.float64) / (BANDS - 1))
    return tl.where(j == BANDS - 1, lowest, tl.maximum(near, lowest))


@triton.jit(do_not_specialize=["vocab"])
def count_bands(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B] float64
    maxima_ptr,  # [B, C] float32
    facts_ptr,  # [B, FACTS] float64
    marks_ptr,  # [B, BANDS] int64
    counts_ptr,  # [B, C, BANDS] int32: logits of the chunk at or above each mark
    shares_ptr,  # [B, C, BANDS] float64: their mass
    vocab,
    stride,
    FACTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BANDS: tl.constexpr,
    STEP: tl.constexpr,
):
    """For rows that draw_by_rank is to draw; the others cost a launch."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(facts_ptr + row * FACTS + MASS) >= 0.0:
        temperature = tl.load(temperature_ptr + row)
        top = tl.load(facts_ptr + row * FACTS + TOP)
        j = tl.arange(0, BANDS)
        marks = tl.load(marks_ptr + row * BANDS + j)
        largest = tl.load(maxima_ptr + row * tl.num_programs(0) + chunk)
        end = tl.where(_key(largest).to(tl.int64) >= tl.min(marks, axis=0), CHUNK, 0)
        count = tl.zeros((BANDS, STEP), tl.int32)
        mass = tl.zeros((BANDS, STEP), tl.float64)
        for begin in range(0, end, STEP):
            i = chunk * CHUNK + begin + tl.arange(0, STEP)
            x = tl.load(logits_ptr + row * stride + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
            above = (_key(x).to(tl.int64)[None, :] >= marks[:, None]) & (i < vocab)[None, :]
            count += above.to(tl.int32)
            mass += tl.where(above, weight(x, top, temperature)[None, :], 0.0)
        where = (row * tl.num_programs(0) + chunk) * BANDS + j
        tl.store(counts_ptr + where, tl.sum(count, axis=1))
        tl.store(shares_ptr + where, tl.sum(mass, axis=1))


@triton.jit
def _whole_row(counts_ptr, shares_ptr, chunks, BANDS: tl.constexpr):
    """What count_bands says of the chunks of one row, added up: [BANDS] int32 and float64."""
    c = tl.arange(0, 16)
    j = tl.arange(0, BANDS)
    count = tl.zeros((16, BANDS), tl.int32)
    mass = tl.zeros((16, BANDS), tl.float64)
    begin = 0
    while begin < chunks:
        where = (begin + c)[:, None] * BANDS + j[None, :]
        there = (begin + c < chunks)[:, None] & (j >= 0)[None, :]
        count += tl.load(counts_ptr + where, mask=there, other=0)
        mass += tl.load(shares_ptr + where, mask=there, other=0.0)
        begin += 16
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _at(values, place, BANDS: tl.constexpr):
    """The value there; 0 before the first."""
    return tl.sum(tl.where(tl.arange(0, BANDS) == place, values, 0), axis=0)


@triton.jit
def _gather(
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
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BANDS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Lists the logits of a band, keys from `low` to below `high`, in `values`, their ids in `places`; how many there
    are. Stops counting at more than ROOM.
    """
    c = tl.arange(0, BLOCK_C)
    down_to = tl.load(counts_ptr + c * BANDS + band, mask=c < chunks, other=0)
    before = tl.load(counts_ptr + c * BANDS + band - 1, mask=(c < chunks) & (band > 0), other=0)
    wanted = (down_to > before).to(tl.int32)
    tl.store(chosen_ptr + tl.cumsum(wanted, 0) - 1, c, mask=wanted > 0)
    chosen = tl.sum(wanted, axis=0)
    tl.debug_barrier()
    lane = tl.arange(0, GATHER * CHUNK)
    count = 0
    begin = 0
    while (begin < chosen) & (count <= ROOM):
        entry = begin + lane // CHUNK
        i = tl.load(chosen_ptr + entry, mask=entry < chosen, other=0) * CHUNK + lane % CHUNK
        there = (entry < chosen) & (i < vocab)
        x = tl.load(row_ptr + i, mask=there, other=float("-inf"))
        key = _key(x.to(tl.float32)).to(tl.int64)
        found = there & (key >= low) & (key < high)
        place = count + tl.cumsum(found.to(tl.int32), 0) - 1
        tl.store(values_ptr + place, x, mask=found & (place < ROOM))
        tl.store(places_ptr + place, i, mask=found & (place < ROOM))
        count += tl.sum(found.to(tl.int32), axis=0)
        begin += GATHER
    tl.debug_barrier()
    return count


# Ranks in a list ------------------------------------------------------------------------------------------------------


@triton.jit
def _above(list_ptr, n, keys, top, temperature):
    """How many of the list's logits are at or above each of `keys` [WAYS], and their mass."""
    count = tl.zeros((WAYS, TILE), tl.int32)
    mass = tl.zeros((WAYS, TILE), tl.float64)
    begin = 0
    while begin < n:
        i = begin + tl.arange(0, TILE)
        x = tl.load(list_ptr + i, mask=i < n, other=float("-inf")).to(tl.float32)
        above = (_key(x).to(tl.int64)[None, :] >= keys[:, None]) & (i < n)[None, :]
        count += above.to(tl.int32)
        mass += tl.where(above, weight(x, top, temperature)[None, :], 0.0)
        begin += TILE
    return tl.sum(count, axis=1), tl.sum(mass, axis=1)


@triton.jit
def _search(list_ptr, n, low, high, top, temperature, least, over, reach):
    """The largest key in low .. high - 1 with `least` of the list's logits at or above it, of a mass over `over` or at
    `reach`. `low` is taken to be such a key."""
    way = tl.arange(0, WAYS)
    while high - low > 1:
        keys = low + 1 + (high - low - 1) * way // WAYS
        count, mass = _above(list_ptr, n, keys, top, temperature)
        enough = (count >= least) & ((mass > over) | (mass >= reach))
        low = tl.maximum(low, tl.max(tl.where(enough, keys, low), axis=0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, keys), axis=0))
    return low


@triton.jit
def _present(list_ptr, n, key):
    """The smallest key in the list at or above `key`."""
    smallest = tl.full((), 2**31 - 1, tl.int64)
    begin = 0
    while begin < n:
        i = begin + tl.arange(0, TILE)
        x = tl.load(list_ptr + i, mask=i < n, other=float("-inf")).to(tl.float32)
        keys = _key(x).to(tl.int64)
        smallest = tl.minimum(smallest, tl.min(tl.where((keys >= key) & (i < n), keys, 2**31 - 1), axis=0))
        begin += TILE
    return smallest


@triton.jit
def _edge(list_ptr, n, key, top, temperature):
    """How many logits are at the key, how many above, and the mass of those above."""
    way = tl.arange(0, WAYS)
    count, mass = _above(list_ptr, n, key + (way > 0).to(tl.int64), top, temperature)
    at_or_above = tl.sum(tl.where(way == 0, count, 0), axis=0)
    above = tl.sum(tl.where(way == 1, count, 0), axis=0)
    return at_or_above - above, above, tl.sum(tl.where(way == 1, mass, 0.0), axis=0)


@triton.jit
def _nth(list_ptr, n, key, nth):
    """The place in the list of the `nth` logit (from 0) at the key."""
    place = 0
    seen = 0
    begin = 0
    while (begin < n) & (seen <= nth):
        i = begin + tl.arange(0, TILE)
        x = tl.load(list_ptr + i, mask=i < n, other=float("-inf")).to(tl.float32)
        equal = ((_key(x).to(tl.int64) == key) & (i < n)).to(tl.int32)
        hit = (equal > 0) & (seen + tl.cumsum(equal, 0) - 1 == nth)
        place += tl.sum(tl.where(hit, i, 0), axis=0)
        seen += tl.sum(equal, axis=0)
        begin += TILE
    return place


@triton.jit
def _first_band(count, mass, least, over, reach, last):
    """The first band by whose end there are `least` logits, of a mass over `over` or at `reach`; `last` at most."""
    enough = (count >= least) & ((mass > over) | (mass >= reach))
    return tl.minimum(tl.sum((enough == 0).to(tl.int32), axis=0), last)


@triton.jit
def _among_equals(list_ptr, n, key, equal, mass, one):
    """Of `equal` logits at the key of mass `one` each: how many reach `mass`, at least one of them, and the place in
    the list of the one that goes beyond it."""
    wanted = tl.where(one > 0.0, mass / one, 0.0)
    reaching = tl.minimum(tl.maximum(tl.ceil(wanted), 1.0), equal.to(tl.float64)).to(tl.int32)
    nth = tl.maximum(tl.minimum(tl.floor(wanted), (equal - 1).to(tl.float64)), 0.0).to(tl.int32)
    return reaching, _nth(list_ptr, n, key, nth)


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
    count, mass = _whole_row(counts_ptr, shares_ptr, tl.where(drawn_here, chunks, 0), BANDS)
    all_count, all_mass = tl.max(count, axis=0), tl.max(mass, axis=0)
    # Kept are the logits above the key `edge`, which is in this band, and of those at it the first `limit`.
    edge = _at(marks, BANDS - 1, BANDS)
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
        band = _first_band(count, mass, least, over, reach, last)
        low = _at(marks, band, BANDS)
        high = tl.where(band > 0, _at(marks, band - 1, BANDS), _key(top).to(tl.int64) + 1)
        above = _at(count, band - 1, BANDS)
        heavier = _at(mass, band - 1, BANDS)
        n = _gather(
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
        found = _search(list_ptr, n, low, high, top, temperature, least - above, over - heavier, reach - heavier)
        found = _present(list_ptr, n, found)
        equal, before, mass_before = _edge(list_ptr, n, found, top, temperature)
        equal = tl.where(found == edge, tl.minimum(equal, limit), equal)
        one = weight(_value(found), top, temperature)
        reaching, place = _among_equals(list_ptr, n, found, equal, target - heavier - mass_before, one)
        token = tl.where(fits, tl.load(places_ptr + place, mask=fits, other=0), place)
        limit = tl.where(rank == BY_TOP_K, top_k.to(tl.int32) - above - before, reaching)
        edge = found
        band_kept = band
        whole = heavier + mass_before + limit * one
        rank = tl.where((rank == BY_TOP_K) & (top_p < 1.0), BY_TOP_P, tl.where(rank < BY_DRAW, BY_DRAW, NOTHING))
    tl.store(tokens_ptr + row, token.to(tl.int64), mask=drawn_here)  # type: ignore[attr-defined]
