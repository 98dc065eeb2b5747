"""What is not a number in one sequence, in one expert, or in memory that nobody may read, beside what is sound.

Each check computes twice, with sound neighbours and with bad ones, and wants the same bits of the sound ones.
"""

from collections.abc import Callable
from typing import Any

import torch

from kernels.gated_delta import Tokens
from kernels.grouped_gemm import combine
from kernels.state_pieces import Span
from tests.kernels.delta_cases import SLOTS, Sizes, copy_of, gates_of, pieces_of, states_of, tokens_of
from tests.kernels.expert_records import Experts

BAD = (float("nan"), float("inf"))
SIZES = Sizes(1, 2, 12, 40)
SPANS = [Span(70, 1, [(70, 1)]), Span(9, -1, [(4, 2), (9, 3)]), Span(66, 4, [(66, 4)])]
"""The first one's sequence is bad. The second starts from zeros, into slots that a bad one had before."""
SOUND = slice(70, 145)
READ, WRITTEN = 4, [2, 3, 4]
SOURCES, TARGETS = [1, -1, 4], [1, 3, 4]


def spoilt_states(state: torch.Tensor, bad: float) -> torch.Tensor:
    """All slots but the one that a sound sequence goes on from."""
    other = copy_of(state)
    other[[slot for slot in range(SLOTS) if slot != READ]] = bad
    return other


def spoilt_rows(x: torch.Tensor, rows: int, bad: float) -> torch.Tensor:
    """A copy with the same strides, whose first `rows` are bad."""
    copy = x.new_empty(0).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())  # type: ignore[no-untyped-call]
    copy[:rows] = bad
    return copy


def check_states(gated_delta: Callable[..., Any], causal_conv: Callable[..., Any], bad: float) -> None:
    """Prefill: spans beside a bad one."""
    pieces, tokens, gates = pieces_of(SPANS), tokens_of(145, SIZES), gates_of(SIZES)
    _compare(
        lambda x, state: gated_delta(x, gates, state, pieces),
        (tokens, Tokens(*(spoilt_rows(part, 70, bad) for part in tokens))), states_of(2, 12, 40), SOUND, bad,
    )  # fmt: skip
    x, weight = torch.randn(145, 75, generator=torch.Generator().manual_seed(0))[:, :70], torch.ones(70, 4)
    _compare(
        lambda x, state: causal_conv(x, weight, state, pieces),
        (x, spoilt_rows(x, 70, bad)),
        states_of(3, 70),
        SOUND,
        bad,
    )


def check_state_steps(gated_delta_step: Callable[..., Any], causal_conv_step: Callable[..., Any], bad: float) -> None:
    """Decode: rows beside a bad one."""
    slots = [torch.tensor(named, dtype=torch.int32) for named in (SOURCES, TARGETS)]
    tokens, gates = tokens_of(3, SIZES), gates_of(SIZES)
    _compare(
        lambda x, state: gated_delta_step(x, gates, state, *slots),
        (tokens, Tokens(*(spoilt_rows(part, 1, bad) for part in tokens))), states_of(2, 12, 40), slice(1, 3), bad,
    )  # fmt: skip
    x, weight = torch.randn(3, 75, generator=torch.Generator().manual_seed(0))[:, :70], torch.ones(70, 4)
    _compare(
        lambda x, state: causal_conv_step(x, weight, state, *slots),
        (x, spoilt_rows(x, 1, bad)), states_of(3, 70), slice(1, 3), bad,
    )  # fmt: skip


def _compare(
    compute: Callable[[Any, torch.Tensor], torch.Tensor],
    inputs: tuple[Any, Any],
    state: torch.Tensor,
    rows: slice,
    bad: float,
) -> None:
    """`compute` of sound inputs and states and of those with bad ones; `rows` are the sound ones."""
    states = copy_of(state), spoilt_states(state, bad)
    outs = [compute(x, own) for x, own in zip(inputs, states, strict=True)]
    assert torch.equal(outs[0][rows], outs[1][rows]) and bool(torch.isfinite(outs[0]).all())
    assert not bool(torch.isfinite(outs[1][0]).all()), "the bad one stays so"
    sound = [slot for slot in WRITTEN if not torch.equal(states[0][slot], state[slot])]
    assert sound and all(torch.equal(states[0][slot], states[1][slot]) for slot in sound)


Run = Callable[[Experts, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check_experts(run: Run, bad: float, tokens: int = 37) -> None:
    """One expert's weights and one token's row are bad, beside rows of other experts and tokens."""
    generator = torch.Generator().manual_seed(3)
    experts = Experts("float32", 48, 40, 5, generator)
    x = torch.randn(tokens, 48, generator=generator)
    chosen = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(tokens)]).to(torch.int32)
    weights = torch.rand(tokens, 2, generator=generator)
    sound = run(experts, x, weights, chosen)
    for name in ("gate_up", "down"):
        field = experts.layout.field(name)
        experts.records[3, field.offset : field.offset + 4] = torch.tensor([bad]).view(torch.uint8)
    x = spoilt_rows(x, 1, bad)
    rows = run(experts, x, weights, chosen)
    touched = (chosen == 3) | (torch.arange(tokens) == 0)[:, None]
    assert bool(touched.any(1).logical_not().sum() > 3) and bool((chosen == 3).sum() > 3)
    assert torch.equal(rows[~touched.flatten()], sound[~touched.flatten()])
    assert not bool(torch.isfinite(rows[touched.flatten()]).all(1).any()), "all of the bad ones stay so"
    assert torch.equal(combine(rows, tokens)[~touched.any(1)], combine(sound, tokens)[~touched.any(1)])
