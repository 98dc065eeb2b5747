"""The gated delta rule: the definition token by token in float64, chunks against it, and the device's kernels."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.causal_conv import causal_conv, causal_conv_step
from kernels.gated_delta import Gates, Tokens, gated_delta, gated_delta_step, ref
from kernels.norm import gated_rms_norm
from kernels.state_pieces import Pieces, Span
from tests.kernels.delta_cases import SPANS, Sizes, copy_of, gates_of, pieces_of, states_of, tokens_of

ROOT = Path(__file__).parents[2]
SIZES = Sizes(2, 6, 12, 20)
LARGE = Sizes(16, 32, 128, 128)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def by_definition(
    tokens: Tokens, gates: Gates, state: torch.Tensor, spans: list[Span]
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, Hv, Dv] and the states after the step, token by token in float64."""
    states, outs, row = state.to(torch.float64), [], 0
    before = states.clone()
    for span in spans:
        s = before[span.source] if span.source >= 0 else torch.zeros_like(before[0])
        kept = dict(enumerate(span.keep))
        for done in range(1, span.rows + 1):
            one = Tokens(*(x[row : row + 1] for x in tokens))
            out, s = ref.recurrence(ref.prepare(one, gates, torch.float64), s)
            outs.append(out[:, 0])
            row += 1
            for end, slot in kept.values():
                if end == done:
                    states[slot] = s
    return torch.stack(outs), states


