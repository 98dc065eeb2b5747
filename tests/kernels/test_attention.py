"""Paged attention against a naive float64 loop; the Triton kernels against float64 and the reference."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.attention import attention, cost, decode_attention, store_kv

ROOT = Path(__file__).parents[2]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[n, heads * D] float64, one row and head at a time; k and v are [length, kv_heads, D]."""
    rows, heads, head_dim = q.shape
    out = torch.zeros(rows, heads, head_dim, dtype=torch.float64)
    group = heads // k.shape[1]
    for i in range(rows):
        for h in range(heads):
            seen = slice(max(0, start + i + 1 - (window or start + i + 1)), start + i + 1)
            weights = torch.exp(scale * (k[seen, h // group].double() @ q[i, h].double()))
            whole = weights.sum() + (0 if sinks is None else sinks[h].double().exp())
            out[i, h] = weights / whole @ v[seen, h // group].double()
    return out.flatten(1)


def paged(tensor: torch.Tensor, page_tokens: int, pages: list[int], num_pages: int) -> torch.Tensor:
    """[num_pages, page_tokens, kv_heads, D] with row r in page `pages[r // page_tokens]`; not a number elsewhere."""
    out = torch.full((num_pages, page_tokens, *tensor.shape[1:]), float("nan"), dtype=tensor.dtype)
    for position, row in enumerate(tensor):
        out[pages[position // page_tokens], position % page_tokens] = row
    return out


class Decode:
    """One new token of each of several sequences, whose pages lie mixed in one pool, not a number elsewhere."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: str,
        window: int | None = None,
        with_sinks: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        self.window = window
        self.sinks = torch.randn(heads, generator=generator).to(device) if with_sinks else None
        self.lengths, self.scale = lengths, 1 / math.sqrt(head_dim)
        self.q = torch.randn(len(lengths), heads, head_dim, generator=generator).to(dtype)
        shape = (kv_heads, head_dim)
        self.k = [torch.randn(length, *shape, generator=generator).to(dtype) for length in lengths]
        self.v = [torch.randn(length, *shape, generator=generator).to(dtype) for length in lengths]
        counts = [-(-length // page_tokens) for length in lengths]
        free = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        table = torch.full((len(lengths), max(counts) + 3), -1, dtype=torch.int32)
        k_pages, v_pages = torch.full((2, sum(counts) + 1, page_tokens, *shape), float("nan"), dtype=dtype)
        for row, count in enumerate(counts):
            pages, free = free[:count], free[count:]
            table[row, :count] = torch.tensor(pages, dtype=torch.int32)
            for store, rows in ((k_pages, self.k[row]), (v_pages, self.v[row])):
                padded = torch.full((count * page_tokens, *shape), float("nan"), dtype=dtype)
                padded[: lengths[row]] = rows
                store[pages] = padded.view(count, page_tokens, *shape)
        self.pages = (k_pages.to(device), v_pages.to(device))
        self.table = table.to(device)
        self.on_device = (self.q.to(device), torch.tensor(lengths, dtype=torch.int32, device=device))

    def run(self) -> torch.Tensor:
        """[B, heads * D]"""
        q, lengths = self.on_device
        return decode_attention(q, *self.pages, self.table, lengths, self.scale, self.window, self.sinks)

    def run_alone(self, row: int, more_pages: int = 0) -> torch.Tensor:
        """[1, heads * D] with a table of the sequence's pages and `more_pages` others."""
        q, lengths = self.on_device
        page_tokens = self.pages[0].shape[1]
        count = max(1, -(-self.lengths[row] // page_tokens))
        table = torch.zeros(1, count + more_pages, dtype=torch.int32, device=q.device)
        table[0, :count] = self.table[row, :count]
        kind = (self.window, self.sinks)
        return decode_attention(q[row : row + 1], *self.pages, table, lengths[row : row + 1], self.scale, *kind)

    def check(self, out: torch.Tensor) -> None:
        """`out` is near float64's; rows of no length are zeros."""
        assert out.shape == (len(self.lengths), self.q[0].numel()) and out.dtype == self.q.dtype
        tolerance = TOLERANCE[self.q.dtype]
        for row, length in enumerate(self.lengths):
            expected = torch.zeros(1, self.q[0].numel(), dtype=torch.float64)
            if length:
                seen = slice(max(0, length - (self.window or length)), None)
                expected = last_row(self.q[row], self.k[row][seen], self.v[row][seen], self.scale, self.sinks)
            torch.testing.assert_close(out[row : row + 1].double().cpu(), expected, atol=tolerance, rtol=tolerance)


def last_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[1, heads * D] float64 of q [heads, D] over all of k, v [length, kv_heads, D]."""
    grouped = q.double().view(k.shape[1], -1, q.shape[1])
    scores = scale * torch.einsum("hgd,lhd->hgl", grouped, k.double())
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().cpu().view(*scores.shape[:2], 1)), dim=2)
    shares = torch.softmax(scores, dim=2)[..., : k.shape[0]]
    return torch.einsum("hgl,lhd->hgd", shares, v.double()).reshape(1, -1)


def store_and_check(dtype: torch.dtype, rows: int, kv_heads: int, head_dim: int, device: str) -> None:
    """store_kv of views of a qkv product and of packed rows, against a loop; what is not written stays."""
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(rows, 4 * kv_heads, head_dim, generator=generator).to(dtype).to(device)
    places = torch.randperm(4 * rows + 4, generator=generator)[:rows]
    pages, offsets = (places // 4).to(device), (places % 4).to(device)
    for k in (qkv[:, 2 * kv_heads : 3 * kv_heads], qkv[:, :kv_heads].contiguous()):
        v = qkv[:, 3 * kv_heads :]
        stored = torch.full((2, rows + 1, 4, kv_heads, head_dim), 7.0, dtype=dtype, device=device)
        expected = stored.clone()
        for i in range(rows):
            expected[0, pages[i], offsets[i]], expected[1, pages[i], offsets[i]] = k[i], v[i]
        store_kv(k, v, stored[0], stored[1], pages, offsets)
        assert torch.equal(stored, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 2), (4, 2, 16), (6, 1, 24), (3, 3, 64)])
@pytest.mark.parametrize(
    ("rows", "start", "page_tokens"),
    [(0, 5, 4), (1, 0, 1), (1, 37, 16), (2, 0, 16), (16, 16, 16), (17, 15, 16), (33, 0, 5), (5, 128, 127)],
)
def test_prefill_with_a_cached_prefix_and_decode_are_those_of_the_naive_loop(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rows: int, start: int, page_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + start)
    length = start + rows
    q = torch.randn(rows, heads, head_dim, generator=generator).to(dtype)
    k, v = (torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
    count = max(1, -(-length // page_tokens))
    pages = (torch.randperm(count, generator=generator) + 2).tolist()
    k_pages, v_pages = (paged(tensor, page_tokens, pages, count + 3) for tensor in (k, v))
    scale = 1 / math.sqrt(head_dim)
    out = attention(q, k_pages, v_pages, torch.tensor(pages), start, scale)
    assert out.shape == (rows, heads * head_dim) and out.dtype == dtype
    torch.testing.assert_close(out.double(), naive(q, k, v, start, scale), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "window", "with_sinks"),
    [
        *((torch.float32, window, with_sinks) for window in (None, 1, 5, 17, 400) for with_sinks in (False, True)),
        *((dtype, window, True) for window in (None, 17) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_windows_and_sinks_are_those_of_the_naive_loop(
    dtype: torch.dtype, window: int | None, with_sinks: bool
) -> None:
    """Chunks with a cached prefix and decode rows, what lies in pages before the window being no numbers."""
    for rows, start, page_tokens in ((0, 5, 4), (1, 0, 1), (1, 37, 16), (2, 0, 16), (17, 15, 16), (33, 0, 5)):
        generator = torch.Generator().manual_seed(rows * 100 + start)
        q = torch.randn(rows, 6, 8, generator=generator).to(dtype)
        k, v = (torch.randn(start + rows, 2, 8, generator=generator).to(dtype) for _ in range(2))
        sinks = torch.randn(6, generator=generator) if with_sinks else None
        pages = list(range(-(-(start + rows) // page_tokens)))
        first_seen = max(0, start + 1 - (window or start + 1))
        stored = [paged(tensor, page_tokens, pages, len(pages) + 1) for tensor in (k, v)]
        for tensor in stored:
            tensor[: first_seen // page_tokens] = math.nan
        expected = naive(q, k, v, start, 0.4, window, sinks)
        out = attention(q, stored[0], stored[1], torch.tensor(pages), start, 0.4, window, sinks)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        if rows == 1:
            table, lengths = torch.tensor([pages, pages], dtype=torch.int32), torch.tensor([start + 1, 0])
            q_twice, lengths = q.repeat(2, 1, 1), lengths.to(torch.int32)
            both = decode_attention(q_twice, stored[0], stored[1], table, lengths, 0.4, window, sinks)
            assert torch.equal(both[:1], out) and not both[1].any()


@pytest.mark.parametrize("rows", [511, 512, 513])
def test_chunks_longer_than_a_query_block(rows: int) -> None:
    """Against the naive loop at rows around the block's edge."""
    generator = torch.Generator().manual_seed(rows)
    start, page_tokens = 9, 16
    q = torch.randn(rows, 2, 8, generator=generator)
    k, v = (torch.randn(start + rows, 1, 8, generator=generator) for _ in range(2))
    pages = list(range(-(-(start + rows) // page_tokens)))
    k_pages, v_pages = (paged(tensor, page_tokens, pages, len(pages)) for tensor in (k, v))
    for window, sinks in ((None, None), (300, None), (None, torch.tensor([0.5, -1.0])), (300, torch.ones(2))):
        out = attention(q, k_pages, v_pages, torch.tensor(pages), start, 0.3, window, sinks)
        for row in {0, 1, rows - 2, rows - 1}:
            expected = naive(q[row : row + 1], k, v, start + row, 0.3, window, sinks)
            torch.testing.assert_close(out[row : row + 1].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("q", "kv", "pages", "start"),
    [
        ((3, 4, 8), (2, 4, 3, 8), 2, 0),
        ((3, 4, 8), (2, 4, 2, 6), 2, 0),
        ((3, 4, 8), (2, 4, 2, 8), 2, 6),
        ((3, 4, 8), (2, 4, 2, 8), 2, -1),
        ((3, 32), (2, 4, 2, 8), 2, 0),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q: tuple[int, ...], kv: tuple[int, ...], pages: int, start: int) -> None:
    """Against the docstring."""
    with pytest.raises(ValueError, match=r"fit|expected"):
        attention(torch.zeros(q), torch.zeros(kv), torch.zeros(kv), torch.arange(pages), start, 1.0)


@pytest.mark.parametrize(
    ("window", "sinks"), [(0, None), (-1, None), (4, torch.zeros(3)), (None, torch.zeros(4, dtype=torch.bfloat16))]
)
def test_windows_and_sinks_that_do_not_fit_are_refused(window: int | None, sinks: torch.Tensor | None) -> None:
    """Against the docstring."""
    pages, q = torch.zeros(5, 4, 2, 8), torch.zeros(1, 4, 8)
    table, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"window must|sinks must"):
        attention(q, pages, pages, table[0].long(), 0, 1.0, window, sinks)
    with pytest.raises(ValueError, match=r"window must|sinks must"):
        decode_attention(q, pages, pages, table, lengths, 1.0, window, sinks)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 2), (12, 1, 24), (4, 2, 64)])
def test_decode_rows_are_those_of_the_naive_loop_and_of_each_sequence_alone(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Against float64; and as equality against the row alone with a table just long enough."""
    case = Decode([1, 0, 16, 17, 127, 200], heads, kv_heads, head_dim, 16, dtype, "cpu")
    out = case.run()
    case.check(out)
    for row in range(len(case.lengths)):
        assert torch.equal(case.run_alone(row), out[row : row + 1])


def test_stored_keys_and_values_are_where_they_were_told() -> None:
    """Against a loop over rows; what is not written stays."""
    store_and_check(torch.float32, 5, 2, 8, "cpu")
    store_and_check(torch.bfloat16, 0, 1, 4, "cpu")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"q": torch.zeros(2, 3, 8)}, "heads"),
        ({"table": torch.zeros(3, 4, dtype=torch.int32)}, "table"),
        ({"table": torch.zeros(2, 4, dtype=torch.int64)}, "table"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "lengths"),
    ],
)
def test_a_decode_step_that_does_not_fit_is_refused(change: dict[str, torch.Tensor], match: str) -> None:
    """Against the docstring."""
    pages = torch.zeros(5, 4, 2, 8)
    arguments = {
        "q": torch.zeros(2, 4, 8),
        "table": torch.zeros(2, 4, dtype=torch.int32),
        "lengths": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=match):
        fit = arguments | change
        decode_attention(fit["q"], pages, pages, fit["table"], fit["lengths"], 1.0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"k": torch.zeros(2, 3, 8), "v": torch.zeros(2, 3, 8)}, "does not fit"),
        ({"v": torch.zeros(2, 2, 8, dtype=torch.bfloat16)}, "does not fit"),
        ({"v": torch.zeros(3, 2, 8)}, "expected"),
        ({"pages": torch.zeros(2, dtype=torch.int32)}, "pages"),
        ({"offsets": torch.zeros(3, dtype=torch.int64)}, "offsets"),
    ],
)
def test_keys_and_values_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], match: str) -> None:
    """Against the docstring."""
    arguments = {
        "k": torch.zeros(2, 2, 8),
        "v": torch.zeros(2, 2, 8),
        "k_pages": torch.zeros(5, 4, 2, 8),
        "v_pages": torch.zeros(5, 4, 2, 8),
        "pages": torch.zeros(2, dtype=torch.int64),
        "offsets": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=match):
        store_kv(**(arguments | change))


def test_the_triton_kernels_in_the_interpreter() -> None:
    """Against the reference; a row's bits do not change with what it is computed with."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.kernels.interpreted_attention"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


FEW_WORDS = 48
"""Bytes of a thread's stack that the assembler may take outside the loop where registers are tight."""


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize(
    ("capability", "head_dim", "group"),
    [
        (90, 256, 12),
        (90, 128, 1),
        (90, 96, 4),
        (90, 64, 32),
        (80, 256, 12),
        pytest.param(86, 256, 12, marks=pytest.mark.slow),
        pytest.param(120, 128, 12, marks=pytest.mark.slow),
    ],
)
def test_the_triton_kernels_compile(dtype: str, capability: int, head_dim: int, group: int) -> None:
    """Against the shared memory of sm_90 and of smaller GPUs; in 16 bits on sm_90 nothing spills, and prefill's
    products are warpgroup matrix instructions."""
    pytest.importorskip("triton")
    from kernels.attention import tri
    from tests.kernels.compiled_for import SHARED_NBYTES, expect_fits

    types = dict.fromkeys(("sums_ptr", "stats_ptr", "sinks_ptr"), "*fp32")
    types |= {"table_ptr": "*i32", "lengths_ptr": "*i32"}
    types |= dict.fromkeys(("rows", "start", "splits", "share", "q_stride", "q_head_stride", "table_stride"), "i32")
    types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), dtype) | {"scale": "fp32"}
    narrow = dtype == "*bf16"
    stack = 0 if narrow and capability == 90 else FEW_WORDS
    sizes = (2 * group, 2, head_dim)
    limits = (2 if narrow else 4, SHARED_NBYTES[capability])
    pages = torch.empty(8, 16, 2, head_dim, device="meta")
    tile, splits = cost.decode_plan(*sizes, *limits)
    arguments = tri.launch_arguments(2 * group, pages, tile, wide=False) | {"SPLITS": splits}
    expect_fits(tri._decode, types, arguments, capability, stack)
    expect_fits(tri._merge, types, tri.merge_arguments(2 * group, pages, splits, tile, decode=True), capability)
    types["table_ptr"] = "*i64"
    for rows in (4096, 38):
        tile, splits = cost.prefill_plan(rows, *sizes, 30_000, *limits)
        arguments = tri.launch_arguments(2 * group, pages, tile, wide=False) | {"SPLIT": splits > 1, "SINKS": False}
        compiled = expect_fits(tri._prefill, types, arguments, capability, stack)
        merge = tri.merge_arguments(2 * group, pages, cost.PROGRAMS, tile, decode=False)
        expect_fits(tri._merge, types, merge, capability)
        assert "wgmma.mma_async" in compiled.asm["ptx"] or not narrow or capability != 90


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_the_triton_kernels_compile_with_windows_and_sinks(capability: int) -> None:
    """In gpt-oss' geometry, against the shared memory of the GPU; on sm_90 nothing spills."""
    pytest.importorskip("triton")
    from kernels.attention import tri
    from tests.kernels.compiled_for import SHARED_NBYTES, expect_fits

    types = dict.fromkeys(("sums_ptr", "stats_ptr", "sinks_ptr"), "*fp32") | {"lengths_ptr": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("rows", "start", "splits", "share", "q_stride", "q_head_stride", "table_stride"), "i32")
    types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    stack = 0 if capability == 90 else FEW_WORDS
    pages = torch.empty(8, 16, 8, 64, device="meta")
    tile, splits = cost.decode_plan(64, 8, 64, 2, SHARED_NBYTES[capability])
    arguments = tri.launch_arguments(64, pages, tile, False, 128) | {"SPLITS": splits}
    expect_fits(tri._decode, types | {"table_ptr": "*i32"}, arguments, capability, stack)
    expect_fits(tri._merge, types, tri.merge_arguments(64, pages, splits, tile, True, 128, True), capability)
    for split, tile in enumerate(cost.prefill_tiles(64, 2, SHARED_NBYTES[capability])):
        arguments = tri.launch_arguments(64, pages, tile, False, 128) | {"SPLIT": split > 0, "SINKS": True}
        expect_fits(tri._prefill, types | {"table_ptr": "*i64"}, arguments, capability, stack)
        merge = tri.merge_arguments(64, pages, cost.PROGRAMS, tile, False, 128, True)
        expect_fits(tri._merge, types, merge, capability)


def test_offsets_beyond_32_bits_compile_too() -> None:
    """For sm_90, and the kernel that stores."""
    pytest.importorskip("triton")
    from kernels.attention import tri
    from tests.kernels.compiled_for import SHARED_NBYTES, expect_fits

    types = dict.fromkeys(("table_ptr", "pages_ptr", "offsets_ptr"), "*i64")
    types |= dict.fromkeys(("rows", "start", "splits", "share", "q_stride", "q_head_stride"), "i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("k_stride", "k_head_stride", "v_stride", "v_head_stride"), "i32")
    pointers = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "k_pages_ptr", "v_pages_ptr")
    types |= dict.fromkeys(("sums_ptr", "stats_ptr", "sinks_ptr"), "*fp32") | dict.fromkeys(pointers, "*bf16")
    tile, splits = cost.prefill_plan(4096, 24, 2, 256, 30_000, 2, SHARED_NBYTES[90])
    pages = torch.empty(8, 16, 2, 256, device="meta")
    arguments = tri.launch_arguments(24, pages, tile, wide=True) | {"SPLIT": splits > 1, "SINKS": False}
    expect_fits(tri._prefill, types, arguments, stack_nbytes=FEW_WORDS)
    expect_fits(tri._store_kv, types, tri.store_arguments(2, 256, 16))


def test_a_plan_fills_a_gpu_and_splits_in_powers_of_two() -> None:
    """Against what the kernels need, at sizes around every limit."""
    for rows in (1, 2, 38, 127, 128, 129, 1324, 4096, 100_000):
        for length in (rows, rows + 255, rows + 256, rows + 32_768, 262_144 + rows):
            for heads, kv_heads in ((24, 2), (32, 8), (8, 8), (1, 1)):
                tile, splits = cost.prefill_plan(rows, heads, kv_heads, 256, length, 2, 227 * 1024)
                programs = -(-rows * (heads // kv_heads) // tile.block_m) * kv_heads
                assert splits & (splits - 1) == 0 and (splits == 1 or programs * splits <= cost.PROGRAMS)
                assert splits == 1 or length // splits >= cost.LEAST_SHARE
    for kv_heads in (1, 2, 3, 8, 16, 128):
        tile, splits = cost.decode_plan(8 * kv_heads, kv_heads, 128, 2, 227 * 1024)
        assert splits & (splits - 1) == 0 and splits >= 8 and tile.block_m >= 8


class Chunk:
    """A prefill chunk on a device, after `start` positions, its pages mixed, not a number past its end."""

    def __init__(
        self,
        rows: int,
        start: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        window: int | None = None,
        with_sinks: bool = False,
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(rows + start)
        length, page_tokens = start + rows, 16
        count = max(1, -(-length // page_tokens))
        wide = torch.randn(rows, heads + 1, head_dim, device="cuda", generator=generator)
        self.q = wide.to(dtype)[:, :heads]
        self.kv = torch.full((2, count * page_tokens, kv_heads, head_dim), float("nan"), dtype=dtype, device="cuda")
        self.kv[:, :length].normal_(generator=generator)
        self.pages = torch.randperm(count, generator=generator, device="cuda")
        self.stored = torch.empty(2, count, page_tokens, kv_heads, head_dim, dtype=dtype, device="cuda")
        self.stored[:, self.pages] = self.kv.view(2, count, page_tokens, kv_heads, head_dim)
        self.start, self.scale, self.window = start, head_dim**-0.5, window
        self.sinks = torch.randn(heads, device="cuda", generator=generator) if with_sinks else None

    def check(self) -> None:
        """attention gives what float64 does, head by head."""
        kind = (self.window, self.sinks)
        out = attention(self.q, self.stored[0], self.stored[1], self.pages, self.start, self.scale, *kind)
        rows, heads, head_dim = self.q.shape
        assert out.shape == (rows, heads * head_dim) and out.dtype == self.q.dtype
        length = self.start + rows
        visible = torch.ones(rows, length, dtype=torch.bool, device="cuda").tril(self.start)
        visible = visible.triu(self.start + 1 - (self.window or length))
        group = heads // self.kv.shape[2]
        for head in range(heads):
            k, v = self.kv[:, :length, head // group].double()
            scores = (self.q[:, head].double() @ k.T * self.scale).masked_fill(~visible, -math.inf)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks[head].double().expand(rows, 1)), dim=1)
            expected = torch.softmax(scores, dim=1)[:, :length] @ v
            actual = out.view(rows, heads, head_dim)[:, head].double()
            tolerance = TOLERANCE[self.q.dtype]
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


ON_DEVICE = [
    (torch.bfloat16, 24, 2, 256),
    (torch.float16, 24, 2, 256),
    (torch.float32, 24, 2, 256),
    (torch.bfloat16, 32, 8, 128),
    (torch.bfloat16, 3, 3, 64),
    (torch.bfloat16, 12, 2, 96),
    (torch.float32, 32, 1, 24),
]
"""Type, heads, kv heads and D; each compiles kernels of its own, for some seconds."""


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim"), ON_DEVICE)
def test_the_device_s_chunks_are_those_of_float64(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """With and without a cached prefix, split and whole, around the tiles' and the pages' edges."""
    for rows, start in ((0, 5), (1, 0), (1, 37), (2, 0), (16, 16), (33, 0), (63, 64), (128, 0), (129, 255), (513, 1)):
        Chunk(rows, start, heads, kv_heads, head_dim, dtype).check()
    for rows, start in ((1, 9000), (38, 28_000), (201, 5000), (1324, 0)):
        Chunk(rows, start, heads, kv_heads, head_dim, dtype).check()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim"), ON_DEVICE)
def test_the_device_s_decode_rows_are_those_of_float64_and_of_each_sequence_alone(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Against float64; and as equality against B = 1 with a table of another width."""
    lengths = [1, 0, 15, 16, 17, 63, 64, 65, 127, 1000, 4097, 8192]
    case = Decode(lengths, heads, kv_heads, head_dim, 16, dtype, "cuda")
    out = case.run()
    case.check(out)
    for row in range(len(lengths)):
        assert torch.equal(case.run_alone(row, more_pages=row), out[row : row + 1])


WINDOWS = [(torch.bfloat16, 64, 8, 64, 128), (torch.float32, 12, 2, 96, 100), (torch.float16, 24, 2, 256, 4096)]
"""Type, heads, kv heads, D and window; the first is gpt-oss'."""


@pytest.mark.gpu
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "window"), WINDOWS)
def test_the_device_s_chunks_with_windows_and_sinks_are_those_of_float64(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int, with_sinks: bool
) -> None:
    """Around the window's and the tiles' edges, split and whole; and sinks without a window."""
    shape = (heads, kv_heads, head_dim, dtype)
    for rows, start in ((0, 5), (1, 0), (1, 37), (1, 9000), (33, 0), (129, 255), (513, 1), (38, 28_000), (1324, 0)):
        Chunk(rows, start, *shape, window, with_sinks).check()
    for rows in (window - 1, window, window + 1):
        Chunk(rows, 0, *shape, window, with_sinks).check()
        Chunk(1, rows - 1, *shape, window, with_sinks).check()
    for rows, start in ((1, 9000), (201, 5000)):
        Chunk(rows, start, *shape, None, with_sinks).check()


@pytest.mark.gpu
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "window"), WINDOWS)
def test_the_device_s_decode_rows_with_windows_and_sinks(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int, with_sinks: bool
) -> None:
    """Against float64; as equality against B = 1; and replayed from a CUDA graph."""
    lengths = [1, 0, 17, 64, window - 1, window, window + 1, 1000, 8192]
    for own in (window, None):
        case = Decode(lengths, heads, kv_heads, head_dim, 16, dtype, "cuda", own, with_sinks)
        out = case.run()
        case.check(out)
        for row in range(len(lengths)):
            assert torch.equal(case.run_alone(row, more_pages=row), out[row : row + 1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = case.run()
        graph.replay()
        assert torch.equal(captured, out)


@pytest.mark.gpu
def test_the_device_s_longest_context() -> None:
    """Against float64 at 262,144 positions and one fewer, with pages of 128 tokens."""
    case = Decode([262_144, 262_143], 16, 1, 64, 128, torch.bfloat16, "cuda")
    case.check(case.run())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_device_stores_keys_and_values_where_they_were_told(dtype: torch.dtype) -> None:
    """Against a loop over rows; what is not written stays."""
    for rows, kv_heads, head_dim in ((0, 1, 4), (1, 2, 256), (33, 3, 96), (129, 8, 128)):
        store_and_check(dtype, rows, kv_heads, head_dim, "cuda")


@pytest.mark.gpu
def test_a_captured_decode_step_replays_with_other_lengths() -> None:
    """Against the same launches outside the graph."""
    case = Decode([700, 3, 64, 1500], 24, 2, 256, 16, torch.bfloat16, "cuda")
    q, lengths = case.on_device
    k, v = torch.randn(2, 4, 2, 256, device="cuda").to(torch.bfloat16)
    places = torch.zeros(2, 4, dtype=torch.int64, device="cuda")
    stored = torch.stack(case.pages).nan_to_num(0.5)

    def step() -> torch.Tensor:
        store_kv(k, v, stored[0], stored[1], places[0], places[1])
        return decode_attention(q, stored[0], stored[1], case.table, lengths, case.scale)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for shorter in (0, 1, 130):
        lengths.copy_(torch.tensor(case.lengths) - shorter).clamp_(min=0)
        places.copy_(torch.stack((case.table[:, 0].long(), torch.arange(4, device="cuda"))))
        k.normal_()
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step())


@pytest.mark.gpu
def test_what_the_device_does_not_take_is_refused() -> None:
    """Against the docstrings."""
    pages, table = torch.zeros(2, 4, 1, 8, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    for q, refused in (
        (torch.zeros(3, 33, 8, device="cuda"), pages),
        (torch.zeros(3, 1, 257, device="cuda"), torch.zeros(2, 4, 1, 257, device="cuda")),
        (torch.zeros(3, 1, 8, device="cuda", dtype=torch.bfloat16), pages),
        (torch.zeros(3, 2, 8, device="cuda"), torch.zeros(2, 2, 4, 8, device="cuda").transpose(1, 2)),
    ):
        with pytest.raises(ValueError, match=r"more than|one type|contiguous"):
            attention(q, refused, refused, table, 0, 1.0)
