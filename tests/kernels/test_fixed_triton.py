"""The Triton kernels with a fixed order of sums: compiled for GPUs on a machine without one, and on a device.

There a row's bits are those that it has alone, in every number of rows around a tile's edges; values are those of
float64 or of the other kind.
"""

import pytest
import torch

from kernels.attention.cost import prefill_tiles
from kernels.formats import layout
from kernels.grouped_gemm import cost as grouped_cost
from kernels.grouped_gemm import variant
from kernels.latent_attention import cost as latent_cost
from kernels.linear import cost, heads_linear, linear
from kernels.moe_align import align_in_blocks
from tests.kernels import device_checks
from tests.kernels.expert_records import KINDS
from tests.kernels.test_fixed_attention import expect_one_set_of_bits, expect_one_set_of_bits_of_latents
from tests.kernels.test_grouped_gemm import COMPILED

CAPABILITIES = [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 86, 120))]
ON_DEVICE = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 129, 300)
"""Rows."""


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_compile(capability: int, dtype: str) -> None:
    """Of few and of many rows of the weight, by heads and with a bias; in 16 bits by sm_90's warpgroups."""
    pytest.importorskip("triton")
    from kernels.linear import tri
    from tests.kernels.compiled_for import expect_fits

    types = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "out_ptr"), dtype)
    types |= dict.fromkeys(("tokens", "w_head_stride", "w_row_stride", "w_stride"), "i32")
    for heads, columns, out, bias in ((1, 2048, 5120, True), (1, 2048, 151_936, False), (128, 128, 512, False)):
        arguments = tri.launch_arguments(heads, columns, out, bias, cost.tile(out, 2 if dtype == "*bf16" else 4))
        compiled = expect_fits(tri._linear, types, arguments | ({"w_stride": 1} if heads == 1 else {}), capability)
        assert "wgmma.mma_async" in compiled.asm["ptx"] or dtype != "*bf16" or capability != 90


@pytest.mark.parametrize("dtype", ["*bf16", pytest.param("*fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_attention_compiles(capability: int, dtype: str) -> None:
    """In the geometries of Qwen3-30B-A3B, Qwen3-Next, gpt-oss (windows and sinks) and DeepSeek-V3."""
    pytest.importorskip("triton")
    from kernels.attention import fixed_tri
    from kernels.latent_attention import fixed_tri as latent_tri
    from tests.kernels.compiled_for import SHARED_NBYTES, expect_fits

    narrow, shared = dtype == "*bf16", SHARED_NBYTES[capability]
    types = dict.fromkeys(("sums_ptr", "stats_ptr", "sinks_ptr"), "*fp32") | {"scale": "fp32"}
    types |= dict.fromkeys(("rows", "after", "splits", "table_stride"), "i32")
    types |= dict.fromkeys(("table_ptr", "lengths_ptr"), "*i32")
    types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "q_rope_ptr", "latent_ptr", "rope_ptr"), dtype)
    for group, kv_heads, head_dim, window in ((8, 4, 128, None), (8, 2, 256, None), (8, 8, 64, 128)):
        pages = torch.empty(8, 16, kv_heads, head_dim, device="meta")
        tile = fixed_tri.fixed_tile(group, head_dim, 2 if narrow else 4, shared)
        arguments = fixed_tri.share_arguments(group * kv_heads, pages, tile, window=window)
        compiled = expect_fits(fixed_tri._share, types, arguments, capability, 48)
        assert "wgmma.mma_async" in compiled.asm["ptx"] or not narrow or capability != 90
        merge = fixed_tri.merge_arguments(group * kv_heads, head_dim, window=window, sinks=window is not None)
        expect_fits(fixed_tri._merge, types, merge, capability)
    latents, ropes = (torch.empty(8, 16, 1, width, device="meta") for width in (512, 64))
    of_latents = latent_cost.tile(128, 2 if narrow else 4, shared)
    expect_fits(latent_tri._share, types, latent_tri.share_arguments(128, latents, ropes, of_latents), capability, 200)
    expect_fits(fixed_tri._merge, types, fixed_tri.merge_arguments(128, 512), capability)


@pytest.mark.parametrize("kind", COMPILED)
def test_tiles_of_experts_are_one_for_any_number_of_tokens(kind: str) -> None:
    """Of a kind that is compiled for all GPUs already: that of steps of as many rows for each expert."""
    record = layout(COMPILED[kind], 2560, 640)
    device = torch.device("cpu")
    chosen = {variant(tokens, 10, 512, record, device, fixed=True) for tokens in (0, 1, 16, 17, 900, 5000)}
    assert chosen == {variant(1000, 10, 512, record, device)}
    assert next(iter(chosen)).gate_up.block_m == grouped_cost.FIXED_ROWS


def test_a_share_begins_with_a_block() -> None:
    """Or else its first block would hold positions of the share before."""
    from kernels.attention.fixed_tri import SHARE

    for shared_kib in (99, 163, 227):
        for head_dim in (64, 128, 256):
            for itemsize in (2, 4):
                assert all(SHARE % tile.block_n == 0 for tile in prefill_tiles(head_dim, itemsize, shared_kib * 1024))
        for heads in (1, 16, 128):
            assert SHARE % latent_cost.tile(heads, 2, shared_kib * 1024).block_n == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "out"), [(2048, 5120), (2048, 128), (300, 61), (2048, 20_001)])
