"""The causal convolution: against torch's own over the whole sequence, in float64."""

import pytest
import torch
from torch.nn import functional

from kernels.causal_conv import causal_conv, causal_conv_step
from kernels.state_pieces import Span
from tests.kernels.delta_cases import SPANS, pieces_of, states_of

CHANNELS = 70
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def by_definition(padded: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[R, C] float64 of rows [W - 1 + R, C]."""
    out = functional.conv1d(
        padded.to(torch.float64).mT[None], weight.to(torch.float64)[:, None], groups=weight.shape[0]
    )
    return functional.silu(out[0].mT)


def check(spans: list[Span], width: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(width)
    rows = sum(span.rows for span in spans)
    x = torch.randn(rows, CHANNELS + 9, generator=generator).to(dtype).to(device)[:, 4 : 4 + CHANNELS]
    weight = torch.randn(CHANNELS, width, generator=generator).to(dtype).to(device)
    state = states_of(width - 1, CHANNELS, device=device)
    before, wanted = state.clone(), state.clone()
    out, row = causal_conv(x, weight, state, pieces_of(spans, device)), 0
    for span in spans:
        old = before[span.source] if span.source >= 0 else torch.zeros_like(before[0])
        padded = torch.cat((old, x[row : row + span.rows].to(torch.float32)))
        close = by_definition(padded, weight)
        error = (out[row : row + span.rows].to(torch.float64) - close).abs().max() / close.abs().max()
        assert float(error) <= TOLERANCE[dtype]
        for end, slot in span.keep:
            wanted[slot] = padded[end : end + width - 1]
        row += span.rows
    assert torch.equal(state, wanted)


def check_step(dtype: torch.dtype, device: str) -> None:
    """Against the same rows as spans of one row each, to the bit."""
    sources, targets = [-1, 3, 5, 7, 2], [1, 3, -1, 8, 4]
    spans = [Span(1, s, [(1, t)] if t >= 0 else []) for s, t in zip(sources, targets, strict=True)]
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)[:, 20:290]
    weight = torch.linspace(-1, 1, 270 * 4).view(270, 4).to(dtype).to(device)
    ours, theirs = states_of(3, 270, device=device), states_of(3, 270, device=device)
    places = [torch.tensor(named, dtype=torch.int32, device=device) for named in (sources, targets)]
    stepped = causal_conv_step(x, weight, ours, places[0], places[1])
    assert torch.equal(stepped, causal_conv(x, weight, theirs, pieces_of(spans, device))) and torch.equal(ours, theirs)


@pytest.mark.parametrize("case", SPANS)
@pytest.mark.parametrize("width", [2, 4])
def test_rows_and_states_are_those_of_the_whole_sequence(case: str, width: int) -> None:
    check(SPANS[case], width, torch.float32, "cpu")


def test_a_step_is_a_span_of_one_row() -> None:
    check_step(torch.float32, "cpu")


def test_what_does_not_fit_is_refused() -> None:
    """Against the docstring."""
    pieces = pieces_of([Span(3, -1, [])])
    for x, state in ((torch.zeros(3, 8), states_of(2, 8)), (torch.zeros(3, 7), states_of(3, 8))):
        with pytest.raises(ValueError, match="do not fit"):
            causal_conv(x, torch.zeros(8, 4), state, pieces)
    with pytest.raises(ValueError, match="float32"):
        causal_conv(torch.zeros(3, 8), torch.zeros(8, 4), states_of(3, 8).to(torch.float64), pieces)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_device_s_rows_and_states_are_those_of_the_whole_sequence(dtype: torch.dtype) -> None:
    for spans in SPANS.values():
        for width in (2, 4, 8):
            check(spans, width, dtype, "cuda")
    check_step(dtype, "cuda")