def check(spans: list[Span], sizes: Sizes, dtype: torch.dtype, device: str) -> None:
    """Outputs and states within TOLERANCE of the largest."""
    tokens = tokens_of(sum(span.rows for span in spans), sizes, dtype, device)
    gates = gates_of(sizes, dtype, device)
    state = states_of(sizes.heads, sizes.k_dim, sizes.v_dim, device=device)
    wanted, states = by_definition(tokens, gates, state, spans)
    out = gated_delta(tokens, gates, state, pieces_of(spans, device))
    for ours, theirs in ((out, wanted), (state, states)):
        assert float((ours.to(torch.float64) - theirs).abs().max() / theirs.abs().max()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("case", SPANS)
def test_chunks_are_the_recurrence(case: str) -> None:
    """Against the definition in float64, with keys so much alike that the system is far from the identity."""
    check(SPANS[case], SIZES, torch.float32, "cpu")


def test_a_chunk_in_float64_is_the_recurrence_to_the_last_digits() -> None:
    tokens, gates = tokens_of(64, SIZES), gates_of(SIZES)
    rows, state = ref.prepare(tokens, gates, torch.float64), states_of(6, 12, 20)[0].to(torch.float64)
    for ours, theirs in zip(ref.chunk(rows, state), ref.recurrence(rows, state), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-11)


SOURCES, TARGETS = [-1, 3, 5, 7, 2], [1, 3, -1, 8, 4]


def check_step(sizes: Sizes, dtype: torch.dtype, device: str) -> None:
    """One row of each of five sequences, against the definition; and each alone, to the bit."""
    tokens, gates = tokens_of(5, sizes, dtype, device), gates_of(sizes, dtype, device)
    state = states_of(sizes.heads, sizes.k_dim, sizes.v_dim, device=device)
    spans = [Span(1, s, [(1, t)] if t >= 0 else []) for s, t in zip(SOURCES, TARGETS, strict=True)]
    wanted, states = by_definition(tokens, gates, state, spans)
    before = copy_of(state)
    sources, targets = (torch.tensor(x, dtype=torch.int32, device=device) for x in (SOURCES, TARGETS))
    out = gated_delta_step(tokens, gates, state, sources, targets)
    for ours, theirs in ((out, wanted), (state, states)):
        assert float((ours.to(torch.float64) - theirs).abs().max() / theirs.abs().max()) <= TOLERANCE[dtype]
    for row in range(5):
        own, at = copy_of(before), slice(row, row + 1)
        alone = gated_delta_step(Tokens(*(x[at] for x in tokens)), gates, own, sources[at], targets[at])
        assert torch.equal(alone, out[at])
        assert TARGETS[row] < 0 or torch.equal(own[TARGETS[row]], state[TARGETS[row]])


def test_a_step_is_one_token_of_the_recurrence_whatever_else_is_in_it() -> None:
    check_step(SIZES, torch.float32, "cpu")


def check_alone(sizes: Sizes, dtype: torch.dtype, device: str) -> None:
    """A span's rows and states have the same bits alone as between others; so has what follows a snapshot."""
    spans = [Span(7, -1, [(7, 0)]), Span(90, 1, [(20, 2), (90, 1)]), Span(65, 3, [(65, 3)])]
    tokens, gates = tokens_of(162, sizes, dtype, device), gates_of(sizes, dtype, device)
    before = states_of(sizes.heads, sizes.k_dim, sizes.v_dim, device=device)
    whole = copy_of(before)
    out = gated_delta(tokens, gates, whole, pieces_of(spans, device))
    own = copy_of(before)
    alone = gated_delta(Tokens(*(x[7:97] for x in tokens)), gates, own, pieces_of(spans[1:2], device))
    assert torch.equal(alone, out[7:97]) and torch.equal(own[1:3], whole[1:3])
    later = gated_delta(Tokens(*(x[27:97] for x in tokens)), gates, own, pieces_of([Span(70, 2, [(70, 4)])], device))
    assert torch.equal(later, out[27:97]) and torch.equal(own[4], whole[1])


def test_a_spans_bits_are_its_own() -> None:
    check_alone(SIZES, torch.float32, "cpu")


def test_shapes_that_do_not_fit_are_refused() -> None:
    """Against the docstring."""
    tokens, gates, pieces = tokens_of(3, SIZES), gates_of(SIZES), pieces_of([Span(3, -1, [])])
    with pytest.raises(ValueError, match="do not fit together"):
        gated_delta(tokens, gates, states_of(6, 12, 21), pieces)
    with pytest.raises(ValueError, match="do not fit together"):
        gated_delta(tokens._replace(a=tokens.a[:, :5]), gates, states_of(6, 12, 20), pieces)
    with pytest.raises(ValueError, match="float32"):
        gated_delta(tokens, gates, states_of(6, 12, 20).to(torch.float64), pieces)
    with pytest.raises(ValueError, match="sources"):
        slots = torch.zeros(2, dtype=torch.int32)
        gated_delta_step(tokens, gates, states_of(6, 12, 20), slots, slots)


def test_triton_computes_what_the_reference_does() -> None:
    """In Triton's interpreter, the convolution's and the gated norm's kernels too."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.kernels.interpreted_gated_delta"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


FLOAT32 = ("state_ptr", "solved_ptr", "scores_ptr", "totals_ptr")
INT32 = ("table_ptr", "spans_ptr", "sources_ptr", "targets_ptr")
STRIDES = {f"{name}_STRIDE": 8192 for name in "QKV"} | {f"{name}_HEAD_STRIDE": 128 for name in "QKV"}
STRIDES |= {"A_STRIDE": 12352, "B_STRIDE": 12352, "SLOT_STRIDE": 36 * (32 * 128 * 128 + 3 * 8192)}


def expect_compiles(kernel: Any, arguments: dict[str, Any], capability: int, stack_nbytes: int = 0) -> None:
    from tests.kernels.compiled_for import expect_fits

    pointers = {name: "*fp32" if name in FLOAT32 else "*i32" if name in INT32 else "*bf16" for name in kernel.arg_names}
    types = {name: kind if name.endswith("_ptr") else "i32" for name, kind in pointers.items()} | {"eps": "fp32"}
    known = {name: value for name, value in (arguments | STRIDES).items() if name in kernel.arg_names}
    options = {name: value for name, value in arguments.items() if name.startswith("num_")}
    expect_fits(kernel, types, known | options, capability, stack_nbytes)


@pytest.mark.parametrize(("capability", "stack_nbytes"), [(90, 160), (80, 512)])
def test_the_triton_kernels_compile(capability: int, stack_nbytes: int) -> None:
    """Against shared memory and registers at Qwen3-Next's sizes; two kernels spill a few tens of registers."""
    pytest.importorskip("triton")
    from kernels.causal_conv import tri as conv
    from kernels.gated_delta import tri, tri_step
    from kernels.norm import tri_gated

    prefill = tri.launch_arguments(16, 32, 128, exact=False)
    advance = {"V_DIM": 128, "BLOCK_V": tri.BLOCK_V, "num_warps": tri.ADVANCE_WARPS}
    expect_compiles(tri._solve, prefill | {"num_warps": tri.SOLVE_WARPS}, capability, stack_nbytes)
    expect_compiles(tri._advance, prefill | advance, capability, stack_nbytes)
    expect_compiles(tri_step._take_in, tri_step.launch_arguments(16, 32, 128, 128), capability)
    expect_compiles(conv._convolve, conv.rows_arguments(4), capability)
    expect_compiles(conv._keep, conv.state_arguments(4), capability)
    expect_compiles(conv._step, conv.state_arguments(4), capability)
    expect_compiles(tri_gated._gated_rms_norm, tri_gated.launch_arguments(128), capability)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [SIZES, LARGE])