def test_a_row_of_a_product_on_a_device(dtype: torch.dtype, width: int, out: int) -> None:
    """Against float64, and every row against the row alone."""
    generator = torch.Generator("cuda").manual_seed(width + out)
    weight = (torch.randn(out, width, device="cuda", generator=generator) / width**0.5).to(dtype)
    bias = torch.randn(out, device="cuda", generator=generator).to(dtype)
    x = torch.randn(max(ON_DEVICE), width, device="cuda", generator=generator).to(dtype)
    whole = linear(x, weight, bias, 0)
    bound = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole.double(), exact, atol=bound, rtol=bound)
    for count in ON_DEVICE:
        for first in (0, min(7, len(x) - count)):
            part = slice(first, first + count)
            assert torch.equal(linear(x[part], weight, bias, 0), whole[part]), (count, first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_by_heads_on_a_device(dtype: torch.dtype) -> None:
    """In the geometry of DeepSeek-V3's absorbed keys and values, of fewer heads."""
    generator = torch.Generator("cuda").manual_seed(1)
    for width, out in ((128, 512), (512, 128)):
        weight = (torch.randn(16, width, out, device="cuda", generator=generator) / width**0.5).to(dtype)
        x = torch.randn(130, 16, width + 64, device="cuda", generator=generator).to(dtype)[..., :width]
        whole = heads_linear(x, weight, 0)
        exact = torch.einsum("tha,hab->thb", x.double(), weight.double())
        bound = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(whole.double(), exact, atol=bound, rtol=bound)
        for count in (1, 2, 17, 64, 65):
            assert torch.equal(heads_linear(x[:count], weight, 0), whole[:count])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "kind"),
    [(32, 4, 128, (None, False)), (16, 2, 256, (None, False)), (64, 8, 64, (128, True)), (6, 2, 24, (700, True))],
)
def test_a_row_on_a_device_has_one_set_of_bits(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, kind: tuple[int | None, bool]
) -> None:
    """Over contexts of one share and of several."""
    for length in (1, 511, 1100):
        expect_one_set_of_bits(heads, kv_heads, head_dim, length, dtype, kind, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_over_latents_on_a_device_has_one_set_of_bits(dtype: torch.dtype) -> None:
    """In DeepSeek-V3's geometry, and of few heads of odd sizes."""
    expect_one_set_of_bits_of_latents(128, 512, 64, 600, dtype, "cuda")
    expect_one_set_of_bits_of_latents(5, 40, 8, 1100, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("format_name", [*KINDS, "bfloat16", "float32"])
def test_rows_of_experts_on_a_device(format_name: str) -> None:
    """A token's rows beside others, whose experts take some of its own, against those of the token alone."""
    device_checks.fixed_rows_alike(format_name, 300, 16, 4, 512, 160)


def test_blocks_of_one_tile() -> None:
    """On the host they are cut as on a device: against their bound."""
    record = layout("float32", 32, 16)
    rows = variant(1, 2, 4, record, torch.device("cpu"), fixed=True).gate_up.block_m
    _, blocks = align_in_blocks(torch.zeros(40, 1, dtype=torch.int32), 4, rows)
    assert blocks.rows[:2].tolist() == [rows, 40 - rows]
