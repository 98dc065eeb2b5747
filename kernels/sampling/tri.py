# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: two launches for all rows. Many programs survey the logits, then one program a row draws.

The survey leaves of each chunk of CHUNK logits the largest, its id, and, where the draw will need it, the mass. With
that a greedy row is done, and a row without top_k and top_p reads the one chunk that its draw falls into.

The order of the others is that of the reference's stable sort: by logit, then the lower id. Nothing is sorted: a rank
or a mass is found as the largest key (the logit's bits, made to order like integers) above which there is enough, WAYS
keys at a time. Before that, tokens that cannot be among the kept ones are left out: of top_k, all below the k-th
largest of the chunks' maxima; of min_p, all below its edge, which is a logit; of top_p alone, all below a logit so
small that V tokens of it have less mass than top_p leaves out. Where the rest is more than CANDIDATES, the searches run
over the whole row instead, which takes longer.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.sampling import ref

CHUNK = 1024
CANDIDATES = 16384
GATHER = tl.constexpr(4)
"""Chunks looked at together for candidates."""
LOWEST = tl.constexpr(-(2**31))
GOLDEN, MIX_1, MIX_2 = (tl.constexpr(word) for word in (ref.GOLDEN, ref.MIX_1, ref.MIX_2))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    chunk: int = CHUNK,
    candidates: int = CANDIDATES,
) -> torch.Tensor:
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return tokens
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chunks = triton.cdiv(vocab, chunk)
    room = min(candidates, vocab)
    maxima = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    ids = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    masses = torch.empty(rows, chunks, dtype=torch.float64, device=device)
    chosen = torch.empty_like(ids)
    values = torch.empty(rows, room, dtype=logits.dtype, device=device)
    places = torch.empty(rows, room, dtype=torch.int32, device=device)
    settings = [x.contiguous() for x in (temperature, top_k, top_p, min_p, seed, position)]
    stride = logits.stride(0)
    survey = (logits, *settings[:2], maxima, ids, masses, vocab, stride)
    _survey[(chunks, rows)](*survey, CHUNK=chunk, num_warps=4)
    _draw[(rows,)](
        logits,
        *settings,
        maxima,
        ids,
        masses,
        chosen,
        values,
        places,
        tokens,
        vocab,
        stride,
        **draw_arguments(vocab, chunk, room),
    )
    return tokens


def draw_arguments(vocab: int, chunk: int, room: int) -> dict[str, Any]:
    chunks = triton.cdiv(vocab, chunk)
    return {
        "CHUNK": chunk,
        "BLOCK_C": triton.next_power_of_2(chunks),
        "ROOM": room,
        "TILE": 512,
        "WAYS": 8,
        "num_warps": 8,
        "maxnreg": 160,  # left alone, the assembler stays at 128 and spills
    }


