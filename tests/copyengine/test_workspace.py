"""The largest step's memory: against sums by hand, and against the kernel whose rows it counts."""

import msgspec
import pytest

from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.families import parse_spec
from copyengine.model_spec import DenseSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec, RopeSpec
from copyengine.workspace import (
    ATTENTION_ROWS,
    CHANGED_ROWS,
    CUBLAS_NBYTES,
    DRAW_BANDS,
    DRAW_CANDIDATES,
    DRAW_CHUNK,
    LATENT_PAIRS,
    SINK_SCORES,
    context_nbytes,
    gpu_step_nbytes,
    host_step_nbytes,
)
from kernels.attention.ref import QUERY_BLOCK
from kernels.attention.ref import SINK_SCORES as SCORES_AT_ONCE
from kernels.latent_attention.ref import BLOCK_PAIRS
from worker.drawing import BLOCK_ROWS

TINY = Sizes(
    layers=2, hidden=8, intermediate=4, experts=8, experts_per_token=2, heads=2, kv_heads=1, head_dim=4, vocab_size=10
)


def spec_of(sizes: Sizes = TINY) -> ModelSpec:
    return parse_spec(model_config(sizes))


def test_attention_over_the_whole_context() -> None:
    """By hand, for 2 heads and 1 KV head of 4: k and v of 3 heads, 512 rows of mask as bool and bfloat16."""
    spec = spec_of(msgspec.structs.replace(TINY, max_position=1000))
    per_position = 2 * 3 * 4 * 2 + 512 * 3
    for kv_tokens, context in ((16, 16), (999, 999), (1000, 1000), (5000, 1000)):
        assert context_nbytes(spec, "bfloat16", 4096, kv_tokens) == context * per_position
    assert context_nbytes(spec, "bfloat16", 1, 16) == 16 * (2 * 3 * 4 * 2 + 3)


def test_latent_attention() -> None:
    """By hand, for 2 heads over latents of 6 + 2, heads of 4 + 2 and 3: latents in bfloat16 and float32, keys of them,
    and scores twice; q, its rotated part and what is made of it, the latents, and what comes of it."""
    layer = LayerSpec(MlaSpec(2, 6, 4, 2, 3, 1.0, RopeSpec(1e4), q_rank=5), DenseSpec(1))
    spec = msgspec.structs.replace(spec_of(), layers=(layer,), max_position=1000)
    position = 6 * (2 + 4) + 8 * 4 + 2 * (2 + 4)
    assert context_nbytes(spec, "bfloat16", 4096, 10) == 10 * (position + 512 * 8)
    assert context_nbytes(spec, "bfloat16", 3, 10) == 10 * (position + 3 * 2 * 8)
    row = 5 + 2 * (4 + 2 * 2 + 6) + 3 * 8 + 2 * (6 + 2 * 3)
    assert gpu_step_nbytes(spec, "bfloat16", 2, 0) - CUBLAS_NBYTES == 5 * (2 * (3 * 8 + row) + 8 * 2) // 2
    assert host_step_nbytes(spec, 1, 0) == 4 * (4 * 8 + row) + 10 * 48


def test_attention_with_sinks_writes_scores_out() -> None:
    """By hand: four times, in float32, a million of them, or one row's of 2 heads."""
    plain = spec_of(msgspec.structs.replace(TINY, max_position=2_000_000))
    layer = plain.layers[0]
    sinks = msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, sinks=True))
    spec = msgspec.structs.replace(plain, layers=(layer, sinks))
    for context, scores in ((1000, SINK_SCORES), (1_000_000, 2 * 1_000_000)):
        more = context_nbytes(spec, "float32", 512, context) - context_nbytes(plain, "float32", 512, context)
        assert more == 16 * scores


def test_a_step_on_the_host() -> None:
    """By hand: 4 x 8 and 8 + 2 x (16 + 12) elements a row, 10 logits of 16 sequences, of four of them 50 bytes each
    that are changed, and six float64 of one."""
    assert host_step_nbytes(spec_of(), 3, 16) == 4 * 3 * (32 + 8 + 2 * 28) + 10 * (4 * 16 + 4 * 50 + 48)


def test_a_step_on_a_gpu() -> None:
    """By hand, in bfloat16: 4 x 8, 8 logits, 2 x 12 elements and 2 x 3 words; or attention's, in a model with more
    heads; or a wide shared expert's, or a dense MLP's; and angles of 4 float32 each."""
    cublas = CUBLAS_NBYTES
    assert gpu_step_nbytes(spec_of(), "bfloat16", 4, 0) - cublas == 5 * (2 * (32 + 8 + 24) + 24 + 32)
    wide = spec_of(msgspec.structs.replace(TINY, heads=16))
    assert gpu_step_nbytes(wide, "bfloat16", 2, 0) - cublas == 5 * (2 * (24 + 3 * 17 * 4) + 32) // 2
    layer = spec_of().layers[0]
    dense = msgspec.structs.replace(spec_of(), layers=(msgspec.structs.replace(layer, ffn=DenseSpec(100)),))
    assert gpu_step_nbytes(dense, "bfloat16", 2, 0) - cublas == 5 * (2 * (16 + 400) + 32) // 2
    shared = msgspec.structs.replace(layer, ffn=MoeSpec(8, 2, 4, True, 100))
    both = msgspec.structs.replace(spec_of(), layers=(shared,))
    assert gpu_step_nbytes(both, "bfloat16", 2, 0) - cublas == 5 * (2 * (8 + 8 + 16 + 400) + 16 + 32) // 2
    drawing = 10 * 8 + 1 * (32 * 12 + 20)
    assert gpu_step_nbytes(spec_of(), "float32", 0, 5) - cublas == 10 * (10 * (4 + 4) + drawing) + 4 * 10 * 50


def test_what_drawing_takes_does_not_grow_with_the_vocabulary_for_ever() -> None:
    """By hand, for 248,320 logits: room for 65,536, and 243 chunks of 32 bands."""
    large = spec_of(msgspec.structs.replace(TINY, vocab_size=248_320))
    row = gpu_step_nbytes(large, "float32", 0, 6) - gpu_step_nbytes(large, "float32", 0, 5)
    assert row == 2 * (248_320 * 8 + 65_536 * 8 + 243 * (32 * 12 + 20))


def test_every_running_sequence_has_a_row_of_logits() -> None:
    """Against V float32 values a row; the step itself is as large either way."""
    one, many = (host_step_nbytes(spec_of(), 4096, n) for n in (4, 68))
    assert many - one == 64 * 4 * 10


def test_rows_that_are_taken_at_once_are_those_of_who_takes_them() -> None:
    """Against their own constants, which this module must not import: they bring torch."""
    assert ATTENTION_ROWS == QUERY_BLOCK and LATENT_PAIRS == BLOCK_PAIRS and CHANGED_ROWS == BLOCK_ROWS
    assert SINK_SCORES == SCORES_AT_ONCE


def test_what_drawing_takes_on_a_gpu_is_what_its_kernels_are_given() -> None:
    pytest.importorskip("triton")
    from kernels.sampling import tri

    assert (DRAW_CHUNK, DRAW_BANDS, DRAW_CANDIDATES) == (tri.CHUNK, tri.BANDS, tri.CANDIDATES)
