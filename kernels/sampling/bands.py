# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: the bands of a row.

BANDS keys, the marks, cut a row's logits into bands; `count_bands` says for each chunk of the row how many logits and
how much mass are at or above each mark.
"""

import triton
import triton.language as tl

from kernels.sampling.search import WAYS, key_of, search, value_of, weight, wide_key

FACTS = 4
TOP, MASS, FLOOR, DRAW = (tl.constexpr(i) for i in range(FACTS))
"""What is known of a row before its bands, float64 each: the largest logit, the mass of all, the key of min_p's floor,
and the draw, in [0, 1). A mass below 0 says that the row is not drawn here."""
GATHER = tl.constexpr(4)
"""Chunks looked at together for a band's logits. 8, with as many more warps, were slower (H200, 2026-11)."""
LOWEST = tl.constexpr(-(2**31))
UNDERFLOW = tl.constexpr(746.0)
"""A logit so many temperatures below the top has no mass in float64."""
NEAR = tl.constexpr(64.0)
"""The marks but the last are at most so many temperatures below the top, so that a few logits far away, as a mask
leaves, do not make all bands wide."""


@triton.jit
def min_p_floor(top, temperature, min_p):
    """The lowest key, [] int64, whose logit min_p keeps: one that is -temperature * log(min_p) below the top or less.
    LOWEST if min_p is off.

    The sum's rounding may be a key or two off the comparison's, so the keys around it are compared.
    """
    on = min_p > 0.0
    depth = temperature * tl.log(tl.where(on, min_p, 1.0))
    near = wide_key(top.to(tl.float64) + depth)
    keys = near + tl.arange(0, WAYS) - WAYS // 2
    kept = value_of(keys).to(tl.float64) - top.to(tl.float64) >= depth
    lowest = tl.min(tl.where(kept, keys, near + WAYS), axis=0)  # not under a condition: Triton 3.6 may lose that
    return tl.where(on, lowest, LOWEST)


@triton.jit
def lowest_kept(maxima_ptr, chunks, vocab, whole, top, temperature, top_k, top_p, floor):
    """A key, [] int64, at or below that of every token with a mass that top_k, min_p and top_p keep; of every one that
    top_k and min_p keep, if one of them is on, since top_p is a share of their mass."""
    lowest = tl.maximum(wide_key(top.to(tl.float64) - temperature * UNDERFLOW), floor)
    # Below it V tokens have less than what top_p leaves out of the whole; 1e-9 is for the roundings of the masses.
    share = (1.0 - top_p) * (1.0 - 1e-9) * whole / vocab.to(tl.float64)
    by_mass = (top_k == 0) & (floor == LOWEST) & (share > 0.0)
    beyond = wide_key(top.to(tl.float64) + temperature * tl.log(tl.where(by_mass, share, 1.0))) - 2
    lowest = tl.where(by_mass, tl.maximum(lowest, beyond), lowest)
    # Of top_k tokens none is below the last of as many chunks' largest.
    least = tl.where((top_k > 0) & (top_k <= chunks), top_k, 0)
    n = tl.where(least > 0, chunks, 0)
    high = tl.where(least > 0, key_of(top).to(tl.int64) + 1, lowest)
    return search(maxima_ptr, n, lowest, high, top, temperature, least, -1.0, 0.0)


@triton.jit
def marks_down_to(lowest, top, temperature, BANDS: tl.constexpr):
    """Keys [BANDS] int64 from the top down, evenly apart in logits; the last is `lowest`."""
    depth = tl.minimum(top.to(tl.float64) - value_of(lowest).to(tl.float64), temperature * NEAR)
    j = tl.arange(0, BANDS)
    near = wide_key(top.to(tl.float64) - depth * (j + 1).to(tl.float64) / (BANDS - 1))
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
        end = tl.where(key_of(largest).to(tl.int64) >= tl.min(marks, axis=0), CHUNK, 0)
        count = tl.zeros((BANDS, STEP), tl.int32)
        mass = tl.zeros((BANDS, STEP), tl.float64)
        for begin in range(0, end, STEP):
            i = chunk * CHUNK + begin + tl.arange(0, STEP)
            x = tl.load(logits_ptr + row * stride + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
            above = (key_of(x).to(tl.int64)[None, :] >= marks[:, None]) & (i < vocab)[None, :]
            count += above.to(tl.int32)
            mass += tl.where(above, weight(x, top, temperature)[None, :], 0.0)
        where = (row * tl.num_programs(0) + chunk) * BANDS + j
        tl.store(counts_ptr + where, tl.sum(count, axis=1))
        tl.store(shares_ptr + where, tl.sum(mass, axis=1))


@triton.jit
def whole_row(counts_ptr, shares_ptr, chunks, BANDS: tl.constexpr):
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
def at(values, place, BANDS: tl.constexpr):
    """The value there; 0 before the first."""
    return tl.sum(tl.where(tl.arange(0, BANDS) == place, values, 0), axis=0)


@triton.jit
def gather(
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
        key = key_of(x.to(tl.float32)).to(tl.int64)
        found = there & (key >= low) & (key < high)
        place = count + tl.cumsum(found.to(tl.int32), 0) - 1
        tl.store(values_ptr + place, x, mask=found & (place < ROOM))
        tl.store(places_ptr + place, i, mask=found & (place < ROOM))
        count += tl.sum(found.to(tl.int32), axis=0)
        begin += GATHER
    tl.debug_barrier()
    return count


@triton.jit
def first_band(count, mass, least, over, reach, last):
    """The first band by whose end there are `least` logits, of a mass over `over` or at `reach`; `last` at most."""
    enough = (count >= least) & ((mass > over) | (mass >= reach))
    return tl.minimum(tl.sum((enough == 0).to(tl.int32), axis=0), last)
