"""Paged latent attention against its definition in float64, and against heads that each have keys and values of their
own; the Triton kernels against that and the reference."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.latent_attention import cost, decode_latent_attention, latent_attention, store_latent

ROOT = Path(__file__).parents[2]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Sequence:
    """One sequence's latents in pages that lie mixed in a pool, which holds what is not a number elsewhere."""

    def __init__(self, length: int, rank: int, rope: int, page_tokens: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(length + rank)
        self.latents = torch.randn(length, rank, generator=generator).to(dtype)
        self.ropes = torch.randn(length, rope, generator=generator).to(dtype)
        count = max(1, -(-length // page_tokens))
        self.pages = (torch.randperm(count, generator=generator) + 1).to(device)
        shape = (count + 2, page_tokens, 1)
        kept = [torch.full((*shape, width), float("nan"), dtype=dtype, device=device) for width in (rank, rope)]
        self.kept = kept[0], kept[1]
        places = torch.arange(length, device=device)
        pages, offsets = self.pages[places // page_tokens], places % page_tokens
        rows = (self.latents[:, None].to(device), self.ropes[:, None].to(device))
        store_latent(*rows, *self.kept, pages, offsets)
        self.generator, self.device = generator, device

    def queries(self, rows: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """q, as a product head by head gives it, and q_rope, a view of something wider."""
        rank, rope, dtype = self.latents.shape[1], self.ropes.shape[1], self.latents.dtype
        q = torch.randn(heads, rows, rank, generator=self.generator).to(dtype).to(self.device).transpose(0, 1)
        wide = torch.randn(rows, heads, rope + 6, generator=self.generator).to(dtype).to(self.device)
        return q, wide[..., 6:]

    def expected(self, q: torch.Tensor, q_rope: torch.Tensor, start: int, scale: float) -> torch.Tensor:
        """[n, heads, R] float64 on the device: the definition, with every score held and masked."""
        length = start + q.shape[0]
        c, r = (kept[:length].to(self.device).double() for kept in (self.latents, self.ropes))
        scores = torch.einsum("nhr,lr->nhl", q.double(), c) + torch.einsum("nhp,lp->nhl", q_rope.double(), r)
        positions = torch.arange(length, device=self.device)
        hidden = positions[None] > positions[start:, None]
        weights = torch.softmax((scale * scores).masked_fill(hidden[:, None], float("-inf")), dim=-1)
        return torch.einsum("nhl,lr->nhr", weights, c)


def check_prefill(
    rows: int, start: int, heads: int, rank: int, rope: int, page_tokens: int, dtype: torch.dtype, device: str
) -> None:
    sequence = Sequence(start + rows, rank, rope, page_tokens, dtype, device)
    q, q_rope = sequence.queries(rows, heads)
    scale = (rank + rope) ** -0.5
    out = latent_attention(q, q_rope, *sequence.kept, sequence.pages, start, scale)
    assert out.shape == (rows, heads, rank) and out.dtype == dtype and out.is_contiguous()
    expected = sequence.expected(q, q_rope, start, scale)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def check_decode(
    lengths: list[int], heads: int, rank: int, rope: int, page_tokens: int, dtype: torch.dtype, device: str
) -> None:
    """Rows over one pool; each equals itself alone with a wider table, bit for bit."""
    sequence = Sequence(max(lengths), rank, rope, page_tokens, dtype, device)
    q, q_rope = sequence.queries(len(lengths), heads)
    table = sequence.pages.to(torch.int32).repeat(len(lengths), 1)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = decode_latent_attention(q, q_rope, *sequence.kept, table, counts, 0.1)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        expected = torch.zeros(1, heads, rank, dtype=torch.float64, device=device)
        if length:
            expected = sequence.expected(q[one], q_rope[one], length - 1, 0.1)
        torch.testing.assert_close(out[one].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        wider = torch.nn.functional.pad(table[one], (0, 3))
        assert torch.equal(
            decode_latent_attention(q[one], q_rope[one], *sequence.kept, wider, counts[one], 0.1), out[one]
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "start", "heads"), [(0, 0, 3), (1, 0, 1), (1, 17, 4), (7, 0, 5), (40, 9, 16)])
def test_prefill_is_that_of_float64(rows: int, start: int, heads: int, dtype: torch.dtype) -> None:
    """40 rows of 16 heads are more than the reference scores at once."""
    check_prefill(rows, start, heads, 24, 6, 4, dtype, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decode_is_that_of_float64_row_by_row(dtype: torch.dtype) -> None:
    check_decode([1, 0, 16, 17, 33], 5, 24, 6, 16, dtype, "cpu")


def test_the_absorbed_form_is_attention_of_heads_with_keys_and_values_of_their_own() -> None:
    """Against the plain form in float64: k and v of each head made of the latents, and torch's softmax over them."""
    generator = torch.Generator().manual_seed(3)
    sequence = Sequence(9, 12, 4, 4, torch.float32, "cpu")
    k_up, v_up = torch.randn(2, 3, 5, 12, generator=generator).double()
    q_nope = torch.randn(9, 3, 5, generator=generator).double()
    q_rope = torch.randn(9, 3, 4, generator=generator)
    latents, ropes = sequence.latents.double(), sequence.ropes.double()
    scores = torch.einsum("thn,hnr,lr->htl", q_nope, k_up, latents)
    scores = 0.3 * (scores + torch.einsum("thp,lp->htl", q_rope.double(), ropes))
    weights = torch.softmax(scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf")), dim=-1)
    expected = torch.einsum("htl,lr,hvr->thv", weights, latents, v_up)
    absorbed = torch.einsum("thn,hnr->thr", q_nope, k_up).float()
    attended = latent_attention(absorbed, q_rope, *sequence.kept, sequence.pages, 0, 0.3)
    torch.testing.assert_close(torch.einsum("thr,hvr->thv", attended.double(), v_up), expected, atol=1e-4, rtol=1e-4)


def test_what_does_not_fit_together_is_refused() -> None:
    """Against the docstrings."""
    latents, ropes = torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 2)
    q, q_rope = torch.zeros(2, 5, 8), torch.zeros(2, 5, 2)
    pages, table, lengths = torch.tensor([0]), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for changed in ((q[..., :7], q_rope), (q, q_rope[:1]), (q, torch.zeros(2, 5, 4))):
        with pytest.raises(ValueError, match="expected q"):
            latent_attention(*changed, latents, ropes, pages, 0, 1.0)
    with pytest.raises(ValueError, match="of one type"):
        latent_attention(q.bfloat16(), q_rope, latents, ropes, pages, 0, 1.0)
    with pytest.raises(ValueError, match=r"positions 3 \.\. 4"):
        latent_attention(q, q_rope, latents, ropes, pages, 3, 1.0)
    with pytest.raises(ValueError, match="table must be"):
        decode_latent_attention(q, q_rope, latents, ropes, table.long(), lengths, 1.0)
    with pytest.raises(ValueError, match="lengths must be"):
        decode_latent_attention(q, q_rope, latents, ropes, table, lengths[:1], 1.0)
    with pytest.raises(ValueError, match="latent "):
        store_latent(torch.zeros(2, 1, 7), torch.zeros(2, 1, 2), latents, ropes, pages, pages)
    with pytest.raises(ValueError, match="offsets must be"):
        store_latent(torch.zeros(1, 1, 8), torch.zeros(1, 1, 2), latents, ropes, pages, pages.int())


def test_the_triton_kernels_in_the_interpreter() -> None:
    """Against the reference; rows alone and in other chunks as equality of bits."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.kernels.interpreted_latent_attention"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


TYPES = {
    **dict.fromkeys(("sums_ptr", "stats_ptr"), "*fp32"),
    "lengths_ptr": "*i32",
    "scale": "fp32",
    **dict.fromkeys(("rows", "start", "splits", "share", "table_stride"), "i32"),
    **dict.fromkeys(("q_stride", "q_head_stride", "q_rope_stride", "q_rope_head_stride"), "i32"),
}


def compile_all(capability: int, dtype: str, heads: int) -> None:
    """Each kernel for latents of 512 + 64: it fits shared memory and spills nothing."""
    from kernels.latent_attention import tri
    from tests.kernels.compiled_for import SHARED_NBYTES, expect_fits

    tile = cost.tile(heads, 4 if dtype == "fp32" else 2, SHARED_NBYTES[capability])
    pages = [torch.empty(1, 64, 1, width, device="meta") for width in (512, 64)]
    arguments = tri.launch_arguments(heads, pages[0], pages[1], tile, wide=True)
    values = dict.fromkeys(("q_ptr", "q_rope_ptr", "latent_ptr", "rope_ptr", "out_ptr"), f"*{dtype}")
    types = TYPES | values
    expect_fits(tri._prefill, types | {"table_ptr": "*i64"}, arguments | {"SPLIT": True}, capability)
    expect_fits(tri._prefill, types | {"table_ptr": "*i64"}, arguments | {"SPLIT": False}, capability)
    splits = cost.decode_splits(heads, tile)
    expect_fits(tri._decode, types | {"table_ptr": "*i32"}, arguments | {"SPLITS": splits}, capability)
    for decode, most in ((True, splits), (False, cost.PROGRAMS)):
        expect_fits(tri._merge, types, tri.merge_arguments(heads, 512, most, tile, decode), capability)


@pytest.mark.parametrize("capability", [90, 80])
def test_the_triton_kernels_compile_for_128_heads_over_latents_of_512_and_64(capability: int) -> None:
    """Against shared memory and registers of sm_90 and sm_80."""
    pytest.importorskip("triton")
    from kernels.latent_attention import tri
    from tests.kernels.compiled_for import expect_fits

    compile_all(capability, "bf16", 128)
    rows = dict.fromkeys(("latent_ptr", "rope_key_ptr", "latent_pages_ptr", "rope_pages_ptr"), "*bf16")
    types = rows | {"pages_ptr": "*i64", "offsets_ptr": "*i64", "latent_stride": "i32", "rope_stride": "i32"}
    expect_fits(tri._store_latent, types, tri.store_arguments(512, 64, 16), capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 90, 120])
@pytest.mark.parametrize(("dtype", "heads"), [("fp32", 128), ("fp16", 16), ("bf16", 16), ("bf16", 64)])
def test_they_compile_for_every_gpu_type_and_number_of_heads(capability: int, dtype: str, heads: int) -> None:
    """Against shared memory and registers."""
    pytest.importorskip("triton")
    compile_all(capability, dtype, heads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "start", "heads", "rank", "rope"),
    [(1, 0, 128, 512, 64), (33, 1000, 128, 512, 64), (130, 0, 20, 192, 32), (3, 2047, 128, 512, 64)],
)
def test_the_device_s_chunks_are_those_of_float64(
    rows: int, start: int, heads: int, rank: int, rope: int, dtype: torch.dtype
) -> None:
    """Whole contexts and split ones."""
    check_prefill(rows, start, heads, rank, rope, 16, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "rank", "rope"), [(128, 512, 64), (16, 512, 64)])
def test_the_device_s_decode_rows_are_those_of_float64_in_any_batch(
    heads: int, rank: int, rope: int, dtype: torch.dtype
) -> None:
    check_decode([1, 0, 16, 17, 100, 1025], heads, rank, rope, 16, dtype, "cuda")


@pytest.mark.gpu
def test_a_graph_of_a_decode_step_follows_lengths_and_pages_on_the_device() -> None:
    """Against the same call outside a graph, after lengths and tables have changed in place."""
    sequence = Sequence(900, 512, 64, 16, torch.bfloat16, "cuda")
    q, q_rope = sequence.queries(2, 128)
    table = sequence.pages.to(torch.int32).repeat(2, 1)
    lengths = torch.tensor([3, 900], dtype=torch.int32, device="cuda")
    decode_latent_attention(q, q_rope, *sequence.kept, table, lengths, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_latent_attention(q, q_rope, *sequence.kept, table, lengths, 0.1)
    for changed in ([900, 1], [512, 33], [0, 17]):
        lengths.copy_(torch.tensor(changed, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, decode_latent_attention(q, q_rope, *sequence.kept, table, lengths, 0.1))