@triton.jit(do_not_specialize=["vocab"])
def _survey(
    logits_ptr,
    temperature_ptr,  # [B] float64
    top_k_ptr,  # [B] int64
    maxima_ptr,  # [B, C] float32
    ids_ptr,  # [B, C] int32: of the maximum, the lowest of equals; -1 if something in the chunk is not finite
    masses_ptr,  # [B, C] float64: sums of exp((logit - the chunk's maximum) / temperature), where needed
    vocab,
    stride,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    there = i < vocab
    x = tl.load(logits_ptr + row * stride + i, mask=there, other=float("-inf")).to(tl.float32)
    finite = tl.abs(x) < float("inf")  # not so for NaN either
    bad = tl.sum((there & (finite == 0)).to(tl.int32), axis=0)
    best, place = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    where = row * tl.num_programs(0) + chunk
    tl.store(maxima_ptr + where, best)
    tl.store(ids_ptr + where, tl.where(bad > 0, -1, chunk * CHUNK + place))
    heat = tl.load(temperature_ptr + row)
    if (heat > 0) & (tl.load(top_k_ptr + row) == 0):
        tl.store(masses_ptr + where, tl.sum(_weight(x, best, heat), axis=0))


@triton.jit
def _weight(x, top, heat):
    return tl.exp((x.to(tl.float64) - top.to(tl.float64)) / heat)


@triton.jit
def _key(x):
    """int32 that orders like x; the two zeros are one."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _value(key):
    """The float32 of a key [] int64."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _shift_right(word, bits):
    return (word.to(tl.uint64, bitcast=True) >> bits).to(tl.int64, bitcast=True)


@triton.jit
def _mix(word):
    word = (word ^ _shift_right(word, 30)) * MIX_1
    word = (word ^ _shift_right(word, 27)) * MIX_2
    return word ^ _shift_right(word, 31)


@triton.jit
def _uniform(seed, position):
    word = _mix(_mix(seed + GOLDEN) + (position + 1) * GOLDEN)
    return _shift_right(word, 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _above(list_ptr, n, keys, top, heat, MASS: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr):
    """How many of the list's logits are at or above each of `keys`, and their mass (0 unless MASS)."""
    count = tl.zeros((WAYS,), tl.int32)
    mass = tl.zeros((WAYS,), tl.float64)
    begin = 0
    while begin < n:
        i = begin + tl.arange(0, TILE)
        x = tl.load(list_ptr + i, mask=i < n, other=float("-inf")).to(tl.float32)
        above = (_key(x).to(tl.int64)[None, :] >= keys[:, None]) & (i < n)[None, :]
        count += tl.sum(above.to(tl.int32), axis=1)
        if MASS:
            mass += tl.sum(tl.where(above, _weight(x, top, heat)[None, :], 0.0), axis=1)
        begin += TILE
    return count, mass


@triton.jit
def _search(
    list_ptr,
    n,
    low,
    high,
    top,
    heat,
    least,
    over,
    reach,
    MASS: tl.constexpr,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The largest key in low .. high - 1 with `least` logits at or above it, of a mass over `over` or at `reach`.

    `low` is taken to be such a key.
    """
    way = tl.arange(0, WAYS)
    while high - low > 1:
        keys = low + 1 + (high - low - 1) * way // WAYS
        count, mass = _above(list_ptr, n, keys, top, heat, MASS, TILE, WAYS)
        enough = count >= least
        if MASS:
            enough = enough & ((mass > over) | (mass >= reach))
        low = tl.maximum(low, tl.max(tl.where(enough, keys, low), axis=0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, keys), axis=0))
    return low


@triton.jit
def _edge(list_ptr, n, key, top, heat, TILE: tl.constexpr, WAYS: tl.constexpr):
    """How many logits are at the key, how many above, and the mass of those above."""
    way = tl.arange(0, WAYS)
    count, mass = _above(list_ptr, n, key + (way > 0).to(tl.int64), top, heat, True, TILE, WAYS)
    at_or_above = tl.sum(tl.where(way == 0, count, 0), axis=0)
    above = tl.sum(tl.where(way == 1, count, 0), axis=0)
    return at_or_above - above, above, tl.sum(tl.where(way == 1, mass, 0.0), axis=0)


@triton.jit
def _nth(list_ptr, n, key, nth, TILE: tl.constexpr):
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
def _gather(
    row_ptr,
    maxima_ptr,
    chosen_ptr,
    values_ptr,
    places_ptr,
    vocab,
    chunks,
    lowest,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Lists the logits whose keys are at or above `lowest` in `values`, their ids in `places`; how many there are.

    Stops counting at more than ROOM.
    """
    c = tl.arange(0, BLOCK_C)
    maxima = tl.load(maxima_ptr + c, mask=c < chunks, other=float("-inf"))
    wanted = ((_key(maxima).to(tl.int64) >= lowest) & (c < chunks)).to(tl.int32)
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
        found = there & (_key(x.to(tl.float32)).to(tl.int64) >= lowest)
        place = count + tl.cumsum(found.to(tl.int32), 0) - 1
        tl.store(values_ptr + place, x, mask=found & (place < ROOM))
        tl.store(places_ptr + place, i, mask=found & (place < ROOM))
        count += tl.sum(found.to(tl.int32), axis=0)
        begin += GATHER
    tl.debug_barrier()
    return count


@triton.jit
def _by_id(row_ptr, maxima, masses, top, heat, u, vocab, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """The token whose mass, together with that of all lower ids, is the first beyond u of the whole."""
    c = tl.arange(0, BLOCK_C)
    mass = tl.cumsum(masses * _weight(maxima, top, heat), 0)
    whole = tl.max(mass, axis=0)
    target = u * whole
    # u * whole may round up to the whole: then it is the last that has any mass.
    chunk = tl.minimum(tl.sum((mass <= target).to(tl.int32), axis=0), tl.sum((mass < whole).to(tl.int32), axis=0))
    before = tl.sum(tl.where(c == chunk - 1, mass, 0.0), axis=0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row_ptr + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    mass = before + tl.cumsum(_weight(x, top, heat), 0)
    last = tl.sum((mass < tl.max(mass, axis=0)).to(tl.int32), axis=0)
    return chunk * CHUNK + tl.minimum(tl.sum((mass <= target).to(tl.int32), axis=0), last)


@triton.jit
def _floor(top, heat, min_p, WAYS: tl.constexpr):
    """The lowest key, [] int64, whose logit min_p keeps: one that is -heat * log(min_p) below the top or less. LOWEST
    if min_p is off.

    The sum's rounding may be a key or two off the comparison's, so the keys around it are compared.
    """
    on = min_p > 0.0
    depth = heat * tl.log(tl.where(on, min_p, 1.0))
    near = _key(tl.maximum(top.to(tl.float64) + depth, -3.4e38).to(tl.float32)).to(tl.int64)
    keys = near + tl.arange(0, WAYS) - WAYS // 2
    kept = _value(keys).to(tl.float64) - top.to(tl.float64) >= depth
    lowest = tl.min(tl.where(kept, keys, near + WAYS), axis=0)  # not under a condition: Triton 3.6 may lose that
    return tl.where(on, lowest, LOWEST)


@triton.jit
def _lower_bound(
    maxima_ptr, chunks, vocab, whole, top, heat, top_k, top_p, floor, TILE: tl.constexpr, WAYS: tl.constexpr
):
    """A key, [] int64, at or below that of every token that top_k, min_p and top_p keep; of every one that top_k and
    min_p keep, if one of them is on, since top_p is a share of their mass."""
    lowest = floor
    if (top_k == 0) & (floor == LOWEST):
        # Below it V tokens have less than what top_p leaves out of the whole; 1e-9 is for the roundings of the masses.
        share = (1.0 - top_p) * (1.0 - 1e-9) * whole / vocab.to(tl.float64)
        bound = top.to(tl.float64) + heat * tl.log(share)
        lowest = tl.maximum(_key(bound.to(tl.float32)).to(tl.int64) - 2, lowest)
    elif (top_k > 0) & (top_k <= chunks):
        high = _key(top).to(tl.int64) + 1
        lowest = _search(maxima_ptr, chunks, lowest, high, top, heat, top_k, 0.0, 0.0, False, TILE, WAYS)
    return lowest


@triton.jit
def _by_rank(list_ptr, n, lowest, whole, top, heat, top_k, top_p, floor, u, TILE: tl.constexpr, WAYS: tl.constexpr):
    """The place in the list of the token drawn; `lowest` is as _lower_bound says, `whole` the row's mass."""
    high = _key(top).to(tl.int64) + 1
    # Kept are the logits above the key `edge`, and of those at it the first `limit`.
    edge = lowest
    limit = n
    if top_k > 0:
        edge = _search(list_ptr, n, edge, high, top, heat, top_k, 0.0, 0.0, False, TILE, WAYS)
    if (top_k > 0) | (floor > LOWEST):
        limit, above, mass = _edge(list_ptr, n, edge, top, heat, TILE, WAYS)
        if top_k > 0:
            limit = tl.minimum(limit, top_k.to(tl.int32) - above)
        whole = mass + limit * _weight(_value(edge), top, heat)
    if top_p < 1.0:
        reach = top_p * whole
        found = _search(list_ptr, n, edge, high, top, heat, 0, float("inf"), reach, True, TILE, WAYS)
        equal, _, mass = _edge(list_ptr, n, found, top, heat, TILE, WAYS)
        equal = tl.where(found == edge, tl.minimum(equal, limit), equal)
        weight = _weight(_value(found), top, heat)
        needed = tl.where(weight > 0.0, tl.ceil((reach - mass) / weight), 1.0)
        limit = tl.minimum(tl.maximum(needed, 1.0), equal.to(tl.float64)).to(tl.int32)
        edge = found
        whole = mass + limit * weight
    target = u * whole
    found = _search(list_ptr, n, edge, high, top, heat, 0, target, whole, True, TILE, WAYS)
    equal, _, mass = _edge(list_ptr, n, found, top, heat, TILE, WAYS)
    equal = tl.where(found == edge, tl.minimum(equal, limit), equal)
    weight = _weight(_value(found), top, heat)
    nth = tl.where(weight > 0.0, tl.floor((target - mass) / weight), 0.0)
    nth = tl.maximum(tl.minimum(nth, (equal - 1).to(tl.float64)), 0.0).to(tl.int32)
    return _nth(list_ptr, n, found, nth, TILE)


@triton.jit(do_not_specialize=["vocab"])
def _draw(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B] float64
    top_k_ptr,  # [B] int64
    top_p_ptr,  # [B] float64
    min_p_ptr,  # [B] float64
    seed_ptr,  # [B] int64
    position_ptr,  # [B] int64
    maxima_ptr,  # [B, C], as the survey left them, and so the next two
    ids_ptr,
    masses_ptr,
    chosen_ptr,  # [B, C] int32, scratch as the next two
    values_ptr,  # [B, ROOM] like logits
    places_ptr,  # [B, ROOM] int32
    tokens_ptr,  # [B] int64
    vocab,
    stride,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.cdiv(vocab, CHUNK)
    c = tl.arange(0, BLOCK_C)
    maxima_ptr += row * chunks
    maxima = tl.load(maxima_ptr + c, mask=c < chunks, other=float("-inf"))
    ids = tl.load(ids_ptr + row * chunks + c, mask=c < chunks, other=0)
    top, first = tl.max(maxima, axis=0, return_indices=True, return_indices_tie_break_left=True)
    heat = tl.load(temperature_ptr + row)
    token = tl.sum(tl.where(c == first, ids, 0), axis=0)
    if tl.min(ids, axis=0) < 0:
        token = -1
    elif heat > 0:
        row_ptr = logits_ptr + row * stride
        top_k = tl.minimum(tl.load(top_k_ptr + row), vocab)
        top_p = tl.load(top_p_ptr + row)
        floor = _floor(top, heat, tl.load(min_p_ptr + row), WAYS)
        u = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        masses = tl.load(masses_ptr + row * chunks + c, mask=(c < chunks) & (top_k == 0), other=0.0)
        if (top_k == 0) & (top_p >= 1.0) & (floor == LOWEST):
            token = _by_id(row_ptr, maxima, masses, top, heat, u, vocab, CHUNK, BLOCK_C)
        else:
            whole = tl.sum(masses * _weight(maxima, top, heat), axis=0)
            lowest = _lower_bound(maxima_ptr, chunks, vocab, whole, top, heat, top_k, top_p, floor, TILE, WAYS)
            values_ptr += row * ROOM
            places_ptr += row * ROOM
            count = _gather(
                row_ptr,
                maxima_ptr,
                chosen_ptr + row * chunks,
                values_ptr,
                places_ptr,
                vocab,
                chunks,
                lowest,
                CHUNK,
                BLOCK_C,
                ROOM,
            )
            list_ptr = row_ptr
            n = vocab
            if count <= ROOM:
                list_ptr = values_ptr
                n = count
            place = _by_rank(list_ptr, n, lowest, whole, top, heat, top_k, top_p, floor, u, TILE, WAYS)
            token = tl.where(count <= ROOM, tl.load(places_ptr + place, mask=count <= ROOM, other=0), place)
    tl.store(tokens_ptr + row, token.to(tl.int64))
