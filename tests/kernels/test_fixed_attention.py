"""Attention with a fixed order of sums: against the other kind, and of a row as equality of bits.

A row of a whole prompt against the row of any chunk, and decoded; on the CPU, on a device, and in Triton's interpreter.
"""

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import attention, decode_attention
from kernels.latent_attention import decode_latent_attention, latent_attention
from kernels.online_softmax import BLOCK_POSITIONS
from tests.kernels.test_attention import TOLERANCE

ROOT = Path(__file__).parents[2]
PAGE_TOKENS = 16
SPARE = 3
"""Pages of no sequence, not numbers."""


class Context:
    """Pages of two kinds [kv_heads, width], that hold `length` positions in mixed order and beyond them no numbers."""

    def __init__(
        self, length: int, shapes: tuple[tuple[int, int], tuple[int, int]], dtype: torch.dtype, device: str, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = -(-length // PAGE_TOKENS)
        self.pages = torch.randperm(count + SPARE, generator=generator)[:count]
        stores = [torch.full((count + SPARE, PAGE_TOKENS, *shape), math.nan, dtype=dtype) for shape in shapes]
        for store in stores:
            rows = torch.full((count * PAGE_TOKENS, *store.shape[2:]), math.nan, dtype=dtype)
            rows[:length] = torch.randn(length, *store.shape[2:], generator=generator).to(dtype)
            store[self.pages] = rows.view(count, PAGE_TOKENS, *store.shape[2:])
        self.k, self.v = (store.to(device) for store in stores)
        self.pages = self.pages.to(device)

    def table(self, rows: int, more: int) -> torch.Tensor:
        """[rows, P + more] int32, behind the pages what is no page's number."""
        own = self.pages.to(torch.int32).repeat(rows, 1)
        return torch.cat([own, own.new_zeros(rows, more)], dim=1)


def expect_one_set_of_bits(
    heads: int,
    kv_heads: int,
    head_dim: int,
    length: int,
    dtype: torch.dtype,
    kind: tuple[int | None, bool],
    device: str,
) -> None:
    """All rows of a chunk of `length`, against chunks that are cut elsewhere, and decoded, alone and together."""
    window, with_sinks = kind
    context = Context(length, ((kv_heads, head_dim),) * 2, dtype, device, length + heads)
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(length, heads, head_dim, generator=generator).to(dtype).to(device)
    sinks = torch.randn(heads, generator=generator).to(device) if with_sinks else None
    over = (0.3, window, sinks)
    whole = attention(q, context.k, context.v, context.pages, 0, *over, fixed=True)
    near = attention(q, context.k, context.v, context.pages, 0, *over)
    torch.testing.assert_close(whole, near, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for cuts in cuts_of(length):
        parts = [
            attention(q[a:b], context.k, context.v, context.pages, a, *over, fixed=True) for a, b in pairwise(cuts)
        ]
        assert torch.equal(torch.cat(parts).view(torch.uint8), whole.view(torch.uint8)), cuts
    rows = decoded_rows(length)
    lengths = torch.tensor([*(row + 1 for row in rows), 0], dtype=torch.int32, device=device)
    table = context.table(len(lengths), 70)
    decoded = decode_attention(q[[*rows, 0]], context.k, context.v, table, lengths, *over, fixed=True)
    assert torch.equal(decoded[:-1].view(torch.uint8), whole[rows].view(torch.uint8)) and not decoded[-1].any()
    alone = decode_attention(q[rows[:1]], context.k, context.v, table[:1, :1], lengths[:1], *over, fixed=True)
    assert torch.equal(alone, whole[rows[:1]])


def expect_one_set_of_bits_of_latents(
    heads: int, rank: int, rope: int, length: int, dtype: torch.dtype, device: str
) -> None:
    """The same over latents."""
    context = Context(length, ((1, rank), (1, rope)), dtype, device, length + heads)
    generator = torch.Generator().manual_seed(heads)
    q, q_rope = (torch.randn(length, heads, w, generator=generator).to(dtype).to(device) for w in (rank, rope))
    whole = latent_attention(q, q_rope, context.k, context.v, context.pages, 0, 0.1, fixed=True)
    near = latent_attention(q, q_rope, context.k, context.v, context.pages, 0, 0.1)
    torch.testing.assert_close(whole, near, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for cuts in cuts_of(length):
        parts = [
            latent_attention(q[a:b], q_rope[a:b], context.k, context.v, context.pages, a, 0.1, fixed=True)
            for a, b in pairwise(cuts)
        ]
        assert torch.equal(torch.cat(parts).view(torch.uint8), whole.view(torch.uint8)), cuts
    rows = decoded_rows(length)
    lengths = torch.tensor([row + 1 for row in rows], dtype=torch.int32, device=device)
    table = context.table(len(rows), 70)
    decoded = decode_latent_attention(q[rows], q_rope[rows], context.k, context.v, table, lengths, 0.1, fixed=True)
    assert torch.equal(decoded.view(torch.uint8), whole[rows].view(torch.uint8))


def cuts_of(length: int) -> list[list[int]]:
    """By 64, and by other numbers."""
    by_64 = [*range(0, length, 64), length]
    ends = (torch.rand(length, generator=torch.Generator().manual_seed(length)) * 90 + 1).long().cumsum(0).tolist()
    return [by_64, [0, *(end for end in ends if end < length), length]]


def decoded_rows(length: int) -> list[int]:
    """The first positions of blocks and of shares, the last ones, and the last of all."""
    edges = [at + step for at in (0, 16, 64, 256, 512, 1024) for step in (-1, 0, 1)]
    return sorted({row for row in edges if 0 <= row < length} | {length - 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "kind"),
    [
        (1, 1, 8, (None, False)),
        (6, 2, 24, (None, True)),
        (4, 4, 16, (17, False)),
        (8, 1, 32, (BLOCK_POSITIONS + 9, True)),
    ],
)
def test_a_row_has_one_set_of_bits(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, kind: tuple[int | None, bool]
) -> None:
    """Over contexts of one block of keys, and of several."""
    for length in (1, BLOCK_POSITIONS, 2 * BLOCK_POSITIONS + 5):
        expect_one_set_of_bits(heads, kv_heads, head_dim, length, dtype, kind, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_over_latents_has_one_set_of_bits(dtype: torch.dtype) -> None:
    """Of few heads, and of more than a tile's pairs."""
    for heads, length in ((4, BLOCK_POSITIONS + 30), (70, 40)):
        expect_one_set_of_bits_of_latents(heads, 24, 8, length, dtype, "cpu")


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 90), st.integers(0, 300), st.sampled_from([None, 1, 5, 260]), st.sampled_from([(2, 1), (3, 3)]))
def test_a_chunk_anywhere(rows: int, start: int, window: int | None, heads: tuple[int, int]) -> None:
    """Its last row, against that row alone."""
    context = Context(start + rows, ((heads[1], 8),) * 2, torch.float32, "cpu", rows)
    q = torch.randn(rows, heads[0], 8, generator=torch.Generator().manual_seed(start))
    chunk = attention(q, context.k, context.v, context.pages, start, 0.5, window, fixed=True)
    last = attention(q[-1:], context.k, context.v, context.pages, start + rows - 1, 0.5, window, fixed=True)
    assert torch.equal(chunk[-1:], last)


def test_the_other_kind_has_more_than_one() -> None:
    """What is tried above can fail."""
    context = Context(300, ((1, 24),) * 2, torch.float32, "cpu", 1)
    q = torch.randn(300, 4, 24, generator=torch.Generator().manual_seed(1))
    whole = attention(q, context.k, context.v, context.pages, 0, 0.3)
    rows = [attention(q[i : i + 1], context.k, context.v, context.pages, i, 0.3) for i in range(300)]
    assert not torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("script", ["interpreted_fixed_attention", "interpreted_linear"])
def test_the_triton_kernels_in_the_interpreter(script: str) -> None:
    """Against the references, and as equality of bits; see the scripts."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", f"tests.kernels.{script}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr
