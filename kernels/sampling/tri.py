# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: four launches for all rows, of which the last two are for those that top_k, top_p or min_p cut.

The survey leaves of each chunk of CHUNK logits the largest, its id, and, where the draw will need it, the mass. With
that a greedy row is done, and a row that nothing cuts reads the one chunk that its draw falls into. The others are
drawn in the order of the reference's stable sort: by logit, then the lower id (see ranks).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.sampling import ref
from kernels.sampling.bands import (
    DRAW,
    FACTS,
    FLOOR,
    LOWEST,
    MASS,
    TOP,
    count_bands,
    lowest_kept,
    marks_down_to,
    min_p_floor,
)
from kernels.sampling.ranks import draw_by_rank
from kernels.sampling.search import weight

CHUNK = 1024
CANDIDATES = 65_536
"""Logits that there is room for of one band: more than flat ones leave in one of 32 at 248,320 tokens."""
BANDS = 32
"""64 and 128 made narrower bands and took longer to count: figures in tests/bench/results/LOG.md."""
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
    bands: int = BANDS,
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
    facts = torch.empty(rows, FACTS, dtype=torch.float64, device=device)
    marks = torch.empty(rows, bands, dtype=torch.int64, device=device)
    counts = torch.empty(rows, chunks, bands, dtype=torch.int32, device=device)
    shares = torch.empty(rows, chunks, bands, dtype=torch.float64, device=device)
    chosen = torch.empty_like(ids)
    values = torch.empty(rows, room, dtype=logits.dtype, device=device)
    places = torch.empty(rows, room, dtype=torch.int32, device=device)
    settings = [x.contiguous() for x in (temperature, top_k, top_p, min_p, seed, position)]
    size = (vocab, logits.stride(0))
    constants = arguments(vocab, chunk, room, bands)
    _survey[(chunks, rows)](logits, *settings[:2], maxima, ids, masses, *size, **constants["_survey"])
    _draw[(rows,)](logits, *settings, maxima, ids, masses, facts, marks, tokens, *size, **constants["_draw"])
    banded = (logits, settings[0], maxima, facts, marks, counts, shares)
    count_bands[(chunks, rows)](*banded, *size, **constants["count_bands"])
    ranked = (logits, *settings[:3], facts, marks, counts, shares, chosen, values, places, tokens)
    draw_by_rank[(rows,)](*ranked, *size, **constants["draw_by_rank"])
    return tokens


def arguments(vocab: int, chunk: int = CHUNK, room: int = CANDIDATES, bands: int = BANDS) -> dict[str, dict[str, Any]]:
    """Constants and options of each kernel."""
    block_c = triton.next_power_of_2(triton.cdiv(vocab, chunk))
    facts = {"FACTS": FACTS, "BANDS": bands, "CHUNK": chunk}
    return {
        "_survey": {"CHUNK": chunk, "num_warps": 4},
        "_draw": facts | {"BLOCK_C": block_c, "num_warps": 8},
        # Warps side by side over STEP logits: none weighs what another one does.
        "count_bands": facts | {"STEP": min(chunk, 256), "num_warps": 8},
        "draw_by_rank": facts | {"BLOCK_C": block_c, "ROOM": room, "num_warps": 8},
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
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0) & (tl.load(top_k_ptr + row) == 0):
        tl.store(masses_ptr + where, tl.sum(weight(x, best, temperature), axis=0))


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
def _by_id(row_ptr, maxima, masses, top, temperature, u, vocab, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """The token whose mass, together with that of all lower ids, is the first beyond u of the whole."""
    c = tl.arange(0, BLOCK_C)
    mass = tl.cumsum(masses * weight(maxima, top, temperature), 0)
    whole = tl.max(mass, axis=0)
    target = u * whole
    # u * whole may round up to the whole: then it is the last that has any mass.
    chunk = tl.minimum(tl.sum((mass <= target).to(tl.int32), axis=0), tl.sum((mass < whole).to(tl.int32), axis=0))
    before = tl.sum(tl.where(c == chunk - 1, mass, 0.0), axis=0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row_ptr + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    mass = before + tl.cumsum(weight(x, top, temperature), 0)
    last = tl.sum((mass < tl.max(mass, axis=0)).to(tl.int32), axis=0)
    return chunk * CHUNK + tl.minimum(tl.sum((mass <= target).to(tl.int32), axis=0), last)


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
    facts_ptr,  # [B, FACTS] float64
    marks_ptr,  # [B, BANDS] int64
    tokens_ptr,  # [B] int64
    vocab,
    stride,
    FACTS: tl.constexpr,
    BANDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The token of a row that nothing cuts; facts and marks of the others."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.cdiv(vocab, CHUNK)
    c = tl.arange(0, BLOCK_C)
    maxima_ptr += row * chunks
    maxima = tl.load(maxima_ptr + c, mask=c < chunks, other=float("-inf"))
    ids = tl.load(ids_ptr + row * chunks + c, mask=c < chunks, other=0)
    top, first = tl.max(maxima, axis=0, return_indices=True, return_indices_tie_break_left=True)
    temperature = tl.load(temperature_ptr + row)
    token = tl.sum(tl.where(c == first, ids, 0), axis=0)
    facts_ptr += row * FACTS
    tl.store(facts_ptr + MASS, -1.0)
    if tl.min(ids, axis=0) < 0:
        token = -1
    elif temperature > 0:
        top_k = tl.minimum(tl.load(top_k_ptr + row), vocab)
        top_p = tl.load(top_p_ptr + row)
        floor = min_p_floor(top, temperature, tl.load(min_p_ptr + row))
        u = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        masses = tl.load(masses_ptr + row * chunks + c, mask=(c < chunks) & (top_k == 0), other=0.0)
        if (top_k == 0) & (top_p >= 1.0) & (floor == LOWEST):
            token = _by_id(logits_ptr + row * stride, maxima, masses, top, temperature, u, vocab, CHUNK, BLOCK_C)
        else:
            whole = tl.sum(masses * weight(maxima, top, temperature), axis=0)
            lowest = lowest_kept(maxima_ptr, chunks, vocab, whole, top, temperature, top_k, top_p, floor)
            tl.store(marks_ptr + row * BANDS + tl.arange(0, BANDS), marks_down_to(lowest, top, temperature, BANDS))
            tl.store(facts_ptr + TOP, top.to(tl.float64))
            tl.store(facts_ptr + MASS, whole)
            tl.store(facts_ptr + FLOOR, floor.to(tl.float64))
            tl.store(facts_ptr + DRAW, u)
    tl.store(tokens_ptr + row, token.to(tl.int64))
