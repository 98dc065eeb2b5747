# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: ranks in a list of logits, by search for the key above which there is enough; keys and masses of logits."""

import triton
import triton.language as tl

TILE = tl.constexpr(512)
"""Logits of a list looked at together."""
WAYS = tl.constexpr(8)


@triton.jit
def weight(x, top, temperature):
    """The mass of x [...], in float64; that of the largest logit is 1."""
    return tl.exp((x.to(tl.float64) - top.to(tl.float64)) / temperature)


@triton.jit
def key_of(x):
    """int32 that orders like x; the two zeros are one."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def wide_key(x):
    """The key of x, a finite float64 or nearly so, rounded to float32."""
    return key_of(tl.maximum(x, -3.4e38).to(tl.float32)).to(tl.int64)


@triton.jit
def value_of(key):
    """The float32 of a key [...] int64."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def mass_above(list_ptr, n, keys, top, temperature):
    """How many of the list's logits are at or above each of `keys` [WAYS], and their mass."""
    count = tl.zeros((WAYS, TILE), tl.int32)
    mass = tl.zeros((WAYS, TILE), tl.float64)
    begin = 0
    while begin < n:
        i = begin + tl.arange(0, TILE)
        x = tl.load(list_ptr + i, mask=i < n, other=float("-inf")).to(tl.float32)
        above = (key_of(x).to(tl.int64)[None, :] >= keys[:, None]) & (i < n)[None, :]
        count += above.to(tl.int32)
        mass += tl.where(above, weight(x, top, temperature)[None, :], 0.0)
        begin += TILE
    return tl.sum(count, axis=1), tl.sum(mass, axis=1)


@triton.jit
def search(list_ptr, n, low, high, top, temperature, least, over, reach):
    """The largest key in low .. high - 1 with `least` of the list's logits at or above it, of a mass over `over` or at
    `reach`. `low` is taken to be such a key."""
    way = tl.arange(0, WAYS)
    while high - low > 1:
        keys = low + 1 + (high - low - 1) * way // WAYS
        count, mass = mass_above(list_ptr, n, keys, top, temperature)
        enough = (count >= least) & ((mass > over) | (mass >= reach))
        low = tl.maximum(low, tl.max(tl.where(enough, keys, low), axis=0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, keys), axis=0))
    return low


@triton.jit
def smallest_from(list_ptr, n, key):
    """The smallest key in the list at or above `key`."""
    smallest = tl.full((), 2**31 - 1, tl.int64)
    begin = 0
    while begin < n:
        i = begin + tl.arange(0, TILE)
        x = tl.load(list_ptr + i, mask=i < n, other=float("-inf")).to(tl.float32)
        keys = key_of(x).to(tl.int64)
        smallest = tl.minimum(smallest, tl.min(tl.where((keys >= key) & (i < n), keys, 2**31 - 1), axis=0))
        begin += TILE
    return smallest


@triton.jit
def edge_at(list_ptr, n, key, top, temperature):
    """How many logits are at the key, how many above, and the mass of those above."""
    way = tl.arange(0, WAYS)
    count, mass = mass_above(list_ptr, n, key + (way > 0).to(tl.int64), top, temperature)
    at_or_above = tl.sum(tl.where(way == 0, count, 0), axis=0)
    above = tl.sum(tl.where(way == 1, count, 0), axis=0)
    return at_or_above - above, above, tl.sum(tl.where(way == 1, mass, 0.0), axis=0)


@triton.jit
def nth_equal(list_ptr, n, key, nth):
    """The place in the list of the `nth` logit (from 0) at the key."""
    place = 0
    seen = 0
    begin = 0
    while (begin < n) & (seen <= nth):
        i = begin + tl.arange(0, TILE)
        x = tl.load(list_ptr + i, mask=i < n, other=float("-inf")).to(tl.float32)
        equal = ((key_of(x).to(tl.int64) == key) & (i < n)).to(tl.int32)
        hit = (equal > 0) & (seen + tl.cumsum(equal, 0) - 1 == nth)
        place += tl.sum(tl.where(hit, i, 0), axis=0)
        seen += tl.sum(equal, axis=0)
        begin += TILE
    return place