def test_the_device_computes_the_recurrence(dtype: torch.dtype, sizes: Sizes) -> None:
    for spans in SPANS.values():
        check(spans, sizes, dtype, "cuda")
    check_step(sizes, dtype, "cuda")
    check_alone(sizes, dtype, "cuda")


@pytest.mark.gpu
def test_a_graph_takes_tokens_into_the_states_it_is_told_of() -> None:
    """A replay with other slots than it was captured with, against the eager step; the other slots stay as they are."""
    tokens, gates = tokens_of(5, LARGE, torch.bfloat16, "cuda"), gates_of(LARGE, torch.bfloat16, "cuda")
    state = states_of(32, 128, 128, device="cuda")
    sources, targets = (torch.full((5,), -1, dtype=torch.int32, device="cuda") for _ in range(2))
    compute: Callable[[], torch.Tensor] = lambda: gated_delta_step(tokens, gates, state, sources, targets)  # noqa: E731
    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    sources.copy_(torch.tensor(SOURCES, dtype=torch.int32))
    targets.copy_(torch.tensor(TARGETS, dtype=torch.int32))
    eager = copy_of(state)
    wanted = gated_delta_step(tokens, gates, eager, sources, targets)
    graph.replay()
    assert torch.equal(out, wanted) and torch.equal(state, eager)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device() -> None:
    spans = [Span(70, 4, [(1, 5), (70, 4)]), Span(3, -1, [(3, 9)])]
    pieces: Pieces = pieces_of(spans, "cuda")
    tokens, gates = tokens_of(73, LARGE, torch.bfloat16, "cuda"), gates_of(LARGE, torch.bfloat16, "cuda")
    state, conv = states_of(32, 128, 128, device="cuda"), states_of(3, 512, device="cuda")
    x, weight = torch.randn(73, 512, device="cuda"), torch.randn(512, 4, device="cuda")
    slots = torch.arange(8, dtype=torch.int32, device="cuda")
    few, before = Tokens(*(part[:8] for part in tokens)), torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gated_delta(tokens, gates, state, pieces)
        gated_delta_step(few, gates, state, slots, slots)
        causal_conv(x, weight, conv, pieces)
        causal_conv_step(x[:8], weight, conv, slots, slots)
        gated_rms_norm(tokens.v, tokens.v, torch.ones_like(tokens.v[0, 0]), 1e-6)
    finally:
        torch.cuda.set_sync_debug_mode(before)
